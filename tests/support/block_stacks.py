"""Small blocks of one class, one after the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8
BLOCKS = 7
LAST = 5
"""The block that does something else, which a shared trace passes over."""


class Block(nn.Module):
    """A residual block that does not read its number."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.epsilon = 1e-5
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.compute(self.linear(self.norm(x)))

    def compute(self, y: Tensor) -> Tensor:
        return F.gelu(y) + self.epsilon


class Stack(nn.Module):
    """Blocks one after the other, and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SecondAsWell(Stack):
    """What the second block returns has another use, too."""

    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                second = x
        return self.head(x) + self.head(second)


def stack(
    kind: type[nn.Module] = Block, blocks: int = 6, model: type[nn.Module] = Stack
) -> nn.Module:
    torch.manual_seed(0)
    return model(*(kind(number) for number in range(blocks))).eval()


def factor(count: int) -> int:
    """Returns what the last block but one multiplies by, and others."""
    return 2 if count % BLOCKS == LAST else 1


def doubled(*arguments: Any) -> Any:
    return 2 * arguments[-1]


class ReadsNumber(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * factor(self.number)


class ReadsPrecision(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * 2 if torch.get_float32_matmul_precision() == "high" else y


class KeepsResult(Block):
    def compute(self, y: Tensor) -> Tensor:
        self.kept = super().compute(y)
        return self.kept


class Negated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)
