"""Bundles: what is written is read, and anything else is an error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import trt_plugin
from custom_ops import ACTIVATIONS, SCORINGS, ExpertOptions, RouterOptions, options
from custom_ops.kernels.expressions import W_INDEX
from custom_ops.kernels.layer import Layer
from custom_ops.layer_shape import LayerShape
from custom_ops.options import GATINGS, PRE_NORMS, ROUNDINGS
from custom_ops.packed_weights import ENCODINGS, divides
from custom_ops.weight_formats import WHOLE_MATRIX, WeightFormat, packed_format, plain_format
from layer_changes import changed
from random_layers import groups
from random_programs import programs
from small_bundles import (
    ONE,
    SMALL,
    TILES,
    TOKENS,
    kernel,
    program,
    refusal,
    repaired,
)
from standin import ROOT
from trt_plugin import Bundle, BundleError
from trt_plugin.bundle import (
    Program,
    is_bundle,
    records,
)
from trt_plugin.bundle.view import layer_text
from trt_plugin.compiling.packing import layer_record
from trt_plugin.compiling.specs import parse_spec

# --- What is written is read ---


def test_what_is_written_is_read() -> None:
    assert trt_plugin.read(SMALL.data) == SMALL
    assert trt_plugin.read(SMALL.data).data == SMALL.data


def test_a_program_is_the_same_in_a_bundle_and_out_of_it() -> None:
    offset, size = records.DIRECTORY_ENTRY.unpack_from(SMALL.data, 48)
    assert offset % 64 == 0
    assert SMALL.data[offset : offset + size] == SMALL.programs[1].data


def test_equal_parts_are_stored_once() -> None:
    data = program(kernels=(kernel("one"), kernel("other"))).data
    assert data.count(kernel().image) == 1
    expressions_of = records.TABLE_ENTRY.unpack_from(data, 144 + 16 * 7)[1]
    assert expressions_of == len({ONE, TOKENS, TILES})


def test_symbols_are_numbered_as_the_sizes_of_a_layer() -> None:
    sizes = sorted(options.SIZES, key=lambda size: size.slot.index)
    names = ["T", *(size.symbol for size in sizes), W_INDEX.value]
    assert names == list(records.SYMBOLS)


@settings(max_examples=100, deadline=None)
@given(st.lists(programs, min_size=1, max_size=3).map(tuple))
@pytest.mark.every
def test_any_program_survives(given_programs: tuple[Program, ...]) -> None:
    assert trt_plugin.read(Bundle(given_programs).data) == Bundle(given_programs)


def test_the_docs_number_tensors_as_they_are() -> None:
    page = (ROOT / "docs" / "reference" / "bundle.md").read_text()
    (listed,) = re.findall(r"^Tensors: (.*?)\. Every", page, re.MULTILINE | re.DOTALL)
    numbered = [f"{number} {name}" for number, name in enumerate(records.TENSORS)]
    assert " ".join(listed.split()).split(", ") == numbered


def test_a_bundle_needs_a_program() -> None:
    with pytest.raises(ValueError, match="a bundle needs a program"):
        _ = Bundle(()).data


# --- Files ---


def test_a_file_is_written_whole_and_read(tmp_path: Path) -> None:
    path = tmp_path / "model.moek"
    path.write_bytes(b"an older file")
    SMALL.save(path)
    assert trt_plugin.read(path) == SMALL
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_wrong_with_a_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "model.moek"
    path.write_bytes(SMALL.data[:100])
    with pytest.raises(
        BundleError, match=r"model\.moek: bundle: truncated: the header says \d+ bytes, got 100"
    ):
        trt_plugin.read(path)


def test_a_bundle_is_told_by_its_name_or_its_bytes(tmp_path: Path) -> None:
    named, unnamed, other = (tmp_path / name for name in ("a.moek", "b", "c.onnx"))
    named.touch()
    unnamed.write_bytes(SMALL.data)
    other.write_bytes(b"\x08\x0a")
    assert [is_bundle(path) for path in (named, unnamed, other)] == [True, True, False]


def test_the_table_shows_every_kernel() -> None:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(SMALL)
    text = shown.get()
    assert "2 programs, 4 kernels" in text
    assert "dropless, 2 of 8 experts, 64 x 128, gated silu, float16" in text
    assert "17-" in text
    flags = 128 | 256 | 1024 | 2048  # rms_norm, residual, w2_transposed, rounded_logits
    layer = SMALL.programs[0].layer._replace(flags=flags, norm_eps=0.5)
    with console.capture() as shown:
        console.print(Bundle((replace(SMALL.programs[0], layer=layer),)))
    assert (
        "64 x 128, silu, rms norm, residual, w2 transposed, rounded logits, float16" in shown.get()
    )
    assert "48 KiB" in text


def test_the_dictionary_holds_what_the_table_shows() -> None:
    shown = trt_plugin.read(SMALL.data).to_dict()["programs"][1]
    assert shown["architecture"] == "sm_80"
    assert shown["layer"]["activation"] == "silu"
    assert "alpha" not in shown["layer"]
    assert shown["ranges"][1]["workspace"] == {"rows": "cdiv(T * K, 16)", "hidden": "T"}
    assert shown["kernels"][0]["description"] == {"function": "up"}


def test_a_description_need_not_be_json() -> None:
    plain = program(kernels=(replace(kernel(), description="{"), kernel("down")))
    assert Bundle((plain,)).to_dict()["programs"][0]["kernels"][0]["description"] == "{"


def test_reading_needs_neither_torch_nor_triton(tmp_path: Path) -> None:
    SMALL.save(tmp_path / "a.moek")
    code = (
        "import sys, trt_plugin; trt_plugin.read(sys.argv[1]).to_dict(); "
        "print({'torch', 'triton', 'numpy', 'tensorrt', 'custom_ops'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.moek")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.skipif(shutil.which("localedef") is None, reason="localedef writes the locale")
def test_a_decimal_comma_of_the_host_program_is_not_in_the_json(tmp_path: Path) -> None:
    layer = SMALL.programs[0].layer._replace(flags=128, norm_eps=0.5, routed_scaling=2.5)
    path = tmp_path / "a.moek"
    Bundle((program(layer=layer),)).save(path)
    write_locale = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "comma")]
    if subprocess.run(write_locale, capture_output=True, check=False).returncode:
        pytest.skip("localedef lacks the sources of de_DE")
    code = (
        "import locale, sys, trt_plugin; locale.setlocale(locale.LC_NUMERIC, 'comma'); "
        "layer = trt_plugin.read(sys.argv[1]).programs[0].layer; words = layer.to_dict(); "
        "print(locale.str(1.5), layer.norm_eps, words['norm_eps'], words['routed_scaling'])"
    )
    command = [sys.executable, "-c", code, str(path)]
    environment = {**os.environ, "LOCPATH": str(tmp_path)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert done.stdout == "1,5 0.5 0.5 2.5\n"


# --- What is not a bundle ---


def test_cut_off_anywhere_it_is_an_error() -> None:
    for size in range(len(SMALL.data)):
        assert refusal(SMALL.data[:size]).startswith("bundle: truncated: the header")


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_altered_anywhere_it_is_an_error_or_a_bundle(data: st.DataObject) -> None:
    content = bytearray(SMALL.data)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    try:
        read = trt_plugin.read(repaired(bytes(content)))
    except BundleError:
        return
    # What was accepted can be shown and written.
    assert trt_plugin.read(read.data).to_dict() == read.to_dict()


@given(st.binary(max_size=200))
def test_anything_else_is_an_error(data: bytes) -> None:
    assert refusal(data)
    assert refusal(records.FILE_MAGIC + data)


# --- The layer ---


floats = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
sizes = st.integers(1, 512).map(lambda size: 8 * size)


@st.composite
def packed_formats(draw: st.DrawFn) -> WeightFormat:
    name = draw(st.sampled_from(list(ENCODINGS)))
    encoding = ENCODINGS[name]
    block = (1, 2 ** draw(st.integers(3, 12)))
    if encoding.block is not None:
        block = draw(st.sampled_from([encoding.block, *encoding.any_of]))
    zero_points = None
    if encoding.has_zero_points:
        zero_points = draw(st.sampled_from([None, block, WHOLE_MATRIX]))
    scales = draw(st.sampled_from(encoding.scales_dtypes))
    return packed_format(name, draw(floats), scales, block, zero_points_block=zero_points)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    activation = draw(st.sampled_from(ACTIVATIONS))
    gated = activation in GATINGS or draw(st.booleans())
    options = ExpertOptions(
        activation,
        gated=gated,
        interleaved=gated and draw(st.booleans()),
        weight_on_input=draw(st.booleans()),
        alpha=draw(st.floats(0.1, 10)),
        limit=draw(st.floats(0.1, 100)),
        pre_norm=draw(st.sampled_from(PRE_NORMS)),
        norm_eps=draw(st.floats(2.0**-126, 1.0)),
        residual=draw(st.booleans()),
    )
    experts = draw(st.integers(1, 1024))
    top_k = draw(st.integers(1, min(32, experts)))
    router = None
    if draw(st.booleans()):
        scoring = draw(st.sampled_from(SCORINGS))
        scaling = draw(st.floats(-10, 10))
        grouped = draw(groups(experts, top_k))
        roundings = (draw(st.sampled_from(ROUNDINGS)) for _ in range(2))
        rounded = dict(zip(("logits_dtype", "routing_weights_dtype"), roundings, strict=True))
        router = RouterOptions(top_k, scoring, draw(st.booleans()), scaling, **grouped, **rounded)
    weight_format = draw(st.builds(plain_format, floats) | packed_formats())
    tokens_dtype = draw(floats) if weight_format.is_plain else weight_format.operand_dtype
    flags: tuple[str, ...] = ("b1", "b2", "tf32")
    if weight_format.is_plain:
        flags = (*flags, "w1_transposed", "w2_transposed")
    width, hidden = draw(sizes), draw(sizes)
    if not all(divides(weight_format.block, size) for size in (width, hidden)):
        width, hidden = (weight_format.block[1] * (1 + size % 3) for size in (width, hidden))
    shape = LayerShape(
        *(experts, width, hidden, top_k),
        *(tokens_dtype, weight_format, options, router),
        draw(floats if router else st.sampled_from([torch.int32, torch.int64])),
        draw(st.none() | floats if router else floats),
        selection_dtype=draw(st.none() | floats) if router else None,
    )
    return changed(Layer(shape), **{name: draw(st.booleans()) for name in flags})


def test_specs_of_packed_layers() -> None:
    """As an export has them: zero points ahead of biases, and blocks no larger than a matrix."""
    common = "experts=4,top_k=2,width=64,hidden=64,dtype=fp16,weight_format="
    plain, wide, whole, biased, mxfp4, fp8, large = (
        layer_record(parse_spec(common + form).canonical())
        for form in (
            *("int4,block_size=32", "int4,block_size=64", "int4", "int4,b1", "mxfp4,b1"),
            *("fp8", "fp8,block_rows=0,block_size=0"),
        )
    )
    assert (plain.block_rows, plain.block_columns, plain.zero_points) == (1, 32, 0)
    assert wide == whole
    assert biased.zero_points == 2
    assert layer_record(parse_spec(common + "int4,b1=false").canonical()) == whole
    assert (mxfp4.scales_dtype, mxfp4.zero_points) == (6, 0)
    assert fp8 == large


def test_packed_layers_look_different() -> None:
    common = "experts=4,top_k=2,width=64,hidden=64,dtype=fp16,weight_format=int4,block_size=32"
    forms = ("", ",zero_points=scales", ",zero_points=experts", ",scales_dtype=fp32")
    records = [layer_record(parse_spec(common + form)) for form in forms]
    texts = [layer_text(record.to_dict()) for record in records]
    assert texts[1].endswith("int4 weights with float16 scales of 1 x 32, zero points of scales")
    assert len({*texts}) == len(forms)


@settings(deadline=None)
@given(layers())
def test_a_layer_survives_and_its_record_is_its_canonical_form(layer: Layer) -> None:
    record = layer_record(layer)
    assert len(record.to_bytes()) == 112
    assert layer_record(layer.canonical()) == record
    bundle = Bundle((program(layer=record),))
    assert trt_plugin.read(bundle.data).programs[0].layer == record
    assert record.to_dict()["experts"] == layer.shape.experts
    assert record.to_dict()["residual"] == layer.shape.options.residual
    assert record.to_dict()["w1_transposed"] == layer.shape.layout.w1_transposed
    assert record.to_dict()["w2_transposed"] == layer.shape.layout.w2_transposed
    described = record.to_dict()
    assert described["weight_format"] == layer.shape.weight_format.name
    for name, size in layer.shape.expert_bytes.items():
        assert described[f"{name}_bytes"] == layer.shape.experts * size
    limited = layer.shape.router is not None and layer.shape.router.limits_groups
    assert described.get("n_group") == (layer.shape.router.n_group if limited else None)
    assert ("norm_eps" in record.to_dict()) == (layer.shape.options.pre_norm == "rms")
    assert record.sizes == layer.shape.sizes
