"""Small models that the export tests share.

Legend: D model width, H hidden width, F = H, or 2H when gated, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import custom_ops
from dynamo_moe.models import DroplessMoEMlp


class Residual(nn.Module):
    """Layer norm and an MLP around a residual stream."""

    def __init__(self, width: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = mlp
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.uniform_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class OpLayer(nn.Module):
    """A layer that calls the operator with weights in its own layout ``[E, F, D]``."""

    def __init__(self, width: int = 16, hidden: int = 24, experts: int = 6, **options: Any) -> None:
        super().__init__()
        rows = hidden * (2 if options.get("gated") else 1)
        biases = options.pop("biases", True)
        self.router_weight = nn.Parameter(torch.randn(experts, width))
        self.w1 = nn.Parameter(torch.randn(experts, rows, width) * width**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.b1 = nn.Parameter(torch.randn(experts, rows)) if biases else None
        self.b2 = nn.Parameter(torch.randn(experts, width)) if biases else None
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return custom_ops.dropless(
            x, self.router_weight, self.w1, self.b1, self.w2, self.b2, 2, **self.options
        )


class OwnRouter(OpLayer):
    """The experts alone, behind a router of the model's own: sigmoid scores, no token dropped."""

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(x @ self.router_weight.mT)
        weights, ids = scores.topk(2, dim=-1)
        return custom_ops.experts(
            x, ids, weights, self.w1, self.b1, self.w2, self.b2, **self.options
        )


def mlp_model(width: int = 16, hidden: int = 24, experts: int = 6, layers: int = 2) -> nn.Module:
    """Residual ``DroplessMoEMlp`` layers, seeded, not converted."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(Residual(width, DroplessMoEMlp(width, hidden, experts, top_k=2)) for _ in range(layers))
    ).eval()


def op_model(*layers: nn.Module) -> nn.Module:
    """Residual layers around the given ones of width 16."""
    return nn.Sequential(*(Residual(16, layer) for layer in layers)).eval()
