"""DBRX: the experts' matrices stacked vertically, ``[E*F, D]``, with a view per expert.

Legend: T tokens, D model width, F hidden width, E experts, K top_k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, first, in_blocks


class DbrxRouter(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        moe_num_experts: int,
        moe_top_k: int,
        moe_normalize_expert_weights: float | None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.moe_num_experts, self.moe_top_k = moe_num_experts, moe_top_k
        self.moe_jitter_eps = None
        self.moe_normalize_expert_weights = moe_normalize_expert_weights
        self.uniform_expert_assignment = False
        self.layer = nn.Linear(hidden_size, moe_num_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores_TE = self.layer(x.view(-1, x.shape[-1])).softmax(dim=-1, dtype=torch.float32)
        weights_TK, ids_TK = torch.topk(scores_TE, self.moe_top_k, dim=-1)
        if self.moe_normalize_expert_weights:
            norm = torch.norm(weights_TK, p=self.moe_normalize_expert_weights, dim=-1, keepdim=True)
            weights_TK = weights_TK / norm
        return scores_TE.to(x.dtype), weights_TK.to(x.dtype), ids_TK


class DbrxExpertGLU(nn.Module):
    def __init__(self, hidden_size: int, ffn_hidden_size: int, moe_num_experts: int) -> None:
        super().__init__()
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.moe_num_experts = moe_num_experts
        rows = moe_num_experts * ffn_hidden_size
        self.w1 = nn.Parameter(torch.empty(rows, hidden_size))
        self.v1 = nn.Parameter(torch.empty(rows, hidden_size))
        self.w2 = nn.Parameter(torch.empty(rows, hidden_size))
        self.activation_fn = F.silu

    def forward(self, x: Tensor, expert_idx: int) -> Tensor:
        shape = (self.moe_num_experts, self.ffn_hidden_size, self.hidden_size)
        w1, v1, w2 = (w.view(shape)[expert_idx] for w in (self.w1, self.v1, self.w2))
        hidden = self.activation_fn(x.matmul(w1.t())) * x.matmul(v1.t())
        return hidden.matmul(w2)


class DbrxExperts(nn.Module):
    def __init__(self, hidden_size: int, ffn_hidden_size: int, moe_num_experts: int) -> None:
        super().__init__()
        self.moe_num_experts = moe_num_experts
        self.mlp = DbrxExpertGLU(hidden_size, ffn_hidden_size, moe_num_experts)

    def forward(
        self, x: Tensor, weights: Tensor, top_weights: Tensor, top_experts: Tensor
    ) -> Tensor:
        batch, length, width = x.shape
        x_TD = x.view(-1, width)
        out_TD = torch.zeros_like(x_TD)
        mask_EKT = F.one_hot(top_experts, num_classes=self.moe_num_experts).permute(2, 1, 0)
        for index in range(self.moe_num_experts):
            slot, token = torch.where(mask_EKT[index])
            if token.shape[0] == 0:
                continue
            token_list, slot_list = token.tolist(), slot.tolist()
            rows = x_TD[None, token_list].reshape(-1, width)
            result = self.mlp(rows, index) * top_weights[token_list, slot_list, None]
            out_TD.index_add_(0, token, result)
        return out_TD.reshape(batch, length, width)


class DbrxFFN(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        moe_num_experts: int,
        moe_top_k: int,
        moe_normalize_expert_weights: float | None = 1,
    ) -> None:
        super().__init__()
        self.router = DbrxRouter(
            hidden_size, moe_num_experts, moe_top_k, moe_normalize_expert_weights
        )
        self.experts = DbrxExperts(hidden_size, ffn_hidden_size, moe_num_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, top_weights, top_experts = self.router(x)
        return self.experts(x, weights, top_weights, top_experts), weights


def expert_slices(moe: nn.Module) -> list[list[Tensor]]:
    parameters = list(moe.experts.parameters())
    return [[p.view(EXPERTS, HIDDEN, DIM)[expert] for p in parameters] for expert in range(EXPERTS)]


CASES = [
    Case(
        name=f"dbrx-norm-{norm}",
        origin="databricks/dbrx model/modeling_dbrx.py",
        make=lambda norm=norm: Model(
            lambda: DbrxFFN(DIM, HIDDEN, EXPERTS, TOP_K, norm), "ffn", first
        ),
        moe_paths=in_blocks("ffn"),
        expert_slices=expert_slices,
        notes=notes,
    )
    for norm, notes in (
        (1, "returns (result, scores [T, E]); indices read as lists"),
        (2, "weights divided by their Euclidean norm: no router of the operator"),
    )
]
