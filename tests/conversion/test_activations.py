"""``convert`` finds each activation by its numbers, and the files compute it.

Legend: T tokens, D model width, H hidden width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

import dynamo_moe
from custom_ops.options import POINTWISE, ExpertOptions
from dynamo_moe.conversion.activation import GatingNumbers, identify_activation, softcaps_of

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


class Softcap(nn.Module):
    def __init__(self, softcap: float) -> None:
        super().__init__()
        self.softcap = softcap

    def forward(self, x: Tensor) -> Tensor:
        return self.softcap * torch.tanh(x / self.softcap)


class SoftcappedSilu(nn.Module):
    """Inkling 2's gating."""

    def __init__(self, gate_cap: float = 4.0, up_cap: float = 25.0) -> None:
        super().__init__()
        self.of_gate, self.of_up = Softcap(gate_cap), Softcap(up_cap)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.of_gate(gate) * torch.sigmoid(gate) * self.of_up(up)


def gated_by(activation: nn.Module, gate: Tensor, up: Tensor | float) -> Tensor:
    """Returns what a gating gives, or what a function of one number does, times up."""
    if isinstance(activation, SoftcappedSilu):
        return activation(gate, up)
    return activation(gate) * up


class Expert(nn.Module):
    def __init__(self, activation: nn.Module, *, gated: bool) -> None:
        super().__init__()
        self.act, self.fc1, self.fc2 = activation, nn.Linear(8, 16), nn.Linear(16, 8)
        self.up = nn.Linear(8, 16) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        up = 1.0 if self.up is None else self.up(x)
        return self.fc2(gated_by(self.act, self.fc1(x), up))


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
        y_ETD = gated_by(self.act, gate_ETH, up_ETH) @ self.w2
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


@pytest.mark.parametrize("kind", [Listed, Stacked])
def test_softcaps_in_submodules(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = nn.Sequential(kind(SoftcappedSilu(), gated=True)).eval(), tmp_path / "m.onnx"
    tokens = [torch.randn(count, 8) * scale for count, scale in ((9, 1.0), (1, 1.0), (40, 1e3))]
    expected = [model(x_TD) for x_TD in tokens]
    assert dynamo_moe.convert(model).replaced
    assert model[0].extra_repr() == "experts=4, softcapped_silu"
    for x_TD, y_TD in zip(tokens, expected, strict=True):
        torch.testing.assert_close(model(x_TD), y_TD, rtol=1e-4, atol=1e-4)
    dynamo_moe.export(model, tokens[0], path, dynamic_shapes=({0: "tokens"},))
    dynamo_moe.verify(path, model, [(x_TD,) for x_TD in tokens])


def of_rows(gating: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda z: gating(*z.chunk(2, dim=-1))


def test_each_softcap_is_found_in_its_place() -> None:
    for gate_cap, up_cap in ((4.0, 25.0), (25.0, 4.0), (9.0, 9.0)):
        gating = SoftcappedSilu(gate_cap, up_cap)
        numbers = GatingNumbers(softcaps=softcaps_of(gating.modules()))
        options = identify_activation(of_rows(gating), gated=True, numbers=numbers)
        assert options == ExpertOptions("softcapped_silu", gated=True, alpha=gate_cap, limit=up_cap)


def test_softcaps_without_numbers_are_refused() -> None:
    gating = SoftcappedSilu()
    for softcaps in ([], [4.0], [4.0, 24.0]):
        with pytest.raises(ValueError, match=r"gating is none that torch\.ops\.moe computes"):
            identify_activation(
                of_rows(gating), gated=True, numbers=GatingNumbers(softcaps=softcaps)
            )


def test_numbers_that_no_softcap_can_be_are_left() -> None:
    for number in (0.0, -4.0, 1e-39, 1e38, float("inf"), float("nan")):
        assert softcaps_of([Softcap(number)]) == []
    assert softcaps_of([Softcap(30)]) == [30.0]


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
