"""``convert`` finds each activation by its numbers, and the files compute it.

Legend: T tokens, D model width, H hidden width, E experts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

import dynamo_moe
from custom_ops.options import POINTWISE
from dynamo_moe.conversion.activation import identify_activation

MODULES = {
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "relu": nn.ReLU(),
    "relu2": ACT2FN["relu2"],
    "quick_gelu": ACT2FN["quick_gelu"],
    "tanh": nn.Tanh(),
    "mish": nn.Mish(),
    "hardswish": nn.Hardswish(),
    "elu": nn.ELU(),
    "leaky_relu": nn.LeakyReLU(),
    "identity": nn.Identity(),
}


class Expert(nn.Module):
    def __init__(self, activation: nn.Module, *, gated: bool) -> None:
        super().__init__()
        self.act, self.fc1, self.fc2 = activation, nn.Linear(8, 16), nn.Linear(16, 8)
        self.up = nn.Linear(8, 16) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc1(x))
        return self.fc2(h if self.up is None else h * self.up(x))


class Listed(nn.Module):
    """A list of experts, two of which a token chooses."""

    def __init__(self, activation: nn.Module, *, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(Expert(activation, gated=gated) for _ in range(4))

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.gate(x_TD).softmax(dim=-1).topk(2, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        y_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(ids_TK == number)
            y_TD.index_add_(0, rows, weights_TK[rows, slots, None] * expert(x_TD[rows]))
        return y_TD


class Stacked(nn.Module):
    """Experts in two parameters, of which all compute."""

    def __init__(self, activation: nn.Module, *, gated: bool) -> None:
        super().__init__()
        self.act, self.gated = activation, gated
        self.gate = nn.Linear(8, 4, bias=False)
        self.w1 = nn.Parameter(torch.randn(4, 8, 32 if gated else 16) * 0.5)
        self.w2 = nn.Parameter(torch.randn(4, 16, 8) * 0.5)

    def forward(self, x_TD: Tensor) -> Tensor:
        scores_TE = self.gate(x_TD).softmax(dim=-1)
        weights_TK, ids_TK = scores_TE.topk(2, dim=-1)
        weights_TE = torch.zeros_like(scores_TE).scatter(1, ids_TK, weights_TK)
        z_ETF = x_TD @ self.w1
        gate_ETH, up_ETH = z_ETF.chunk(2, dim=-1) if self.gated else (z_ETF, 1.0)
        y_ETD = (self.act(gate_ETH) * up_ETH) @ self.w2
        return (weights_TE.T[..., None] * y_ETD).sum(dim=0)


@pytest.mark.each_value
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", POINTWISE[5:])
def test_a_file_computes_what_the_model_does(activation: str, gated: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = (
        nn.Sequential(Listed(MODULES[activation], gated=gated)).eval(),
        tmp_path / "m.onnx",
    )
    tokens = [torch.randn(count, 8) * scale for count, scale in ((9, 1.0), (1, 1.0), (40, 30.0))]
    expected = [model(x_TD) for x_TD in tokens]
    report = dynamo_moe.convert(model)
    assert [layer.module for layer in report.replaced] == ["0"]
    assert model[0].extra_repr() == f"experts=4, {activation}"
    for x_TD, y_TD in zip(tokens, expected, strict=True):
        torch.testing.assert_close(model(x_TD), y_TD, rtol=1e-4, atol=1e-5)
    dynamo_moe.export(model, tokens[0], path, dynamic_shapes=({0: "tokens"},))
    dynamo_moe.verify(path, model, [(x_TD,) for x_TD in tokens])


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [Listed, Stacked])
def test_no_activation_is_taken_for_another(kind: type[nn.Module], dtype: torch.dtype) -> None:
    for place, activation in enumerate(MODULES):
        torch.manual_seed(0)
        model = nn.Sequential(kind(MODULES[activation], gated=place % 2 == 1)).to(dtype)
        assert dynamo_moe.convert(model).replaced
        assert model[0].extra_repr() == f"experts=4, {activation}"


def test_every_activation_has_a_module() -> None:
    assert tuple(MODULES) == POINTWISE


def test_the_names_of_transformers() -> None:
    for name in ("quick_gelu", "tanh", "mish", "hardswish", "leaky_relu", "relu2", "silu"):
        assert identify_activation(ACT2FN[name]).activation == name


def test_others_are_refused() -> None:
    others = nn.LeakyReLU(0.2), nn.ELU(0.5), nn.Hardtanh(), nn.Sigmoid(), nn.SELU(), nn.ReLU6()
    for other in others:
        with pytest.raises(ValueError, match=r"none that torch\.ops\.moe computes"):
            identify_activation(other)
