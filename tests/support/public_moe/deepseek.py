"""DeepSeek's MoE modules: the reference inference model of V3, remote code of V1 and V2.

Legend: T tokens, D model width, H hidden width, E routed experts, K experts per token, G groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, HIDDEN, TOP_K, Case, Model, in_blocks
from public_moe.transformers4 import GateUpDownMLP

REMOTE = "remote code on the Hugging Face hub: deepseek-ai"
GROUPED_EXPERTS = 8


class Gate(nn.Module):
    """V3's gate: returns weights, then indices."""

    def __init__(
        self,
        dim: int,
        n_routed_experts: int,
        n_activated_experts: int,
        n_expert_groups: int = 1,
        n_limited_groups: int = 1,
        score_func: str = "softmax",
        route_scale: float = 1.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.topk = dim, n_activated_experts
        self.n_groups, self.topk_groups = n_expert_groups, n_limited_groups
        self.score_func, self.route_scale = score_func, route_scale
        self.weight = nn.Parameter(torch.empty(n_routed_experts, dim))
        self.bias = nn.Parameter(torch.empty(n_routed_experts)) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits_TE = F.linear(x, self.weight)
        if self.score_func == "softmax":
            scores_TE = logits_TE.softmax(dim=-1, dtype=torch.float32)
        else:
            scores_TE = logits_TE.sigmoid()
        choice_TE = scores_TE if self.bias is None else scores_TE + self.bias
        if self.n_groups > 1:
            choice_TGE = choice_TE.view(x.size(0), self.n_groups, -1)
            if self.bias is None:
                group_TG = choice_TGE.amax(dim=-1)
            else:
                group_TG = choice_TGE.topk(2, dim=-1)[0].sum(dim=-1)
            kept = group_TG.topk(self.topk_groups, dim=-1)[1]
            left_out = choice_TGE.new_ones(x.size(0), self.n_groups, dtype=bool)
            left_out = left_out.scatter_(1, kept, False)
            choice_TE = choice_TGE.masked_fill_(left_out.unsqueeze(-1), float("-inf")).flatten(1)
        ids_TK = torch.topk(choice_TE, self.topk, dim=-1)[1]
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.score_func == "sigmoid":
            weights_TK /= weights_TK.sum(dim=-1, keepdim=True)
        weights_TK *= self.route_scale
        return weights_TK.type_as(x), ids_TK


class Expert(nn.Module):
    """An expert; also V3's shared MLP, which is as wide as all shared experts together."""

    def __init__(self, dim: int, inter_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, inter_dim, bias=False)
        self.w2 = nn.Linear(inter_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, inter_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    def __init__(
        self, dim: int, moe_inter_dim: int, n_routed_experts: int, n_shared_experts: int, gate: Gate
    ) -> None:
        super().__init__()
        self.dim = dim
        self.n_routed_experts = self.n_local_experts = n_routed_experts
        self.n_activated_experts = gate.topk
        self.experts_start_idx, self.experts_end_idx = 0, n_routed_experts
        self.gate = gate
        self.experts = nn.ModuleList(Expert(dim, moe_inter_dim) for _ in range(n_routed_experts))
        self.shared_experts = Expert(dim, n_shared_experts * moe_inter_dim)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()
        x_TD = x.view(-1, self.dim)
        weights_TK, ids_TK = self.gate(x_TD)
        routed_TD = torch.zeros_like(x_TD)
        counts = torch.bincount(ids_TK.flatten(), minlength=self.n_routed_experts).tolist()
        for index in range(self.experts_start_idx, self.experts_end_idx):
            if counts[index] == 0:
                continue
            token, slot = torch.where(ids_TK == index)
            expert = self.experts[index]
            routed_TD[token] += expert(x_TD[token]) * weights_TK[token, slot, None]
        return (routed_TD + self.shared_experts(x_TD)).view(shape)


class MoEGateV2(nn.Module):
    """Returns indices, weights and the auxiliary loss, which is None in evaluation."""

    def __init__(
        self,
        hidden_size: int,
        n_routed_experts: int,
        num_experts_per_tok: int,
        topk_method: str = "greedy",
        n_group: int = 1,
        topk_group: int = 1,
        norm_topk_prob: bool = False,
        routed_scaling_factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.top_k, self.n_routed_experts = num_experts_per_tok, n_routed_experts
        self.routed_scaling_factor = routed_scaling_factor
        self.scoring_func, self.alpha, self.seq_aux = "softmax", 0.001, True
        self.topk_method, self.n_group, self.topk_group = topk_method, n_group, topk_group
        self.norm_topk_prob, self.gating_dim = norm_topk_prob, hidden_size
        self.weight = nn.Parameter(torch.empty(n_routed_experts, hidden_size))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        batch, length, width = hidden_states.shape
        x_TD = hidden_states.view(-1, width)
        logits_TE = F.linear(x_TD.type(torch.float32), self.weight.type(torch.float32), None)
        scores_TE = logits_TE.softmax(dim=-1, dtype=torch.float32)
        if self.topk_method == "greedy":
            weights_TK, ids_TK = torch.topk(scores_TE, k=self.top_k, dim=-1, sorted=False)
        else:
            groups_TG = scores_TE.view(batch * length, self.n_group, -1).max(dim=-1).values
            kept = torch.topk(groups_TG, k=self.topk_group, dim=-1, sorted=False)[1]
            mask_TG = torch.zeros_like(groups_TG)
            mask_TG.scatter_(1, kept, 1)
            mask_TE = mask_TG.unsqueeze(-1)
            mask_TE = mask_TE.expand(
                batch * length, self.n_group, self.n_routed_experts // self.n_group
            ).reshape(batch * length, -1)
            limited_TE = scores_TE.masked_fill(~mask_TE.bool(), 0.0)
            weights_TK, ids_TK = torch.topk(limited_TE, k=self.top_k, dim=-1, sorted=False)
        if self.top_k > 1 and self.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        else:
            weights_TK = weights_TK * self.routed_scaling_factor
        aux_loss = None
        if self.training and self.alpha > 0:
            chosen = ids_TK.view(batch, -1)
            share = torch.zeros(batch, self.n_routed_experts)
            share.scatter_add_(1, chosen, torch.ones(batch, length * self.top_k))
            share.div_(length * self.top_k / self.n_routed_experts)
            mean = scores_TE.view(batch, length, -1).mean(dim=1)
            aux_loss = (share * mean).sum(dim=1).mean() * self.alpha
        return ids_TK, weights_TK, aux_loss


class DeepseekV2MoE(nn.Module):
    """In evaluation, sorts the tokens by expert and reads the counts as numpy numbers."""

    def __init__(
        self,
        hidden_size: int,
        moe_intermediate_size: int,
        n_routed_experts: int,
        n_shared_experts: int | None,
        gate: MoEGateV2,
    ) -> None:
        super().__init__()
        self.num_experts_per_tok = gate.top_k
        self.ep_size, self.experts_per_rank, self.ep_rank = 1, n_routed_experts, 0
        self.experts = nn.ModuleList(
            GateUpDownMLP(hidden_size, moe_intermediate_size) for _ in range(n_routed_experts)
        )
        self.gate = gate
        self.n_shared_experts = n_shared_experts
        if n_shared_experts is not None:
            self.shared_experts = GateUpDownMLP(
                hidden_size, moe_intermediate_size * n_shared_experts
            )

    def forward(self, hidden_states: Tensor) -> Tensor:
        identity, shape = hidden_states, hidden_states.shape
        ids_TK, weights_TK, _aux_loss = self.gate(hidden_states)
        x_TD = hidden_states.view(-1, hidden_states.shape[-1])
        if self.training:
            rows = x_TD.repeat_interleave(self.num_experts_per_tok, dim=0)
            flat_ids = ids_TK.view(-1)
            y = torch.empty_like(rows)
            for index, expert in enumerate(self.experts):
                y[flat_ids == index] = expert(rows[flat_ids == index])
            y = (y.view(*weights_TK.shape, -1) * weights_TK.unsqueeze(-1)).sum(dim=1)
            y = y.to(hidden_states.dtype).view(*shape)
        else:
            y = self.moe_infer(x_TD, ids_TK, weights_TK).view(*shape)
        if self.n_shared_experts is not None:
            y = y + self.shared_experts(identity)
        return y

    @torch.no_grad()
    def moe_infer(self, x: Tensor, topk_ids: Tensor, topk_weight: Tensor) -> Tensor:
        hits_TE = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        hits_TE.scatter_(1, topk_ids, 1)
        order = topk_ids.view(-1).argsort()
        rows = x[order // topk_ids.shape[1]]
        counts = hits_TE.sum(dim=0).cpu().numpy()
        results, begin = [], 0
        for index, count in enumerate(counts):
            end = begin + count
            if count == 0:
                continue
            expert = self.experts[index + self.ep_rank * self.experts_per_rank]
            results.append(expert(rows[begin:end]))
            begin = end
        stacked = torch.cat(results, dim=0) if results else rows.new_empty(0)
        unsorted = torch.empty_like(stacked)
        unsorted[order] = stacked
        weighted = unsorted.view(*topk_ids.shape, -1).type(topk_weight.dtype)
        weighted = weighted.mul_(topk_weight.unsqueeze(dim=-1))
        return weighted.sum(dim=1).type(unsorted.dtype)


class DeepseekMoE(DeepseekV2MoE):
    """The first model's version: cumulated counts without a minimum length, scattered results."""

    @torch.no_grad()
    def moe_infer(self, x: Tensor, topk_ids: Tensor, topk_weight: Tensor) -> Tensor:
        flat_ids, flat_weights = topk_ids.view(-1), topk_weight.view(-1, 1)
        cache = torch.zeros_like(x)
        order = flat_ids.argsort()
        ends = flat_ids.bincount().cpu().numpy().cumsum(0)
        tokens = order // self.num_experts_per_tok
        for index, end in enumerate(ends):
            begin = 0 if index == 0 else ends[index - 1]
            if begin == end:
                continue
            chosen = tokens[begin:end]
            result = self.experts[index](x[chosen])
            result.mul_(flat_weights[order[begin:end]])
            positions = chosen.view(-1, 1).repeat(1, x.shape[-1])
            cache.scatter_reduce_(0, positions, result, reduce="sum")
        return cache


def v3(**gate_options: object) -> MoE:
    gate = Gate(DIM, GROUPED_EXPERTS, TOP_K, **gate_options)
    return MoE(DIM, HIDDEN, GROUPED_EXPERTS, n_shared_experts=2, gate=gate)


def v2(kind: type[DeepseekV2MoE] = DeepseekV2MoE, **gate_options: object) -> DeepseekV2MoE:
    gate = MoEGateV2(DIM, GROUPED_EXPERTS, TOP_K, **gate_options)
    return kind(DIM, HIDDEN, GROUPED_EXPERTS, n_shared_experts=2, gate=gate)


V3 = "deepseek-ai/DeepSeek-V3 inference/model.py"

CASES = [
    Case(
        name="deepseek-v3-reference",
        origin=V3,
        make=lambda: Model(
            lambda: v3(
                n_expert_groups=4,
                n_limited_groups=2,
                score_func="sigmoid",
                route_scale=2.5,
                bias=True,
            ),
            "ffn",
        ),
        moe_paths=in_blocks("ffn"),
        num_experts=GROUPED_EXPERTS,
        notes="groups, a bias for the selection alone, counts read as a list",
    ),
    Case(
        name="deepseek-v3-reference-softmax",
        origin=V3,
        make=lambda: Model(v3, "ffn"),
        moe_paths=in_blocks("ffn"),
        num_experts=GROUPED_EXPERTS,
        notes="the 16B model's: a plain softmax gate, not renormalised",
    ),
    Case(
        name="deepseek-v2-remote",
        origin=f"{REMOTE}/DeepSeek-V2-Lite modeling_deepseek.py",
        make=lambda: Model(v2),
        moe_paths=in_blocks("mlp"),
        num_experts=GROUPED_EXPERTS,
        notes="moe_infer runs under no_grad and reads counts through numpy",
    ),
    Case(
        name="deepseek-v2-remote-groups",
        origin=f"{REMOTE}/DeepSeek-V2 modeling_deepseek.py",
        make=lambda: Model(
            lambda: v2(
                topk_method="group_limited_greedy",
                n_group=4,
                topk_group=2,
                routed_scaling_factor=16.0,
            )
        ),
        moe_paths=in_blocks("mlp"),
        num_experts=GROUPED_EXPERTS,
    ),
    Case(
        name="deepseek-moe-remote",
        origin=f"{REMOTE}/deepseek-moe-16b-base modeling_deepseek.py",
        make=lambda: Model(lambda: v2(DeepseekMoE, norm_topk_prob=True)),
        moe_paths=in_blocks("mlp"),
        num_experts=GROUPED_EXPERTS,
        notes="cumulated counts, scatter_reduce_",
    ),
]
