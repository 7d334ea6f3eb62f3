"""A layer whose experts are modules in a list."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, HIDDEN, COUNT = 64, 32, 4


class Listed(nn.Module):
    """Experts in a list, behind a gate."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, HIDDEN, bias=bias), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=bias)
            )
            for _ in range(COUNT)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(dim=-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (weights * (ids == number)).sum(dim=-1, keepdim=True)
            y = y + weight * expert(x)
        return y


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(sum(shape)))
