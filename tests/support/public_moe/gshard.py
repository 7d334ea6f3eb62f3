"""GShard's gates in PyTorch: the second expert from masked logits, dispatch tensors, capacities.

Legend: S tokens, D model width, H hidden width, E experts, C capacity.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, Case, Model, first, in_blocks


def one_hot(indices: Tensor, num_classes: int, unsqueeze_indices: bool = False) -> Tensor:
    if unsqueeze_indices:
        indices = indices.unsqueeze(-1)
    zeros = torch.zeros(
        (*indices.shape[:-1], num_classes), device=indices.device, dtype=indices.dtype
    )
    return zeros.scatter_(zeros.dim() - 1, indices, 1)


def entropy(probs: Tensor) -> Tensor:
    return -(probs * torch.distributions.utils.probs_to_logits(probs)).sum(-1)


def capacity_of(
    count: int, num_experts: int, fraction: float, factor: float, training: bool
) -> int:
    """In evaluation, a fraction of the tokens."""
    if fraction > 0.0 and not training:
        return math.ceil(fraction * count)
    return int(factor * math.ceil(count / num_experts))


def combine_of(gates_S: Tensor, mask_SE: Tensor, places_SE: Tensor, capacity: int) -> Tensor:
    places_S = torch.sum(places_SE * mask_SE, dim=1)
    gates_SE = gates_S.unsqueeze(-1) * mask_SE.to(gates_S.dtype)
    places_SC = one_hot(places_S, capacity, unsqueeze_indices=True)
    return torch.bmm(gates_SE.unsqueeze(-1), places_SC.to(gates_SE.dtype).unsqueeze(1))


class Top2Gate(nn.Module):
    """Divides by the sum of the two gates after the capacity dropped, in place."""

    def __init__(
        self, model_dim: int, num_experts: int, moe_eval_capacity_token_fraction: float
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.use_fp32, self.second_expert_policy = False, "all"
        self.normalize_gate_prob_before_dropping = False
        self.moe_eval_capacity_token_fraction = moe_eval_capacity_token_fraction
        self.batch_prioritized_routing = False

    def forward(
        self, input: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        logits = self.wg(input)
        gates = F.softmax(logits, dim=1)
        metadata = {"entropy_gating": entropy(gates).mean().detach()}
        count, experts = gates.shape
        capacity = capacity_of(
            count, experts, self.moe_eval_capacity_token_fraction, 2.0, self.training
        )
        indices1 = torch.argmax(gates, dim=1, keepdim=True)
        mask1 = one_hot(indices1, experts)
        others = logits.masked_fill(mask1.bool(), float("-inf"))
        mask2 = one_hot(torch.argmax(others, dim=1, keepdim=True), experts)
        if mask is not None and mask.any():
            kept = ~mask
            mask1 = mask1 * kept.unsqueeze(-1).to(mask1.dtype)
            mask2 = mask2 * kept.unsqueeze(-1).to(mask1.dtype)
        places1 = torch.cumsum(mask1, dim=0) - 1
        places2 = torch.cumsum(mask2, dim=0) - 1
        places2 += torch.sum(mask1, dim=0, keepdim=True)
        loss = torch.mean(gates.mean(dim=0) * mask1.to(gates.dtype).mean(dim=0)) * experts**2
        for name, hits, places in (("1", mask1, places1), ("2", mask2, places2)):
            over = torch.sum(hits * torch.ge(places, capacity))
            metadata[f"overflow_expert{name}"] = 100 * over / torch.sum(hits)
        mask1 = mask1 * torch.lt(places1, capacity)
        mask2 = mask2 * torch.lt(places2, capacity)
        gates1, gates2 = (gates * mask1).sum(dim=1), (gates * mask2).sum(dim=1)
        total = torch.clamp(gates1 + gates2, min=torch.finfo(gates1.dtype).eps)
        gates1 /= total
        gates2 /= total
        combine = combine_of(gates1, mask1, places1, capacity) + combine_of(
            gates2, mask2, places2, capacity
        )
        return loss, combine, combine.bool(), metadata


class FeedForwardNetwork(nn.Module):
    """``subln`` puts a norm between the activation and the second product."""

    def __init__(self, embed_dim: int, ffn_dim: int, subln: bool) -> None:
        super().__init__()
        self.embed_dim, self.activation_fn = embed_dim, F.gelu
        self.activation_dropout_module, self.dropout_module = nn.Dropout(0.1), nn.Dropout(0.1)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.ffn_layernorm = nn.LayerNorm(ffn_dim) if subln else None

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = self.fc1(x.reshape(-1, x.size(-1)))
        x = self.activation_dropout_module(self.activation_fn(x.float()).type_as(x))
        if self.ffn_layernorm is not None:
            x = self.ffn_layernorm(x)
        return self.dropout_module(self.fc2(x).view(shape))


class MOELayer(nn.Module):
    """Products of matrices ``[E*C, S]`` and ``[S, E*C]``; pads to the largest batch of the group.

    With one process, the padding has no rows, but its mask always exists.
    """

    def __init__(self, gate: nn.Module, experts: nn.ModuleList) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.num_local_experts, self.in_generation = len(experts), False
        self.metadata: dict[str, Tensor] = {}

    def forward(
        self, input: Tensor, input_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        shape, width = input.shape, input.shape[2]
        rows = input.reshape(-1, width)
        padding = torch.ones((rows.shape[0],), dtype=torch.bool, device=rows.device)
        if input_padding_mask is not None:
            padding[: rows.shape[0]] = input_padding_mask.reshape(-1)
        else:
            padding[: rows.shape[0]] = False
        loss, combine, dispatch, self.metadata = self.gate(rows, padding)
        dispatch = dispatch.to(input.dtype).permute(1, 2, 0)
        experts, capacity, count = dispatch.size()
        x = torch.mm(dispatch.reshape(experts * capacity, count), rows)
        x = x.reshape(1, self.num_local_experts, -1, width)
        parts = x.chunk(self.num_local_experts, dim=1)
        results = [expert(part) for part, expert in zip(parts, self.experts)]
        x = torch.cat(results, dim=1).reshape(self.num_local_experts, -1, width)
        x = combine.view(count, experts * capacity).mm(x.view(experts * capacity, width))
        return x[: rows.shape[0], :].reshape(shape), loss


def torchscale(kind: type[nn.Module], fraction: float, subln: bool = False) -> nn.Module:
    experts = nn.ModuleList(FeedForwardNetwork(DIM, HIDDEN, subln) for _ in range(EXPERTS))
    return MOELayer(kind(DIM, EXPERTS, fraction), experts)


class SignOf(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: object, scores: Tensor) -> Tensor:
        return torch.sign(scores)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


class GAMoEGateT(nn.Module):
    """Each expert has a threshold for the cosine; a token without any takes the nearest one."""

    def __init__(self, model_dim: int, num_global_experts: int) -> None:
        super().__init__()
        self.sim_matrix = nn.Parameter(torch.empty(model_dim, num_global_experts))
        self.gates = nn.Parameter(torch.zeros(num_global_experts))
        self.experts_mask = nn.Parameter(torch.ones(num_global_experts), requires_grad=False)
        self.temperature = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.clamp_max = math.log(1.0 / 0.01)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.float()
        scale = torch.clamp(self.temperature, max=self.clamp_max).exp()
        cosine = F.normalize(x, dim=1) @ F.normalize(self.sim_matrix.float(), dim=0)
        logits = torch.sigmoid(cosine * scale) * self.experts_mask
        gates = torch.sigmoid(self.gates.float() * scale)
        hits = SignOf.apply(F.relu(logits - gates))
        top_k = torch.sum(hits > 0, dim=1).to(torch.int)
        if self.training:
            return hits, top_k
        none = (torch.sum(hits, dim=1) == 0).to(torch.int)
        none = none.repeat(logits.shape[1]).reshape(logits.shape[1], -1).T
        nearest = F.one_hot(torch.argmax(logits, dim=1), num_classes=logits.shape[1])
        top_k = torch.max(top_k, torch.ones(top_k.shape).to(top_k.device)).to(torch.int)
        return none * nearest + hits, top_k


class AnyGate(nn.Module):
    """The capacity is what the busiest expert needs; weights are 1 over the number of experts."""

    def __init__(self, model_dim: int, num_experts: int) -> None:
        super().__init__()
        self.wg = GAMoEGateT(model_dim, num_experts)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gates, top_k = self.wg(input)
        mask = gates.int()
        counts = torch.sum(mask, dim=0).detach().to("cpu")
        capacity = torch.max(counts).to(gates.device)
        loss = torch.mean(gates.mean(dim=0) * mask.float().mean(dim=0)) * gates.shape[1] ** 2
        places = ((torch.cumsum(mask, dim=0) * mask) - 1) % (capacity + 1)
        gates = gates / torch.clamp(top_k, min=1).unsqueeze(1)
        places_SEC = F.one_hot(places.long(), num_classes=int(capacity + 1)).float()
        combine = torch.einsum("se,sec->sec", gates, places_SEC[:, :, :-1])
        return loss, combine, combine.bool(), counts


class AnyExperts(nn.Module):
    def __init__(self, expert: nn.Module, num_local_experts: int) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(
            copy.deepcopy(expert) for _ in range(num_local_experts)
        )
        self.num_local_experts = num_local_experts

    def forward(self, inputs: Tensor) -> Tensor:
        parts = inputs.chunk(self.num_local_experts, dim=1)
        results = [expert(x) for x, expert in zip(parts, self.deepspeed_experts)]
        return torch.cat(results, dim=1)


class DynMoE(nn.Module):
    """Keeps its loss in an attribute and returns the tokens alone."""

    def __init__(self, dim: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.gate = AnyGate(dim, num_experts)
        self.experts = AnyExperts(FeedForwardNetwork(dim, hidden, subln=False), num_experts)
        self.num_local_experts, self.l_aux = num_experts, None

    def forward(self, hidden_states: Tensor) -> Tensor:
        width = hidden_states.shape[-1]
        rows = hidden_states.reshape(-1, width)
        self.l_aux, combine, dispatch, self.exp_counts = self.gate(rows)
        x = torch.einsum("sec,sm->ecm", dispatch.type_as(rows), rows)
        x = self.experts(x.reshape(1, self.num_local_experts, -1, width))
        x = x.reshape(self.num_local_experts, -1, width)
        out = torch.einsum("sec,ecm->sm", combine.type_as(rows), x)
        return out.reshape(hidden_states.shape)


ORIGIN = "microsoft/torchscale torchscale/component/xmoe"

CASES = [
    Case(
        name="torchscale-top2-keeps-all",
        origin=f"{ORIGIN}/routing.py",
        make=lambda: Model(lambda: torchscale(Top2Gate, 1.0), "moe_layer", first),
        moe_paths=in_blocks("moe_layer"),
        notes="the second expert from masked logits; a capacity of all tokens drops nothing",
    ),
    Case(
        name="torchscale-subln",
        origin="microsoft/torchscale torchscale/component/feedforward_network.py",
        make=lambda: Model(lambda: torchscale(Top2Gate, 1.0, subln=True), "moe_layer", first),
        moe_paths=in_blocks("moe_layer"),
        convertible=False,
        reason="its experts have norms between their products",
    ),
    Case(
        name="dynmoe",
        origin="LINs-lab/DynMoE DeepSpeed-0.9.5/deepspeed/moe/sharded_moe.py",
        make=lambda: Model(lambda: DynMoE(DIM, HIDDEN, EXPERTS), "moe"),
        moe_paths=in_blocks("moe"),
        notes="thresholds give each token another number of experts; a capacity that all fit in",
    ),
]
