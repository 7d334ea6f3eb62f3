"""Decompositions of sorts, and of searches in sorted numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.table import decomposes

_aten = torch.ops.aten


@decomposes(_aten.sort.stable)
def _stable_sort(
    x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    # Becomes TopK, which the standard has take the lower index first.
    values, indices = torch.sort(x, dim, descending)
    return values, indices


@decomposes(_aten.kthvalue.default)
def _kth_value(x: Tensor, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(x.reshape(1) if not x.ndim else x, dim)
    place = torch.zeros(1, dtype=torch.int64, device=x.device) + (k - 1)
    kth = values.index_select(dim, place), indices.index_select(dim, place)
    if keepdim and x.ndim:
        return kth
    return kth[0].squeeze(dim), kth[1].squeeze(dim)


@decomposes(_aten.median.dim)
def _median(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    middle = (x.shape[dim] + 1) // 2 if x.ndim else 1
    values, indices = _kth_value(x, middle, dim, keepdim)  # PyTorch's operator fixes k.
    if not x.is_floating_point():
        return values, indices
    is_nan = x.isnan()
    has_nan = is_nan.any(dim, keepdim)
    places = is_nan.long().argmax(dim, keepdim)
    return values.masked_fill(has_nan, math.nan), torch.where(has_nan, places, indices)


@decomposes(_aten.median.default)
def _median_of_all(x: Tensor) -> Tensor:
    return torch.median(x.flatten(), 0).values


@decomposes(_aten.searchsorted.Tensor, _aten.searchsorted.Scalar)
def _searchsorted(
    boundaries: Tensor,
    x: Tensor | float,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Counts the boundaries below each value: all of them, as ONNX has no binary search."""
    if sorter is not None:
        boundaries = boundaries.gather(-1, sorter)
    if isinstance(x, Tensor):
        x = x.unsqueeze(-1)
    if boundaries.ndim > 1:
        boundaries = boundaries.unsqueeze(-2)
    above = boundaries > x if right or side == "right" else boundaries >= x
    return (~above).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


@decomposes(_aten.bucketize.Tensor)
def _bucketize(x: Tensor, boundaries: Tensor, **options: bool) -> Any:
    return _searchsorted(boundaries, x, **options)
