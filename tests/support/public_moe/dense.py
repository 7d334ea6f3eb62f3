"""Mixtures that run every expert on every token.

Legend: T tokens, D model width, E experts, K top_k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.sequential import expert
from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, in_blocks

ORIGIN = "common in tutorials and private code"


class OneHotMixture(nn.Module):
    """Each expert's result, multiplied by its column of sparse gates."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(expert(dim, hidden, nn.GELU()) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = F.softmax(self.gate(x), dim=-1)
        weights, ids = scores.topk(self.top_k, dim=-1)
        gates = torch.zeros_like(scores).scatter(-1, ids, weights)
        out = torch.zeros_like(x)
        for index, module in enumerate(self.experts):
            out = out + module(x) * gates[..., index : index + 1]
        return out


class SoftMixture(nn.Module):
    """Makes no choice: a softmax over all experts, and the sum of all their results."""

    def __init__(self, dim: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(expert(dim, hidden, nn.ReLU()) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x), dim=-1)
        results = torch.stack([module(x) for module in self.experts], dim=2)
        return torch.einsum("ble,bled->bld", weights, results)


class StackedEinsum(nn.Module):
    """Einsum over stacks of all experts, with the weights masked except for the best K."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Parameter(torch.empty(dim, num_experts))
        self.w_in = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.bias_in = nn.Parameter(torch.empty(num_experts, hidden))
        self.w_out = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.bias_out = nn.Parameter(torch.empty(num_experts, dim))

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.router
        lowest = logits.topk(self.top_k, dim=-1).values[..., -1:]
        weights = logits.masked_fill(logits < lowest, float("-inf")).softmax(dim=-1)
        hidden = F.relu(torch.einsum("bld,edh->bleh", x, self.w_in) + self.bias_in)
        results = torch.einsum("bleh,ehd->bled", hidden, self.w_out) + self.bias_out
        return torch.einsum("bled,ble->bld", results, weights)


class MultiGateMixture(nn.Module):
    """MMoE: tasks share experts, and each task has a gate and a tower."""

    def __init__(self, dim: int, hidden: int, num_experts: int, tasks: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(expert(dim, hidden, nn.ReLU()) for _ in range(num_experts))
        self.gates = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, num_experts), nn.Softmax(dim=-1)) for _ in range(tasks)
        )
        self.towers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(tasks))

    def forward(self, x: Tensor) -> list[Tensor]:
        results = torch.stack([module(x) for module in self.experts], dim=-2)
        mixed = [(gate(x).unsqueeze(-1) * results).sum(dim=-2) for gate in self.gates]
        return [tower(y) for tower, y in zip(self.towers, mixed)]


CASES = [
    Case(
        name="dense-one-hot",
        origin=ORIGIN,
        make=lambda: Model(lambda: OneHotMixture(DIM, HIDDEN, EXPERTS, TOP_K), "moe"),
        moe_paths=in_blocks("moe"),
    ),
    Case(
        name="dense-einsum",
        origin=ORIGIN,
        make=lambda: Model(lambda: StackedEinsum(DIM, HIDDEN, EXPERTS, TOP_K), "moe"),
        moe_paths=in_blocks("moe"),
        notes="its choice is a threshold: ids are nowhere in the module",
    ),
    Case(
        name="dense-soft",
        origin=ORIGIN,
        make=lambda: Model(lambda: SoftMixture(DIM, HIDDEN, EXPERTS), "moe"),
        moe_paths=in_blocks("moe"),
        notes="every token to every expert: top_k is E",
    ),
    Case(
        name="mmoe",
        origin="easezyc/deep-transfer-learning, and other libraries of recommenders",
        make=lambda: Model(
            lambda: MultiGateMixture(DIM, HIDDEN, EXPERTS, tasks=2),
            "mmoe",
            lambda moe, x: sum(moe(x)),
        ),
        moe_paths=in_blocks("mmoe"),
        convertible=False,
        reason="several gates share the experts",
    ),
]
