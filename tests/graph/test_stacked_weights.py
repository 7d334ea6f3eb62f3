"""What experts' weights become in the file: one weight, in the order of the operator's rows."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe

EXPERTS, WIDTH, HIDDEN = 4, 16, 24


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
