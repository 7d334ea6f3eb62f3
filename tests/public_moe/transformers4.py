"""MoE blocks of transformers 4.x, before it stacked its experts.

Legend: T tokens, D model width, H hidden width, E experts, K top_k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, first, in_blocks

ORIGIN = "huggingface/transformers 4.x src/transformers/models"


class MixtralBlockSparseTop2MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.ffn_dim, self.hidden_dim = intermediate_size, hidden_size
        self.w1 = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.w2 = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.w3 = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act_fn(self.w1(x)) * self.w3(x))


class GateUpDownMLP(nn.Module):
    """Qwen2MoeMLP, OlmoeMLP, Qwen3MoeMLP, JambaMLP."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def sum_over_hit_experts(
    experts: nn.ModuleList, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """The loop that those blocks share since 4.5x: over the experts that have tokens."""
    out_TD = torch.zeros(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    mask_EKT = F.one_hot(ids_TK, num_classes=len(experts)).permute(2, 1, 0)
    hit = torch.greater(mask_EKT.sum(dim=(-1, -2)), 0).nonzero()
    for index in hit:
        slot, token = torch.where(mask_EKT[index].squeeze(0))
        rows = x_TD[None, token].reshape(-1, x_TD.shape[-1])
        result = experts[index](rows) * weights_TK[token, slot, None]
        out_TD.index_add_(0, token, result.to(x_TD.dtype))
    return out_TD


def sum_over_all_experts(
    experts: nn.ModuleList, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """The loop that they shared before: over every expert."""
    out_TD = torch.zeros(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    mask_EKT = F.one_hot(ids_TK, num_classes=len(experts)).permute(2, 1, 0)
    for index in range(len(experts)):
        slot, token = torch.where(mask_EKT[index])
        rows = x_TD[None, token].reshape(-1, x_TD.shape[-1])
        result = experts[index](rows) * weights_TK[token, slot, None]
        out_TD.index_add_(0, token, result.to(x_TD.dtype))
    return out_TD


class MixtralSparseMoeBlock(nn.Module):
    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int
    ) -> None:
        super().__init__()
        self.hidden_dim, self.ffn_dim = hidden_size, intermediate_size
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(
            MixtralBlockSparseTop2MLP(hidden_size, intermediate_size) for _ in range(num_experts)
        )
        self.jitter_noise = 0.1

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        if self.training and self.jitter_noise > 0:
            low, high = 1 - self.jitter_noise, 1 + self.jitter_noise
            hidden_states *= torch.empty_like(hidden_states).uniform_(low, high)
        x_TD = hidden_states.view(-1, width)
        router_logits = self.gate(x_TD)
        weights_TE = F.softmax(router_logits, dim=1, dtype=torch.float)
        weights_TK, ids_TK = torch.topk(weights_TE, self.top_k, dim=-1)
        weights_TK /= weights_TK.sum(dim=-1, keepdim=True)
        out_TD = sum_over_hit_experts(self.experts, x_TD, ids_TK, weights_TK.to(x_TD.dtype))
        return out_TD.reshape(batch, length, width), router_logits


class Qwen2MoeSparseMoeBlock(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        moe_intermediate_size: int,
        shared_expert_intermediate_size: int,
        num_experts: int,
        top_k: int,
        norm_topk_prob: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.norm_topk_prob = norm_topk_prob
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(
            GateUpDownMLP(hidden_size, moe_intermediate_size) for _ in range(num_experts)
        )
        self.shared_expert = GateUpDownMLP(hidden_size, shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        x_TD = hidden_states.view(-1, width)
        router_logits = self.gate(x_TD)
        weights_TE = F.softmax(router_logits, dim=1, dtype=torch.float)
        weights_TK, ids_TK = torch.topk(weights_TE, self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights_TK /= weights_TK.sum(dim=-1, keepdim=True)
        out_TD = sum_over_hit_experts(self.experts, x_TD, ids_TK, weights_TK.to(x_TD.dtype))
        shared_TD = self.shared_expert(x_TD)
        out_TD = out_TD + F.sigmoid(self.shared_expert_gate(x_TD)) * shared_TD
        return out_TD.reshape(batch, length, width), router_logits


class OlmoeSparseMoeBlock(nn.Module):
    """Its experts' loop visits every expert; Qwen3-MoE's visits those that were hit."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        norm_topk_prob: bool,
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.norm_topk_prob = norm_topk_prob
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(
            GateUpDownMLP(hidden_size, intermediate_size) for _ in range(num_experts)
        )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        x_TD = hidden_states.view(-1, width)
        router_logits = self.gate(x_TD)
        weights_TE = F.softmax(router_logits, dim=1, dtype=torch.float)
        weights_TK, ids_TK = torch.topk(weights_TE, self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights_TK /= weights_TK.sum(dim=-1, keepdim=True)
        weights_TK = weights_TK.to(x_TD.dtype)
        return self.combine(x_TD, ids_TK, weights_TK).view(batch, length, width), router_logits

    def combine(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return sum_over_all_experts(self.experts, x_TD, ids_TK, weights_TK)


class Qwen3MoeSparseMoeBlock(OlmoeSparseMoeBlock):
    def combine(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return sum_over_hit_experts(self.experts, x_TD, ids_TK, weights_TK)


CASES = [
    Case(
        name="transformers4-mixtral",
        origin=f"{ORIGIN}/mixtral/modeling_mixtral.py",
        make=lambda: Model(
            lambda: MixtralSparseMoeBlock(DIM, HIDDEN, EXPERTS, TOP_K), "block_sparse_moe", first
        ),
        moe_paths=in_blocks("block_sparse_moe"),
        notes="returns (result, router_logits [T, E])",
    ),
    Case(
        name="transformers4-qwen2-moe",
        origin=f"{ORIGIN}/qwen2_moe/modeling_qwen2_moe.py",
        make=lambda: Model(
            lambda: Qwen2MoeSparseMoeBlock(DIM, HIDDEN, 56, EXPERTS, TOP_K), call=first
        ),
        moe_paths=in_blocks("mlp"),
        notes="a shared expert with a sigmoid gate inside the module; weights not renormalised",
    ),
    Case(
        name="transformers4-olmoe",
        origin=f"{ORIGIN}/olmoe/modeling_olmoe.py",
        make=lambda: Model(
            lambda: OlmoeSparseMoeBlock(DIM, HIDDEN, EXPERTS, TOP_K, norm_topk_prob=False),
            call=first,
        ),
        moe_paths=in_blocks("mlp"),
    ),
    *(
        Case(
            name=f"transformers4-qwen3-moe-{'norm' if norm else 'raw'}",
            origin=f"{ORIGIN}/qwen3_moe/modeling_qwen3_moe.py",
            make=lambda norm=norm: Model(
                lambda: Qwen3MoeSparseMoeBlock(DIM, HIDDEN, EXPERTS, TOP_K, norm), call=first
            ),
            moe_paths=in_blocks("mlp"),
        )
        for norm in (True, False)
    ),
]
