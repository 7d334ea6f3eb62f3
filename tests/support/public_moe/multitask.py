"""Mixtures of recommenders, and adapters that a sequence's first token chooses.

Legend: B batch, L length, T tokens, D model width, E experts, K top_k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, in_blocks

TASKS = 2


class MultiLayerPerceptron(nn.Module):
    """Norms over the batch, as running statistics in evaluation."""

    def __init__(self, input_dim: int, embed_dims: list[int], dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in embed_dims:
            layers += [nn.Linear(input_dim, width), nn.BatchNorm1d(width)]
            layers += [nn.ReLU(), nn.Dropout(p=dropout)]
            input_dim = width
        self.mlp = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def gate(input_dim: int, count: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(input_dim, count), nn.Softmax(dim=1))


class OneGateMixture(nn.Module):
    """OMoE: one gate over all experts, and a tower for each task."""

    def __init__(self, dim: int, hidden: int, expert_num: int, task_num: int) -> None:
        super().__init__()
        self.task_num, self.expert_num = task_num, expert_num
        self.expert = nn.ModuleList(
            MultiLayerPerceptron(dim, [hidden, dim], 0.2) for _ in range(expert_num)
        )
        self.tower = nn.ModuleList(nn.Linear(dim, dim) for _ in range(task_num))
        self.gate = gate(dim, expert_num)

    def forward(self, emb: Tensor) -> list[Tensor]:
        value = self.gate(emb).unsqueeze(1)
        each = torch.cat([self.expert[i](emb).unsqueeze(1) for i in range(self.expert_num)], dim=1)
        mixed = torch.bmm(value, each).squeeze(1)
        return [torch.sigmoid(self.tower[i](mixed)) for i in range(self.task_num)]


class ProgressiveLayers(nn.Module):
    """PLE: experts of each task and shared ones, in levels; a gate for each task and level."""

    def __init__(
        self, dim: int, levels: int, task_num: int, shared_expert_num: int, specific_expert_num: int
    ) -> None:
        super().__init__()
        self.task_num, self.layers_num = task_num, levels
        self.shared_expert_num = shared_expert_num
        self.specific_expert_num = specific_expert_num

        def experts(count: int) -> nn.ModuleList:
            return nn.ModuleList(MultiLayerPerceptron(dim, [dim], 0.2) for _ in range(count))

        self.share_experts = nn.ModuleList(experts(shared_expert_num) for _ in range(levels))
        self.share_gates = nn.ModuleList(
            gate(dim, shared_expert_num + task_num * specific_expert_num) for _ in range(levels)
        )
        self.task_experts = nn.ModuleList(
            nn.ModuleList(experts(specific_expert_num) for _ in range(task_num))
            for _ in range(levels)
        )
        self.task_gates = nn.ModuleList(
            nn.ModuleList(
                gate(dim, shared_expert_num + specific_expert_num) for _ in range(task_num)
            )
            for _ in range(levels)
        )
        self.tower = nn.ModuleList(nn.Linear(dim, dim) for _ in range(task_num))

    def forward(self, emb: Tensor) -> list[Tensor]:
        features = [emb for _ in range(self.task_num + 1)]
        for level in range(self.layers_num):
            shared = [expert(features[-1]).unsqueeze(1) for expert in self.share_experts[level]]
            every: list[Tensor] = []
            for task in range(self.task_num):
                own = [
                    expert(features[task]).unsqueeze(1) for expert in self.task_experts[level][task]
                ]
                every.extend(own)
                value = self.task_gates[level][task](features[task]).unsqueeze(1)
                features[task] = torch.bmm(value, torch.cat(own + shared, dim=1)).squeeze(1)
            if level != self.layers_num - 1:
                value = self.share_gates[level](features[-1]).unsqueeze(1)
                features[-1] = torch.bmm(value, torch.cat(every + shared, dim=1)).squeeze(1)
        return [torch.sigmoid(self.tower[i](features[i])) for i in range(self.task_num)]


class SparseDispatcher:
    """Samples of each expert, in the order of experts."""

    def __init__(self, num_experts: int, gates: Tensor) -> None:
        self._gates, self._num_experts = gates, num_experts
        ordered, order = torch.nonzero(gates).sort(0)
        _, self._expert_index = ordered.split(1, dim=1)
        self._batch_index = torch.nonzero(gates)[order[:, 1], 0]
        self._part_sizes = (gates > 0).sum(0).tolist()
        self._nonzero_gates = torch.gather(
            gates[self._batch_index.flatten()], 1, self._expert_index
        )

    def dispatch(self, inp: Tensor) -> tuple[Tensor, ...]:
        return torch.split(inp[self._batch_index].squeeze(1), self._part_sizes, dim=0)

    def combine(self, expert_out: list[Tensor]) -> Tensor:
        stitched = torch.cat(expert_out, 0).mul(self._nonzero_gates)
        zeros = torch.zeros(self._gates.size(0), expert_out[-1].size(1))
        return zeros.index_add(0, self._batch_index, stitched.float())


class Adapter(nn.Module):
    def __init__(self, d_model: int, bottleneck: int) -> None:
        super().__init__()
        self.n_embd, self.down_size = d_model, bottleneck
        self.adapter_layer_norm_before, self.scale, self.dropout = None, 0.1, 0.1
        self.down_proj = nn.Linear(d_model, bottleneck)
        self.non_linear_func = nn.ReLU()
        self.up_proj = nn.Linear(bottleneck, d_model)

    def forward(self, x: Tensor, add_residual: bool = True) -> Tensor:
        down = self.non_linear_func(self.down_proj(x))
        down = F.dropout(down, p=self.dropout, training=self.training)
        up = self.up_proj(down) * self.scale
        return up + x if add_residual else up


class AdapterMixture(nn.Module):
    """The first token of ``[L, B, D]`` chooses adapters for its whole sequence.

    Has a router for each task, of which an attribute tells the present one.
    """

    def __init__(
        self, d_model: int, bottleneck: int, experts_num: int, top_k: int, tasks: int
    ) -> None:
        super().__init__()
        self.top_k, self.experts_num, self.task_id = top_k, experts_num, 1
        self.noisy_gating, self.is_train, self.softmax = True, False, nn.Softmax(1)
        self.router_list = nn.ParameterList(torch.zeros(d_model, experts_num) for _ in range(tasks))
        self.adaptmlp_list = nn.ModuleList(Adapter(d_model, bottleneck) for _ in range(experts_num))
        self.choose_map = torch.zeros([experts_num])

    def noisy_top_k_gating(self, x: Tensor, w_gate: Tensor) -> tuple[Tensor, Tensor]:
        logits = x @ w_gate.to(x)
        best, ids = logits.topk(min(self.top_k + 1, self.experts_num), dim=1)
        scores = self.softmax(best[:, : self.top_k])
        gates = torch.zeros_like(logits).scatter(1, ids[:, : self.top_k], scores)
        return gates, (gates > 0).sum(0)

    def forward(self, x: Tensor) -> Tensor:
        length, batch, width = x.shape
        samples = x.permute(1, 0, 2)
        gates, _load = self.noisy_top_k_gating(samples[:, 0, :], self.router_list[self.task_id])
        dispatcher = SparseDispatcher(self.experts_num, gates)
        inputs = dispatcher.dispatch(samples.reshape(batch, -1))
        results = []
        for index, part in enumerate(inputs):
            rows = part.view(part.shape[0], length, width)
            result = self.adaptmlp_list[index](rows, add_residual=False)
            if result.shape[0] > 0:
                results.append(result.view(result.shape[0], -1))
        y = dispatcher.combine(results).view(batch, length, width)
        return y.permute(1, 0, 2)


def rows_of(moe: nn.Module, x: Tensor) -> Tensor:
    return sum(moe(x.reshape(-1, x.shape[-1]))).reshape(x.shape)


def length_first(moe: nn.Module, x: Tensor) -> Tensor:
    return moe(x.transpose(0, 1)).transpose(0, 1)


def of_first_task(moe: nn.Module) -> list[list[Tensor]]:
    """Returns those that the first result depends on: not the other tasks' last ones."""
    lists = [*moe.share_experts, *moe.task_experts[0], moe.task_experts[1][0]]
    return [list(expert.parameters()) for experts in lists for expert in experts]


RECOMMENDERS = "easezyc/Multitask-Recommendation-Library models"

CASES = [
    Case(
        name="one-gate-mixture",
        origin=f"{RECOMMENDERS}/omoe.py",
        make=lambda: Model(lambda: OneGateMixture(DIM, HIDDEN, EXPERTS, TASKS), "omoe", rows_of),
        moe_paths=in_blocks("omoe"),
        convertible=False,
        reason="its experts have batch norms, and towers follow the sum",
    ),
    Case(
        name="progressive-layers",
        origin=f"{RECOMMENDERS}/ple.py",
        make=lambda: Model(lambda: ProgressiveLayers(DIM, 2, TASKS, 2, 2), "ple", rows_of),
        moe_paths=in_blocks("ple"),
        num_experts=10,
        expert_slices=of_first_task,
        convertible=False,
        reason="levels of gates that share experts",
    ),
    Case(
        name="moe-adapters",
        origin="JiazuoYu/MoE-Adapters4CL mtil/clip/model.py",
        make=lambda: Model(
            lambda: AdapterMixture(DIM, 24, EXPERTS, TOP_K, tasks=3), "adapt", length_first
        ),
        moe_paths=in_blocks("adapt"),
        exact=True,
        convertible=False,
        reason="the first token of a sequence chooses for all",
        notes="a router for each task; a scale of 0.1 within each adapter",
    ),
]
