"""Modules that look like others here but compute something else: to be left, with a reason.

Legend: T tokens, D model width, E experts, K top_k, C capacity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.sequential import MixtureOfExperts, expert
from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, first, in_blocks

ORIGIN = "variations that private code has"


class OtherExperts(MixtureOfExperts):
    """The usual routing, around any experts."""

    def __init__(self, dim: int, top_k: int, experts: Sequence[nn.Module]) -> None:
        super().__init__(dim, 1, len(experts), top_k)
        self.experts = nn.ModuleList(experts)


class DeepExpert(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ScaledExpert(nn.Module):
    """Has a constant that is not a parameter: the same formula with another number."""

    def __init__(self, dim: int, hidden: int, scale: float) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x) * self.scale))


class MinimumCapacity(nn.Module):
    """Drops nothing if there are few tokens, because every expert has room for eight."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.capacity_factor = top_k, num_experts, 0.75
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(expert(dim, hidden, nn.GELU()) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        count = x_TD.shape[0]
        capacity = max(int(self.capacity_factor * count * self.top_k / self.num_experts), 8)
        weights, ids = self.gate(x_TD).softmax(dim=-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x_TD)
        for index, module in enumerate(self.experts):
            token, slot = torch.where(ids == index)
            token, slot = token[:capacity], slot[:capacity]
            out.index_add_(0, token, module(x_TD[token]) * weights[token, slot, None])
        return out.view_as(x)


class SentenceGate(nn.Module):
    """Routes whole sequences of ``[B, L, D]`` by their mean, but single tokens of ``[T, D]``."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(expert(dim, hidden, nn.ReLU()) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean(dim=1, keepdim=True) if x.dim() == 3 else x
        scores = F.softmax(self.gate(pooled), dim=-1)
        weights, ids = scores.topk(self.top_k, dim=-1)
        gates = torch.zeros_like(scores).scatter(-1, ids, weights)
        results = torch.stack([module(x) for module in self.experts], dim=-2)
        return (gates.unsqueeze(-1) * results).sum(dim=-2)


class SwitchGate(nn.Module):
    """Divides by the sum over tokens; its mask is along another dimension of ``[B, L, E]``."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.capacity_factor, self.epsilon = 1.0, 1e-6
        self.w_gate = nn.Linear(dim, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        scores = F.softmax(self.w_gate(x), dim=-1)
        capacity = int(self.capacity_factor * x.size(0))
        ids = scores.topk(1, dim=-1).indices
        mask = torch.zeros_like(scores).scatter_(1, ids, 1)
        masked = scores * mask
        return masked / (masked.sum(0, keepdim=True) + self.epsilon) * capacity


class SwitchMoE(nn.Module):
    def __init__(self, dim: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(expert(dim, hidden, nn.GELU()) for _ in range(num_experts))
        self.gate = SwitchGate(dim, num_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        gates = self.gate(x)
        results = torch.stack([module(x) for module in self.experts], dim=-1)
        return torch.sum(gates.unsqueeze(-2) * results, dim=-1), None


class ExpertChoice(nn.Module):
    """Experts choose tokens."""

    def __init__(self, dim: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.capacity_factor, self.num_experts = 2.0, num_experts
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(expert(dim, hidden, nn.GELU()) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        scores = self.gate(x_TD).softmax(dim=-1)
        capacity = int(x_TD.shape[0] * self.capacity_factor / self.num_experts)
        weights, tokens = scores.t().topk(capacity, dim=-1)
        out = torch.zeros_like(x_TD)
        for index, module in enumerate(self.experts):
            result = module(x_TD[tokens[index]]) * weights[index].unsqueeze(-1)
            out.index_add_(0, tokens[index], result)
        return out.view_as(x)


def activations() -> list[nn.Module]:
    kinds = (nn.ReLU, nn.GELU, nn.SiLU)
    return [expert(DIM, HIDDEN, kinds[index % 3]()) for index in range(EXPERTS)]


def last_differs() -> list[nn.Module]:
    experts = [expert(DIM, HIDDEN, nn.ReLU()) for _ in range(EXPERTS - 1)]
    return [*experts, expert(DIM, HIDDEN, nn.GELU())]


def widths() -> list[nn.Module]:
    return [expert(DIM, HIDDEN + 8 * index, nn.ReLU()) for index in range(EXPERTS)]


def scales() -> list[nn.Module]:
    return [ScaledExpert(DIM, HIDDEN, 1.0 + 0.5 * index) for index in range(EXPERTS)]


def deep() -> list[nn.Module]:
    return [DeepExpert(DIM, HIDDEN) for _ in range(EXPERTS)]


def normed() -> list[nn.Module]:
    return [
        nn.Sequential(nn.LayerNorm(DIM), expert(DIM, HIDDEN, nn.GELU())) for _ in range(EXPERTS)
    ]


CASES = [
    *(
        Case(
            name=f"left-{make.__name__.replace('_', '-')}",
            origin=ORIGIN,
            make=lambda make=make: Model(lambda: OtherExperts(DIM, TOP_K, make()), "moe"),
            moe_paths=in_blocks("moe"),
            convertible=False,
            reason=reason,
        )
        for make, reason in (
            (activations, "its experts have different activations"),
            (last_differs, "the last expert has another activation than the others"),
            (widths, "its experts have different widths"),
            (scales, "its experts have different constants, with parameters of one shape"),
            (deep, "its experts have three products one after the other"),
            (normed, "its experts have norms of their own"),
        )
    ),
    Case(
        name="minimum-capacity",
        origin=ORIGIN,
        make=lambda: Model(lambda: MinimumCapacity(DIM, HIDDEN, EXPERTS, TOP_K), "moe"),
        moe_paths=in_blocks("moe"),
        exact=True,
        notes="8 tokens are as without drops, 128 are not: must not become dropless",
    ),
    Case(
        name="left-sentence-gate",
        origin=ORIGIN,
        make=lambda: Model(lambda: SentenceGate(DIM, HIDDEN, EXPERTS, TOP_K), "moe"),
        moe_paths=in_blocks("moe"),
        exact=True,
        notes="of [B, L, D] it routes sequences, of [T, D] tokens",
    ),
    Case(
        name="left-switch-3d",
        origin="kyegomez/SwitchTransformers switch_transformers/model.py",
        make=lambda: Model(lambda: SwitchMoE(DIM, HIDDEN, num_experts=4), "ffn", first),
        moe_paths=in_blocks("ffn"),
        num_experts=4,
        exact=True,
        notes="its mask is along the sequence of [B, L, D], along the experts of [T, D]",
    ),
    Case(
        name="left-expert-choice",
        origin="expert choice routing, arXiv 2202.09368",
        make=lambda: Model(lambda: ExpertChoice(DIM, HIDDEN, EXPERTS), "moe"),
        moe_paths=in_blocks("moe"),
        exact=True,
        notes="its experts choose tokens, any number of them for a token",
    ),
]
