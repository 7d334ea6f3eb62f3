"""Where experts are found: lists of their parts, and what only looks like experts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.modules import ConvertedModule

WIDTH, HIDDEN, COUNT = 16, 24, 6


def linears(inputs: int, outputs: int, bias: bool = False) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs, bias=bias) for _ in range(COUNT)]


class Parts(nn.Module):
    """An expert's linear layers are in lists of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.add_lists()

    def add_lists(self) -> None:
        self.fc1 = nn.ModuleList(linears(WIDTH, HIDDEN))
        self.fc2 = nn.ModuleList(linears(WIDTH, HIDDEN))
        self.fc3 = nn.ModuleList(linears(HIDDEN, WIDTH))

    def expert(self, index: int, x_TD: Tensor) -> Tensor:
        return self.fc3[index](F.silu(self.fc1[index](x_TD)) * self.fc2[index](x_TD))

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, WIDTH)
        weights_TK, ids_TK = self.gate(x_TD).softmax(dim=-1).topk(2, dim=-1)
        y_TD = torch.zeros_like(x_TD)
        for index in range(COUNT):
            weights_T1 = (weights_TK * (ids_TK == index)).sum(dim=-1, keepdim=True)
            y_TD = y_TD + self.expert(index, x_TD) * weights_T1
        return y_TD.view(x.shape)


class TwoLists(Parts):
    def add_lists(self) -> None:
        self.experts_in = nn.ModuleList(linears(WIDTH, HIDDEN, bias=True))
        self.experts_out = nn.ModuleList(linears(HIDDEN, WIDTH, bias=True))

    def expert(self, index: int, x_TD: Tensor) -> Tensor:
        return self.experts_out[index](F.gelu(self.experts_in[index](x_TD)))


class Dictionaries(Parts):
    """Gate and up are one matrix; members have an activation."""

    def add_lists(self) -> None:
        names = [f"e{index}" for index in range(COUNT)]
        inner = [nn.Sequential(layer, nn.Identity()) for layer in linears(WIDTH, 2 * HIDDEN)]
        self.inner = nn.ModuleDict(dict(zip(names, inner, strict=True)))
        self.outer = nn.ModuleDict(dict(zip(names, linears(HIDDEN, WIDTH), strict=True)))

    def expert(self, index: int, x_TD: Tensor) -> Tensor:
        gate, up = self.inner[f"e{index}"](x_TD).chunk(2, dim=-1)
        return self.outer[f"e{index}"](F.silu(gate) * up)


class ParameterLists(Parts):
    def add_lists(self) -> None:
        inner, outer = linears(WIDTH, HIDDEN, bias=True), linears(HIDDEN, WIDTH, bias=True)
        self.w1, self.b1, self.w2, self.b2 = (
            nn.ParameterList(getattr(layer, name) for layer in layers)
            for layers in (inner, outer)
            for name in ("weight", "bias")
        )

    def expert(self, index: int, x_TD: Tensor) -> Tensor:
        hidden = F.relu(F.linear(x_TD, self.w1[index], self.b1[index]))
        return F.linear(hidden, self.w2[index], self.b2[index])


@pytest.mark.parametrize("kind", [Parts, TwoLists, Dictionaries, ParameterLists])
def test_lists_of_the_experts_parts(kind: type[Parts]) -> None:
    torch.manual_seed(0)
    original = nn.Sequential(kind()).eval()
    model = copy.deepcopy(original)
    report = dynamo_moe.convert(model)
    assert [replaced.module for replaced in report.replaced] == ["0"]
    assert not report.unrecognised
    assert isinstance(model[0], ConvertedModule)
    assert model.state_dict().keys() == original.state_dict().keys()
    x = torch.randn(3, 5, WIDTH)
    torch.testing.assert_close(model(x), original(x), rtol=1e-5, atol=1e-5)


def test_parts_in_lists_are_held_once() -> None:
    layer = TwoLists().eval()
    dynamo_moe.convert(layer)
    with torch.no_grad():
        layer(torch.randn(3, WIDTH))
    kept = layer._dynamo_moe_weights._weights
    assert layer.experts_in[1].weight.data_ptr() == kept.w1[1].data_ptr()
    assert layer.experts_out[3].bias.data_ptr() == kept.b2[3].data_ptr()


class Blocks(nn.Module):
    """A dense model whose layers are in lists, as many as its classes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.ModuleList(linears(WIDTH, HIDDEN))
        self.fc2 = nn.ModuleList(linears(HIDDEN, WIDTH))
        self.head = nn.Linear(WIDTH, COUNT)

    def forward(self, x: Tensor) -> Tensor:
        for inner, outer in zip(self.fc1, self.fc2, strict=True):
            x = x + outer(F.gelu(inner(x)))
        return self.head(x)


def test_dense_models_are_not_suspected() -> None:
    report = dynamo_moe.convert(Blocks().eval())
    assert (report.replaced, report.unrecognised) == ((), ())
