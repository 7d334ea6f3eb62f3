"""Tutel's layer on one device, with PyTorch in place of its kernels.

Legend: S samples, D model width, H hidden width, E experts, C capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, in_blocks


class LinearTopKGate(nn.Module):
    def __init__(
        self, model_dim: int, num_global_experts: int, k: int = 1, fp32_gate: bool = False
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_global_experts, bias=False)
        self.top_k, self.fp32_gate = min(num_global_experts, k), fp32_gate

    def forward(self, x: Tensor) -> Tensor:
        wg = self.wg.float() if self.fp32_gate else self.wg
        return wg(x.to(dtype=wg.weight.dtype))


class CosineTopKGate(nn.Module):
    def __init__(
        self,
        model_dim: int,
        num_global_experts: int,
        k: int = 1,
        fp32_gate: bool = False,
        proj_dim: int = 16,
        init_t: float = 0.5,
    ) -> None:
        super().__init__()
        self.top_k, self.fp32_gate = min(num_global_experts, k), fp32_gate
        self.temperature = nn.Parameter(torch.log(torch.full([1], 1.0 / init_t)))
        self.cosine_projector = nn.Linear(model_dim, proj_dim)
        self.sim_matrix = nn.Parameter(torch.randn(proj_dim, num_global_experts))
        self.clamp_max = torch.log(torch.tensor(1.0 / 0.01)).item()

    def forward(self, x: Tensor) -> Tensor:
        projector, matrix = self.cosine_projector, self.sim_matrix
        if self.fp32_gate:
            x, projector, matrix = x.float(), projector.float(), matrix.float()
        logits = torch.matmul(F.normalize(projector(x), dim=1), F.normalize(matrix, dim=0))
        return logits * torch.clamp(self.temperature, max=self.clamp_max).exp()


class FusedExpertsNetwork(nn.Module):
    """``[E, H, D]`` for both products."""

    def __init__(
        self,
        model_dim: int,
        hidden_size_per_expert: int,
        num_experts_per_device: int,
        activation_fn: Callable[[Tensor], Tensor] = F.relu,
    ) -> None:
        super().__init__()
        self.skip_expert = False
        self.model_dim = self.output_dim = model_dim
        self.hidden_size = self.hidden_size_per_expert = hidden_size_per_expert
        self.local_experts, self.sharded_count = num_experts_per_device, 1
        self.activation_fn = activation_fn
        shape = (num_experts_per_device, hidden_size_per_expert, model_dim)
        self.batched_fc1_w = nn.Parameter(torch.empty(shape))
        self.batched_fc2_w = nn.Parameter(torch.empty(shape))
        self.batched_fc1_bias = nn.Parameter(torch.empty(shape[:2]))
        self.batched_fc2_bias = nn.Parameter(torch.empty(shape[0], shape[2]))

    def forward(self, x: Tensor, ctx: Any) -> Tensor:
        fc1_bias = self.batched_fc1_bias.unsqueeze(1)
        fc2_bias = self.batched_fc2_bias.unsqueeze(1)
        hidden = torch.matmul(x, self.batched_fc1_w.permute(0, 2, 1))
        hidden = self.activation_fn(torch.add(hidden, fc1_bias))
        return torch.add(torch.matmul(hidden, self.batched_fc2_w), fc2_bias)


def one_hot(ids: Tensor, num_classes: int, dtype: torch.dtype, hot: float = 1) -> Tensor:
    zeros = torch.zeros([ids.size(0), num_classes], device=ids.device, dtype=dtype)
    return zeros.scatter_(1, ids.unsqueeze(-1), hot)


def gshard_loss(scores: Tensor, ids: Tensor) -> Tensor:
    samples, experts = int(scores.size(0)), int(scores.size(1))
    mask = one_hot(ids[:, 0], experts, scores.dtype, experts / samples)
    return torch.sum(scores.sum(dim=0) * mask.sum(dim=0)) / samples


class Critical(NamedTuple):
    """The inputs of the two kernels."""

    indices: list[Tensor]
    locations: list[Tensor]
    gates: list[Tensor]
    capacity: int


def extract_critical(
    scores: Tensor,
    top_k: int,
    capacity_factor: float,
    batch_prioritized_routing: bool,
    normalize_gate: bool,
) -> tuple[Critical, Tensor]:
    """With a capacity factor of 0, the capacity is the fullest expert's count: no drops."""
    experts = int(scores.size(1))
    ids = torch.topk(scores, top_k, dim=1).indices
    indices = [column.view(-1) for column in ids.chunk(top_k, dim=1)]
    masks = [one_hot(column, experts, column.dtype) for column in indices]
    gates = [(scores * mask).sum(dim=1) for mask in masks]
    loss = gshard_loss(scores, ids)

    def locate(mask: Tensor) -> Tensor:
        if not batch_prioritized_routing:
            return torch.cumsum(mask, dim=0) - 1
        importance = -1 * scores.max(dim=1)[0]
        in_order = mask[importance.argsort(dim=0)]
        places = (torch.cumsum(in_order, dim=0) - 1) * in_order
        return places[importance.argsort(dim=0).argsort(dim=0)]

    located = locate(masks[0])
    locations = [torch.sum(located * masks[0], dim=1).to(torch.int32)]
    if top_k > 1:
        before = None
        for k in range(1, top_k):
            own = torch.sum(masks[k - 1], dim=0, keepdim=True)
            before = own if before is None else before + own
            located = locate(masks[k]) + before
            locations.append(torch.sum(located * masks[k], dim=1).to(torch.int32))
        if normalize_gate:
            total = torch.clamp(sum(gates), min=torch.finfo(gates[0].dtype).eps)
            gates = [gate / total for gate in gates]
    per_expert = (int(scores.size(0)) + experts - 1) // experts
    if capacity_factor > 0:
        capacity = top_k * int(capacity_factor * per_expert)
    else:
        capacity = int(max(location.max() for location in locations)) + 1
    return Critical(indices, locations, gates, capacity), loss


def fast_encode(x: Tensor, experts: int, critical: Critical) -> Tensor:
    """Puts tokens in their places ``[E, C, D]``; tokens beyond a capacity are dropped."""
    size = experts * critical.capacity
    out = x.new_zeros(size + 1, x.size(1))
    for ids, places in zip(critical.indices, critical.locations):
        slots = torch.where(places < critical.capacity, ids * critical.capacity + places, size)
        out = out.index_copy(0, slots, x)
    return out[:size].view(experts, critical.capacity, x.size(1))


def fast_decode(y: Tensor, critical: Critical) -> Tensor:
    rows = y.reshape(-1, y.size(-1))
    out = None
    for ids, places, gate in zip(critical.indices, critical.locations, critical.gates):
        kept = places < critical.capacity
        slots = torch.where(kept, ids * critical.capacity + places, 0)
        result = rows[slots] * (gate * kept).unsqueeze(1)
        out = result if out is None else out + result
    return out


class MOELayer(nn.Module):
    """Keeps the loss, and also attaches it to the result tensor as an attribute."""

    def __init__(
        self,
        gate: nn.Module,
        experts: FusedExpertsNetwork,
        capacity_factor: float = 1.0,
        batch_prioritized_routing: bool = False,
        normalize_gate: bool = True,
    ) -> None:
        super().__init__()
        self.skip_moe, self.result_func = False, None
        self.num_local_experts = experts.local_experts
        self.register_buffer("_num_global_experts", torch.tensor(experts.local_experts))
        self.world_size, self.model_dim, self.is_postscore = 1, experts.model_dim, True
        self.batch_prioritized_routing = batch_prioritized_routing
        self.normalize_gate, self.is_gshard_loss = normalize_gate, True
        self.experts = experts
        gate.gate_noise, gate.capacity_factor = 1.0, capacity_factor
        self.gates = nn.ModuleList([gate])

    @property
    def num_global_experts(self) -> int:
        return int(self._num_global_experts)

    def forward(
        self, input: Tensor, gate_index: int = 0, capacity_factor: float | None = None
    ) -> Tensor:
        shape, dtype = input.shape, input.dtype
        x_SD = input.reshape(-1, shape[-1])
        x_SD = x_SD.to(next(self.experts.parameters()).dtype)
        gate = self.gates[gate_index]
        logits = gate(x_SD)
        if self.training and gate.gate_noise > 0:
            noise = gate.gate_noise * torch.randn_like(logits)
            logits = logits + noise / self.num_local_experts
        critical, l_aux = extract_critical(
            F.softmax(logits, dim=1),
            gate.top_k,
            gate.capacity_factor if capacity_factor is None else capacity_factor,
            self.batch_prioritized_routing,
            self.normalize_gate,
        )
        rows_ECD = fast_encode(x_SD.to(logits.dtype), self.num_local_experts, critical)
        y_ECD = self.experts(rows_ECD.to(x_SD.dtype), self)
        y = fast_decode(y_ECD.to(logits.dtype), critical).view(shape).to(dtype)
        self.l_aux = y.l_aux = l_aux
        return y


def make_layer(gate: type[nn.Module] = LinearTopKGate, k: int = 1, **options: Any) -> MOELayer:
    experts = FusedExpertsNetwork(DIM, HIDDEN, EXPERTS)
    return MOELayer(gate(DIM, EXPERTS, k), experts, **options)


ORIGIN = "microsoft/tutel tutel/impls/moe_layer.py, tutel/impls/fast_dispatch.py"

CASES = [
    Case(
        name="tutel-top1",
        origin=ORIGIN,
        make=lambda: Model(lambda: make_layer(capacity_factor=0.0), "_moe_layer"),
        moe_paths=in_blocks("_moe_layer"),
        notes="capacity 0: as much as the fullest expert needs; l_aux an attribute of the result",
    ),
    Case(
        name="tutel-top2",
        origin=ORIGIN,
        make=lambda: Model(lambda: make_layer(k=TOP_K, capacity_factor=0.0), "_moe_layer"),
        moe_paths=in_blocks("_moe_layer"),
    ),
    Case(
        name="tutel-cosine-top1",
        origin="microsoft/tutel tutel/gates/cosine_top.py",
        make=lambda: Model(lambda: make_layer(CosineTopKGate, capacity_factor=0.0), "_moe_layer"),
        moe_paths=in_blocks("_moe_layer"),
        notes="a router in front of the node",
    ),
    Case(
        name="tutel-capacity",
        origin=ORIGIN,
        make=lambda: Model(lambda: make_layer(k=TOP_K, capacity_factor=1.0), "_moe_layer"),
        moe_paths=in_blocks("_moe_layer"),
        exact=True,
        notes="drops the last tokens of a full expert",
    ),
    Case(
        name="tutel-capacity-batch-prioritised",
        origin=ORIGIN,
        make=lambda: Model(
            lambda: make_layer(capacity_factor=1.25, batch_prioritized_routing=True),
            "_moe_layer",
        ),
        moe_paths=in_blocks("_moe_layer"),
        exact=True,
        notes="drops the tokens with the lowest scores of a full expert",
    ),
]
