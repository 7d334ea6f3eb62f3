"""megablocks: the dropless layer's layouts and the layer with a capacity, without its kernels.

Legend: L length, B batch, D model width, F hidden width, E experts, K top_k, N = L*B*K.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, in_blocks

gelu = partial(F.gelu, approximate="tanh")


class LearnedRouter(nn.Module):
    def __init__(
        self, hidden_size: int, moe_num_experts: int, moe_top_k: int, norm: float | None
    ) -> None:
        super().__init__()
        self.moe_top_k, self.moe_normalize_expert_weights = moe_top_k, norm
        self.layer = nn.Linear(hidden_size, moe_num_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.layer(x.view(-1, x.shape[-1])).softmax(dim=-1)
        if self.moe_top_k == 1:
            weights, ids = scores.max(dim=-1, keepdim=True)
        else:
            weights, ids = torch.topk(scores, self.moe_top_k, dim=-1)
        if self.moe_normalize_expert_weights:
            weights = weights / torch.norm(
                weights, p=self.moe_normalize_expert_weights, dim=-1, keepdim=True
            )
        return scores, weights, ids


class SparseMLP(nn.Module):
    """All experts' matrices stacked vertically; the down projection is stored transposed."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, moe_num_experts: int) -> None:
        super().__init__()
        self.num_experts = moe_num_experts
        rows = moe_num_experts * ffn_hidden_size
        self.w1 = nn.Parameter(torch.empty(rows, hidden_size))
        self.w2 = nn.Parameter(torch.empty(rows, hidden_size))

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        parts = torch.split(x, tokens_per_expert.tolist())
        return torch.cat([self.one(part, i) for i, part in enumerate(parts)])

    def one(self, x: Tensor, index: int) -> Tensor:
        w1, w2 = (w.view(self.num_experts, -1, w.shape[-1])[index] for w in (self.w1, self.w2))
        return gelu(x @ w1.t()) @ w2


class SparseGLU(SparseMLP):
    def __init__(self, hidden_size: int, ffn_hidden_size: int, moe_num_experts: int) -> None:
        super().__init__(hidden_size, ffn_hidden_size, moe_num_experts)
        self.v1 = nn.Parameter(torch.empty_like(self.w1))

    def one(self, x: Tensor, index: int) -> Tensor:
        matrices = (self.w1, self.v1, self.w2)
        w1, v1, w2 = (w.view(self.num_experts, -1, w.shape[-1])[index] for w in matrices)
        return (gelu(x @ w1.t()) * (x @ v1.t())) @ w2


class ParallelDroplessMLP(nn.Module):
    """The bias is added after the weighted sum, and belongs to the layer."""

    def __init__(self, mlp: SparseMLP, hidden_size: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = mlp.num_experts, top_k
        self.mlp = mlp
        self.bias = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Tensor, scores: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        shape = x.size()
        flat_ids = ids.flatten().int()
        with torch.no_grad():
            _bins, order = torch.sort(flat_ids)
            counts = torch.histc(flat_ids.float(), self.num_experts, 0, self.num_experts - 1)
        rows = x.view(-1, x.shape[-1])[order // self.top_k]
        results = self.mlp(rows, counts.int())
        weighted = results * weights.flatten()[order].unsqueeze(-1)
        out = torch.zeros_like(x.view(-1, x.shape[-1]))
        out = out.index_add(0, order // self.top_k, weighted)
        return out.view(shape) + self.bias


class MLP(nn.Module):
    """With a capacity: one batched product."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, moe_num_experts: int) -> None:
        super().__init__()
        self.num_experts = moe_num_experts
        self.w1 = nn.Parameter(torch.empty(moe_num_experts, hidden_size, ffn_hidden_size))
        self.w2 = nn.Parameter(torch.empty(moe_num_experts, ffn_hidden_size, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(gelu(torch.bmm(x, self.w1)), self.w2)


class ParallelMLP(nn.Module):
    """Cuts sorted ids at the capacity, which drops later tokens."""

    def __init__(self, mlp: MLP, top_k: int, moe_capacity_factor: float) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.mlp = mlp.num_experts, top_k, mlp
        self.moe_capacity_factor = moe_capacity_factor

    def expert_capacity(self, tokens: int) -> int:
        return int(self.moe_capacity_factor * (self.top_k * tokens / self.num_experts))

    def forward(self, x: Tensor, scores: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        shape = x.size()
        x_TD = x.view(-1, x.shape[-1])
        flat_ids = ids.flatten()
        bins, order = torch.sort(flat_ids, stable=True)
        counts = torch.bincount(flat_ids, minlength=self.num_experts)
        capacity = self.expert_capacity(x_TD.shape[0])
        if capacity == 0:
            capacity = torch.max(counts).item()
        begins = torch.cumsum(counts, 0) - counts
        place = torch.arange(len(order), device=x.device) - begins[bins]
        kept = place < capacity
        slots = (bins * capacity + place)[kept]
        tokens = (order // self.top_k)[kept]
        buffer = x_TD.new_zeros(self.num_experts * capacity, x_TD.shape[-1])
        buffer = buffer.index_copy(0, slots, x_TD[tokens])
        results = self.mlp(buffer.view(self.num_experts, capacity, -1)).flatten(0, 1)[slots]
        weighted = results * weights.flatten()[order][kept].unsqueeze(-1)
        return torch.zeros_like(x_TD).index_add(0, tokens, weighted).view(shape)


class MoE(nn.Module):
    """Takes ``[L, B, D]``."""

    def __init__(self, router: LearnedRouter, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts, self.shared_expert = router, experts, None

    def forward(self, x: Tensor) -> Tensor:
        scores, weights, ids = self.router(x)
        return self.experts(x, scores, weights, ids)


def length_first(moe: nn.Module, x: Tensor) -> Tensor:
    return moe(x.transpose(0, 1).contiguous()).transpose(0, 1)


def dropless(kind: type[SparseMLP], top_k: int, norm: float | None) -> MoE:
    mlp = kind(DIM, HIDDEN, EXPERTS)
    router = LearnedRouter(DIM, EXPERTS, top_k, norm)
    return MoE(router, ParallelDroplessMLP(mlp, DIM, top_k))


def expert_slices(moe: nn.Module) -> list[list[Tensor]]:
    parameters = list(moe.experts.mlp.parameters())
    return [[p.view(EXPERTS, HIDDEN, DIM)[expert] for p in parameters] for expert in range(EXPERTS)]


ORIGIN = "databricks/megablocks megablocks/layers/dmoe.py, mlp.py, glu.py, router.py"

CASES = [
    Case(
        name="megablocks-dmoe",
        origin=ORIGIN,
        make=lambda: Model(lambda: dropless(SparseMLP, 1, None), "ffn", length_first),
        moe_paths=in_blocks("ffn"),
        expert_slices=expert_slices,
        notes="[E*F, D] for both products, top-1 by max, a bias of the layer",
    ),
    Case(
        name="megablocks-dmoe-glu",
        origin=ORIGIN,
        make=lambda: Model(lambda: dropless(SparseGLU, TOP_K, 1.0), "ffn", length_first),
        moe_paths=in_blocks("ffn"),
        expert_slices=expert_slices,
    ),
    Case(
        name="megablocks-moe-capacity",
        origin="databricks/megablocks megablocks/layers/moe.py",
        make=lambda: Model(
            lambda: MoE(
                LearnedRouter(DIM, EXPERTS, TOP_K, None),
                ParallelMLP(MLP(DIM, HIDDEN, EXPERTS), TOP_K, moe_capacity_factor=1.0),
            ),
            "ffn",
            length_first,
        ),
        moe_paths=in_blocks("ffn"),
        exact=True,
        notes="drops by the order of the tokens",
    ),
]
