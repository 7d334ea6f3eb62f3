"""torchtitan's MoE of 2025, with its loop over experts that needs no GPU, and that of 2026.

Legend: T tokens, D model width, F hidden width, E experts, K top_k, N = T*K routed tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, flat, in_blocks


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class GroupedExperts(nn.Module):
    """Takes rows sorted by expert."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.use_grouped_mm = False

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        counts = num_tokens_per_expert.int().tolist()
        padding = x.shape[0] - sum(counts)
        parts = torch.split(x[: sum(counts)], counts, dim=0)
        results = []
        for index, part in enumerate(parts):
            hidden = F.silu(torch.matmul(part, self.w1[index].transpose(-2, -1)))
            hidden = hidden * torch.matmul(part, self.w3[index].transpose(-2, -1))
            results.append(torch.matmul(hidden, self.w2[index].transpose(-2, -1)))
        out = torch.cat(results, dim=0)
        return torch.vstack((out, out.new_zeros((padding, out.shape[-1]))))


class TokenChoiceTopKRouter(nn.Module):
    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        score_func: str,
        route_norm: bool,
        route_scale: float,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.num_experts, self.top_k = num_experts, top_k
        self.score_func, self.route_norm = score_func, route_norm
        self.route_scale = route_scale

    def forward(
        self, x: Tensor, expert_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.gate(x)
        if self.score_func == "sigmoid":
            scores = torch.sigmoid(scores.to(torch.float32))
        else:
            scores = F.softmax(scores.to(torch.float32), dim=1)
        if expert_bias is None:
            top_scores, ids = torch.topk(scores, k=self.top_k, dim=1)
        else:
            ids = torch.topk(scores + expert_bias, k=self.top_k, dim=1)[1]
            top_scores = scores.gather(dim=1, index=ids)
        if self.route_norm:
            top_scores = top_scores / (top_scores.sum(dim=-1, keepdim=True) + 1e-20)
        top_scores = top_scores * self.route_scale
        counts = torch.histc(
            ids.view(-1).float(), bins=self.num_experts, min=0, max=self.num_experts
        )
        return top_scores, ids, counts


class TokenReorderer(nn.Module):
    """Has no state; it is a module so that it can be parallelised."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k

    def forward(self, top_scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts = torch.histc(
            ids.view(-1).float(), bins=self.num_experts, min=0, max=self.num_experts
        )
        order = torch.argsort(ids.view(-1), stable=True)
        return top_scores.view(-1)[order], order // self.top_k, counts


class MoE(nn.Module):
    """Counts tokens in a buffer, in evaluation too."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        num_shared_experts: int = 1,
        score_func: str = "sigmoid",
        route_norm: bool = False,
        route_scale: float = 1.0,
        score_before_experts: bool = True,
        load_balance_coeff: float | None = 1e-3,
    ) -> None:
        super().__init__()
        self.experts = GroupedExperts(dim, hidden_dim, num_experts)
        self.router = TokenChoiceTopKRouter(
            dim, num_experts, top_k, score_func, route_norm, route_scale
        )
        self.reorderer = TokenReorderer(num_experts, top_k)
        shared = FeedForward(dim, hidden_dim * num_shared_experts) if num_shared_experts else None
        self.shared_experts = shared
        self.score_before_experts = score_before_experts
        self.load_balance_coeff = load_balance_coeff
        if load_balance_coeff is None:
            self.expert_bias = None
        else:
            self.register_buffer("expert_bias", torch.zeros(num_experts))
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        x_TD = x.view(-1, dim)
        top_scores, ids, counts = self.router(x_TD, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        scores_N, tokens_N, counts = self.reorderer(top_scores, ids)
        index_ND = tokens_N.reshape(-1, 1).expand(-1, dim)
        rows_ND = torch.gather(x_TD, dim=0, index=index_ND)
        if self.score_before_experts:
            rows_ND = (rows_ND.to(torch.float32) * scores_N.reshape(-1, 1)).to(x.dtype)
        routed_ND = self.experts(rows_ND, counts)
        out_TD = (
            torch.zeros_like(x_TD) if self.shared_experts is None else self.shared_experts(x_TD)
        )
        if not self.score_before_experts:
            routed_ND = (routed_ND.to(torch.float32) * scores_N.reshape(-1, 1)).to(x.dtype)
        out_TD = out_TD.scatter_add(dim=0, index=index_ND, src=routed_ND)
        return out_TD.reshape(batch, length, dim)


class GroupedExpertsNamed(nn.Module):
    """The 2026 version: parameter names contain the layout; products in bfloat16."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.w1_EFD = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2_EDF = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3_EFD = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        ends_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)

        def product(rows: Tensor, weight: Tensor) -> Tensor:
            return F.grouped_mm(rows, weight.bfloat16().transpose(-2, -1), offs=ends_E)

        rows = x_RD.bfloat16()
        hidden = F.silu(product(rows, self.w1_EFD)) * product(rows, self.w3_EFD)
        return product(hidden, self.w2_EDF).type_as(x_RD)


class LocalTokenDispatcher:
    """Sorts by expert and scatters back; has no state and is not a module."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        self.num_experts, self.top_k = num_experts, top_k

    def dispatch(self, x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor) -> tuple[Tensor, ...]:
        order_N = torch.argsort(ids_TK.view(-1), stable=True)
        tokens_N = order_N // self.top_k
        return x_TD[tokens_N], scores_TK.view(-1)[order_N], tokens_N

    def combine(self, rows_ND: Tensor, scores_N: Tensor, tokens_N: Tensor, x_TD: Tensor) -> Tensor:
        rows_ND = (rows_ND.float() * scores_N.reshape(-1, 1)).to(rows_ND.dtype)
        index_ND = tokens_N.reshape(-1, 1).expand(-1, x_TD.shape[-1])
        return torch.zeros_like(x_TD).scatter_add(0, index_ND, rows_ND)


class RoutedExperts(nn.Module):
    def __init__(self, dim: int, hidden_dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.inner_experts = GroupedExpertsNamed(dim, hidden_dim, num_experts)
        self.token_dispatcher = LocalTokenDispatcher(num_experts, top_k)

    def forward(self, x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, counts_E: Tensor) -> Tensor:
        rows, scores, tokens = self.token_dispatcher.dispatch(x_TD, scores_TK, ids_TK)
        routed = self.inner_experts(rows, counts_E)
        return self.token_dispatcher.combine(routed, scores, tokens, x_TD)


class AutocastRouter(nn.Module):
    """The 2026 version: gate in float32 by autocast, unsorted choice, groups on request."""

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
        route_norm: bool = True,
        route_scale: float = 1.5,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.num_experts, self.top_k, self.score_func = num_experts, top_k, "sigmoid"
        self.num_expert_groups, self.num_limited_groups = num_expert_groups, num_limited_groups
        self.route_norm, self.route_scale = route_norm, route_scale

    def forward(
        self, x_TD: Tensor, expert_bias_E: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(device_type=x_TD.device.type, dtype=torch.float32):
            scores_TE = self.gate(x_TD)
        scores_TE = torch.sigmoid(scores_TE)
        choice_TE = scores_TE if expert_bias_E is None else scores_TE + expert_bias_E
        if self.num_expert_groups is not None:
            size = self.num_experts // self.num_expert_groups
            choice_TGE = choice_TE.unflatten(-1, (self.num_expert_groups, size))
            best_TG = choice_TGE.topk(2, dim=-1)[0].sum(dim=-1)
            kept = torch.topk(best_TG, k=self.num_limited_groups, dim=-1, sorted=False)[1]
            left_out = torch.ones_like(best_TG, dtype=torch.bool)
            left_out.scatter_(-1, kept, False)
            choice_TE = choice_TGE.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(-2)
        ids_TK = torch.topk(choice_TE, k=self.top_k, dim=-1, sorted=False)[1]
        weights_TK = scores_TE.gather(dim=-1, index=ids_TK)
        if self.route_norm:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return weights_TK * self.route_scale, ids_TK, scores_TE


class FlatMoE(nn.Module):
    """The 2026 version: takes ``[T, D]``."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
    ) -> None:
        super().__init__()
        self.routed_experts = RoutedExperts(dim, hidden_dim, num_experts, top_k)
        self.router = AutocastRouter(dim, num_experts, top_k, num_expert_groups, num_limited_groups)
        self.shared_experts = FeedForward(dim, hidden_dim)
        self.load_balance_coeff = 1e-3
        self.register_buffer("expert_bias_E", torch.zeros(num_experts))
        self.register_buffer("tokens_per_expert_E", torch.zeros(num_experts), persistent=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK, scores_TE = self.router(x_TD, self.expert_bias_E)
        chosen_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(-1, ids_TK, True)
        counts_E = chosen_TE.sum(dim=0)
        if self.training:
            with torch.no_grad():
                self.tokens_per_expert_E.add_(counts_E)
        return self.routed_experts(x_TD, weights_TK, ids_TK, counts_E) + self.shared_experts(x_TD)


ORIGIN_2025 = "pytorch/torchtitan torchtitan/models/moe/moe.py, 2025"
ORIGIN_2026 = "pytorch/torchtitan torchtitan/models/common/moe.py, 2026"

CASES = [
    Case(
        name="torchtitan-score-before",
        origin=ORIGIN_2025,
        make=lambda: Model(lambda: MoE(DIM, HIDDEN, EXPERTS, TOP_K), "moe"),
        moe_paths=in_blocks("moe"),
        notes="weights on the experts' input; a buffer counts tokens in evaluation too",
    ),
    Case(
        name="torchtitan-score-after",
        origin=ORIGIN_2025,
        make=lambda: Model(
            lambda: MoE(
                DIM,
                HIDDEN,
                EXPERTS,
                TOP_K,
                num_shared_experts=0,
                score_func="softmax",
                route_norm=True,
                route_scale=2.5,
                score_before_experts=False,
                load_balance_coeff=None,
            ),
            "moe",
        ),
        moe_paths=in_blocks("moe"),
    ),
    Case(
        name="torchtitan-2026",
        origin=ORIGIN_2026,
        make=lambda: Model(
            lambda: FlatMoE(DIM, HIDDEN, 8, TOP_K, num_expert_groups=4, num_limited_groups=2),
            "moe",
            flat,
        ),
        moe_paths=in_blocks("moe"),
        num_experts=8,
        notes="takes [T, D]; autocast around the gate; products of experts in bfloat16",
    ),
]
