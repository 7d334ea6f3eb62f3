"""Bodies of registered operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx.defs
import onnx.helper
import onnx_ir as ir
import pytest
import torch
from onnxscript import opset18, opset20, script

import dynamo_moe
from registered_operators import (
    DOMAIN,
    OPSET,
    define,
    exported,
    other_shapes,
    relu,
    relu_18,
    relu_22,
    relu_op,
)


@pytest.mark.parametrize("form", ["onnx", "ir"])
def test_bodies_of_onnx_and_onnx_ir(tmp_path: Path, form: str) -> None:
    op = relu_op(f"relu_{form}")
    proto = relu_18.to_function_proto()
    body = proto if form == "onnx" else ir.from_proto(proto)
    dynamo_moe.register_op(op, domain=DOMAIN, op_type=f"Relu_{form}", body=body)
    model, found = exported(tmp_path / "m.onnx", op)
    # Written for opset 18 and converted to the file's opset.
    assert {o.domain: o.version for o in found.functions[0].opset_import} == {"": 20}
    other_shapes(tmp_path / "m.onnx", model)


def test_a_body_newer_than_the_file(tmp_path: Path) -> None:
    op = relu_op("relu_new")
    dynamo_moe.register_op(op, domain=DOMAIN, op_type="ReluNew", body=relu_22)
    with pytest.raises(ValueError, match="opset 22, the file has 20: export with opset=22"):
        exported(tmp_path / "m.onnx", op)
    model, _ = exported(tmp_path / "m.onnx", op, opset=22)
    other_shapes(tmp_path / "m.onnx", model)


def test_bodies_that_do_not_fit() -> None:
    @script(OPSET)
    def two(x, y):
        return opset20.Add(x, y)

    @script(OPSET)
    def foreign(x, slope: float):
        return opset20.Elu(x, alpha=slope)

    @script(OPSET)
    def helper(x):
        return opset20.Relu(x)

    @script(OPSET)
    def calling(x):
        return helper(x)

    def refused(body: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            dynamo_moe.register_op(relu, domain=DOMAIN, op_type="Relu_", body=body)

    @script(OPSET)
    def nested(x):
        return OPSET.Scaled(x)

    refused(nested, ValueError, "uses registered::Scaled, which is not an ONNX operator")
    refused(two, ValueError, r"must have 1 inputs \(x\), got 2 \(x, y\)")
    refused(foreign, ValueError, "the attribute 'slope', which the operator does not have")
    refused(calling, ValueError, "uses registered::helper, which is not an ONNX operator")
    for node, message in (
        (onnx.helper.make_node("Relu", ["q"], ["y"]), "not a valid ONNX function: .*input 'q'"),
        (
            onnx.helper.make_node("Relu", ["x"], ["y"], a=1),
            "not a valid .*Unrecognized attribute: a",
        ),
        (onnx.helper.make_node("Relu", ["x"], ["z"]), "computes no output 'y'"),
    ):
        opsets = [onnx.helper.make_opsetid("", 20)]
        invalid = onnx.helper.make_function(DOMAIN, "Relu_", ["x"], ["y"], [node], opsets)
        refused(invalid, ValueError, message)
    refused("Relu", TypeError, "body must be an onnxscript function.*got str")


def test_a_fixed_body_for_any_number_of_tensors() -> None:
    op = define("any_number(Tensor[] xs) -> Tensor", lambda xs: sum(xs[1:], xs[0] * 1))
    with pytest.raises(ValueError, match="a fixed number of inputs, but 'xs' is a list"):
        dynamo_moe.register_op(op, domain=DOMAIN, op_type="AnyNumber", body=relu_18)


# Bodies of individual nodes, and what must not be merged.


def test_bodies_that_name_no_overload_are_told_apart(tmp_path: Path) -> None:
    op = define("times(Tensor x, int n) -> Tensor", lambda x, n: x * n)

    def body(node: ir.Node, opset: int, target: str) -> ir.Function:
        factor = float(node.attributes["n"].as_int())
        nodes = [
            onnx.helper.make_node("Constant", [], ["c"], value_float=factor),
            onnx.helper.make_node("Mul", ["x", "c"], ["y"]),
        ]
        opsets = [onnx.helper.make_opsetid("", opset)]
        proto = onnx.helper.make_function(DOMAIN, "Times", ["x"], ["y"], nodes, opsets)
        return ir.serde.deserialize_function(proto)

    dynamo_moe.register_op(op, domain=DOMAIN, op_type="Times", body=body)
    for target in ("plugin", "dense"):
        path = tmp_path / f"{target}.onnx"
        model, proto = exported(path, lambda x: op(x, 2) + op(x, 3) + op(x + 1, 2), target=target)
        other_shapes(path, model)
        if target == "plugin":
            domains = [node.domain for node in proto.graph.node if node.op_type == "Times"]
            assert domains == [DOMAIN, f"{DOMAIN}.body_2", DOMAIN]


def test_a_body_and_the_attributes_that_a_node_leaves_out(tmp_path: Path) -> None:
    op = define(
        "bent(Tensor x, float? slope=None, float? scale=None) -> Tensor",
        lambda x, slope=None, scale=None: (
            torch.nn.functional.elu(x, 1.0 if slope is None else slope) * (scale or 1)
        ),
    )

    @script(OPSET)
    def body(x, slope: float, scale: float):
        factor = opset18.CastLike(opset18.Constant(value_float=scale), x)
        return opset18.Mul(opset18.Elu(x, alpha=slope), factor)

    dynamo_moe.register_op(op, domain=DOMAIN, op_type="Bent", body=body)
    for target in ("plugin", "dense"):
        path = tmp_path / f"{target}.onnx"
        # Elu has a default; a constant has none.
        model, _ = exported(path, lambda x: op(x, None, 2.0), target=target)
        other_shapes(path, model)
        with pytest.raises(ValueError, match=r"attribute 'scale', which .*: Constant needs it"):
            exported(path, lambda x: op(x, 0.5), target=target)


def test_equal_calls_of_an_untagged_random_operator_stay_two(tmp_path: Path) -> None:
    op = define("noise(Tensor x) -> Tensor", torch.rand_like)
    dynamo_moe.register_op(op, domain=DOMAIN, op_type="Noise")
    _, proto = exported(tmp_path / "m.onnx", lambda x: op(x) - op(x))
    first, second = [node for node in proto.graph.node if node.op_type == "Noise"]
    assert first.output != second.output
    assert all(node.overload == "" for node in (first, second))
