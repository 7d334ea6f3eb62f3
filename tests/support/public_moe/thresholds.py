"""Routings that give each token its own number of experts, or experts that compute nothing.

Legend: T tokens, D model width, H hidden width, E experts, K top_k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, in_blocks


class LlamaMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MegatronMLP(nn.Module):
    """Gate and up in one matrix; returns (result, bias), the bias being None."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden_size, 2 * ffn_hidden_size, bias=False)
        self.linear_fc2 = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        gate, up = torch.chunk(self.linear_fc1(hidden_states), 2, dim=-1)
        return self.linear_fc2(F.silu(gate) * up), None


class SequentialMLP(nn.Module):
    """Takes rows sorted by expert and how many each expert has."""

    def __init__(self, num_local_experts: int, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.num_local_experts = num_local_experts
        self.local_experts = nn.ModuleList(
            MegatronMLP(hidden_size, ffn_hidden_size) for _ in range(num_local_experts)
        )

    def forward(self, rows: Tensor, tokens_per_expert: Tensor) -> tuple[Tensor, None]:
        parts = torch.split(rows, tokens_per_expert.tolist())
        results = []
        for expert, part in zip(self.local_experts, parts):
            result, _bias = expert(part)
            results.append(result)
        return torch.cat(results, dim=0), None


class ReLURouter(nn.Module):
    """A token goes to all experts with a positive logit, which is their weight."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.topk, self.num_experts, self.input_jitter = TOP_K, num_experts, None

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(input, self.weight).view(-1, self.num_experts)
        probs = torch.relu(logits)
        return probs, probs > 0


class ReMoELayer(nn.Module):
    """Megatron's permutation by a map ``[T, E]``; returns (result, bias)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.router = ReLURouter(hidden_size, num_experts)
        self.experts = SequentialMLP(num_experts, hidden_size, ffn_hidden_size)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        probs, routing_map = self.router(hidden_states)
        shape = hidden_states.shape
        x_TD = hidden_states.view(-1, shape[-1])
        map_ET = routing_map.T.contiguous()
        positions = torch.arange(x_TD.shape[0], device=x_TD.device).unsqueeze(0)
        tokens = positions.expand(probs.shape[1], -1).masked_select(map_ET)
        rows, _bias = self.experts(x_TD.index_select(0, tokens), routing_map.sum(dim=0))
        rows = rows * probs.T.contiguous().masked_select(map_ET).unsqueeze(-1)
        out = torch.zeros(x_TD.shape, dtype=rows.dtype, device=rows.device)
        out.scatter_add_(0, tokens.unsqueeze(1).expand(-1, shape[-1]), rows)
        return out.view(shape), None


class NullExpertMoeBlock(nn.Module):
    """AdaMoE's Mixtral: a second gate adds null experts, which compute nothing."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.hidden_dim, self.ffn_dim = dim, hidden
        self.num_experts, self.num_null_experts, self.top_k = num_experts, num_experts, top_k
        self.gate = nn.Linear(dim, self.num_experts, bias=False)
        self.gate2 = nn.Linear(dim, self.num_null_experts, bias=False)
        self.experts = nn.ModuleList(LlamaMLP(dim, hidden) for _ in range(num_experts))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        x_TD = hidden_states.view(-1, width)
        logits = torch.cat([self.gate(x_TD), self.gate2(x_TD)], 1)
        weights, ids = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), self.top_k, dim=-1)
        real = (ids >= 0) & (ids <= self.num_experts - 1)
        chosen = weights * real.float()
        total = chosen.sum(dim=-1, keepdim=True)
        total[total == 0] = 1
        weights = (chosen / total + weights * (~real).float()).to(x_TD.dtype)
        out = torch.zeros((batch * length, width), dtype=x_TD.dtype, device=x_TD.device)
        classes = self.num_experts + self.num_null_experts
        mask = F.one_hot(ids, num_classes=classes).permute(2, 1, 0)
        for index in range(self.num_experts):
            slot, token = torch.where(mask[index])
            rows = x_TD[None, token].reshape(-1, width)
            result = self.experts[index](rows) * weights[token, slot, None]
            out.index_add_(0, token, result.to(x_TD.dtype))
        return out.reshape(batch, length, width), logits


class BaseSublayer(nn.Module):
    def __init__(self, embed_dim: int, ffn_embed_dim: int) -> None:
        super().__init__()
        self.activation_fn, self.norm = F.relu, nn.LayerNorm(embed_dim)
        self.ff1, self.ff2 = (
            nn.Linear(embed_dim, ffn_embed_dim),
            nn.Linear(ffn_embed_dim, embed_dim),
        )

    def forward(self, xs: Tensor) -> Tensor:
        return xs + self.ff2(self.activation_fn(self.ff1(self.norm(xs))))


class BaseLayer(nn.Module):
    """BASE: one expert, mixed with the token itself by a sigmoid of the affinity.

    In fairseq each worker has one expert and gets its rows by an exchange; here one process has
    them all.
    """

    def __init__(self, embed_dim: int, ffn_embed_dim: int, num_workers: int) -> None:
        super().__init__()
        self.num_workers, self.shuffle = num_workers, False
        self.expert_centroids = nn.Parameter(torch.empty(num_workers, embed_dim))
        self.expert_network = nn.ModuleList(
            nn.Sequential(BaseSublayer(embed_dim, ffn_embed_dim)) for _ in range(num_workers)
        )

    def forward(self, input_features: Tensor, *args: object) -> tuple[Tensor, None, None]:
        features = input_features.reshape(-1, input_features.size(-1))
        with torch.no_grad():
            affinities = features.matmul(self.expert_centroids.transpose(0, 1))
        order, splits = self.greedy_assignment(affinities)
        parts = torch.split(features[order], splits)
        results = []
        for index, rows in enumerate(parts):
            result = rows
            if rows.size(0) > 0:
                alpha = torch.sigmoid(rows.mv(self.expert_centroids[index])).unsqueeze(1)
                result = alpha * self.expert_network[index](rows) + (1 - alpha) * rows
            results.append(result)
        result = torch.cat(results)[self.inverse_sort(order)]
        return result.view(input_features.size()), None, None

    def inverse_sort(self, order: Tensor) -> Tensor:
        positions = torch.arange(0, order.size(0), device=order.device)
        return torch.empty_like(order).scatter_(0, order, positions)

    def greedy_assignment(self, scores: Tensor, k: int = 1) -> tuple[Tensor, list[int]]:
        ids = torch.topk(scores, dim=1, k=k, largest=True).indices.view(-1)
        ids, order = torch.sort(ids)
        splits = torch.zeros((self.num_workers,), dtype=torch.long, device=scores.device)
        workers, counts = torch.unique_consecutive(ids, return_counts=True)
        splits[workers] = counts
        return order // k, splits.tolist()


def pair(moe: nn.Module, x: Tensor) -> Tensor:
    result, _other = moe(x)
    return result


CASES = [
    Case(
        name="remoe",
        origin="thu-ml/ReMoE megatron/core/transformer/moe/router.py",
        make=lambda: Model(lambda: ReMoELayer(DIM, HIDDEN, EXPERTS), "mlp", pair),
        moe_paths=in_blocks("mlp"),
        notes="every expert with a positive logit, which is its weight: top_k is E",
    ),
    Case(
        name="adamoe-null-experts",
        origin="CengZihao/AdaMoE exp_2/LLaMA_Factory/src/llamafactory/model/adaptive_moe_utils.py",
        make=lambda: Model(
            lambda: NullExpertMoeBlock(DIM, HIDDEN, EXPERTS, 3), "block_sparse_moe", pair
        ),
        moe_paths=in_blocks("block_sparse_moe"),
        notes="null experts among the chosen ones compute nothing: fewer than top_k remain",
    ),
    Case(
        name="base-layer",
        origin="facebookresearch/fairseq fairseq/modules/base_layer.py",
        make=lambda: Model(
            lambda: BaseLayer(DIM, HIDDEN, EXPERTS), "moe", lambda moe, x: moe(x)[0]
        ),
        moe_paths=in_blocks("moe"),
        convertible=False,
        reason="a residual and a norm within experts, mixed with the token itself",
    ),
]
