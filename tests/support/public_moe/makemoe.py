"""Tutorial modules: makeMoE and nanoMoE.

Legend: B batch, L length, T tokens, D model width, E experts, K top_k, C capacity.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, TOP_K, Case, Model, in_blocks


class Expert(nn.Module):
    """Four times as wide inside, with a dropout at the end."""

    def __init__(self, n_embed: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_embed, 4 * n_embed),
            nn.ReLU(),
            nn.Linear(4 * n_embed, n_embed),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def sparse_softmax(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, only the chosen ones having a logit: ``[.., E]`` and ids."""
    chosen, ids = logits.topk(top_k, dim=-1)
    masked = torch.full_like(logits, float("-inf")).scatter(-1, ids, chosen)
    return F.softmax(masked, dim=-1), ids


class TopkRouter(nn.Module):
    def __init__(self, n_embed: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.linear = nn.Linear(n_embed, num_experts)

    def forward(self, mh_output: Tensor) -> tuple[Tensor, Tensor]:
        return sparse_softmax(self.linear(mh_output), self.top_k)


class NoisyTopkRouter(nn.Module):
    """Adds its noise in evaluation too, unless restricted to training."""

    def __init__(
        self, n_embed: int, num_experts: int, top_k: int, always_noisy: bool = True
    ) -> None:
        super().__init__()
        self.top_k, self.always_noisy = top_k, always_noisy
        self.topkroute_linear = nn.Linear(n_embed, num_experts)
        self.noise_linear = nn.Linear(n_embed, num_experts)

    def forward(self, mh_output: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.topkroute_linear(mh_output)
        spread = self.noise_linear(mh_output)
        if self.always_noisy or self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(spread)
        return sparse_softmax(logits, self.top_k)


class SparseMoE(nn.Module):
    """The first tutorial's version: boolean masks, in-place addition to masked rows."""

    def __init__(self, n_embed: int, num_experts: int, router: nn.Module) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(Expert(n_embed) for _ in range(num_experts))
        self.top_k = router.top_k

    def forward(self, x: Tensor) -> Tensor:
        gates, ids = self.router(x)
        out = torch.zeros_like(x)
        x_TD = x.view(-1, x.size(-1))
        gates_TE = gates.view(-1, gates.size(-1))
        for index, expert in enumerate(self.experts):
            mask = (ids == index).any(dim=-1)
            mask_T = mask.view(-1)
            if mask_T.any():
                rows = x_TD[mask_T]
                weights = gates_TE[mask_T, index].unsqueeze(1)
                out[mask] += (expert(rows) * weights).squeeze(1)
        return out


class SparseMoEWithCapacity(SparseMoE):
    """The later version: each expert takes its first tokens up to a capacity, drops the rest."""

    def __init__(
        self, n_embed: int, num_experts: int, router: nn.Module, capacity_factor: float
    ) -> None:
        super().__init__(n_embed, num_experts, router)
        self.capacity_factor, self.num_experts = capacity_factor, num_experts

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        gates, ids = self.router(x)
        x_TD = x.view(-1, x.size(-1))
        gates_TE = gates.view(-1, gates.size(-1))
        slots = batch * length * self.top_k
        capacity = int((slots / self.num_experts) * self.capacity_factor)
        out_TD = torch.zeros_like(x_TD)
        for index, expert in enumerate(self.experts):
            mask_T = (ids == index).any(dim=-1).view(-1)
            tokens = torch.nonzero(mask_T).squeeze(-1)
            kept = tokens[:capacity] if tokens.numel() > capacity else tokens
            if kept.numel() > 0:
                weights = gates_TE[kept, index].unsqueeze(1)
                out_TD.index_add_(0, kept, expert(x_TD[kept]) * weights)
        return torch.zeros_like(x) + out_TD.view(batch, length, -1)


class Router(nn.Module):
    """nanoMoE's router: returns used capacity, combine weights ``[T, E, C]`` and their mask."""

    def __init__(
        self, n_embd: int, n_exp: int, top_k: int, eval_capacity: float, min_capacity: int
    ) -> None:
        super().__init__()
        self.top_k, self.n_exp = top_k, n_exp
        self.train_capacity, self.eval_capacity = 1.25, eval_capacity
        self.min_capacity = min_capacity
        self.use_noisy_top_k = False
        self.w_g = nn.Linear(n_embd, n_exp, bias=False)
        self.w_noise = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.amp.autocast(device_type=kind, enabled=False):
            batch, length, _ = x.size()
            count = batch * length
            gates, ids = sparse_softmax(self.w_g(x), self.top_k)
            capacity = self.get_capacity(count)
            mask_KTE = F.one_hot(ids, num_classes=self.n_exp)
            mask_KTE = mask_KTE.view(count, self.top_k, self.n_exp).permute(1, 0, 2)
            # First choices come before second ones.
            rank = mask_KTE.reshape(self.top_k * count, self.n_exp)
            rank = (torch.cumsum(rank, dim=0) - 1).reshape(self.top_k, count, self.n_exp)
            mask_KTE = mask_KTE * torch.lt(rank, capacity)
            used = torch.sum(mask_KTE, dim=(0, 1))
            rank_KT = torch.sum(mask_KTE * rank, dim=-1)
            weights_KTE = mask_KTE * gates.view(count, self.n_exp)[None, :]
            place_KTC = F.one_hot(rank_KT, num_classes=capacity)
            combine_TEC = torch.sum(weights_KTE.unsqueeze(3) * place_KTC.unsqueeze(2), dim=0)
            return used, combine_TEC, combine_TEC.bool()

    def get_capacity(self, tokens_per_batch: int) -> int:
        factor = self.train_capacity if self.training else self.eval_capacity
        capacity = math.floor(self.top_k * factor * tokens_per_batch / self.n_exp)
        capacity += capacity % 2
        return int(max(capacity, self.min_capacity))


class MLPExperts(nn.Module):
    """Biases ``[E, 1, H]``."""

    def __init__(self, n_embd: int, n_exp: int, bias: bool = True) -> None:
        super().__init__()
        self.bias = bias
        self.c_fc = nn.Parameter(torch.empty(n_exp, n_embd, 4 * n_embd))
        self.c_proj = nn.Parameter(torch.empty(n_exp, 4 * n_embd, n_embd))
        self.fc_bias = nn.Parameter(torch.empty(n_exp, 1, 4 * n_embd)) if bias else None
        self.proj_bias = nn.Parameter(torch.empty(n_exp, 1, n_embd)) if bias else None
        self.gelu = nn.GELU()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.bmm(x, self.c_fc)
        if self.bias:
            x += self.fc_bias
        x = torch.bmm(self.gelu(x), self.c_proj)
        if self.bias:
            x += self.proj_bias
        return self.dropout(x)


class MOELayer(nn.Module):
    def __init__(self, router: Router, experts: MLPExperts) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        _used, weights_TEC, mask_TEC = self.router(x)
        x_TD = x.view(batch * length, width)
        rows_ECD = mask_TEC.permute(1, 2, 0).type_as(x_TD) @ x_TD
        results = self.experts(rows_ECD).view(-1, width)
        out_TD = weights_TEC.view(batch * length, -1) @ results
        return out_TD.view(batch, length, width)


def nano(eval_capacity: float, min_capacity: int) -> MOELayer:
    router = Router(DIM, EXPERTS, TOP_K, eval_capacity, min_capacity)
    return MOELayer(router, MLPExperts(DIM, EXPERTS))


MAKEMOE = "AviSoori1x/makeMoE"
NANOMOE = "wolfecameron/nanoMoE model.py"

CASES = [
    Case(
        name="makemoe",
        origin=f"{MAKEMOE} makeMoE_from_Scratch.ipynb",
        make=lambda: Model(
            lambda: SparseMoE(DIM, EXPERTS, TopkRouter(DIM, EXPERTS, TOP_K)), "smoe"
        ),
        moe_paths=in_blocks("smoe"),
        notes="gates [B, L, E] with zeros, boolean indexing",
    ),
    Case(
        name="makemoe-noisy-in-training",
        origin=f"{MAKEMOE} makeMoE_Concise.ipynb",
        make=lambda: Model(
            lambda: SparseMoE(
                DIM, EXPERTS, NoisyTopkRouter(DIM, EXPERTS, TOP_K, always_noisy=False)
            ),
            "smoe",
        ),
        moe_paths=in_blocks("smoe"),
        notes="as most copies of the tutorial have it: noise in training alone",
    ),
    Case(
        name="makemoe-always-noisy",
        origin=f"{MAKEMOE} makeMoE_from_Scratch.ipynb",
        make=lambda: Model(
            lambda: SparseMoE(DIM, EXPERTS, NoisyTopkRouter(DIM, EXPERTS, TOP_K)), "smoe"
        ),
        moe_paths=in_blocks("smoe"),
        random=True,
        notes="noise in evaluation: run in front of the experts as it is",
    ),
    Case(
        name="makemoe-capacity",
        origin=f"{MAKEMOE} makeMoE.py",
        make=lambda: Model(
            lambda: SparseMoEWithCapacity(
                DIM, EXPERTS, TopkRouter(DIM, EXPERTS, TOP_K), capacity_factor=1.0
            ),
            "smoe",
        ),
        moe_paths=in_blocks("smoe"),
        exact=True,
        notes="an expert's tokens beyond int(T*K/E) are dropped, the last first",
    ),
    Case(
        name="nanomoe",
        origin=NANOMOE,
        make=lambda: Model(lambda: nano(eval_capacity=1.0, min_capacity=4)),
        moe_paths=in_blocks("mlp"),
        exact=True,
        notes="dispatch and combine by [T, E, C]; drops where an expert is chosen too often",
    ),
]
