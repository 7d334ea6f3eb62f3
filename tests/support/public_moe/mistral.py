"""Mixtral's layer as in mistral-inference: tokens packed to ``[T, D]``, top-k before the softmax.

Legend: T tokens, D model width, H hidden width, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, flat, in_blocks


@dataclass
class MoeArgs:
    num_experts: int
    num_experts_per_tok: int


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoeLayer(nn.Module):
    """The parent creates the experts and the gate."""

    def __init__(self, experts: Sequence[nn.Module], gate: nn.Module, moe_args: MoeArgs) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.gate = gate
        self.args = moe_args

    def forward(self, inputs: Tensor) -> Tensor:
        logits_TE = self.gate(inputs)
        chosen_TK, ids_TK = torch.topk(logits_TE, self.args.num_experts_per_tok)
        weights_TK = F.softmax(chosen_TK, dim=1, dtype=torch.float).to(inputs.dtype)
        out_TD = torch.zeros_like(inputs)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(ids_TK == index)
            out_TD[token] += weights_TK[token, slot, None] * expert(inputs[token])
        return out_TD


def make_layer() -> MoeLayer:
    return MoeLayer(
        experts=[FeedForward(DIM, HIDDEN) for _ in range(EXPERTS)],
        gate=nn.Linear(DIM, EXPERTS, bias=False),
        moe_args=MoeArgs(EXPERTS, TOP_K),
    )


CASES = [
    Case(
        name="mistral-inference",
        origin="mistralai/mistral-inference src/mistral_inference/moe.py",
        make=lambda: Model(make_layer, "feed_forward", flat),
        moe_paths=in_blocks("feed_forward"),
        notes="takes [T, D]; in-place addition to indexed rows",
    ),
]
