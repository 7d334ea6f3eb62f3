"""Modules that only accept CUDA tensors, for torch.nn.functional.grouped_mm.

Legend: T tokens, D model width, H hidden width, E experts, K top_k, N = T*K.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, in_blocks

ORIGIN = "image and board game models with a Swin Transformer of their own"


class DroplessMoEMlp(nn.Module):
    """Keeps its losses in attributes and its router in float32."""

    def __init__(
        self, in_features: int, hidden_features: int, num_experts: int, top_k: int
    ) -> None:
        super().__init__()
        self.in_features, self.hidden_features = in_features, hidden_features
        self.num_experts, self.top_k = num_experts, top_k
        self.router = nn.Linear(in_features, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(num_experts, in_features, hidden_features))
        self.b1 = nn.Parameter(torch.zeros(num_experts, hidden_features))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden_features, in_features))
        self.b2 = nn.Parameter(torch.zeros(num_experts, in_features))
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.1)
        self.aux_loss: Tensor | None = None
        self.z_loss: Tensor | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module = super()._apply(fn, recurse)
        self.router.float()
        return module

    def check(self, x: Tensor) -> None:
        if not x.is_cuda:
            raise RuntimeError(
                f"{type(self).__name__} requires CUDA tensors because it uses "
                "torch.nn.functional.grouped_mm."
            )
        if self.router.weight.dtype != torch.float32:
            raise RuntimeError("the router's weights must stay float32")

    def keep_losses(self, logits_TE: Tensor, scores_TE: Tensor, counts_E: Tensor) -> None:
        if not self.training:
            self.aux_loss = self.z_loss = None
            return
        share_E = counts_E.to(scores_TE.dtype) / counts_E.sum().to(scores_TE.dtype)
        self.aux_loss = self.num_experts * torch.sum(share_E * scores_TE.mean(dim=0))
        self.z_loss = torch.mean(torch.logsumexp(logits_TE, dim=-1).square())

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        shape = x.shape
        x_TD = x.reshape(-1, self.in_features)
        count = x_TD.shape[0]
        with torch.autocast(device_type="cuda", enabled=False):
            logits_TE = self.router(x_TD.float())
            scores_TE = F.softmax(logits_TE, dim=-1)
            best_TK, ids_TK = torch.topk(scores_TE, k=self.top_k, dim=-1)
            weights_TK = best_TK / best_TK.sum(dim=-1, keepdim=True)
        ids_N, weights_N = ids_TK.reshape(-1), weights_TK.reshape(-1)
        tokens_N = torch.arange(count, device=x_TD.device).repeat_interleave(self.top_k)
        order_N = torch.argsort(ids_N)
        ids_N, tokens_N, weights_N = ids_N[order_N], tokens_N[order_N], weights_N[order_N]
        rows = x_TD.index_select(0, tokens_N)
        counts_E = torch.bincount(ids_N, minlength=self.num_experts)
        ends_E = torch.cumsum(counts_E, dim=0).to(torch.int32)
        self.keep_losses(logits_TE, scores_TE, counts_E)
        hidden = self.product(rows, self.w1, ends_E)
        hidden = hidden + self.b1.index_select(0, ids_N).to(dtype=hidden.dtype)
        hidden = self.drop(self.act(hidden))
        result = self.product(hidden, self.w2, ends_E)
        result = result + self.b2.index_select(0, ids_N).to(dtype=result.dtype)
        result = self.drop(result) * weights_N.unsqueeze(-1).to(dtype=result.dtype)
        out_TD = torch.zeros_like(x_TD)
        out_TD.index_add_(0, tokens_N, result.to(dtype=out_TD.dtype))
        return out_TD.reshape(shape)

    @staticmethod
    def product(rows: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
        weight = weight if weight.dtype == rows.dtype else weight.to(dtype=rows.dtype)
        # One row beyond the last group, which the product ignores.
        padding = torch.zeros(1, rows.shape[-1], dtype=rows.dtype, device=rows.device)
        padded = torch.cat((rows, padding), dim=0)
        return F.grouped_mm(padded, weight, offs=ends_E)[: rows.shape[0]]


class DroplessMoEMlpWithLosses(DroplessMoEMlp):
    """Another copy, which computes its losses in evaluation too."""

    def keep_losses(self, logits_TE: Tensor, scores_TE: Tensor, counts_E: Tensor) -> None:
        share_E = counts_E.to(scores_TE.dtype) / counts_E.sum().to(scores_TE.dtype)
        self.aux_loss = self.num_experts * torch.sum(share_E * scores_TE.mean(dim=0))
        self.z_loss = torch.mean(torch.logsumexp(logits_TE, dim=-1).square())


class DroplessMoESwiGLUFFN(DroplessMoEMlp):
    """Takes ``[B, C, H, W]``; gate and value in one product, no biases; chooses by logits."""

    def __init__(
        self, in_features: int, hidden_features: int, num_experts: int, top_k: int = 2
    ) -> None:
        super().__init__(in_features, hidden_features, num_experts, top_k)
        self.w1 = nn.Parameter(torch.empty(num_experts, in_features, 2 * hidden_features))
        self.b1 = self.b2 = None
        self.act = nn.SiLU()
        self.register_buffer("_flat_token_cache", torch.empty(0).long(), persistent=False)

    def flat_tokens(self, count: int, device: torch.device) -> Tensor:
        if self._flat_token_cache.numel() != count * self.top_k:
            tokens = torch.arange(count, device=device)
            self._flat_token_cache = tokens.repeat_interleave(self.top_k)
        return self._flat_token_cache

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        batch, channels, height, width = x.shape
        count = batch * height * width
        x_TD = x.permute(0, 2, 3, 1).contiguous().view(count, channels)
        with torch.autocast(device_type="cuda", enabled=False):
            logits_TE = self.router(x_TD.float())
            best_TK, ids_TK = torch.topk(logits_TE, k=self.top_k, dim=-1)
            weights_TK = F.softmax(best_TK, dim=-1)
        ids_N, weights_N = ids_TK.flatten(), weights_TK.flatten()
        order_N = torch.argsort(ids_N)
        ids_N, weights_N = ids_N.index_select(0, order_N), weights_N.index_select(0, order_N)
        tokens_N = self.flat_tokens(count, x.device).index_select(0, order_N)
        counts_E = torch.bincount(ids_N, minlength=self.num_experts)
        ends_E = torch.cumsum(counts_E, dim=0).to(torch.int32)
        both = self.product(x_TD.index_select(0, tokens_N), self.w1, ends_E)
        gate, value = both.split((self.hidden_features, self.hidden_features), dim=-1)
        result = self.product(value * self.act(gate), self.w2, ends_E)
        result = result * weights_N.unsqueeze(-1).to(dtype=result.dtype)
        unsorted = torch.empty(count * self.top_k, channels, dtype=x_TD.dtype, device=x.device)
        unsorted.index_copy_(0, order_N, result.to(dtype=unsorted.dtype))
        out_TD = unsorted.view(count, self.top_k, channels).sum(dim=1)
        return out_TD.view(batch, height, width, channels).permute(0, 3, 1, 2).contiguous()


def as_image(moe: nn.Module, x: Tensor) -> Tensor:
    """``[B, L, D]`` as the image ``[B, D, L, 1]``."""
    return moe(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)


CASES = [
    Case(
        name="dropless-cuda-only",
        origin=ORIGIN,
        make=lambda: Model(lambda: DroplessMoEMlp(DIM, HIDDEN, EXPERTS, TOP_K)),
        moe_paths=in_blocks("mlp"),
        cuda_only=True,
        notes="aux_loss and z_loss None in evaluation; _apply keeps the router in float32",
    ),
    Case(
        name="dropless-cuda-only-losses",
        origin=ORIGIN,
        make=lambda: Model(lambda: DroplessMoEMlpWithLosses(DIM, HIDDEN, EXPERTS, TOP_K)),
        moe_paths=in_blocks("mlp"),
        cuda_only=True,
        notes="aux_loss and z_loss kept in evaluation too",
    ),
    Case(
        name="dropless-cuda-only-swiglu-image",
        origin=ORIGIN,
        make=lambda: Model(
            lambda: DroplessMoESwiGLUFFN(DIM, HIDDEN, EXPERTS, TOP_K), "ffn", as_image
        ),
        moe_paths=in_blocks("ffn"),
        cuda_only=True,
        notes="takes [B, D, H, W]; value * silu(gate), gate first; a cached index of tokens",
    ),
]
