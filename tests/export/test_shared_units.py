"""Two units of equal blocks are traced, and a third where the second does not show what all do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from block_stacks import WIDTH, Block, Stack, stack

pytest_plugins = ("shared_exports",)


class GivesAScale(nn.Module):
    """The first computes what it does not use, and all others are given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        if scale is None:
            return x + self.linear(x), x.mean()
        return x + self.linear(x) * scale, scale


class OfTheFirst(Stack):
    def forward(self, x: Tensor) -> Any:
        scale = None
        for block in self.blocks:
            x, scale = block(x, scale)
        return self.head(x)


class BetweenFirstAndSecond(Stack):
    """The model computes from the first block's result what all others are given."""

    def forward(self, x: Tensor) -> Any:
        scale = torch.ones(())
        for number, block in enumerate(self.blocks):
            x, _ = block(x, scale)
            if number == 0:
                scale = x.mean()
        return self.head(x)


class AfterTheSecond(Stack):
    """What the second block returns has another use, too."""

    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                second = x
        return self.head(x) + self.head(second)


def offset(y: Tensor) -> Tensor:
    return y + EPSILON


EPSILON = 0.5


class OtherNames(nn.Module):
    """Only blocks that are given a residual call ``offset``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self.linear(x), 2 * x
        x = x + residual
        return offset(self.linear(x)), x


class Residuals(Stack):
    def forward(self, x: Tensor) -> Any:
        residual = None
        for block in self.blocks:
            x, residual = block(x, residual)
        return self.head(x + residual)


@pytest.mark.parametrize(
    ("make", "third"),
    [
        (stack, False),
        (lambda: Stack(*(Block(n) for n in range(4))), False),
        (lambda: OfTheFirst(*(GivesAScale() for _ in range(6))), True),
        (lambda: BetweenFirstAndSecond(*(GivesAScale() for _ in range(6))), True),
        (lambda: AfterTheSecond(*(Block() for _ in range(6))), True),
        (lambda: Residuals(*(OtherNames() for _ in range(6))), True),
    ],
    ids=["plain", "four", "of-the-first", "between", "after-the-second", "other-names"],
)
def test_a_third_unit_is_traced_where_it_is_needed(
    compared: Callable[..., int],
    caplog: pytest.LogCaptureFixture,
    make: Callable[[], nn.Module],
    third: bool,
) -> None:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)

    with caplog.at_level(logging.INFO, logger="dynamo_moe.exporting"):
        assert compared(seeded) == 1
    assert ("Two units of equal blocks are too few" in caplog.text) == third
