"""Further mixtures of lucidrains: a threshold for second experts, two levels, product keys.

Legend: B batch, N length, D model width, E experts, O outer experts, I inner experts, C capacity,
P halves of a key, Q queries, K keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.lucidrains import MIN_EXPERT_CAPACITY, cumsum_exclusive, safe_one_hot
from public_moe.surroundings import DIM, EXPERTS, HIDDEN, Case, Model, first, in_blocks


def top1(x: Tensor) -> tuple[Tensor, Tensor]:
    values, index = x.topk(k=1, dim=-1)
    return values.squeeze(dim=-1), index.squeeze(dim=-1)


class Top2Gating(nn.Module):
    """Changes gates and masks in place; ``importance`` tells first from second choices."""

    def __init__(
        self,
        dim: int,
        num_gates: int,
        second_policy_eval: str,
        capacity_factor_eval: float,
        outer_expert_dims: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.eps, self.num_gates = 1e-9, num_gates
        self.w_gating = nn.Parameter(torch.empty(*outer_expert_dims, dim, num_gates))
        self.second_policy_eval, self.second_threshold_eval = second_policy_eval, 0.2
        self.capacity_factor_eval = capacity_factor_eval

    def forward(self, x: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        *_, length, _dim = x.shape
        scores = torch.einsum("...bnd,...de->...bne", x, self.w_gating).softmax(dim=-1)
        gate_1, index_1 = top1(scores)
        mask_1 = F.one_hot(index_1, self.num_gates).float()
        proxy = scores
        if importance is not None:
            firsts = (importance == 1.0).float()
            mask_1 *= firsts[..., None]
            gate_1 *= firsts
            proxy = proxy * firsts[..., None]
        gate_2, index_2 = top1(scores * (1.0 - mask_1))
        mask_2 = F.one_hot(index_2, self.num_gates).float()
        if importance is not None:
            mask_2 *= (importance > 0.0).float()[..., None]
        total = gate_1 + gate_2 + self.eps
        gate_1 /= total
        gate_2 /= total
        loss = (proxy.mean(dim=-2) * mask_1.mean(dim=-2)).mean() * float(self.num_gates**2)
        if self.second_policy_eval == "threshold":
            mask_2 *= (gate_2 > self.second_threshold_eval).float()[..., None]
        capacity = min(length, int((length * self.capacity_factor_eval) / self.num_gates))
        capacity = max(capacity, MIN_EXPERT_CAPACITY)
        place_1 = cumsum_exclusive(mask_1) * mask_1
        mask_1 *= (place_1 < float(capacity)).float()
        used_1 = mask_1.sum(dim=-2, keepdim=True)
        kept_1 = mask_1.sum(dim=-1)
        place_1 = place_1.sum(dim=-1)
        gate_1 *= kept_1
        place_2 = cumsum_exclusive(mask_2) + used_1
        place_2 *= mask_2
        mask_2 *= (place_2 < float(capacity)).float()
        kept_2 = mask_2.sum(dim=-1)
        place_2 = place_2.sum(dim=-1)
        gate_2 *= kept_2
        combine = sum(
            gate[..., None, None]
            * kept[..., None, None]
            * F.one_hot(index, self.num_gates)[..., None]
            * safe_one_hot(place.long(), capacity)[..., None, :]
            for gate, kept, index, place in (
                (gate_1, kept_1, index_1, place_1),
                (gate_2, kept_2, index_2, place_2),
            )
        )
        return combine.bool().to(combine), combine, loss


class Experts(nn.Module):
    def __init__(self, dim: int, num_experts: tuple[int, ...], hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(*num_experts, dim, hidden_dim))
        self.w2 = nn.Parameter(torch.empty(*num_experts, hidden_dim, dim))
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(torch.einsum("...nd,...dh->...nh", x, self.w1))
        return torch.einsum("...nh,...hd->...nd", hidden, self.w2)


class MoE(nn.Module):
    def __init__(
        self, dim: int, num_experts: int, hidden_dim: int, capacity_factor_eval: float
    ) -> None:
        super().__init__()
        self.num_experts, self.loss_coef = num_experts, 1e-2
        self.gate = Top2Gating(dim, num_experts, "threshold", capacity_factor_eval)
        self.experts = Experts(dim, (num_experts,), hidden_dim)

    def forward(self, inputs: Tensor, **kwargs: object) -> tuple[Tensor, Tensor]:
        dispatch, combine, loss = self.gate(inputs)
        rows = torch.einsum("bnd,bnec->ebcd", inputs, dispatch)
        shape = rows.shape
        rows = rows.reshape(self.num_experts, -1, inputs.shape[-1])
        results = self.experts(rows).reshape(*shape)
        return torch.einsum("ebcd,bnec->bnd", results, combine), loss * self.loss_coef


class HeirarchicalMoE(nn.Module):
    """Groups of experts get what an outer gate gives them, and route that among their own."""

    def __init__(self, dim: int, num_experts: tuple[int, int], hidden_dim: int) -> None:
        super().__init__()
        self.num_experts_outer, self.num_experts_inner = num_experts
        self.loss_coef = 1e-2
        self.gate_outer = Top2Gating(dim, num_experts[0], "all", 2.0)
        self.gate_inner = Top2Gating(dim, num_experts[1], "all", 2.0, (num_experts[0],))
        self.experts = Experts(dim, num_experts, hidden_dim)

    def forward(self, inputs: Tensor, **kwargs: object) -> tuple[Tensor, Tensor]:
        outer, inner = self.num_experts_outer, self.num_experts_inner
        dispatch_outer, combine_outer, loss_outer = self.gate_outer(inputs)
        outer_rows = torch.einsum("bnd,bnec->ebcd", inputs, dispatch_outer)
        weights = combine_outer.permute(2, 0, 3, 1).sum(dim=-1)
        importance = 0.5 * ((weights > 0.5).float() + (weights > 0.0).float())
        dispatch, combine, loss_inner = self.gate_inner(outer_rows, importance=importance)
        rows = torch.einsum("ebnd,ebnfc->efbcd", outer_rows, dispatch)
        shape = rows.shape
        results = self.experts(rows.reshape(outer, inner, -1, inputs.shape[-1])).reshape(*shape)
        results = torch.einsum("efbcd,ebnfc->ebnd", results, combine)
        out = torch.einsum("ebcd,bnec->bnd", results, combine_outer)
        return out, (loss_outer + loss_inner) * self.loss_coef


class Rearranged(nn.Module):
    """``b n (p h d) -> p b n h d``."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 1, 3, 4)


class PEER(nn.Module):
    """Experts of one hidden unit each, found by product keys and looked up as embeddings."""

    def __init__(self, dim: int, heads: int, num_experts: int, num_experts_per_head: int) -> None:
        super().__init__()
        self.norm, self.heads, self.num_experts = nn.Identity(), heads, num_experts
        self.weight_down_embed = nn.Embedding(num_experts, dim)
        self.weight_up_embed = nn.Embedding(num_experts, dim)
        self.activation, self.num_keys = nn.GELU(), int(num_experts**0.5)
        width = dim // 2
        self.to_queries = nn.Sequential(
            nn.Linear(dim, width * heads * 2, bias=False), Rearranged(heads)
        )
        self.product_key_topk = self.num_experts_per_head_topk = num_experts_per_head
        self.keys = nn.Parameter(torch.empty(heads, self.num_keys, 2, width))
        self.dropout, self.score_activation = nn.Dropout(0.0), nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        similarity = torch.einsum("pbnhd,hkpd->pbnhk", self.to_queries(x), self.keys)
        scores, ids = similarity.topk(self.product_key_topk, dim=-1)
        (scores_x, scores_y), (ids_x, ids_y) = scores, ids
        scores = (scores_x[..., :, None] + scores_y[..., None, :]).flatten(-2)
        ids = (ids_x[..., :, None] * self.num_keys + ids_y[..., None, :]).flatten(-2)
        scores, places = scores.topk(self.num_experts_per_head_topk, dim=-1)
        ids = ids.gather(-1, places)
        down, up = self.weight_down_embed(ids), self.weight_up_embed(ids)
        hidden = self.activation(torch.einsum("bnd,bnhkd->bnhk", x, down))
        hidden = self.dropout(hidden) * self.score_activation(scores)
        return torch.einsum("bnhk,bnhkd->bnd", hidden, up)


def inner_experts(moe: nn.Module) -> list[list[Tensor]]:
    stacks = (moe.experts.w1.flatten(0, 1), moe.experts.w2.flatten(0, 1))
    return [[stack[index] for stack in stacks] for index in range(len(stacks[0]))]


def units(moe: nn.Module) -> list[list[Tensor]]:
    tables = (moe.weight_down_embed.weight, moe.weight_up_embed.weight)
    return [[table[index] for table in tables] for index in range(moe.num_experts)]


ORIGIN = "lucidrains/mixture-of-experts mixture_of_experts/mixture_of_experts.py"

CASES = [
    Case(
        name="lucidrains-top2-threshold",
        origin=ORIGIN,
        make=lambda: Model(
            lambda: MoE(DIM, EXPERTS, HIDDEN, capacity_factor_eval=1.0 * EXPERTS), "moe", first
        ),
        moe_paths=in_blocks("moe"),
        notes="a second expert only if its gate is over 0.2; changes gates in place; drops nothing",
    ),
    Case(
        name="lucidrains-hierarchical",
        origin=ORIGIN,
        make=lambda: Model(lambda: HeirarchicalMoE(DIM, (2, 3), HIDDEN), "moe", first),
        moe_paths=in_blocks("moe"),
        expert_slices=inner_experts,
        exact=True,
        notes="two gates, one after the other, with capacities",
    ),
    Case(
        name="peer",
        origin="lucidrains/PEER-pytorch PEER_pytorch/PEER.py",
        make=lambda: Model(lambda: PEER(DIM, 4, 36, num_experts_per_head=3), "peer"),
        moe_paths=in_blocks("peer"),
        num_experts=36,
        expert_slices=units,
        convertible=False,
        reason="product keys choose for every head",
    ),
]
