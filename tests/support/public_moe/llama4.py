"""Llama 4's reference: every expert on every token; experts not chosen get zeros.

Legend: A tokens, D model width, F hidden width, E experts, K top_k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, Case, Model, in_blocks, options
from public_moe.torchtitan import FeedForward


class Experts(nn.Module):
    def __init__(self, num_local_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.num_local_experts, self.dim = num_local_experts, dim
        self.w1 = nn.Parameter(torch.empty(num_local_experts, dim, hidden_dim))
        self.w2 = nn.Parameter(torch.empty(num_local_experts, hidden_dim, dim))
        self.w3 = nn.Parameter(torch.empty(num_local_experts, dim, hidden_dim))

    def forward(self, routed_in_egD: Tensor) -> Tensor:
        x_EAD = routed_in_egD.view(self.num_local_experts, -1, self.dim)
        hidden_EAF = F.silu(torch.bmm(x_EAD, self.w1)) * torch.bmm(x_EAD, self.w3)
        return torch.bmm(hidden_EAF, self.w2).view(-1, self.dim)


class MoE(nn.Module):
    """Multiplies the experts' input by the sigmoid of the chosen logits."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.moe_args = options(num_experts=num_experts, top_k=top_k)
        self.experts = Experts(num_experts, dim, hidden_dim)
        self.router_DE = nn.Parameter(torch.empty(dim, num_experts))
        self.shared_expert = FeedForward(dim, hidden_dim)

    def forward(self, x_bsD: Tensor) -> Tensor:
        _, length, D = x_bsD.shape
        x_AD = x_bsD.view(-1, D)
        count = x_AD.shape[0]
        logits_AE = torch.matmul(x_AD, self.router_DE)
        chosen_AK, ids_AK = torch.topk(logits_AE, self.moe_args.top_k, dim=1)
        masked_AE = torch.full_like(logits_AE, float("-inf")).scatter_(1, ids_AK, chosen_AK)
        scores_EA = torch.sigmoid(masked_AE.transpose(0, 1))
        positions_EA = torch.arange(count, device=x_AD.device).view(1, -1)
        positions_EA = positions_EA.expand(scores_EA.size(0), -1)
        index = positions_EA.reshape(-1, 1).expand(-1, D)
        rows = torch.gather(x_AD, dim=0, index=index) * scores_EA.reshape(-1, 1)
        out_AD = self.shared_expert(x_AD)
        routed = self.experts(rows.detach())
        out_AD.scatter_add_(dim=0, index=index, src=routed.view(-1, D))
        return out_AD.view(-1, length, D)


CASES = [
    Case(
        name=f"llama4-reference-top{top_k}",
        origin="meta-llama/llama-models models/llama4/moe.py",
        make=lambda top_k=top_k: Model(lambda: MoE(DIM, HIDDEN, EXPERTS, top_k), "feed_forward"),
        moe_paths=in_blocks("feed_forward"),
        notes="weights on the experts' input; in-place scatter onto the shared expert's result",
    )
    for top_k in (1, 2)
]
