"""Experts that compute nothing beside those that do, groups of which each gives an expert.

Legend: B batch, L length, T tokens, D model width, E experts, K top_k, G groups, Z experts that
compute nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, first, in_blocks

ZERO_EXPERTS = 2


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LongcatFlashTopkRouter(nn.Module):
    """Scores all experts, also those that compute nothing; a bias has a say in the choice."""

    def __init__(self, hidden_size: int, total: int, top_k: int) -> None:
        super().__init__()
        self.top_k, self.n_routed_experts, self.routed_scaling_factor = top_k, total, 6.0
        self.register_buffer("e_score_correction_bias", torch.zeros(total))
        self.classifier = nn.Linear(hidden_size, total, bias=False)

    @torch.no_grad()
    def get_topk_indices(self, scores: Tensor) -> Tensor:
        scores = scores.view(-1, self.n_routed_experts) + self.e_score_correction_bias[None]
        return torch.topk(scores, k=self.top_k, dim=-1, sorted=False)[1]

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x_TD = hidden_states.view(-1, hidden_states.shape[-1]).float()
        scores = F.linear(x_TD, self.classifier.weight.float()).softmax(dim=-1)
        ids = self.get_topk_indices(scores)
        return scores.gather(1, ids) * self.routed_scaling_factor, ids


class LongcatFlashMoE(nn.Module):
    """The last experts give back what they get."""

    def __init__(self, hidden_size: int, intermediate_size: int, routed: int, zero: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            [GatedMLP(hidden_size, intermediate_size) for _ in range(routed)]
            + [nn.Identity() for _ in range(zero)]
        )
        self.router = LongcatFlashTopkRouter(hidden_size, routed + zero, 3)

    def moe(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TD = torch.zeros_like(x_TD, dtype=weights_TK.dtype)
        mask_EKT = F.one_hot(ids_TK, num_classes=len(self.experts)).permute(2, 0, 1)
        for index in range(len(self.experts)):
            token, slot = torch.where(mask_EKT[index])
            if token.numel() > 0:
                result = self.experts[index](x_TD[token])
                out_TD.index_add_(0, token, result * weights_TK[token, slot].unsqueeze(-1))
        return out_TD.type(x_TD.dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape
        weights, ids = self.router(hidden_states)
        return self.moe(hidden_states.view(-1, shape[-1]), ids, weights).view(*shape)


class LongcatFlashExperts(nn.Module):
    """Two stacks of different numbers of experts, of which the first has rows that none reads."""

    def __init__(self, hidden_size: int, intermediate_size: int, routed: int, zero: int) -> None:
        super().__init__()
        self.num_routed_experts, self.total_experts = routed, routed + zero
        self.act_fn, self.identity_expert = nn.SiLU(), nn.Identity()
        self.gate_up_proj = nn.Parameter(
            torch.empty(routed + zero, 2 * intermediate_size, hidden_size)
        )
        self.down_proj = nn.Parameter(torch.empty(routed, hidden_size, intermediate_size))

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        mask = F.one_hot(ids, num_classes=self.total_experts).permute(2, 1, 0)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            index = int(hit.item())
            slot, token = torch.where(mask[index])
            rows = hidden_states[token]
            if index >= self.num_routed_experts:
                result = self.identity_expert(rows)
            else:
                gate, up = F.linear(rows, self.gate_up_proj[index]).chunk(2, dim=-1)
                result = F.linear(self.act_fn(gate) * up, self.down_proj[index])
            out.index_add_(0, token, result * weights[token, slot, None])
        return out


class StackedLongcatFlashMoE(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, routed: int, zero: int) -> None:
        super().__init__()
        self.experts = LongcatFlashExperts(hidden_size, intermediate_size, routed, zero)
        self.router = LongcatFlashTopkRouter(hidden_size, routed + zero, 3)

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape
        weights, ids = self.router(hidden_states)
        return self.experts(hidden_states.view(-1, shape[-1]), ids, weights).view(*shape)


class CopyExpert(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


class ZeroExpert(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return torch.zeros_like(inputs)


class ConstantExpert(nn.Module):
    """Mixes the token with a vector, by two weights of the token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.randn(width))
        self.wg = nn.Linear(width, 2, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        weight = F.softmax(self.wg(inputs), dim=-1, dtype=torch.float32)
        token = torch.einsum("b,bd->bd", weight[:, 0].type_as(inputs), inputs)
        return token + torch.einsum("b,d->bd", weight[:, 1].type_as(inputs), self.constant)


class SMoEPlusPlus(nn.Module):
    """MoE++: experts of four kinds in a list; returns losses and a dictionary beside the result."""

    def __init__(self, width: int, hidden: int, num_of_experts: int, num_selected: int) -> None:
        super().__init__()
        self.num_selected = num_selected
        experts: list[nn.Module] = [
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(num_of_experts)
        ]
        self.experts = nn.ModuleList([*experts, ZeroExpert(), CopyExpert(), ConstantExpert(width)])
        self.num_of_experts = len(self.experts)
        self.gate = nn.Linear(width, self.num_of_experts, bias=False)

    def forward(
        self, x: Tensor, return_id_experts: bool = False
    ) -> tuple[Tensor, Tensor, None, dict[str, Tensor]]:
        scores = F.softmax(self.gate(x), dim=-1, dtype=torch.float)
        weights, chosen = torch.topk(scores, self.num_selected)
        weights = weights / torch.sum(weights, dim=-1, keepdim=True).to(x.dtype)
        output = torch.zeros(x.shape, device=x.device, dtype=x.dtype)
        for index, expert in enumerate(self.experts):
            sample, position, slot = torch.where(chosen == index)
            rows = expert(x[sample, position])
            output[sample, position] += weights[sample, position, slot].unsqueeze(-1) * rows
        return output, torch.tensor(0.0), None, {}


class PanguProMoESparseMoeBlock(nn.Module):
    """The best expert of each group, with a learnt factor for each expert."""

    def __init__(self, hidden: int, intermediate: int, num_experts: int, groups: int) -> None:
        super().__init__()
        self.num_experts, self.num_experts_per_tok = num_experts, groups
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.router_scale = nn.Parameter(torch.ones((1, num_experts)))
        self.experts = nn.ModuleList(GatedMLP(hidden, intermediate) for _ in range(num_experts))
        self.shared_expert = GatedMLP(hidden, intermediate * 2)

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape
        x_TD = hidden_states.view(-1, shape[-1])
        size = self.num_experts // self.num_experts_per_tok
        scores = F.softmax(self.gate(x_TD), dim=1, dtype=torch.float)
        grouped = scores.view(-1, self.num_experts_per_tok, size)
        weights, places = torch.max(grouped, dim=-1)
        ids = places + torch.arange(0, self.num_experts, size, device=places.device)
        scale = self.router_scale.view(-1).index_select(0, ids.view(-1)).view(ids.shape)
        weights = weights * scale
        out_TD = self.shared_expert(x_TD)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(ids == index)
            result = expert(x_TD[token]) * weights[token, slot, None]
            out_TD = out_TD.index_add(0, token, result.to(x_TD.dtype))
        return out_TD.view(shape)


class TimeMoeSparseExpertsLayer(nn.Module):
    """A loop over all experts, and a shared one behind a sigmoid; returns logits."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.top_k, self.hidden_size, self.num_experts = TOP_K, hidden_size, num_experts
        self.norm_topk_prob = False
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(
            GatedMLP(hidden_size, intermediate_size // self.top_k) for _ in range(num_experts)
        )
        self.shared_expert = GatedMLP(hidden_size, intermediate_size)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        x_TD = hidden_states.view(-1, width)
        logits = self.gate(x_TD)
        weights, ids = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x_TD.dtype)
        out_TD = torch.zeros((batch * length, width), dtype=x_TD.dtype, device=x_TD.device)
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        for index in range(self.num_experts):
            slot, token = torch.where(mask[index])
            rows = x_TD[None, token].reshape(-1, width)
            result = self.experts[index](rows) * weights[token, slot, None]
            out_TD.index_add_(0, token, result.to(x_TD.dtype))
        shared = F.sigmoid(self.shared_expert_gate(x_TD)) * self.shared_expert(x_TD)
        return (out_TD + shared).reshape(batch, length, width), logits


def of_matrices(moe: nn.Module) -> list[list[Tensor]]:
    """Returns the experts that have parameters."""
    tensors = [list(expert.parameters()) for expert in moe.experts]
    return [each for each in tensors if each]


def routed_stacks(moe: nn.Module) -> list[list[Tensor]]:
    stacks = [*moe.experts.parameters()]
    count = moe.experts.num_routed_experts
    return [[stack[index] for stack in stacks] for index in range(count)]


LONGCAT = "src/transformers/models/longcat_flash/modular_longcat_flash.py"

CASES = [
    Case(
        name="longcat-flash",
        origin=f"huggingface/transformers 4.57 {LONGCAT}",
        make=lambda: Model(lambda: LongcatFlashMoE(DIM, HIDDEN, EXPERTS, ZERO_EXPERTS)),
        moe_paths=in_blocks("mlp"),
        expert_slices=of_matrices,
        notes="experts that give back the token, as modules in the same list",
    ),
    Case(
        name="longcat-flash-stacked",
        origin=f"huggingface/transformers 5 {LONGCAT}",
        make=lambda: Model(lambda: StackedLongcatFlashMoE(DIM, HIDDEN, EXPERTS, ZERO_EXPERTS)),
        moe_paths=in_blocks("mlp"),
        expert_slices=routed_stacks,
        convertible=False,
        reason="its first stack has weights of experts that the second has not",
    ),
    Case(
        name="moe-plus-plus",
        origin="Fsoft-AIC/LibMoE vision_language_model/moe_model/model/moe/moe_plus_plus.py",
        make=lambda: Model(lambda: SMoEPlusPlus(DIM, HIDDEN, EXPERTS, TOP_K), "moe", first),
        moe_paths=in_blocks("moe"),
        num_experts=EXPERTS + 1,
        expert_slices=of_matrices,
        notes="zero, copy and constant experts behind the others in a list",
    ),
    Case(
        name="pangu-pro-moe",
        origin="vllm-project/vllm-ascend vllm_ascend/models/pangu_moe.py",
        make=lambda: Model(lambda: PanguProMoESparseMoeBlock(DIM, HIDDEN, EXPERTS, 3)),
        moe_paths=in_blocks("mlp"),
        notes="the best expert of each group, with a learnt factor",
    ),
    Case(
        name="time-moe",
        origin="Time-MoE/Time-MoE time_moe/models/modeling_time_moe.py",
        make=lambda: Model(
            lambda: TimeMoeSparseExpertsLayer(DIM, 2 * HIDDEN, EXPERTS), "ffn_layer", first
        ),
        moe_paths=in_blocks("ffn_layer"),
        notes="as Qwen2-MoE's, with a loop over all experts",
    ),
]
