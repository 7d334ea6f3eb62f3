"""The most common mixture in private code: nn.Sequential experts behind a softmax gate.

It does not come from one repository: it is in tutorials and hundreds of projects, with small
differences.

Legend: T tokens, D model width, E experts, K top_k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, flat, in_blocks

ORIGIN = "common in tutorials and private code"


def expert(dim: int, hidden: int, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(dim, hidden), activation, nn.Dropout(0.1), nn.Linear(hidden, dim)
    )


class MixtureOfExperts(nn.Module):
    """Softmax over all, then the best K, divided by their sum; a loop over experts and slots."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(expert(dim, hidden, nn.ReLU()) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        scores = torch.softmax(self.gate(x_TD), dim=-1)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x_TD)
        for slot in range(self.top_k):
            for index in range(self.num_experts):
                mask = ids[:, slot] == index
                if mask.any():
                    out[mask] += weights[mask, slot].unsqueeze(-1) * self.experts[index](x_TD[mask])
        return out.view_as(x)


class GateIsSequential(nn.Module):
    """A two-layer gate ending in a softmax; results stacked in a list of experts, then gathered."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.k = top_k
        self.gating_network = nn.Sequential(
            nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, num_experts), nn.Softmax(dim=-1)
        )
        self.expert_list = nn.ModuleList(expert(dim, hidden, nn.GELU()) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gating_network(x).topk(self.k, dim=-1)
        results = torch.stack([expert(x) for expert in self.expert_list], dim=-2)
        index = ids.unsqueeze(-1).expand(*ids.shape, x.shape[-1])
        chosen = results.gather(-2, index)
        return (chosen * weights.unsqueeze(-1)).sum(dim=-2)


class SwitchOfLinears(nn.Module):
    """Top-1 by max; experts run on the rows with ``index == e``, and results are put back."""

    def __init__(self, dim: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.n_experts = num_experts
        self.switch = nn.Linear(dim, num_experts)
        self.softmax = nn.Softmax(dim=-1)
        self.experts = nn.ModuleList(expert(dim, hidden, nn.SiLU()) for _ in range(num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
        batch, length, width = x.shape
        x_TD = x.view(-1, width)
        scores = self.softmax(self.switch(x_TD))
        best, routes = torch.max(scores, dim=-1)
        lists = [torch.eq(routes, i).nonzero(as_tuple=True)[0] for i in range(self.n_experts)]
        out = x_TD.new_zeros(x_TD.shape)
        counts = x_TD.new_tensor([len(tokens) for tokens in lists])
        for index, tokens in enumerate(lists):
            out[tokens, :] = self.experts[index](x_TD[tokens, :])
        out = out * best.view(-1, 1)
        return out.view(batch, length, width), counts, scores.sum(0), 0, best


class GEGLU(nn.Module):
    """Values first, gates second."""

    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, dim=-1)
        return x * F.gelu(gate)


class GatedMixture(nn.Module):
    """Experts with both halves in one Linear; sigmoid scores, not renormalised."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(dim, hidden * 2), GEGLU(), nn.Dropout(0.1), nn.Linear(hidden, dim)
            )
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.sigmoid(self.router(x)).topk(self.top_k, dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            where = torch.nonzero(ids == index, as_tuple=False)
            tokens, slots = where[:, 0], where[:, 1]
            result = expert(x[tokens]) * weights[tokens, slots].unsqueeze(-1)
            out = out.index_put((tokens,), result, accumulate=True)
        return out


CASES = [
    Case(
        name="sequential-experts",
        origin=ORIGIN,
        make=lambda: Model(lambda: MixtureOfExperts(DIM, HIDDEN, EXPERTS, TOP_K), "moe"),
        moe_paths=in_blocks("moe"),
        notes="nn.Sequential experts with biases, a gate with a bias, loops over slots and experts",
    ),
    Case(
        name="sequential-gate",
        origin=ORIGIN,
        make=lambda: Model(lambda: GateIsSequential(DIM, HIDDEN, EXPERTS, TOP_K), "moe", flat),
        moe_paths=in_blocks("moe"),
        notes="every expert on every token, the chosen gathered; a gate of two layers",
    ),
    Case(
        name="labml-switch",
        origin="labmlai/annotated_deep_learning_paper_implementations"
        " labml_nn/transformers/switch/__init__.py",
        make=lambda: Model(
            lambda: SwitchOfLinears(DIM, HIDDEN, EXPERTS), "ffn", lambda moe, x: moe(x)[0]
        ),
        moe_paths=in_blocks("ffn"),
        notes="returns five things, of which the parent uses the first",
    ),
    Case(
        name="sequential-geglu",
        origin="experts as in lucidrains' feed-forward modules",
        make=lambda: Model(lambda: GatedMixture(DIM, HIDDEN, EXPERTS, TOP_K), "moe", flat),
        moe_paths=in_blocks("moe"),
        notes="values before gates in one Linear; nonzero and index_put",
    ),
]
