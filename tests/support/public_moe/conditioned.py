"""Layers called with a second tensor: token ids, the features of a task, time, a mask.

Legend: B batch, L length, T tokens, D model width, E experts, K top_k, C capacity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.fastmoe import _Expert
from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Block, Case, in_blocks

VOCABULARY, TASKS, TASK_WIDTH = 50, 3, 7


class Conditioned(nn.Module):
    """Two blocks and a head; passes the second tensor on to its MoE layers.

    Args:
        make: Creates one MoE layer.
        name: The attribute of a block that holds the layer.
        call: Calls the layer with tokens and the second tensor.
        prepare: What the model makes of the second tensor before the layers.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        name: str,
        call: Callable[[nn.Module, Tensor, Tensor], Tensor],
        prepare: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.prepare = prepare or nn.Identity()
        self.layers = nn.ModuleList(Block(make(), name, self.run) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 5)
        self._call = call
        self._condition: Tensor | None = None

    def run(self, moe: nn.Module, x: Tensor) -> Tensor:
        return self._call(moe, x, self._condition)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        self._condition = self.prepare(condition)
        for layer in self.layers:
            x = layer(x)
        self._condition = None
        return self.head(self.norm(x))


class HashLayerFFN(nn.Module):
    """Token ids choose the expert by a table; experts are two lists of linear layers."""

    def __init__(self, dim: int, dim_hidden: int, hashsize: int, dict_size: int) -> None:
        super().__init__()
        self.relu_dropout, self.nonlinear = nn.Dropout(0.1), F.relu
        self.dim, self.dim_hidden, self.hashsize = dim, dim_hidden, hashsize
        self.linears1 = nn.ModuleList(nn.Linear(dim, dim_hidden) for _ in range(hashsize))
        self.linears2 = nn.ModuleList(nn.Linear(dim_hidden, dim) for _ in range(hashsize))
        generator = torch.Generator().manual_seed(42)
        # Not a buffer in the original either.
        self.hash_bin_map = torch.randint(hashsize, (dict_size,), generator=generator)

    def forward(self, x: Tensor, orig_input: Tensor) -> Tensor:
        bins = self.hash_bin_map[orig_input]
        places = [torch.eq(bins, i).nonzero(as_tuple=True) for i in range(self.hashsize)]
        out = x.new_zeros(x.shape)
        for index, (sample, position) in enumerate(places):
            rows = x[sample, position, :]
            if rows.shape[0] > 0:
                hidden = self.relu_dropout(self.nonlinear(self.linears1[index](rows)))
                out[sample, position, :] = self.linears2[index](hidden)
        return out


class NoisyGateVMoE(nn.Module):
    """V-MoE's gate as M3ViT has it: noise of no width in evaluation; ids and gates, not divided."""

    def __init__(self, d_model: int, num_expert: int, top_k: int) -> None:
        super().__init__()
        self.tot_expert, self.top_k, self.noise_std = num_expert, top_k, 1
        self.w_gate = nn.Parameter(torch.zeros(d_model, num_expert))
        self.softmax, self.activation, self.loss = nn.Softmax(1), None, 0

    def forward(self, inp: Tensor, task_id: int | None = None) -> tuple[Tensor, Tensor]:
        shape = inp.shape[:-1]
        clean = inp.reshape(-1, inp.shape[-1]) @ self.w_gate
        deviation = self.noise_std / self.tot_expert * self.training
        scores = self.softmax(clean + torch.randn_like(clean) * deviation)
        best, ids = scores.topk(min(self.top_k + 1, self.tot_expert), dim=1)
        gates, ids = best[:, : self.top_k], ids[:, : self.top_k]
        self.activation = scores.reshape([*shape, -1]).contiguous()
        return ids.reshape([*shape, self.top_k]), gates.reshape([*shape, self.top_k])


class FMoETransformerMLP(nn.Module):
    """The gate gets each token with the features of a task; the experts get the token alone."""

    def __init__(
        self, num_expert: int, d_model: int, d_hidden: int, top_k: int, gate_task_specific_dim: int
    ) -> None:
        super().__init__()
        self.num_expert, self.d_model, self.top_k = num_expert, d_model, top_k
        self.multi_gate, self.gate_task_specific_dim = False, gate_task_specific_dim
        self.gate = NoisyGateVMoE(d_model + gate_task_specific_dim, num_expert, top_k)
        self.experts = _Expert(num_expert, d_model, d_hidden, nn.GELU())

    def forward(
        self,
        inp: Tensor,
        gate_inp: Tensor | None = None,
        task_id: int | None = None,
        task_specific_feature: Tensor | None = None,
    ) -> Tensor:
        gate_inp = inp if gate_inp is None else gate_inp
        shape = inp.shape
        inp, gate_inp = inp.reshape(-1, self.d_model), gate_inp.reshape(-1, gate_inp.shape[-1])
        if task_id is not None and task_specific_feature is not None:
            feature = task_specific_feature.repeat(gate_inp.shape[0], 1)
            gate_inp = torch.cat((gate_inp, feature), dim=-1)
        ids, scores = self.gate(gate_inp, task_id=task_id)
        order = torch.sort(ids.reshape(-1))[1]
        counts = torch.bincount(ids.reshape(-1), minlength=self.num_expert).cpu()
        rows = self.experts(inp.index_select(0, torch.div(order, self.top_k).long()), counts)
        out = torch.zeros_like(rows).index_copy_(0, order, rows)
        out = out.view(-1, self.top_k, self.d_model)
        return torch.bmm(scores.view(-1, 1, self.top_k), out).reshape(shape)


class SwiGLUExperts(nn.Module):
    def __init__(self, hidden_size: int, moe_intermediate_dim: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts, self.use_grouped_mm = num_experts, False
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts, hidden_size, 2 * moe_intermediate_dim)
        )
        self.down_proj = nn.Parameter(torch.empty(num_experts, moe_intermediate_dim, hidden_size))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        counts = num_tokens_per_expert.tolist()
        results = []
        for index, rows in enumerate(torch.split(x[: sum(counts)], counts, dim=0)):
            gate, up = torch.matmul(rows, self.gate_up_proj[index]).chunk(2, dim=-1)
            results.append(torch.matmul(F.silu(gate) * up, self.down_proj[index]))
        return torch.cat(results, dim=0)


class SharedSwiGLU(nn.Module):
    def __init__(self, dim: int, inner_dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, 2 * inner_dim, bias=False)
        self.out = nn.Linear(inner_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return self.out(value * F.silu(gate))


class NucleusMoELayer(nn.Module):
    """Experts choose tokens of a sequence, by the time and the token before modulation."""

    def __init__(
        self,
        hidden_size: int,
        moe_intermediate_dim: int,
        num_experts: int,
        capacity_factor: float,
        route_scale: float,
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.capacity_factor, self.use_sigmoid = capacity_factor, True
        self.route_scale = route_scale
        self.gate = nn.Linear(hidden_size * 2, num_experts, bias=False)
        self.experts = SwiGLUExperts(hidden_size, moe_intermediate_dim, num_experts)
        self.shared_expert = SharedSwiGLU(hidden_size, moe_intermediate_dim)

    def forward(
        self,
        hidden_states: Tensor,
        hidden_states_unmodulated: Tensor,
        timestep: Tensor | None = None,
    ) -> Tensor:
        batch, length, width = hidden_states.shape
        x = hidden_states_unmodulated
        if timestep is not None:
            x = torch.cat([timestep.unsqueeze(1).expand(-1, length, -1), x], dim=-1)
        scores = torch.sigmoid(self.gate(x).float()).to(hidden_states.dtype)
        affinity = scores.transpose(1, 2)
        capacity = max(1, math.ceil(self.capacity_factor * length / self.num_experts))
        ids = torch.topk(affinity, k=capacity, dim=-1).indices
        gates = affinity.gather(dim=-1, index=ids)
        offsets = (
            torch.arange(batch, device=ids.device, dtype=torch.long).view(batch, 1, 1) * length
        )
        tokens = (offsets + ids).transpose(0, 1).reshape(self.num_experts, -1).reshape(-1)
        gates = gates.transpose(0, 1).reshape(self.num_experts, -1).reshape(-1)
        sums = torch.zeros(batch * length, device=gates.device, dtype=gates.dtype)
        sums.scatter_add_(0, tokens, gates)
        gates = gates / (sums[tokens] + 1e-12) * self.route_scale
        rows = hidden_states.reshape(batch * length, width)[tokens]
        counts = torch.full((self.num_experts,), batch * capacity, dtype=torch.long)
        result = self.experts(rows, counts).float() * gates.unsqueeze(-1)
        out = self.shared_expert(hidden_states).reshape(batch * length, width)
        index = tokens.reshape(-1, 1).expand(-1, width)
        out = out.scatter_add(dim=0, index=index, src=result.to(out.dtype))
        return out.reshape(batch, length, width)


class ParallelExperts(nn.Module):
    """Writes each expert's rows into its part of one result."""

    def __init__(self, num_experts: int, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, input_size, output_size))
        self.register_parameter("bias", None)
        self.num_experts = num_experts

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        out = torch.empty((inputs.size(0), self.weight.size(2)), dtype=inputs.dtype)
        parts, results = inputs.split(expert_size, dim=0), out.split(expert_size)
        for index in range(self.num_experts):
            results[index].copy_(torch.mm(parts[index], self.weight[index]))
        return out


class TopKGating(nn.Module):
    """Centroids and a learnt temperature (``gmm``), or an MLP; a mask makes probabilities 0."""

    def __init__(
        self, input_size: int, num_experts: int, top_k: int, hidden_size: int, gate_type: str
    ) -> None:
        super().__init__()
        self.num_experts, self.input_size, self.top_k = num_experts, input_size, top_k
        self.gate_type, self.acc_aux_loss, self.loss = gate_type, False, 0
        self.p_e, self.neg_H_e_given_x, self.count_layers = 0.0, 0.0, 0
        if gate_type == "mlp":
            self.w_gate = nn.Sequential(
                nn.Linear(input_size, hidden_size),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Linear(hidden_size, num_experts, bias=False),
            )
        else:
            self.w_gate = nn.Linear(input_size, hidden_size, bias=False)
            self.expert_centroids = nn.Parameter(torch.empty(num_experts, hidden_size))
            self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, skip_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.w_gate(x)
        if self.gate_type == "gmm":
            centroids = F.normalize(self.expert_centroids, p=2, dim=-1)
            logits = F.normalize(logits, p=2, dim=-1) @ centroids.t() * self.temperature.exp()
        probs = torch.softmax(logits, dim=1)
        if skip_mask is not None:
            probs = torch.masked_fill(probs, (skip_mask == 0), 0)
            logits = torch.masked_fill(logits, (skip_mask == 0), 0)
        gates, ids = probs.topk(self.top_k, dim=1)
        self.p_e = self.p_e + probs.mean(0)
        entropies = (probs * torch.log_softmax(logits, dim=-1)).sum() / probs.size(0)
        self.neg_H_e_given_x = self.neg_H_e_given_x + entropies
        self.count_layers += 1
        self.loss = self.get_aux_loss_and_clear()
        return ids, gates, probs

    def get_aux_loss_and_clear(self, eps: float = 1e-8) -> Tensor:
        p_e = self.p_e / self.count_layers
        loss = (p_e * (p_e + eps).log()).sum() - self.neg_H_e_given_x / self.count_layers
        self.p_e, self.neg_H_e_given_x, self.count_layers = 0.0, 0.0, 0
        return loss


class ModuleFormerMoE(nn.Module):
    """Keeps its last routing in attributes; returns (result, loss)."""

    def __init__(self, input_size: int, head_size: int, num_experts: int, gate_type: str) -> None:
        super().__init__()
        self.num_experts, self.input_size, self.head_size = num_experts, input_size, head_size
        self.experts = ParallelExperts(num_experts, input_size, head_size)
        self.output_experts = ParallelExperts(num_experts, head_size, input_size)
        self.top_k, self.activation = TOP_K, nn.GELU()
        self.gate = TopKGating(input_size, num_experts, TOP_K, 24, gate_type)

    def compute_gate(self, moe_inp: Tensor, skip_mask: Tensor | None) -> Tensor:
        ids, gates, probs = self.gate(moe_inp, skip_mask=skip_mask)
        sizes = torch.zeros_like(probs).scatter(1, ids, 1).long().sum(0)
        _, self.index_sorted_experts = ids.flatten().sort(0)
        self.batch_index = self.index_sorted_experts.div(self.top_k, rounding_mode="trunc")
        self.batch_gates = gates.flatten()[self.index_sorted_experts]
        self.expert_size = sizes.tolist()
        return self.gate.loss

    def forward(
        self,
        x: Tensor,
        skip_mask: Tensor | None = None,
        sample_topk: int = 0,
        multiply_by_gates: bool = True,
    ) -> tuple[Tensor, Tensor]:
        batch, length, width = x.size()
        if skip_mask is not None:
            skip_mask = skip_mask.flatten()[:, None]
        x = x.reshape(-1, width)
        loss = self.compute_gate(x, skip_mask)
        hidden = self.activation(self.experts(x[self.batch_index], self.expert_size))
        results = self.output_experts(hidden, self.expert_size)
        if multiply_by_gates:
            results = results * self.batch_gates[:, None]
        zeros = torch.zeros((batch * length, self.input_size), dtype=results.dtype)
        y = zeros.index_add(0, self.batch_index, results)
        return y.view(batch, length, self.input_size), loss


def drawn(
    shape: Callable[[int, int], tuple[int, ...]], kind: str = "normal"
) -> Callable[[int, int, int], tuple[Tensor, ...]]:
    """Returns a function that draws tokens and a second tensor of a shape."""

    def args(batch: int = 2, length: int = 5, seed: int = 0) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, length, DIM, generator=generator)
        size = shape(batch, length)
        if kind == "ids":
            return x, torch.randint(VOCABULARY, size, generator=generator)
        if kind == "mask":
            return x, (torch.rand(size, generator=generator) < 0.7).long()
        return x, torch.randn(size, generator=generator)

    return args


def dynamic(**condition: Any) -> dict[str, dict[int, str]]:
    return {
        "x": {0: "batch", 1: "length"},
        "condition": {int(key[1:]): value for key, value in condition.items()},
    }


def stacked(moe: nn.Module) -> list[list[Tensor]]:
    stacks = [*moe.experts.parameters()]
    return [[stack[index] for stack in stacks] for index in range(len(stacks[0]))]


def two_lists(moe: nn.Module) -> list[list[Tensor]]:
    pairs = zip(moe.linears1, moe.linears2, strict=True)
    return [[*one.parameters(), *two.parameters()] for one, two in pairs]


def two_stacks(moe: nn.Module) -> list[list[Tensor]]:
    weights = (moe.experts.weight, moe.output_experts.weight)
    return [[weight[index] for weight in weights] for index in range(moe.num_experts)]


MODULEFORMER = "IBM/ModuleFormer moduleformer/utils"

CASES = [
    Case(
        name="hash-layer",
        origin="facebookresearch/ParlAI projects/params_vs_compute/hash_ladder/hash_ladder.py",
        make=lambda: Conditioned(
            lambda: HashLayerFFN(DIM, HIDDEN, EXPERTS, VOCABULARY),
            "ffn",
            lambda moe, x, ids: moe(x, ids),
        ),
        moe_paths=in_blocks("ffn"),
        expert_slices=two_lists,
        args=drawn(lambda batch, length: (batch, length), "ids"),
        dynamic=dynamic(d0="batch", d1="length"),
        notes="token ids choose the expert, by a table that is no buffer; two lists of layers",
    ),
    Case(
        name="m3vit-task-feature",
        origin="VITA-Group/M3ViT models/custom_moe_layer.py",
        make=lambda: Conditioned(
            lambda: FMoETransformerMLP(EXPERTS, DIM, HIDDEN, TOP_K, TASK_WIDTH),
            "mlp",
            lambda moe, x, feature: moe(x, task_id=1, task_specific_feature=feature),
            nn.Linear(TASKS, TASK_WIDTH),
        ),
        moe_paths=in_blocks("mlp"),
        args=drawn(lambda batch, length: (1, TASKS)),
        expert_slices=stacked,
        dynamic=dynamic(),
        notes="the gate gets the token and one task's features, the experts the token alone",
    ),
    Case(
        name="nucleus-expert-choice",
        origin="huggingface/diffusers "
        "src/diffusers/models/transformers/transformer_nucleusmoe_image.py",
        make=lambda: Conditioned(
            lambda: NucleusMoELayer(DIM, HIDDEN, EXPERTS, capacity_factor=2.0, route_scale=2.5),
            "img_mlp",
            lambda moe, x, time: moe(x * (1 + 0.1 * time.unsqueeze(1)), x, time),
        ),
        moe_paths=in_blocks("img_mlp"),
        args=drawn(lambda batch, length: (batch, DIM)),
        dynamic=dynamic(d0="batch"),
        exact=True,
        notes="experts choose tokens; three tensors: modulated tokens, tokens, a time embedding",
    ),
    Case(
        name="moduleformer-skip-mask",
        origin=f"{MODULEFORMER}/moe.py, {MODULEFORMER}/gate.py",
        make=lambda: Conditioned(
            lambda: ModuleFormerMoE(DIM, HIDDEN, EXPERTS, "gmm"),
            "moe",
            lambda moe, x, mask: moe(x, skip_mask=mask)[0],
        ),
        moe_paths=in_blocks("moe"),
        expert_slices=two_stacks,
        args=drawn(lambda batch, length: (batch, length), "mask"),
        dynamic=dynamic(d0="batch", d1="length"),
        notes="cosines with centroids, a learnt temperature; the parent passes a mask by name",
    ),
    Case(
        name="moduleformer-mlp-gate",
        origin=f"{MODULEFORMER}/moe.py, {MODULEFORMER}/gate.py",
        make=lambda: Conditioned(
            lambda: ModuleFormerMoE(DIM, HIDDEN, EXPERTS, "mlp"),
            "moe",
            lambda moe, x, mask: moe(x)[0] * mask.unsqueeze(-1),
        ),
        moe_paths=in_blocks("moe"),
        expert_slices=two_stacks,
        args=drawn(lambda batch, length: (batch, length), "mask"),
        dynamic=dynamic(d0="batch", d1="length"),
        notes="a gate of two layers; experts write into parts of one result; keeps statistics",
    ),
]
