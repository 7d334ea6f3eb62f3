"""Experts stored by name, or in lists of parameters.

Legend: B batch, L length, T tokens, D model width, E experts, K top_k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import (
    DIM,
    EXPERTS,
    HIDDEN,
    TOP_K,
    Case,
    Model,
    first,
    in_blocks,
    options,
)


class SwitchTransformersDenseActDense(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.wi = nn.Linear(d_model, d_ff, bias=False)
        self.wo = nn.Linear(d_ff, d_model, bias=False)
        self.dropout, self.act = nn.Dropout(0.1), nn.ReLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.wo(self.dropout(self.act(self.wi(hidden_states))))


class SwitchTransformersTop1Router(nn.Module):
    """A one-hot ``[B, L, E]``, without tokens beyond the capacity of their sequence."""

    def __init__(self, d_model: int, num_experts: int, expert_capacity: int) -> None:
        super().__init__()
        self.num_experts, self.expert_capacity = num_experts, expert_capacity
        self.classifier = nn.Linear(d_model, num_experts, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.classifier(hidden_states.float())
        scores = F.softmax(logits, dim=-1)
        chosen = F.one_hot(torch.argmax(scores, dim=-1), num_classes=self.num_experts)
        chosen = chosen * (torch.cumsum(chosen, dim=-2) <= self.expert_capacity)
        return chosen, torch.max(scores, dim=-1).values.unsqueeze(-1), logits


class SwitchTransformersSparseMLP(nn.Module):
    """Dropped tokens keep their own values, multiplied by the weight."""

    def __init__(self, d_model: int, d_ff: int, num_experts: int, expert_capacity: int) -> None:
        super().__init__()
        self.router = SwitchTransformersTop1Router(d_model, num_experts, expert_capacity)
        self.experts = nn.ModuleDict()
        for index in range(num_experts):
            self.experts[f"expert_{index}"] = SwitchTransformersDenseActDense(d_model, d_ff)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mask, weights, logits = self.router(hidden_states)
        ids = torch.argmax(mask, dim=-1)
        out = hidden_states.clone()
        mask = mask.bool()
        hit = mask.flatten(0, 1).sum(dim=0)
        for index in torch.nonzero(hit, as_tuple=True)[0].tolist():
            own = mask[:, :, index]
            out[own] = self.experts[f"expert_{index}"](hidden_states[own])
        return weights * out, (logits, ids)


class NllbMoeDenseActDense(nn.Module):
    def __init__(self, d_model: int, ffn_dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d_model, ffn_dim), nn.Linear(ffn_dim, d_model)
        self.dropout, self.act = nn.Dropout(0.1), nn.ReLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.act(self.fc1(hidden_states))))


class NllbMoeTop2Router(nn.Module):
    def __init__(self, d_model: int, num_experts: int, bias: bool) -> None:
        super().__init__()
        self.num_experts, self.expert_capacity = num_experts, None
        self.classifier = nn.Linear(d_model, num_experts, bias=bias)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = self.classifier(hidden_states.float())
        scores = F.softmax(logits, dim=-1)
        mask1 = F.one_hot(torch.argmax(scores, dim=-1), num_classes=self.num_experts)
        others = logits.masked_fill(mask1.bool(), float("-inf"))
        mask2 = F.one_hot(torch.argmax(others, dim=-1), num_classes=self.num_experts)
        weight1, weight2 = ((scores * mask).sum(dim=1) for mask in (mask1, mask2))
        total = torch.clamp(weight1 + weight2, min=torch.finfo(scores.dtype).eps)
        place1 = torch.cumsum(mask1, dim=0) - 1
        place2 = torch.cumsum(mask2, dim=0) - 1 + torch.sum(mask1, dim=0, keepdim=True)
        capacity = 2 * math.ceil(logits.shape[0] / self.num_experts)
        mask1 = mask1 * torch.lt(place1, capacity)
        mask2 = mask2 * torch.lt(place2, capacity)
        combining = (weight1 / total)[:, None] * mask1 + (weight2 / total)[:, None] * mask2
        return combining.bool(), combining


class NllbMoeSparseMLP(nn.Module):
    """In evaluation, its dropout of whole tokens becomes a factor."""

    def __init__(self, d_model: int, ffn_dim: int, num_experts: int) -> None:
        super().__init__()
        self.router = NllbMoeTop2Router(d_model, num_experts, bias=False)
        self.moe_token_dropout = 0.2
        self.token_dropout = nn.Dropout(self.moe_token_dropout)
        self.num_experts = num_experts
        self.experts = nn.ModuleDict()
        for index in range(num_experts):
            self.experts[f"expert_{index}"] = NllbMoeDenseActDense(d_model, ffn_dim)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, width = hidden_states.shape
        mask_TE, weights_TE = self.router(hidden_states.reshape(-1, width), padding_mask)
        x_TD = hidden_states.reshape(-1, width)
        x_ETD = torch.einsum("bm,be->ebm", x_TD, mask_TE.to(x_TD.dtype))
        for index, expert in enumerate(self.experts.values()):
            tokens = mask_TE[:, index]
            result = expert(x_ETD[index, tokens])
            if self.training:
                result = self.token_dropout(result)
            else:
                result *= 1 - self.moe_token_dropout
            weights = weights_TE[tokens, index]
            x_ETD[index, tokens] = torch.einsum("b,be->be", weights, result)
        out = x_ETD.sum(dim=0).reshape(batch, length, width)
        return out, (weights_TE, torch.argmax(mask_TE.int(), dim=-1))


class LinearGLUExperts(nn.Module):
    """Lists of parameters; called with the index of the expert."""

    def __init__(self, in_features: int, size: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts, self.size_experts = num_experts, [size] * num_experts
        self.act_fn = nn.SiLU()

        def matrices(rows: int, columns: int) -> nn.ParameterList:
            return nn.ParameterList(torch.empty(rows, columns) for _ in range(num_experts))

        self.weight_gate = matrices(size, in_features)
        self.weight_up = matrices(size, in_features)
        self.weight_down = matrices(in_features, size)
        for name in ("bias_gate", "bias_up", "bias_down"):
            self.register_parameter(name, None)

    def forward(self, input: Tensor, i: int) -> Tensor:
        gate = self.act_fn(F.linear(input, self.weight_gate[i], None))
        up = F.linear(input, self.weight_up[i], None)
        return F.linear(gate * up, self.weight_down[i], None)


class TopKBalancedNoisyGate(nn.Module):
    """Two layers with a tanh; returns a dictionary, with losses in evaluation too."""

    def __init__(self, input_size: int, num_experts: int, num_selects: int) -> None:
        super().__init__()
        self.num_experts, self.num_selects = num_experts, num_selects
        self.gate_network = nn.Sequential(
            nn.Linear(input_size, num_experts, bias=False),
            nn.Tanh(),
            nn.Linear(num_experts, num_experts, bias=False),
        )
        self.softmax, self.softplus = nn.Softmax(1), nn.Softplus()
        self.balance_loss_weight, self.add_noise, self.noise_epsilon = 1e-2, True, 1e-2
        self.weight_noise = nn.Linear(input_size, num_experts, bias=False)

    def cv_squared(self, x: Tensor) -> Tensor:
        return x.float().var() / (x.float().mean() ** 2 + 1e-10)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.gate_network(x)
        if self.training and self.add_noise:
            spread = self.softplus(self.weight_noise(x)) + self.noise_epsilon
            logits = logits + torch.randn_like(logits) * spread
        best, ids = logits.topk(min(self.num_selects + 1, self.num_experts), dim=1)
        ids = ids[:, : self.num_selects]
        scores = self.softmax(best[:, : self.num_selects].to(torch.float32)).to(logits.dtype)
        gates = torch.zeros_like(logits, requires_grad=True).scatter(1, ids, scores)
        importance, load = gates.sum(0), (gates > 0).sum(0)
        loss = (self.cv_squared(importance) + self.cv_squared(load)) * self.balance_loss_weight
        return {
            "topK_indices": ids,
            "topK_scores": scores,
            "balance_loss": loss,
            "load": load,
            "importance": importance,
        }


@dataclass
class CalculatorOutput:
    hidden_states: Tensor
    num_dropped_tokens: Tensor


class UniversalCalculator(nn.Module):
    """Sorts, splits by a list of counts, skips experts without rows."""

    def __init__(self, experts: LinearGLUExperts, score_scale_factor: float) -> None:
        super().__init__()
        self.experts, self.num_experts = experts, experts.num_experts
        self.multiply_gate_scores, self.score_scale_factor = True, score_scale_factor
        self.mlp_norm = None

    def forward(self, x: Tensor, topK_indices: Tensor, topK_scores: Tensor) -> CalculatorOutput:
        count, slots = topK_indices.shape
        ids, scores = topK_indices.flatten(), topK_scores.flatten()
        tokens = torch.arange(count, device=x.device).repeat_interleave(slots)
        order = ids.sort(0)[1]
        scores, tokens = scores.index_select(0, order), tokens.index_select(0, order)
        sizes = ids.bincount(minlength=self.num_experts).tolist()
        parts = torch.split(x.index_select(0, tokens), sizes, dim=0)
        results = torch.cat(
            [self.experts(parts[i], i) for i in range(self.num_experts) if parts[i].shape[0] > 0],
            0,
        )
        results = torch.mul(results, scores.reshape(-1, 1) * self.score_scale_factor)
        zeros = torch.zeros((count, results.size(1)), device=x.device, dtype=results.dtype)
        return CalculatorOutput(zeros.index_add(0, tokens, results), torch.tensor(-1.0))


class LinearGLUMoELayer(nn.Module):
    """Returns an object, from which the parent takes ``hidden_states``."""

    def __init__(
        self, input_size: int, hidden_size: int, num_experts: int, num_selects: int
    ) -> None:
        super().__init__()
        self.num_experts, self.num_selects = num_experts, num_selects
        self.gate = TopKBalancedNoisyGate(input_size, num_experts, num_selects)
        self.calculator = UniversalCalculator(
            LinearGLUExperts(input_size, hidden_size, num_experts),
            score_scale_factor=num_experts / num_selects,
        )

    def forward(self, x: Tensor) -> object:
        shape = x.shape[:-1]
        x_TD = x.reshape(-1, x.shape[-1])
        gated = self.gate(x_TD)
        result = self.calculator(x_TD, gated["topK_indices"], gated["topK_scores"])
        return options(
            hidden_states=result.hidden_states.reshape(*shape, -1),
            balance_loss=gated["balance_loss"],
            num_dropped_tokens=result.num_dropped_tokens,
            gate_load=gated["load"].tolist(),
            gate_importance=gated["importance"].tolist(),
        )


class HiddenStatesOf(nn.Module):
    """The part of a decoder layer that unpacks the object, because it is traced with the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.mlp = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x).hidden_states


def by_name(moe: nn.Module) -> list[list[Tensor]]:
    return [list(expert.parameters()) for expert in moe.experts.values()]


def by_list(moe: nn.Module) -> list[list[Tensor]]:
    experts = moe.calculator.experts
    lists = (experts.weight_gate, experts.weight_up, experts.weight_down)
    return [[matrices[index] for matrices in lists] for index in range(EXPERTS)]


ORIGIN = "huggingface/transformers 4.x src/transformers/models"

CASES = [
    Case(
        name="transformers4-switch",
        origin=f"{ORIGIN}/switch_transformers/modeling_switch_transformers.py",
        make=lambda: Model(
            lambda: SwitchTransformersSparseMLP(DIM, HIDDEN, EXPERTS, expert_capacity=64),
            call=first,
        ),
        moe_paths=in_blocks("mlp"),
        expert_slices=by_name,
        notes="nn.ModuleDict; drops nothing from sequences of up to 64 tokens, then it does",
        exact=False,
    ),
    Case(
        name="transformers4-switch-dropping",
        origin=f"{ORIGIN}/switch_transformers/modeling_switch_transformers.py",
        make=lambda: Model(
            lambda: SwitchTransformersSparseMLP(DIM, HIDDEN, EXPERTS, expert_capacity=1),
            call=first,
        ),
        moe_paths=in_blocks("mlp"),
        expert_slices=by_name,
        exact=True,
        notes="what its capacity drops keeps its own value",
    ),
    Case(
        name="transformers4-nllb",
        origin=f"{ORIGIN}/nllb_moe/modeling_nllb_moe.py",
        make=lambda: Model(lambda: NllbMoeSparseMLP(DIM, HIDDEN, EXPERTS), "ffn", first),
        moe_paths=in_blocks("ffn"),
        expert_slices=by_name,
        exact=True,
        notes="nn.ModuleDict; capacity; results times 0.8 in evaluation",
    ),
    Case(
        name="llama-moe",
        origin="pjlab-sys4nlp/llama-moe smoe/models/llama_moe/modeling_llama_moe_hf.py",
        make=lambda: Model(lambda: HiddenStatesOf(LinearGLUMoELayer(DIM, HIDDEN, EXPERTS, TOP_K))),
        moe_paths=tuple(f"{path}.mlp" for path in in_blocks("mlp")),
        expert_slices=by_list,
        notes="nn.ParameterList per matrix; a gate of two layers; returns an object with lists",
    ),
]
