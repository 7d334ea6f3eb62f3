"""Layers that compute something else for many, large or empty tokens are not taken for others."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.conversion.comparison import TOLERANCE, compare_shapes, relative_error


class Mixture(nn.Module):
    """Experts in a list, each of which takes the tokens that ``rows`` leaves it."""

    def __init__(self, *, biases: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16, bias=biases))
            for _ in range(4)
        )

    def logits(self, x: Tensor) -> Tensor:
        return self.gate(x)

    def rows(self, rows: Tensor, tokens: int) -> Tensor:
        return rows

    def tokens(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        weights, ids = self.logits(x_TD).softmax(dim=-1).topk(2, dim=-1)
        y = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            rows, slots = (ids == number).nonzero(as_tuple=True)
            kept = self.rows(torch.arange(len(rows)), len(x_TD))
            rows, slots = rows[kept], slots[kept]
            y[rows] += weights[rows, slots, None] * expert(self.tokens(x_TD[rows]))
        return y.view_as(x)


class AFloor(Mixture):
    """Drops what is above a capacity that is never below 64."""

    def rows(self, rows: Tensor, tokens: int) -> Tensor:
        return rows[: max(64, int(1.25 * 2 * tokens / 4))]


class SlotsPerExpert(Mixture):
    slots_per_expert = 300

    def rows(self, rows: Tensor, tokens: int) -> Tensor:
        return rows[: self.slots_per_expert]


class ALiteral(Mixture):
    def rows(self, rows: Tensor, tokens: int) -> Tensor:
        return rows[:2000]


class ClampsTokens(Mixture):
    def tokens(self, x: Tensor) -> Tensor:
        return x.clamp(-100, 100)


class ClampsLogits(Mixture):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x).clamp(-30, 30)


class SmallAlone(Mixture):
    def tokens(self, x: Tensor) -> Tensor:
        return x if not x.numel() or x.abs().amax() < 50 else x / 2


class SkipsPadding(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (x != 0).any(dim=-1, keepdim=True)


@pytest.mark.parametrize("kind", [ClampsTokens, SmallAlone])
def test_conditions_that_few_tokens_show(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(kind())
    report = dynamo_moe.convert(model)
    assert report.replaced == ()
    assert len(report.unrecognised) == 1


@pytest.mark.parametrize("kind", [AFloor, SlotsPerExpert, ALiteral, SkipsPadding])
def test_conditions_on_rows_are_the_layers_own_code(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind()).eval()
    x = torch.randn(1, 1, 16).expand(2, 2500, 16).contiguous()
    x[:, ::5] = torch.randn(2, 500, 16)
    x[:, 3::50] = 0
    expected = model(x)
    assert [layer.module for layer in dynamo_moe.convert(model).replaced] == ["0"]
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_clamped_logits_are_the_layers_own_code() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ClampsLogits())
    x = 100 * torch.randn(2, 30, 16)
    expected = model(x)
    assert [layer.module for layer in dynamo_moe.convert(model).replaced] == ["0"]
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("biases", [False, True])
def test_without_such_conditions(biases: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Mixture(biases=biases))
    assert [layer.module for layer in dynamo_moe.convert(model).replaced] == ["0"]


def test_the_report_says_where_scores_are_equal() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Mixture() for _ in range(3)))
    nn.init.zeros_(model[1].gate.weight)
    model[2].gate = nn.Linear(16, 4)  # Its bias decides for a token of zeros.
    report = dynamo_moe.convert(model)
    large, zeros = "100 times as large tokens", "tokens of zeros"
    assert [layer.ties for layer in report.replaced] == [
        (large, zeros),
        ("random tokens", large, zeros),
        (large,),
    ]
    console = Console(width=500, file=io.StringIO())
    console.print(report)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"Scores were equal for {large} in each; {zeros} in 0, 1; random tokens in 1." in shown


def test_large_logits_may_differ_by_rounding_and_by_no_more() -> None:
    torch.manual_seed(0)
    w_DE = torch.randn(64, 1) + 1e-4 * torch.randn(64, 4)
    values_ED = torch.randn(4, 64)

    def layer(x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        return (x.to(dtype) @ w_DE.to(dtype)).float().softmax(dim=-1) @ values_ED

    def rounded(x: Tensor) -> Tensor:
        return layer(x, torch.float32)

    x = 0.005 * torch.randn(2, 5, 64)
    assert relative_error(rounded(1e4 * x), layer(1e4 * x)) > TOLERANCE
    compare_shapes(layer, rounded, x, "a layer", extremes=[1e4])
    with pytest.raises(ValueError, match="10000 times random tokens"):
        compare_shapes(layer, lambda x: layer(x) * (1 + 1e-2 * (x > 100)), x, "a", extremes=[1e4])
