"""A model that onnx's checker refuses is never written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import dynamo_moe
from dynamo_moe import model_graph
from dynamo_moe.files.copies import Copy
from dynamo_moe.graph import checking
from small_models import mlp_model


def spoil(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Lets a function change the graph as the last step of its optimization."""
    optimize = model_graph.give_form

    def spoiled(model: ir.Model, *options):
        layers = optimize(model, *options)
        change(model)
        return layers

    monkeypatch.setattr(model_graph, "give_form", spoiled)


def gemm(model: ir.Model) -> ir.Node:
    return next(node for node in model.graph if node.op_type == "Gemm")


def other_dtype(model: ir.Model) -> None:
    weight = gemm(model).inputs[1]
    assert weight is not None
    weight.const_value = ir.tensor(weight.const_value.numpy().astype(np.float16), name=weight.name)
    weight.dtype = ir.DataType.FLOAT16


def unknown_attribute(model: ir.Model) -> None:
    gemm(model).attributes["beta_2"] = ir.AttrInt64("beta_2", 1)


def lost_input(model: ir.Model) -> None:
    gemm(model).replace_input_with(0, ir.Value(name="nobody"))


SPOILED = [
    (other_dtype, r"node name: 0/Gemm.*(inconsistent type|incompatible)"),
    (unknown_attribute, r"Unrecognized attribute: beta_2.*0/Gemm"),
    (lost_input, r"input 'nobody' of node.*0/Gemm"),
]


@pytest.mark.parametrize(("change", "reason"), SPOILED)
@pytest.mark.parametrize("external", [False, True])
def test_an_invalid_graph_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change, reason: str, external: bool
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"earlier")
    spoil(monkeypatch, change)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
    with pytest.raises(dynamo_moe.ExportError, match=reason):
        dynamo_moe.export(model, torch.randn(2, 16), path, external_data=external)
    assert path.read_bytes() == b"earlier"
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_a_body_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: ir.Model) -> None:
        (function,) = model.functions.values()
        next(iter(function)).attributes["nonsense"] = ir.AttrInt64("nonsense", 1)

    spoil(monkeypatch, change)
    model = mlp_model()
    dynamo_moe.convert(model)
    with pytest.raises(dynamo_moe.ExportError, match="Unrecognized attribute: nonsense"):
        dynamo_moe.export(model, torch.randn(2, 16), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_no_weight_is_read() -> None:
    class Unreadable(ir.Tensor):
        def numpy(self):
            raise AssertionError("read")

        tobytes = numpy

    def value(name: str, *shape: int, weight: ir.TensorProtocol | None = None) -> ir.Value:
        kind = ir.TensorType(ir.DataType.FLOAT)
        return ir.Value(name=name, type=kind, shape=ir.Shape(shape), const_value=weight)

    held = Unreadable(np.zeros((300, 3), np.float32), name="held")
    outside = ir.ExternalTensor(
        "nowhere", 0, 2**40, ir.DataType.FLOAT, shape=ir.Shape([3, 3]), name="outside"
    )
    weights = [value("held", 300, 3, weight=held), value("outside", 3, 3, weight=outside)]
    result = value("result", 300, 3)
    node = ir.Node("", "MatMul", weights, outputs=[result])
    graph = ir.Graph(
        [], [result], nodes=[node], initializers=weights, opset_imports={"": 20}, name="graph"
    )
    model = ir.Model(graph, ir_version=10)
    checking.check(model)
    assert list(graph.initializers) == ["held", "outside"]
    result.shape = ir.Shape([300, 4])
    with pytest.raises(checking.InvalidGraphError, match="op_type:MatMul"):
        checking.check(model)


def _with_a_copy(
    operator: str = "Relu", name: str = "copied", typed: bool = True, given: str = "a"
) -> tuple[ir.Model, dict[ir.Node, list[Copy]]]:
    """A node, and a copy of it whose result another node uses."""
    kind = ir.TensorType(ir.DataType.FLOAT)

    def value(its: str, known: bool = True) -> ir.Value:
        return ir.Value(
            name=its, type=kind if known else None, shape=ir.Shape([2]) if known else None
        )

    x = value("x")
    first = ir.Node("", operator, [x], outputs=[value("a", typed)], name="first")
    copied = value(name, typed)
    last = ir.Node("", "Neg", [copied], outputs=[value("y")], name="last")
    nodes = [first, last]
    graph = ir.Graph([x], list(last.outputs), nodes=nodes, opset_imports={"": 20}, name="graph")
    inputs = [first.outputs[0] if given == "a" else value(given)]
    return ir.Model(graph, ir_version=9), {first: [Copy(first, inputs, [copied], name="copy")]}


@pytest.mark.parametrize("typed", [True, False])
def test_copies_are_checked_with_or_without_their_types(typed: bool) -> None:
    proto = checking.check(*_with_a_copy(typed=typed))
    assert [node.op_type for node in proto.graph.node] == ["Relu", "Relu", "Neg"]
    assert [each.name for each in proto.graph.input] == ["x"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"operator": "Nothing"}, "No Op registered for Nothing"),
        ({"name": "a"}, "output names multiple times"),
        ({"name": "a", "typed": False}, "output names multiple times"),
        ({"given": "missing"}, "topologically sorted"),
    ],
)
def test_wrong_copies_are_refused(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(checking.InvalidGraphError, match=reason):
        checking.check(*_with_a_copy(**wrong))
