"""What experts' weights become in the file: one weight, in the order of the operator's rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.graph.stacked_weights import fold_stacked_weights
from dynamo_moe.weights.placeholders import as_ir

EXPERTS, WIDTH, HIDDEN = 4, 16, 24
FLOAT = ir.TensorType(ir.DataType.FLOAT)


def gated(rows: Tensor, up_first: bool) -> Tensor:
    first, second = rows.chunk(2, dim=-1)
    up, gate = (first, second) if up_first else (second, first)
    return up * F.gelu(gate)


class Expert(nn.Module):
    def __init__(self, up_first: bool) -> None:
        super().__init__()
        self.up_first = up_first
        self.rows = nn.Linear(WIDTH, 2 * HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(gated(self.rows(x), self.up_first))
        return down


class Layer(nn.Module):
    """Top-2 of the softmax over experts, each of which gets its rows."""

    def __init__(self, up_first: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up_first = up_first

    def compute(self, expert: int, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        scores, chosen = self.gate(rows).softmax(dim=-1).topk(2, dim=-1)
        y = torch.zeros_like(rows)
        for expert in range(EXPERTS):
            token, slot = torch.where(chosen == expert)
            y.index_add_(0, token, self.compute(expert, rows[token]) * scores[token, slot, None])
        return y.reshape(x.shape)


class ListOfExperts(Layer):
    def __init__(self, up_first: bool) -> None:
        super().__init__(up_first)
        self.experts = nn.ModuleList(Expert(up_first) for _ in range(EXPERTS))

    def compute(self, expert: int, x: Tensor) -> Tensor:
        y: Tensor = self.experts[expert](x)
        return y


class OneWeight(Layer):
    def __init__(self, up_first: bool) -> None:
        super().__init__(up_first)
        self.rows = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)

    def compute(self, expert: int, x: Tensor) -> Tensor:
        return gated(x @ self.rows[expert].T, self.up_first) @ self.down[expert].T


@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("kind", [ListOfExperts, OneWeight])
def test_nothing_is_left_to_be_stacked(kind: type[Layer], up_first: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind(up_first).eval()
    [replaced] = dynamo_moe.convert(model).replaced
    assert replaced.compared
    path = tmp_path / "model.onnx"
    report = dynamo_moe.export(model, torch.randn(2, 5, WIDTH), path)
    assert report.nodes == {"moe::DroplessMoE": 1}
    graph = onnx.load(path).graph
    assert [each.name for each in graph.input] == ["x"]
    rows = graph.node[0].input[2]
    [weight] = [each for each in graph.initializer if each.name == rows]
    assert weight.dims == [EXPERTS, 2 * HIDDEN, WIDTH]
    dynamo_moe.verify(path, model)


def halves(start: ir.Value, *, has_other_user: bool) -> ir.Model:
    """Returns an MoE node whose weight is made of a weight's rows from ``start`` on, and others."""
    rows = ir.Value(name="rows", shape=ir.Shape((4, 6, 3)), type=FLOAT)
    rows.const_value = as_ir(torch.randn(4, 6, 3), "rows")
    x = ir.Value(name="x", shape=ir.Shape((5, 3)), type=FLOAT)
    zero, half, end, one = (integer(number).outputs[0] for number in (0, 3, 6, 1))
    first = ir.node("Slice", [rows, zero, half, one, one])
    second = ir.node("Slice", [rows, start, end, one, one])
    joined = ir.node("Concat", [second.outputs[0], first.outputs[0]], {"axis": 1})
    layer = ir.Node("moe", "DroplessMoE", [x, x, joined.outputs[0]])
    nodes = [each.producer() for each in (zero, half, end, one)]
    while (maker := start.producer()) is not None:
        nodes.append(maker)
        start = maker.inputs[0] if maker.inputs else rows
    nodes += [first, second, joined, layer]
    results = [layer.outputs[0]]
    if has_other_user:
        nodes.append(ir.node("Relu", [first.outputs[0]]))
        results.append(nodes[-1].outputs[0])
    graph = ir.Graph([x], results, nodes=nodes, initializers=[rows], opset_imports={"": 20})
    graph.sort()
    return ir.Model(graph, ir_version=10)


def integer(number: float, dtype: type = np.int64) -> ir.Node:
    return ir.node("Constant", [], {"value": ir.tensor(np.array([number], dtype))})


def cast(number: float, dtype: type, to: ir.DataType) -> ir.Value:
    return ir.node("Cast", [integer(number, dtype).outputs[0]], {"to": to}).outputs[0]


@pytest.mark.parametrize(
    ("start", "folds"),
    [
        (lambda: integer(3).outputs[0], True),
        (lambda: cast(3, np.int32, ir.DataType.INT64), True),
        (lambda: cast(3.7, np.float32, ir.DataType.INT64), False),
        (lambda: cast(3, np.int64, ir.DataType.BOOL), False),
    ],
    ids=["integer", "widened", "rounded", "boolean"],
)
def test_rows_are_taken_by_integers_alone(start: Callable[[], ir.Value], folds: bool) -> None:
    model = halves(start(), has_other_user=False)
    fold_stacked_weights(model)
    assert ("Slice" not in {node.op_type for node in model.graph}) == folds


def test_rows_with_another_user_stay() -> None:
    model = halves(integer(3).outputs[0], has_other_user=True)
    fold_stacked_weights(model)
    assert [node.op_type for node in model.graph].count("Slice") == 2
