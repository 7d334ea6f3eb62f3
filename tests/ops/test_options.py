"""The table of options and what is derived from it, also with an option added to a copy of it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import get_type_hints

import onnx.helper
import pytest
import torch
from torch import Tensor

import custom_ops
from custom_ops._library import schema_of, with_options
from custom_ops.kernels.layer import Layer
from custom_ops.layer_shape import LayerShape
from custom_ops.options import (
    EXPERT_OPTIONS,
    LAYOUT_OPTIONS,
    ROUTER_OPTIONS,
    SIZES,
    DroplessKeywords,
    ExpertKeywords,
    ExpertOptions,
    Flag,
    Option,
    Word,
    _option,
    _with_rows,
)
from custom_ops.weight_formats import plain_format
from dynamo_moe.moe_nodes.nodes import DROPLESS, EXPERTS, TENSORRT_ATTRIBUTES
from dynamo_moe.moe_nodes.schemas import SCHEMAS, attribute
from layer_changes import changed
from trt_plugin.bundle.records import FLAGS_WITHOUT_OPTION, FLAGS_WORD, LayerRecord
from trt_plugin.compiling.layer_table import FILE, layer_table
from trt_plugin.compiling.packing import layer_record

DROPLESS_OPTIONS = (*ROUTER_OPTIONS, *EXPERT_OPTIONS)
OPERATORS = {
    "dropless": (DROPLESS_OPTIONS, DroplessKeywords),
    "experts": (EXPERT_OPTIONS, ExpertKeywords),
}


@_with_rows
@dataclass(frozen=True)
class MoreOptions(ExpertOptions):
    negated: bool = _option(
        False, "The result's sign is changed.", attribute="sign", slot=Flag(1 << 20)
    )
    halving: str = _option(
        "none",
        "What is halved.",
        names=("none", "x", "y"),
        only_with=("residual", (True,)),
        slot=Word(99),
    )


MORE_OPTIONS = MoreOptions.rows


@pytest.mark.parametrize("op", OPERATORS)
def test_operators_and_functions_take_the_table_s_options(op: str) -> None:
    options, keywords = OPERATORS[op]
    table = {option.name: option.default for option in options}
    schema = getattr(torch.ops.moe, op).default._schema.arguments
    assert {a.name: a.default_value for a in schema if a.kwarg_only} == table
    function = getattr(custom_ops, op)
    parameters = inspect.signature(function).parameters.values()
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == table
    assert get_type_hints(keywords) == {option.name: option.type for option in options}
    for option in options:
        assert f"\n        {option.name}: {option.description[:40]}" in function.__doc__


def test_every_option_has_a_place_of_its_own_in_a_bundle_s_record() -> None:
    slots = [row.slot for row in (*DROPLESS_OPTIONS, *LAYOUT_OPTIONS, *SIZES)]
    bits = [slot.bit for slot in slots if isinstance(slot, Flag)]
    words = [slot.index for slot in slots if isinstance(slot, Word)]
    assert len(set(bits)) == len(bits)
    assert all(bit.bit_count() == 1 for bit in bits)
    assert len(set(words)) == len(words)


@pytest.mark.parametrize(
    "option", [*DROPLESS_OPTIONS, *LAYOUT_OPTIONS], ids=lambda option: option.name
)
def test_a_row_is_complete(option: Option) -> None:
    option.check(option.default)
    assert option.doc.endswith(".")
    assert bool(option.names) == (option.type is str)
    if option.only_with is not None:
        other, values = option.only_with
        on = next(each for each in DROPLESS_OPTIONS if each.name == other)
        for value in values:
            on.check(value)


def test_an_added_option_is_in_schema_signature_and_docstring() -> None:
    assert schema_of(MORE_OPTIONS) == (
        schema_of(EXPERT_OPTIONS) + ', bool negated=False, str halving="none"'
    )

    @with_options(MORE_OPTIONS)
    def function(x: Tensor, **options: object) -> None:
        """Takes options.

        {options}
        """

    *_, negated, halving = inspect.signature(function).parameters.values()
    assert (negated.name, negated.default, negated.kind) == ("negated", False, negated.KEYWORD_ONLY)
    assert halving.default == "none"
    assert "negated: The result's sign is changed." in function.__doc__


def test_an_added_option_is_checked_and_has_a_canonical_value() -> None:
    with pytest.raises(ValueError, match="halving must be one of none, x, y; got 'z'"):
        MoreOptions(halving="z")
    assert MoreOptions(halving="x").canonical() == MoreOptions()
    kept = MoreOptions(halving="x", residual=True)
    assert kept.canonical() == kept


def test_nodes_have_the_table_s_options_as_attributes() -> None:
    for op_type, options in ((DROPLESS, DROPLESS_OPTIONS), (EXPERTS, EXPERT_OPTIONS)):
        declared = SCHEMAS[op_type].attributes
        for option in (*options, *LAYOUT_OPTIONS):
            if option.rare:
                assert declared[option.attribute].description.endswith(
                    f"Absent: `{option.default}`."
                )
                assert not declared[option.attribute].required
                assert not declared[option.attribute].default_value.type
                continue
            default = onnx.helper.get_attribute_value(declared[option.attribute].default_value)
            default = default.decode() if isinstance(default, bytes) else default
            wanted = pytest.approx(option.default) if option.type is float else option.default
            assert default == wanted
        rows = (*options, *LAYOUT_OPTIONS, *SIZES)
        known = {row.attribute for row in rows} | {*TENSORRT_ATTRIBUTES}
        assert set(declared) == known


def test_an_added_option_is_an_attribute() -> None:
    *_, negated, halving = map(attribute, MORE_OPTIONS)
    assert (negated.name, negated.type.name) == ("sign", "INT")
    assert onnx.helper.get_attribute_value(negated.default_value) == 0
    assert halving.type.name == "STRING"
    assert "One of `none`, `x`, `y`." in halving.description


def test_the_record_s_words_are_where_the_table_says() -> None:
    for row in (*DROPLESS_OPTIONS, *SIZES):
        if isinstance(row.slot, Word):
            assert LayerRecord._fields[row.slot.index] == row.name
    assert LayerRecord._fields[FLAGS_WORD] == "flags"
    options = (*DROPLESS_OPTIONS, *LAYOUT_OPTIONS)
    bits = [row.slot.bit for row in options if isinstance(row.slot, Flag)]
    assert not set(bits) & set(FLAGS_WITHOUT_OPTION.values())


def test_an_added_option_is_in_a_layer_s_record() -> None:
    layer = Layer(
        LayerShape(
            4, 16, 16, 2, torch.float16, plain_format(torch.float16), MoreOptions(negated=True)
        )
    )
    plain = changed(layer, options=MoreOptions())
    assert layer_record(layer).flags == layer_record(plain).flags + (1 << 20)


@pytest.mark.parametrize("option", LAYOUT_OPTIONS, ids=lambda option: option.name)
def test_a_layout_is_in_a_layer_s_record(option: Option) -> None:
    plain = Layer(LayerShape(4, 16, 16, 2, torch.float16, plain_format(torch.float16)))
    record = layer_record(changed(plain, **{option.name: True}))
    assert record == layer_record(plain)._replace(flags=option.slot.bit)
    assert record.to_dict()[option.name] is True
    assert layer_record(plain).to_dict()[option.name] is False


def test_the_native_library_s_table_is_up_to_date() -> None:
    assert FILE.read_text() == layer_table(), "run `make tables` and build the library"


def test_an_added_option_is_in_the_native_library_s_table() -> None:
    text = layer_table(MORE_OPTIONS)
    assert "  kNegated = 1048576," in text
    assert '    {"negated", "sign", false, false, false, Option::kBool, 5, 1048576, ' in text
    names = 'inline constexpr const char* kHalvingNames[] = {"none", "x", "y"};'
    assert names in text
    assert "kHalvingNames, 3, 0.0F, nullptr, 0.0F, 8, 2}," in text
