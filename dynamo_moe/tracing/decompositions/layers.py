"""Embedding, normalisation and attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.registry import decomposes

__all__: list[str] = []

_aten = torch.ops.aten


@decomposes(_aten.embedding_bag.default, _aten.embedding_bag.padding_idx)
def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, None, None, None]:
    """The exporter makes a loop over the bags, with a sequence, which TensorRT does not take.

    The three other results are for the backward pass.
    """
    if include_last_offset:
        offsets = offsets[:-1]
    # Several bags can begin at one place, also behind the last index; all but the last are empty.
    begins = offsets.new_zeros(indices.shape[0] + 1).index_add(0, offsets, torch.ones_like(offsets))
    bags = begins.cumsum(0)[:-1] - 1
    rows = weight[indices]
    kept = torch.ones_like(indices, dtype=torch.bool)
    if padding_idx is not None:
        kept = indices != (padding_idx + weight.shape[0] if padding_idx < 0 else padding_idx)
    counts = weight.new_zeros(offsets.shape[0]).index_add(0, bags, kept.to(weight.dtype))
    if mode == 2:
        least = rows.new_full((offsets.shape[0], weight.shape[1]), -math.inf)
        rows = rows.masked_fill(~kept[:, None], -math.inf)
        most = least.scatter_reduce(0, bags[:, None].expand(rows.shape), rows, "amax")
        return torch.where(counts[:, None] > 0, most, 0.0), None, None, None
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    result = weight.new_zeros(offsets.shape[0], weight.shape[1])
    result = result.index_add(0, bags, rows * kept[:, None])
    if mode == 1:
        result = result / counts.clamp(min=1)[:, None]
    return result, None, None, None


def _of_the_batch(*arguments: Any) -> bool:
    return bool(arguments[5])


@decomposes(
    _aten.native_batch_norm.default, _aten._native_batch_norm_legit.default, when=_of_the_batch
)
def _native_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """By the statistics of the batch; the running ones matter to training alone."""
    *_, eps = arguments
    dims = [0, *range(2, x.ndim)]
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    scale = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    result = centred * scale
    shape = [-1] + [1] * (x.ndim - 2)
    if weight is not None:
        result = result * weight.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    return result, mean.reshape(-1), scale.reshape(-1)


@decomposes(_aten.batch_norm.default, when=_of_the_batch)
def _batch_norm(*arguments: Any) -> Any:
    return _native_batch_norm(*arguments[:-1])[0]  # The last: whether cuDNN is enabled.


@decomposes(
    _aten.scaled_dot_product_attention.default,
    when=lambda query, *_, **__: query.ndim != 4,
)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
    result: Tensor = _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result
