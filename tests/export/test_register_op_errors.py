"""What ``dynamo_moe.register_op`` refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx.defs
import onnx.helper
import pytest
import torch
from torch import Tensor

import dynamo_moe
from registered_operators import (
    DOMAIN,
    OPS,
    define,
    exported,
    relu,
    relu_op,
)

REFUSED: dict[str, tuple[str, str, str]] = {
    "no fake kernel": (
        "refused_fake(Tensor x) -> Tensor",
        "",
        r"has no fake kernel.*register_fake\(\"registered::refused_fake\"\)",
    ),
    "argument type": (
        "refused_dtype(Tensor x, ScalarType to) -> Tensor",
        "impl",
        "argument 'to' has the type ScalarType, which is neither",
    ),
    "optional device": (
        "refused_device(Tensor x, Device? on=None) -> Tensor",
        "impl",
        r"argument 'on' has the type Device\?",
    ),
    "optional tensors": (
        "refused_tensors(Tensor?[] xs) -> Tensor",
        "impl",
        r"argument 'xs' has the type Tensor\?\[\]",
    ),
    "mutable": (
        "refused_mutable(Tensor(a!) x) -> ()",
        "impl",
        "changes its argument 'x'",
    ),
    "aliasing": ("refused_view(Tensor(a) x) -> Tensor(a)", "impl", "shares the memory of 'x'"),
    "list of results": (
        "refused_list(Tensor x) -> Tensor[]",
        "impl",
        r"result 0 has the type Tensor\[\]",
    ),
    "number": ("refused_number(Tensor x) -> int", "impl", "result 0 has the type int"),
    "no result": ("refused_none(Tensor x) -> ()", "impl", "has no result"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_operators_that_are_refused(case: str) -> None:
    schema, kernel, message = REFUSED[case]
    name = schema.partition("(")[0]
    if not hasattr(OPS, name):
        define(schema, (lambda x, *rest: x) if kernel else None)
    with pytest.raises((TypeError, ValueError), match=message):
        dynamo_moe.register_op(getattr(OPS, name), domain=DOMAIN, op_type="Refused")
    assert not onnx.defs.has("Refused", DOMAIN)


def test_a_custom_op_without_a_fake_kernel() -> None:
    @torch.library.custom_op("registered::no_fake", mutates_args=())
    def no_fake(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(ValueError, match="has no fake kernel"):
        dynamo_moe.register_op(no_fake, domain=DOMAIN, op_type="NoFake")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op_type": "Relu"}, "Relu is a standard ONNX operator"),
        ({"op_type": "no name"}, "op_type must be letters"),
        ({"domain": ""}, "domain must be letters"),
        ({"domain": "ai.onnx"}, "'ai.onnx' is not yours"),
        ({"domain": "com.microsoft"}, "'com.microsoft' is not yours"),
        ({"domain": "moe"}, "'moe' is dynamo_moe's own"),
        ({"attributes": {"slop": "alpha"}}, "names 'slop', but only these arguments of .*: none"),
        ({"attributes": lambda arguments: {}}, "pass both or neither"),
        ({"outputs": ["a", "b"]}, "outputs must name the 1 results"),
        ({"shape_inference": "like:z"}, "'like:z' needs one result and a Tensor argument 'z'"),
        ({"outputs": [""]}, "results need names, got ''"),
        ({"inputs": "x"}, "inputs must be a list of names, got 'x'"),
        ({"outputs": "y"}, "outputs must be a list of names, got 'y'"),
        ({"version": 0}, "version must be at least 1, got 0"),
        ({"constants": {"k": None}}, r"constants\['k'\] must be an int.*got None"),
        ({"constants": {"k": []}}, r"constants\['k'\] must be an int.*got \[\]"),
        ({"constants": {"k": torch.ones(2)}}, r"constants\['k'\] must be an int.*got tensor"),
        ({"shape_inference": "static"}, "shape_inference must be \"fake\".*'static'"),
    ],
)
def test_declarations_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        dynamo_moe.register_op(relu, **{"domain": DOMAIN, "op_type": "Mine", **options})


def own_schema(
    name: str = "Mine", domain: str = DOMAIN, inputs: str = "x", outputs: int = 1
) -> onnx.defs.OpSchema:
    formal = onnx.defs.OpSchema.FormalParameter
    plugin = ("plugin_version", "1"), ("plugin_namespace", "")
    return onnx.defs.OpSchema(
        name,
        domain,
        1,
        inputs=[formal(name, "T") for name in inputs],
        outputs=[formal(f"y{place}", "T") for place in range(outputs)],
        type_constraints=[("T", ["tensor(float)"], "")],
        attributes=[
            onnx.defs.OpSchema.Attribute(name, onnx.helper.make_attribute(name, value))
            for name, value in plugin
        ],
    )


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        ({"name": "Relu"}, {}, "has the name 'Relu', it must be 'Mine'"),
        ({"domain": "com.microsoft"}, {}, "has the domain 'com.microsoft', it must be 'registered"),
        ({}, {"version": 7}, "has the since_version 1, it must be 7"),
        ({"inputs": "a"}, {}, r"tensor arguments .*: x \(single\); got a \(single\)"),
        ({"outputs": 2}, {}, "as many outputs as .* has results, 1; got 2"),
        ({}, {"inputs": ["x"]}, r"inputs and schema: .* got inputs=\['x'\]"),
        ({}, {"outputs": ["q"]}, "outputs and schema"),
        ({}, {"shape_inference": "like:x"}, "shape_inference and schema"),
        ({}, {"doc": "Text."}, "doc and schema"),
    ],
)
def test_schemas_that_are_refused(
    schema: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dynamo_moe.register_op(
            relu,
            domain=DOMAIN,
            op_type="Mine",
            schema=own_schema(**schema),
            attributes=lambda arguments: {},
            **options,
        )


def test_an_attribute_that_the_schema_does_not_declare(tmp_path: Path) -> None:
    op = relu_op("relu_undeclared")
    dynamo_moe.register_op(
        op,
        domain=DOMAIN,
        op_type="Undeclared",
        schema=own_schema("Undeclared"),
        attributes=lambda arguments: {"width": 8},
    )
    with pytest.raises(dynamo_moe.ExportError, match=r"'width', which the schema of .*Undeclared"):
        exported(tmp_path / "m.onnx", op)


def test_random_numbers() -> None:
    with pytest.raises(ValueError, match=r"aten\.bernoulli\.default draws random numbers"):
        dynamo_moe.register_op(torch.ops.aten.bernoulli.default, domain=DOMAIN, op_type="Random")


def test_what_is_no_operator() -> None:
    with pytest.raises(TypeError, match=r"torch_op must be an operator.*got function"):
        dynamo_moe.register_op(lambda x: x, domain=DOMAIN, op_type="Mine")
    with pytest.raises(ValueError, match=r"has several overloads, name one: aten\.relu"):
        dynamo_moe.register_op(torch.ops.aten.relu, domain=DOMAIN, op_type="Mine")
