"""FastMoE, with PyTorch in place of its CUDA operators.

Legend: T tokens, D model width, E experts, K top_k, N = T*K.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, in_blocks


class MOELinear(Function):
    """Rows sorted by expert, each through its expert's matrix."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        parts = torch.split(rows, counts.tolist())
        results = [F.linear(part, weight[i], bias[i]) for i, part in enumerate(parts)]
        return torch.cat(results)


class FMoELinear(nn.Module):
    def __init__(self, num_expert: int, in_feat: int, out_feat: int) -> None:
        super().__init__()
        self.num_expert, self.in_feat, self.out_feat = num_expert, in_feat, out_feat
        self.rank = 0
        self.weight = nn.Parameter(torch.empty(num_expert, out_feat, in_feat))
        self.bias = nn.Parameter(torch.zeros(num_expert, out_feat))

    def forward(self, inp: Tensor, fwd_expert_count: Tensor) -> Tensor:
        return MOELinear.apply(inp.type_as(self.weight), fwd_expert_count, self.weight, self.bias)


class _Expert(nn.Module):
    def __init__(
        self,
        num_expert: int,
        d_model: int,
        d_hidden: int,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.htoh4 = FMoELinear(num_expert, d_model, d_hidden)
        self.h4toh = FMoELinear(num_expert, d_hidden, d_model)
        self.activation = activation

    def forward(self, inp: Tensor, fwd_expert_count: Tensor) -> Tensor:
        hidden = self.activation(self.htoh4(inp, fwd_expert_count))
        return self.h4toh(hidden, fwd_expert_count)


class NaiveGate(nn.Module):
    """The best logits, unsorted, then a softmax over them; keeps a loss."""

    def __init__(self, d_model: int, num_expert: int, top_k: int) -> None:
        super().__init__()
        self.world_size, self.num_expert, self.tot_expert = 1, num_expert, num_expert
        self.loss = None
        self.gate = nn.Linear(d_model, self.tot_expert, bias=True)
        self.top_k = top_k

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(inp)
        best, ids = torch.topk(logits, k=self.top_k, dim=-1, largest=True, sorted=False)
        scores = F.softmax(best.view(-1, self.top_k), dim=-1)
        self.loss = torch.zeros(1, requires_grad=True).to(inp.device)
        return ids, scores


class SwitchGate(NaiveGate):
    """Top-1 of a softmax; tokens beyond an expert's capacity get expert -1."""

    def __init__(self, d_model: int, num_expert: int, capacity: tuple[float, float]) -> None:
        super().__init__(d_model, num_expert, top_k=1)
        self.switch_eps, self.capacity = 0.1, capacity

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.softmax(self.gate(inp).float(), dim=-1)
        best, ids = torch.topk(scores, k=1, dim=-1, largest=True)
        rate = self.capacity[0 if self.training else 1]
        capacity = math.ceil(rate * inp.shape[0] / self.num_expert)
        hits_TE = F.one_hot(ids.view(-1), self.num_expert)
        place_T = ((torch.cumsum(hits_TE, dim=0) - 1) * hits_TE).sum(dim=1)
        ids = torch.where(place_T.unsqueeze(1) < capacity, ids, torch.full_like(ids, -1))
        return ids, best.to(dtype=inp.dtype)


class MOEScatter(Function):
    """Copies rows to where their experts need them."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, pos: Tensor) -> Tensor:
        return torch.index_select(inp, 0, pos)


class MOEGather(Function):
    """Copies rows back; rows without an expert are zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pos: Tensor, count: int) -> Tensor:
        out = torch.zeros(count, rows.shape[-1], dtype=rows.dtype, device=rows.device)
        return out.index_copy_(0, pos, rows)


class FMoE(nn.Module):
    """``expert`` is called once per expert, for a list of experts; if None, one module has all."""

    def __init__(
        self,
        num_expert: int,
        d_model: int,
        gate: NaiveGate,
        expert: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.num_expert, self.d_model, self.world_size = num_expert, d_model, 1
        self.slice_size, self.top_k = 1, gate.top_k
        self.experts_fused = expert is None
        if expert is not None:
            self.experts = nn.ModuleList(expert(d_model) for _ in range(num_expert))
        self.gate = gate
        self.gate_hook = self.mask = self.mask_dict = None

    def expert_fn(self, inp: Tensor, fwd_expert_count: Tensor) -> Tensor:
        if self.experts_fused:
            return self.experts(inp, fwd_expert_count)
        counts = fwd_expert_count.cpu().numpy()
        results, begin = [], 0
        for index in range(self.num_expert):
            end = begin + counts[index]
            own = torch.tensor([fwd_expert_count[index]])
            results.append(self.experts[index](inp[begin:end], own))
            begin = end
        return torch.cat(results, dim=0)

    def forward(self, moe_inp: Tensor) -> Tensor:
        ids, scores = self.gate(moe_inp)
        flat_ids = ids.reshape(-1)
        # Sorted by expert, without those of no expert.
        dropped = int((flat_ids < 0).sum().item())
        pos = torch.argsort(flat_ids, stable=True)[dropped:]
        counts = torch.bincount(flat_ids[flat_ids >= 0], minlength=self.num_expert).cpu()
        rows = MOEScatter.apply(moe_inp, torch.div(pos, self.top_k, rounding_mode="floor"))
        results = self.expert_fn(rows, counts)
        out = MOEGather.apply(results, pos, moe_inp.shape[0] * self.top_k)
        out = out.view(-1, self.top_k, self.d_model)
        return torch.bmm(scores.view(-1, 1, self.top_k), out).reshape(-1, self.d_model)


class FMoETransformerMLP(FMoE):
    def __init__(
        self, num_expert: int, d_model: int, d_hidden: int, gate: NaiveGate, fused: bool
    ) -> None:
        activation = nn.GELU()

        def one_expert(width: int) -> _Expert:
            return _Expert(1, width, d_hidden, activation)

        super().__init__(num_expert, d_model, gate, None if fused else one_expert)
        if fused:
            self.experts = _Expert(num_expert, d_model, d_hidden, activation)

    def forward(self, inp: Tensor) -> Tensor:
        return super().forward(inp.reshape(-1, self.d_model)).reshape(inp.shape)


def make_layer(fused: bool, gate: Callable[[], NaiveGate]) -> FMoETransformerMLP:
    return FMoETransformerMLP(EXPERTS, DIM, HIDDEN, gate(), fused)


def naive() -> NaiveGate:
    return NaiveGate(DIM, EXPERTS, TOP_K)


ORIGIN = "laekov/fastmoe fmoe/layers.py, fmoe/transformer.py"

CASES = [
    Case(
        name="fastmoe-fused",
        origin=f"{ORIGIN}, up to version 1.0",
        make=lambda: Model(lambda: make_layer(fused=True, gate=naive)),
        moe_paths=in_blocks("mlp"),
        notes="stacks [E, out, in] behind autograd functions",
    ),
    Case(
        name="fastmoe-list",
        origin=f"{ORIGIN}, since version 1.1",
        make=lambda: Model(lambda: make_layer(fused=False, gate=naive)),
        moe_paths=in_blocks("mlp"),
        notes="a list of experts, each a stack of one",
    ),
    Case(
        name="fastmoe-switch-capacity",
        origin="laekov/fastmoe fmoe/gates/switch_gate.py",
        make=lambda: Model(
            lambda: make_layer(
                fused=True, gate=lambda: SwitchGate(DIM, EXPERTS, capacity=(1.2, 1.2))
            )
        ),
        moe_paths=in_blocks("mlp"),
        exact=True,
        notes="ids of -1 for what the capacity drops",
    ),
]
