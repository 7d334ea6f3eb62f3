"""Decompositions of embeddings, batch norms and attention."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.half_precision import widened_half
from dynamo_moe.tracing.decompositions.table import decomposes

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


def _in_training(*arguments: Any) -> bool:
    return bool(arguments[5])


class _Normalized(NamedTuple):
    """A batch norm's result in its input's dtype, and the batch's statistics in the weight's."""

    y: Tensor
    mean: Tensor
    variance: Tensor
    scale: Tensor


def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Tensor | None, eps: float
) -> _Normalized:
    """Normalises by the statistics of the batch, in float32 if x is in half precision.

    As in PyTorch: squares beyond 65504 are infinite in float16.
    """
    dims, shape = [0, *range(2, x.ndim)], [-1] + [1] * (x.ndim - 2)
    wide = widened_half(x)
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    variance = centred.square().mean(dims, keepdim=True)
    scale = (variance + eps).rsqrt()
    y = centred * scale
    if weight is not None:
        y = y * weight.reshape(shape)
    if bias is not None:
        y = y + bias.reshape(shape)
    like = next((tensor for tensor in (weight, running) if tensor is not None), x)
    statistics = (value.reshape(-1).to(like.dtype) for value in (mean, variance, scale))
    return _Normalized(y.to(x.dtype), *statistics)


@decomposes(
    _aten.native_batch_norm.default, _aten._native_batch_norm_legit.default, when=_in_training
)
def _native_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """By the statistics of the batch; the running ones matter to training alone."""
    *_, eps = arguments
    normalized = _normalized(x, weight, bias, running_mean, eps)
    return normalized.y, normalized.mean, normalized.scale


@decomposes(_aten.batch_norm.default, when=_in_training)
def _batch_norm(*arguments: Any) -> Any:
    return _native_batch_norm(*arguments[:-1])[0]  # The last: whether cuDNN is enabled.


@decomposes(_aten._native_batch_norm_legit_functional.default, when=_in_training)
def _functional_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """The running variance is without bias, which that of ONNX's operator has."""
    y, mean, variance, scale = _normalized(x, weight, bias, running_mean, eps)
    count = x.shape[0] * math.prod(x.shape[2:])
    unbiased = variance * (count / (count - 1))
    return (
        y,
        mean,
        scale,
        running_mean + momentum * (mean - running_mean),
        running_var + momentum * (unbiased - running_var),
    )


@decomposes(
    _aten.scaled_dot_product_attention.default, when=lambda query, *_, **__: query.ndim != 4
)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
    attention = _aten._scaled_dot_product_attention_math
    return attention(query, key, value, attn_mask, 0.0, is_causal, **options)[0]
