"""Small models shared by the export tests.

Legend: D model width, H hidden width, F = H, or 2H when gated, E experts, B batch, L length,
N heads, A width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import custom_ops
from dynamo_moe.models import DroplessMoEMlp
from dynamo_moe.modules import ConvertedModule


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
    """A layer that calls the operator, with weights in its own layout ``[E, F, D]``."""

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


class InOut(OpLayer):
    """The same layer with the named weights as (in, out): it passes transposed views of them."""

    def __init__(self, *names: str, **options: Any) -> None:
        super().__init__(**options)
        self.names = names
        for name in names:
            setattr(self, name, nn.Parameter(getattr(self, name).mT.contiguous()))

    def forward(self, x: Tensor) -> Tensor:
        w1, w2 = (
            getattr(self, name).mT if name in self.names else getattr(self, name)
            for name in ("w1", "w2")
        )
        return custom_ops.dropless(
            x, self.router_weight, w1, self.b1, w2, self.b2, 2, **self.options
        )


class OwnRouter(OpLayer, ConvertedModule):
    """Only the experts, behind the model's own router: sigmoid scores, no token dropped.

    It is converted as it is, so that its router stays outside of the node.
    """

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(x @ self.router_weight.mT)
        weights, ids = scores.topk(2, dim=-1)
        return custom_ops.experts(
            x, ids, weights, self.w1, self.b1, self.w2, self.b2, **self.options
        )

    def experts_parameters(self) -> dict[str, nn.Parameter]:
        parameters = {"w1": self.w1, "b1": self.b1, "w2": self.w2, "b2": self.b2}
        return {name: value for name, value in parameters.items() if value is not None}


def mlp_model(width: int = 16, hidden: int = 24, experts: int = 6, layers: int = 2) -> nn.Module:
    """Residual ``DroplessMoEMlp`` layers, seeded, not converted."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(Residual(width, DroplessMoEMlp(width, hidden, experts, top_k=2)) for _ in range(layers))
    ).eval()


def op_model(*layers: nn.Module) -> nn.Module:
    """Residual blocks around the given layers of width 16."""
    return nn.Sequential(*(Residual(16, layer) for layer in layers)).eval()


class T5Encoder(nn.Module):
    """T5's encoder with the given feed-forward layers, which include their norm and residual."""

    def __init__(
        self, vocabulary: int, width: int, heads: int, feed_forwards: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position_bias = PositionBias(heads)
        self.blocks = nn.ModuleList(T5Block(width, heads, each) for each in feed_forwards)
        self.norm = nn.RMSNorm(width, eps=1e-6)

    def forward(self, ids: Tensor) -> Tensor:
        x_BLD = self.embedding(ids)
        bias_NLL = self.position_bias(ids.shape[1])
        for block in self.blocks:
            x_BLD = block(x_BLD, bias_NLL)
        return self.norm(x_BLD)


class T5Block(nn.Module):
    """Attention without scaling, its scores shifted by a bias; then the feed-forward layer."""

    def __init__(self, width: int, heads: int, feed_forward: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward = feed_forward

    def forward(self, x_BLD: Tensor, bias_NLL: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x_BLD)).unflatten(-1, (3, self.heads, -1))
        q_BNLA, k_BNLA, v_BNLA = qkv.permute(2, 0, 3, 1, 4)
        probabilities_BNLL = (q_BNLA @ k_BNLA.mT + bias_NLL).softmax(-1)
        attended_BLD = (probabilities_BNLL @ v_BNLA).transpose(1, 2).flatten(2)
        return self.feed_forward(x_BLD + self.out(attended_BLD))


class PositionBias(nn.Module):
    """A bias for each head and distance; large distances share a bucket (T5, arXiv 1910.10683)."""

    def __init__(self, heads: int, buckets: int = 8, furthest: int = 32) -> None:
        super().__init__()
        self.buckets, self.furthest = buckets, furthest
        self.bias = nn.Embedding(buckets, heads)

    def forward(self, length: int) -> Tensor:
        position_L = torch.arange(length, device=self.bias.weight.device)
        distance_LL = position_L[None, :] - position_L[:, None]
        side = self.buckets // 2
        near = side // 2
        apart_LL = distance_LL.abs()
        steps = torch.log(apart_LL.clamp(min=1) / near) / math.log(self.furthest / near)
        far_LL = (near + (steps * (side - near)).long()).clamp(max=side - 1)
        bucket_LL = torch.where(apart_LL < near, apart_LL, far_LL) + side * (distance_LL > 0)
        return self.bias(bucket_LL).permute(2, 0, 1)
