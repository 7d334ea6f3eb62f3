"""gpt-fast's Mixtral: every token gathers the weights of its experts.

Legend: T tokens, D model width, H hidden width, E experts, A activated experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, in_blocks


class ConditionalFeedForward(nn.Module):
    def __init__(self, dim: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, intermediate_size, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, intermediate_size))
        self.w3 = nn.Parameter(torch.empty(num_experts, intermediate_size, dim))

    def forward(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        w1_TAHD, w3_TAHD = self.w1[expert_indices], self.w3[expert_indices]
        w2_TADH = self.w2[expert_indices]
        gate_TAH = F.silu(torch.einsum("td,tahd->tah", x, w1_TAHD))
        up_TAH = torch.einsum("td,tahd->tah", x, w3_TAHD)
        return torch.einsum("tah,tadh->tad", gate_TAH * up_TAH, w2_TADH)


class MOEFeedForward(nn.Module):
    """Its result keeps the tokens flat: the residual sum needs a batch of one, or a reshape."""

    def __init__(
        self, dim: int, intermediate_size: int, num_experts: int, num_activated_experts: int
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.cond_ffn = ConditionalFeedForward(dim, intermediate_size, num_experts)
        self.dim, self.num_activated_experts = dim, num_activated_experts

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.view(-1, self.dim)
        scores_TE = F.softmax(self.gate(x_TD), dim=-1)
        weights_TA, ids_TA = torch.topk(scores_TE, self.num_activated_experts, dim=-1)
        weights_TA /= weights_TA.sum(dim=-1, keepdim=True)
        return torch.einsum("tad,ta->td", self.cond_ffn(x_TD, ids_TA), weights_TA)


CASES = [
    Case(
        name="gpt-fast-mixtral",
        origin="pytorch-labs/gpt-fast mixtral-moe/model.py",
        make=lambda: Model(
            lambda: MOEFeedForward(DIM, HIDDEN, EXPERTS, TOP_K),
            "block_sparse_moe",
            lambda moe, x: moe(x).view(x.shape),
        ),
        moe_paths=in_blocks("block_sparse_moe"),
        notes="takes [B, L, D], returns [T, D]",
    ),
]
