"""lucidrains' mixtures: dispatch and combine tensors per sequence, and slots.

Legend: B batch, N length, D model width, H hidden width, E experts, C capacity, S slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, Case, Model, first, in_blocks

MIN_EXPERT_CAPACITY = 4


def cumsum_exclusive(x: Tensor) -> Tensor:
    """Along the length, the dimension before the last."""
    return F.pad(x, (0, 0, 1, 0)).cumsum(dim=-2)[..., :-1, :]


def safe_one_hot(indexes: Tensor, max_length: int) -> Tensor:
    """Zeros for indices out of bounds; its intermediate size depends on the data."""
    most = indexes.max() + 1
    return F.one_hot(indexes, max(most + 1, max_length))[..., :max_length]


class Experts(nn.Module):
    def __init__(self, dim: int, num_experts: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(torch.einsum("...nd,...dh->...nh", x, self.w1))
        return torch.einsum("...nh,...hd->...nd", hidden, self.w2)


class Top2Gating(nn.Module):
    """``second_policy_eval`` decides about second experts; by default at random."""

    def __init__(
        self, dim: int, num_gates: int, second_policy_eval: str, capacity_factor_eval: float
    ) -> None:
        super().__init__()
        self.eps, self.num_gates = 1e-9, num_gates
        self.w_gating = nn.Parameter(torch.empty(dim, num_gates))
        self.second_policy_eval, self.second_threshold_eval = second_policy_eval, 0.2
        self.capacity_factor_eval = capacity_factor_eval

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        *_, length, _dim = x.shape
        scores = torch.einsum("...bnd,...de->...bne", x, self.w_gating).softmax(dim=-1)
        gate_1, index_1 = (t.squeeze(dim=-1) for t in scores.topk(k=1, dim=-1))
        mask_1 = F.one_hot(index_1, self.num_gates).float()
        gate_2, index_2 = (t.squeeze(dim=-1) for t in (scores * (1.0 - mask_1)).topk(k=1, dim=-1))
        mask_2 = F.one_hot(index_2, self.num_gates).float()
        total = gate_1 + gate_2 + self.eps
        gate_1, gate_2 = gate_1 / total, gate_2 / total
        loss = (scores.mean(dim=-2) * mask_1.mean(dim=-2)).mean() * float(self.num_gates**2)
        if self.second_policy_eval == "random":
            chance = torch.zeros_like(gate_2).uniform_(0.0, 1.0)
            taken = chance < (gate_2 / max(self.second_threshold_eval, self.eps))
            mask_2 = mask_2 * taken.float().unsqueeze(-1)
        capacity = min(length, int((length * self.capacity_factor_eval) / self.num_gates))
        capacity = max(capacity, MIN_EXPERT_CAPACITY)
        place_1 = cumsum_exclusive(mask_1) * mask_1
        mask_1 = mask_1 * (place_1 < float(capacity)).float()
        used_1 = mask_1.sum(dim=-2, keepdim=True)
        kept_1 = mask_1.sum(dim=-1)
        gate_1 *= kept_1
        place_2 = (cumsum_exclusive(mask_2) + used_1) * mask_2
        mask_2 = mask_2 * (place_2 < float(capacity)).float()
        kept_2 = mask_2.sum(dim=-1)
        gate_2 *= kept_2
        combine = sum(
            (gate * kept)[..., None, None]
            * F.one_hot(index, self.num_gates)[..., None]
            * safe_one_hot(place.sum(dim=-1).long(), capacity)[..., None, :]
            for gate, kept, index, place in (
                (gate_1, kept_1, index_1, place_1),
                (gate_2, kept_2, index_2, place_2),
            )
        )
        return combine.bool().to(combine), combine, loss


class MoE(nn.Module):
    """Takes ``[B, N, D]``; the capacity applies to a sequence."""

    def __init__(
        self,
        dim: int,
        num_experts: int,
        hidden_dim: int,
        second_policy_eval: str,
        capacity_factor_eval: float,
    ) -> None:
        super().__init__()
        self.num_experts, self.loss_coef = num_experts, 1e-2
        self.gate = Top2Gating(dim, num_experts, second_policy_eval, capacity_factor_eval)
        self.experts = Experts(dim, num_experts, hidden_dim)

    def forward(self, inputs: Tensor, **kwargs: object) -> tuple[Tensor, Tensor]:
        width, experts = inputs.shape[-1], self.num_experts
        dispatch, combine, loss = self.gate(inputs)
        rows = torch.einsum("bnd,bnec->ebcd", inputs, dispatch)
        shape = rows.shape
        results = self.experts(rows.reshape(experts, -1, width)).reshape(*shape)
        out = torch.einsum("ebcd,bnec->bnd", results, combine)
        return out, loss * self.loss_coef


class GEGLU(nn.Module):
    """ST-MoE's GEGLU: the expert multiplies the hidden values by its own vector."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mult_bias = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, dim=-1)
        return F.gelu(gate) * x * self.mult_bias


class STExpert(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, hidden * 2), GEGLU(hidden), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class STExperts(nn.Module):
    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.num_experts = len(experts)
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        results = [expert(part) for expert, part in zip(self.experts, x)]
        return torch.stack(results).transpose(0, 1)


class STMoE(nn.Module):
    """Returns (outputs, three kinds of losses)."""

    def __init__(self, dim: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = Top2Gating(dim, num_experts, "random", capacity_factor_eval=2.0)
        self.experts = STExperts([STExpert(dim, hidden) for _ in range(num_experts)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dispatch, combine, loss = self.gate(x)
        rows = torch.einsum("bnd,bnec->becd", x, dispatch)
        out = torch.einsum("becd,bnec->bnd", self.experts(rows), combine)
        return out, loss, loss, torch.zeros(1)


class SoftMoE(nn.Module):
    """Tokens do not go to experts: slots are mixtures of all tokens of a sequence."""

    def __init__(self, dim: int, hidden: int, num_experts: int, num_slots: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.slot_embeds = nn.Parameter(torch.empty(num_experts, num_slots, dim))
        self.experts = STExperts(
            [
                nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
                for _ in range(num_experts)
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        logits = torch.einsum("bnd,esd->bnes", x, self.slot_embeds)
        dispatch = logits.softmax(dim=1)
        combine = logits.flatten(2).softmax(dim=-1)
        slots = torch.einsum("bnd,bnes->besd", x, dispatch)
        return torch.einsum("bsd,bns->bnd", self.experts(slots).flatten(1, 2), combine)


ORIGIN = "lucidrains/mixture-of-experts mixture_of_experts/mixture_of_experts.py"

CASES = [
    Case(
        name="lucidrains-top2",
        origin=ORIGIN,
        make=lambda: Model(
            lambda: MoE(DIM, EXPERTS, HIDDEN, second_policy_eval="all", capacity_factor_eval=1.0),
            "moe",
            first,
        ),
        moe_paths=in_blocks("moe"),
        exact=True,
        notes="capacity of a sequence, at least 4; a one-hot as wide as the data wants",
    ),
    Case(
        name="lucidrains-top2-random",
        origin=ORIGIN,
        make=lambda: Model(
            lambda: MoE(
                DIM, EXPERTS, HIDDEN, second_policy_eval="random", capacity_factor_eval=2.0
            ),
            "moe",
            first,
        ),
        moe_paths=in_blocks("moe"),
        exact=True,
        random=True,
        notes="its defaults: second experts by chance in evaluation too",
    ),
    Case(
        name="st-moe",
        origin="lucidrains/st-moe-pytorch st_moe_pytorch/st_moe_pytorch.py",
        make=lambda: Model(lambda: STMoE(DIM, HIDDEN, EXPERTS), "moe", first),
        moe_paths=in_blocks("moe"),
        exact=True,
        random=True,
        convertible=False,
        reason="its experts multiply their hidden values by a vector of their own",
    ),
    Case(
        name="soft-moe",
        origin="lucidrains/soft-moe-pytorch soft_moe_pytorch/soft_moe.py",
        make=lambda: Model(lambda: SoftMoE(DIM, HIDDEN, EXPERTS, num_slots=2), "moe"),
        moe_paths=in_blocks("moe"),
        exact=True,
        convertible=False,
        reason="its experts get mixtures of tokens, not tokens",
    ),
]
