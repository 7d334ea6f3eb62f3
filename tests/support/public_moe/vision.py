"""Mixtures in vision models: channels last, convolutions, a mask.

Legend: B batch, H height, W width, C channels, L length, E experts, K top_k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Block, Case, Model, in_blocks

ORIGIN = "common in vision models with timm's parts"


class Mlp(nn.Module):
    """timm's Mlp."""

    def __init__(self, in_features: int, hidden_features: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(0.1)
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(hidden_features, in_features)
        self.drop2 = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.drop1(self.act(self.fc1(x))))
        return self.drop2(self.fc2(x))


class ChannelsLastMoE(nn.Module):
    """Takes ``[B, H, W, C]``; ids and weights keep the image's shape."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(Mlp(dim, hidden) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        weights, ids = self.gate(x).softmax(dim=-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        flat = x.reshape(-1, channels)
        out = torch.zeros_like(flat)
        flat_ids, flat_weights = ids.flatten(0, -2), weights.flatten(0, -2)
        for index, expert in enumerate(self.experts):
            token, slot = (flat_ids == index).nonzero(as_tuple=True)
            out.index_add_(0, token, expert(flat[token]) * flat_weights[token, slot, None])
        return out.view(batch, height, width, channels)


class ConvolutionMixture(nn.Module):
    """Whole images choose: a gate over an image's mean, and experts that convolve."""

    def __init__(self, dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(
            nn.Conv2d(dim, dim, kernel_size=3, padding=1) for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(F.adaptive_avg_pool2d(x, 1).flatten(1)).softmax(dim=-1)
        weights, ids = scores.topk(self.top_k, dim=-1)
        gates = torch.zeros_like(scores).scatter(1, ids, weights)
        results = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (gates[:, :, None, None, None] * results).sum(dim=1)


class MaskedMoE(nn.Module):
    """The parent passes a mask of the present tokens; the others get zeros."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(Mlp(dim, hidden) for _ in range(num_experts))
        self.load_balancing_loss = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        weights, ids = self.router(x).softmax(dim=-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        if mask is not None:
            weights = weights * mask.unsqueeze(-1).to(weights.dtype)
        x_TD, ids_TK, weights_TK = x.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1)
        out_TD = torch.zeros_like(x_TD)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(ids_TK == index)
            out_TD[token] += weights_TK[token, slot, None] * expert(x_TD[token])
        return out_TD.view_as(x)


class MaskedModel(nn.Module):
    """Passes a mask to its layers, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Block(MaskedMoE(DIM, HIDDEN, EXPERTS, TOP_K), "moe", self.call) for _ in range(2)
        )
        self.head = nn.Linear(DIM, 5)
        self._mask: Tensor | None = None

    def call(self, moe: nn.Module, x: Tensor) -> Tensor:
        return moe(x, mask=self._mask)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self._mask = mask
        for layer in self.layers:
            x = layer(x)
        self._mask = None
        return self.head(x)


def masked_tokens(batch: int = 2, length: int = 5, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, DIM, generator=generator)
    return x, torch.rand(batch, length, generator=generator) < 0.7


def channels_last(moe: nn.Module, x: Tensor) -> Tensor:
    return moe(x.unsqueeze(2)).squeeze(2)


def channels_first(moe: nn.Module, x: Tensor) -> Tensor:
    return moe(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)


CASES = [
    Case(
        name="vision-channels-last",
        origin=ORIGIN,
        make=lambda: Model(
            lambda: ChannelsLastMoE(DIM, HIDDEN, EXPERTS, TOP_K), "mlp", channels_last
        ),
        moe_paths=in_blocks("mlp"),
        notes="takes [B, H, W, C]",
    ),
    Case(
        name="vision-convolutions",
        origin="mixtures of convolutions, as in CondConv and its followers",
        make=lambda: Model(lambda: ConvolutionMixture(DIM, EXPERTS, TOP_K), "moe", channels_first),
        moe_paths=in_blocks("moe"),
        convertible=False,
        reason="its experts are convolutions, and images choose them, not tokens",
    ),
    Case(
        name="masked",
        origin="facebookresearch/fairseq's branch with mixtures, and others that pad",
        make=MaskedModel,
        moe_paths=in_blocks("moe"),
        args=masked_tokens,
        dynamic={"x": {0: "batch", 1: "length"}, "mask": {0: "batch", 1: "length"}},
        notes="forward takes mask=None, which the parent passes by name",
    ),
]
