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
    """The loop that these blocks share since 4.5x: over the experts that have tokens."""
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
    """Its loop visits every expert; Qwen3-MoE's visits only those with tokens."""

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


class JambaSparseMoeBlock(nn.Module):
    """Its gate is called ``router``; weights are the softmax's, not renormalised."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int
    ) -> None:
        super().__init__()
        self.hidden_dim, self.ffn_dim = hidden_size, intermediate_size
        self.num_experts, self.top_k = num_experts, top_k
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(
            GateUpDownMLP(hidden_size, intermediate_size) for _ in range(num_experts)
        )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        x_TD = hidden_states.view(-1, width)
        router_logits = self.router(x_TD)
        weights_TE = F.softmax(router_logits, dim=1, dtype=torch.float)
        weights_TK, ids_TK = torch.topk(weights_TE, self.top_k, dim=-1)
        weights_TK = weights_TK.to(x_TD.dtype)
        out_TD = torch.zeros(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
        mask_EKT = F.one_hot(ids_TK, num_classes=self.num_experts).permute(2, 1, 0)
        for index in range(self.num_experts):
            slot, token = torch.where(mask_EKT[index])
            if token.shape[0] == 0:
                continue
            rows = x_TD[None, token].reshape(-1, width)
            result = self.experts[index](rows) * weights_TK[token, slot, None]
            out_TD.index_add_(0, token, result.to(x_TD.dtype))
        return out_TD.reshape(batch, length, width), router_logits


class GraniteMoeParallelExperts(nn.Module):
    def __init__(self, num_experts: int, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, output_size, input_size))
        self.num_experts, self.input_size = num_experts, input_size
        self.output_size = output_size

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        parts = inputs.split(expert_size, dim=0)
        return torch.cat([F.linear(parts[i], self.weight[i]) for i in range(self.num_experts)])


class GraniteMoeTopKGating(nn.Module):
    """Returns the experts' inputs: rows sorted by expert, and how many each expert has."""

    def __init__(self, input_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.input_size, self.top_k = num_experts, input_size, top_k
        self.layer = nn.Linear(input_size, num_experts, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, list[int], Tensor, Tensor]:
        logits = self.layer(hidden_states).float()
        best, ids = logits.topk(self.top_k, dim=1)
        gates = torch.softmax(best, dim=1).type_as(hidden_states)
        zeros = torch.zeros([best.size(0), self.num_experts], dtype=gates.dtype)
        counts = zeros.scatter(1, ids, 1).long().sum(0).tolist()
        order = ids.flatten().sort(0)[1]
        tokens = order.div(self.top_k, rounding_mode="trunc")
        return order, tokens, counts, gates.flatten()[order], logits


class GraniteMoeMoE(nn.Module):
    """Gate and up in one stack. JetMoe's version also has a bias for the whole layer."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, bias: bool
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size = hidden_size, intermediate_size
        self.activation = nn.SiLU()
        self.input_linear = GraniteMoeParallelExperts(
            num_experts, hidden_size, intermediate_size * 2
        )
        self.output_linear = GraniteMoeParallelExperts(num_experts, intermediate_size, hidden_size)
        self.router = GraniteMoeTopKGating(hidden_size, num_experts, top_k)
        self.bias = nn.Parameter(torch.empty(hidden_size)) if bias else None

    def forward(self, layer_input: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = layer_input.size()
        x_TD = layer_input.reshape(-1, width)
        _order, tokens, counts, gates, router_logits = self.router(x_TD)
        gate, up = self.input_linear(x_TD[tokens], counts).chunk(2, dim=-1)
        results = self.output_linear(self.activation(gate) * up, counts) * gates[:, None]
        zeros = torch.zeros((batch * length, self.input_size), dtype=results.dtype)
        out = zeros.index_add(0, tokens, results).view(batch, length, self.input_size)
        return out if self.bias is None else out + self.bias, router_logits


def sparsemixer(scores: Tensor, jitter_eps: float) -> tuple[Tensor, Tensor]:
    """The two best experts in turn, each with a softmax over the experts close to it."""
    weights, ids, left = [], [], scores
    for _ in range(2):
        with torch.no_grad():
            best, index = left.max(dim=-1, keepdim=True)
            factor = scores.abs().clamp(min=best)
            far = ((best - scores) / factor) > (2 * jitter_eps)
        near = torch.softmax(left.masked_fill(far, float("-inf")), dim=-1)
        weights.append(near.gather(dim=-1, index=index))
        ids.append(index)
        left = torch.scatter(scores, -1, index, float("-inf"))
    return torch.concat(weights, dim=-1), torch.concat(ids, dim=-1)


class PhimoeSparseMoeBlock(nn.Module):
    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, jitter_eps: float
    ) -> None:
        super().__init__()
        self.hidden_dim, self.ffn_dim = hidden_size, intermediate_size
        self.num_experts, self.top_k = num_experts, 2
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(
            MixtralBlockSparseTop2MLP(hidden_size, intermediate_size) for _ in range(num_experts)
        )
        self.router_jitter_noise, self.input_jitter_noise = jitter_eps, 0.0

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        x_TD = hidden_states.view(-1, width)
        router_logits = self.gate(x_TD)
        weights_TK, ids_TK = sparsemixer(router_logits, jitter_eps=self.router_jitter_noise)
        out_TD = sum_over_all_experts(self.experts, x_TD, ids_TK, weights_TK)
        return out_TD.reshape(batch, length, width), router_logits


class Ernie4_5_MoeStatics(nn.Module):  # noqa: N801  As it is called there.
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.e_score_correction_bias = nn.Parameter(
            torch.zeros(1, num_experts), requires_grad=False
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.e_score_correction_bias.squeeze()


class Ernie4_5_MoeSparseMoeBlock(nn.Module):  # noqa: N801  As it is called there.
    """A bias on the softmax for the selection only, and a lower bound for the sum of weights."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int
    ) -> None:
        super().__init__()
        self.hidden_dim, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.norm_min = 1e-12
        self.moe_statics = Ernie4_5_MoeStatics(num_experts)
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(
            GateUpDownMLP(hidden_size, intermediate_size) for _ in range(num_experts)
        )
        self.shared_experts = GateUpDownMLP(hidden_size, intermediate_size * 2)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        x_TD = hidden_states.view(-1, width)
        shared = self.shared_experts(x_TD)
        with torch.autocast(device_type=x_TD.device.type, enabled=False):
            router_logits = self.gate(x_TD.float())
            scores_TE = F.softmax(router_logits, dim=1, dtype=torch.float)
            ids_TK = torch.topk(self.moe_statics(scores_TE), self.top_k, dim=-1)[1]
            weights_TK = torch.gather(scores_TE, dim=-1, index=ids_TK)
            total = weights_TK.sum(dim=-1, keepdim=True)
            weights_TK = weights_TK / torch.clamp(total, min=self.norm_min)
        out_TD = sum_over_hit_experts(self.experts, x_TD, ids_TK, weights_TK.to(x_TD.dtype))
        return (out_TD + shared).reshape(batch, length, width), router_logits


class GptOssExperts(nn.Module):
    """Outside training: every expert on every token, weighted by a sparse ``[T, E]``."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.hidden_size, self.expert_dim = hidden_size, intermediate_size
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts, hidden_size, 2 * intermediate_size)
        )
        self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.alpha, self.limit = 1.702, 7.0

    def forward(self, hidden_states: Tensor, router_indices: Tensor, weights: Tensor) -> Tensor:
        batch = hidden_states.shape[0]
        x_TD = hidden_states.reshape(-1, self.hidden_size)
        count = weights.shape[1]
        rows = x_TD.repeat(count, 1).view(count, -1, self.hidden_size)
        both = torch.bmm(rows, self.gate_up_proj) + self.gate_up_proj_bias[..., None, :]
        gate, up = both[..., ::2], both[..., 1::2]
        gate = gate.clamp(min=None, max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        hidden = (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        results = torch.bmm(hidden, self.down_proj) + self.down_proj_bias[..., None, :]
        results = results.view(count, batch, -1, self.hidden_size)
        weights = weights.transpose(0, 1).view(count, batch, -1)[..., None]
        return (results * weights).sum(dim=0)


class GptOssTopKRouter(nn.Module):
    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.hidden_dim = top_k, num_experts, hidden_size
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x_TD = hidden_states.reshape(-1, self.hidden_dim)
        logits_TE = F.linear(x_TD, self.weight, self.bias)
        best_TK, ids_TK = torch.topk(logits_TE, self.top_k, dim=-1)
        best_TK = F.softmax(best_TK, dim=1, dtype=best_TK.dtype)
        return torch.zeros_like(logits_TE).scatter_(1, ids_TK, best_TK), ids_TK


class GptOssMLP(nn.Module):
    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int
    ) -> None:
        super().__init__()
        self.router = GptOssTopKRouter(hidden_size, num_experts, top_k)
        self.experts = GptOssExperts(hidden_size, intermediate_size, num_experts)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        scores, ids = self.router(hidden_states)
        return self.experts(hidden_states, router_indices=ids, weights=scores), scores


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
    Case(
        name="transformers4-jamba",
        origin=f"{ORIGIN}/jamba/modeling_jamba.py",
        make=lambda: Model(
            lambda: JambaSparseMoeBlock(DIM, HIDDEN, EXPERTS, TOP_K), "feed_forward", first
        ),
        moe_paths=in_blocks("feed_forward"),
    ),
    Case(
        name="transformers4-granite",
        origin=f"{ORIGIN}/granitemoe/modeling_granitemoe.py",
        make=lambda: Model(
            lambda: GraniteMoeMoE(DIM, HIDDEN, EXPERTS, TOP_K, bias=False),
            "block_sparse_moe",
            first,
        ),
        moe_paths=in_blocks("block_sparse_moe"),
        notes="fused gate and up; the gate sorts, and counts in a list",
    ),
    Case(
        name="transformers4-jetmoe",
        origin=f"{ORIGIN}/jetmoe/modeling_jetmoe.py",
        make=lambda: Model(
            lambda: GraniteMoeMoE(DIM, HIDDEN, EXPERTS, TOP_K, bias=True), "mlp", first
        ),
        moe_paths=in_blocks("mlp"),
        notes="a bias after the experts are summed",
    ),
    Case(
        name="transformers4-phimoe",
        origin=f"{ORIGIN}/phimoe/modeling_phimoe.py",
        # With the original's 0.01, hardly any expert is close to another.
        make=lambda: Model(
            lambda: PhimoeSparseMoeBlock(DIM, HIDDEN, EXPERTS, jitter_eps=0.2),
            "block_sparse_moe",
            first,
        ),
        moe_paths=in_blocks("block_sparse_moe"),
        notes="sparsemixer: weights that no router of the operator has",
    ),
    Case(
        name="transformers4-ernie4-5-moe",
        origin=f"{ORIGIN}/ernie4_5_moe/modeling_ernie4_5_moe.py",
        make=lambda: Model(
            lambda: Ernie4_5_MoeSparseMoeBlock(DIM, HIDDEN, EXPERTS, TOP_K), call=first
        ),
        moe_paths=in_blocks("mlp"),
        notes="a correction bias in a module of its own, autocast around the router",
    ),
    Case(
        name="transformers4-gpt-oss",
        origin=f"{ORIGIN}/gpt_oss/modeling_gpt_oss.py",
        make=lambda: Model(lambda: GptOssMLP(DIM, HIDDEN, EXPERTS, TOP_K), call=first),
        moe_paths=in_blocks("mlp"),
        notes="interleaved clamped SwiGLU with biases; dense outside of training",
    ),
]
