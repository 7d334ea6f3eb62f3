"""DeepSpeed-MoE: a wrapper, a layer, a gate that returns tensors ``[S, E, C]``, copied experts.

Legend: S tokens, D model width, E experts, C capacity.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, Case, Model, first, in_blocks


class Experts(nn.Module):
    """Each expert gets its part of dimension 1."""

    def __init__(self, expert: nn.Module, num_local_experts: int) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(
            copy.deepcopy(expert) for _ in range(num_local_experts)
        )
        self.num_local_experts = num_local_experts

    def forward(self, inputs: Tensor) -> Tensor:
        parts = inputs.chunk(self.num_local_experts, dim=1)
        results = []
        for part, expert in zip(parts, self.deepspeed_experts):
            out = expert(part)
            results.append(out[0] if isinstance(out, tuple) else out)
        return torch.cat(results, dim=1)


def _capacity(scores: Tensor, factor: Tensor, minimum: Tensor) -> Tensor:
    capacity = torch.ceil((scores.shape[0] / scores.shape[1]) * factor).to(torch.int64)
    return minimum.to(torch.int64) if capacity < minimum else capacity


class TopKGate(nn.Module):
    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int,
        eval_capacity_factor: float,
        min_capacity: int,
        drop_tokens: bool,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.capacity_factor = k, 1.0
        self.eval_capacity_factor, self.min_capacity = eval_capacity_factor, min_capacity
        self.noisy_gate_policy, self.drop_tokens, self.use_rts = None, drop_tokens, False
        self.top2_2nd_expert_sampling = False

    def forward(
        self, input: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = F.linear(input.float(), weight=self.wg.weight.float(), bias=None)
        return self.top1(logits, used_token) if self.k == 1 else self.top2(logits)

    def top1(
        self, logits: Tensor, used_token: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keeps the tokens with the largest values of a column, which are all ones: the first."""
        scores = F.softmax(logits, dim=1)
        capacity = _capacity(
            scores, torch.tensor(self.eval_capacity_factor), torch.tensor(self.min_capacity)
        )
        experts = int(scores.shape[1])
        mask = F.one_hot(torch.argmax(scores, dim=1), num_classes=experts)
        if used_token is not None:
            mask = torch.einsum("s,se->se", used_token, mask)
        counts = torch.sum(mask, dim=0).detach()
        if not self.drop_tokens:
            capacity = torch.max(counts)
        l_aux = torch.sum(scores.mean(dim=0) * mask.float().mean(dim=0)) * experts
        places = torch.cumsum(mask, dim=0) - 1
        mask = mask * torch.lt(places, capacity)
        place = torch.sum(places * mask, dim=1)
        combine = torch.einsum(
            "se,sc->sec",
            scores * mask.float(),
            F.one_hot(place, num_classes=int(capacity)).float(),
        )
        return l_aux, combine, combine.bool(), counts

    def top2(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scores = F.softmax(logits, dim=1)
        experts = int(scores.shape[1])
        mask1 = F.one_hot(torch.argmax(scores, dim=1), num_classes=experts)
        others = logits.masked_fill(mask1.bool(), float("-inf"))
        mask2 = F.one_hot(torch.argmax(others, dim=1), num_classes=experts)
        places1 = torch.cumsum(mask1, dim=0) - 1
        places2 = torch.cumsum(mask2, dim=0) - 1 + torch.sum(mask1, dim=0, keepdim=True)
        l_aux = torch.mean(scores.mean(dim=0) * mask1.float().mean(dim=0)) * experts * experts
        counts = torch.sum(mask1 + mask2, dim=0).detach()
        if self.drop_tokens:
            capacity = _capacity(
                scores,
                torch.tensor(self.eval_capacity_factor * 2),
                torch.tensor(self.min_capacity),
            )
            mask1 = mask1 * torch.lt(places1, capacity)
            mask2 = mask2 * torch.lt(places2, capacity)
        else:
            capacity = torch.max(counts)
        weight1 = torch.einsum("se,se->s", scores, mask1.float())
        weight2 = torch.einsum("se,se->s", scores, mask2.float())
        total = torch.clamp(weight1 + weight2, min=torch.finfo(scores.dtype).eps)
        weight1 /= total
        weight2 /= total
        combine = 0
        for weight, mask, places in ((weight1, mask1, places1), (weight2, mask2, places2)):
            gates = torch.einsum("s,se->se", weight, mask.float())
            place = F.one_hot(torch.sum(places * mask, dim=1), num_classes=int(capacity))
            combine = combine + torch.einsum("se,sc->sec", gates, place.float())
        return l_aux, combine, combine.bool(), counts


class MOELayer(nn.Module):
    def __init__(self, gate: TopKGate, experts: Experts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.ep_size, self.num_local_experts = 1, experts.num_local_experts

    def forward(self, *input: Tensor | None) -> Tensor:
        width = input[0].shape[-1]
        x_SD = input[0].reshape(-1, width)
        self.l_aux, combine, dispatch, self.exp_counts = self.gate(x_SD, input[1])
        rows = torch.einsum("sec,sm->ecm", dispatch.type_as(input[0]), x_SD)
        rows = rows.reshape(self.ep_size, self.num_local_experts, -1, width)
        results = self.experts(rows).reshape(self.ep_size * self.num_local_experts, -1, width)
        combined = torch.einsum("sec,ecm->sm", combine.type_as(input[0]), results)
        return combined.reshape(input[0].shape)


class RoutesLayer(MOELayer):
    """As DeepSpeed 0.19 has it: a row of an expert for each route, and no tensor ``[S, E, C]``."""

    def forward(self, *input: Tensor | None) -> Tensor:
        width = input[0].shape[-1]
        x_SD = input[0].reshape(-1, width)
        logits = F.linear(x_SD.float(), self.gate.wg.weight.float())
        scores = F.softmax(logits, dim=1)
        factor, least = self.gate.eval_capacity_factor, self.gate.min_capacity
        capacity = torch.ceil((scores.shape[0] / scores.shape[1]) * torch.tensor(factor))
        capacity = torch.maximum(capacity.to(torch.int64), torch.tensor(least).to(torch.int64))
        ids = torch.argmax(scores, dim=1)
        experts = int(scores.shape[1])
        mask = F.one_hot(ids, num_classes=experts)
        if input[1] is not None:
            mask = torch.einsum("s,se->se", input[1], mask)
        self.exp_counts = torch.sum(mask, dim=0).detach()
        if not self.gate.drop_tokens:
            capacity = torch.max(self.exp_counts)
        self.l_aux = torch.sum(scores.mean(dim=0) * mask.float().mean(dim=0)) * experts
        mask = mask * torch.lt(torch.cumsum(mask, dim=0) - 1, capacity)
        ids = torch.min(ids, mask.sum(dim=1) * experts - 1)
        places = torch.sum((torch.cumsum(mask, dim=0) - 1) * mask, dim=1)
        gates = (scores * mask).sum(dim=1)
        capacity = int(capacity)
        unused = torch.full_like(ids, experts * capacity)
        slots = torch.where(ids >= 0, ids * capacity + places, unused)
        sources = torch.full((experts * capacity + 1,), len(x_SD), dtype=torch.long)
        sources.scatter_(0, slots, torch.arange(len(x_SD)))
        padded = torch.cat([x_SD, x_SD.new_zeros(1, width)])
        rows = padded.index_select(0, sources[:-1]).view(1, experts, capacity, width)
        results = self.experts(rows).reshape(-1, width)
        results = torch.cat([results, results.new_zeros(1, width)])
        combined = results.index_select(0, slots) * gates.unsqueeze(-1)
        return combined.reshape(input[0].shape)


class MoE(nn.Module):
    """Returns (result, l_aux, counts); with ``use_residual`` an MLP is mixed in."""

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int,
        k: int = 1,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        drop_tokens: bool = True,
        layer: type[MOELayer] = MOELayer,
    ) -> None:
        super().__init__()
        self.use_residual, self.num_experts = use_residual, num_experts
        gate = TopKGate(
            hidden_size, num_experts, k, eval_capacity_factor, min_capacity, drop_tokens
        )
        self.deepspeed_moe = layer(gate, Experts(expert, num_experts))
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            share = F.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + dense * share[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


class Expert(nn.Module):
    """Close to Megatron's ParallelMLP."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(dim, hidden)
        self.dense_4h_to_h = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


def make_layer(**arguments: object) -> MoE:
    return MoE(DIM, Expert(DIM, HIDDEN), EXPERTS, **arguments)


ORIGIN = "deepspeedai/DeepSpeed deepspeed/moe/layer.py, sharded_moe.py, experts.py"

CASES = [
    Case(
        name=f"deepspeed-{name}",
        origin=ORIGIN,
        make=lambda arguments=arguments: Model(lambda: make_layer(**arguments), "mlp", first),
        moe_paths=in_blocks("mlp.deepspeed_moe"),
        exact=arguments.get("drop_tokens", True),
        notes=notes,
    )
    for name, arguments, notes in (
        ("top1", {}, "capacity in a tensor, at least 4; a branch on its value"),
        ("top2", {"k": 2}, "second experts queue after all first ones"),
        ("top2-keep-all", {"k": 2, "drop_tokens": False}, "capacity from the data"),
        (
            "top1-residual",
            {"use_residual": True, "drop_tokens": False},
            "a dense MLP with a coefficient beside the experts",
        ),
        ("top2-no-minimum", {"k": 2, "min_capacity": 0}, "a decision that no size changes"),
        (
            "routes-capacity",
            {"layer": RoutesLayer, "min_capacity": 0},
            "a capacity of a tensor, read as a number behind the weights",
        ),
        (
            "routes",
            {"layer": RoutesLayer, "drop_tokens": False},
            "slots for routes; a number read from a tensor",
        ),
        (
            "routes-residual",
            {"layer": RoutesLayer, "drop_tokens": False, "use_residual": True},
            "a dense MLP behind a number read from a tensor",
        ),
    )
]
