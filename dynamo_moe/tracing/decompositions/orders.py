"""Decompositions of sorts, and of searches in sorted numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.table import decomposes

_aten = torch.ops.aten


def extreme(dtype: torch.dtype, sign: int) -> float:
    """Returns the greatest number of a dtype, or with a negative sign the least."""
    if dtype.is_floating_point:
        return sign * math.inf
    bounds = torch.iinfo(dtype)
    return bounds.max if sign > 0 else bounds.min


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


@decomposes(_aten.nanmedian.dim)
def _nan_median(x: Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    """The place of the first number that is the median."""
    if not x.is_floating_point() or not x.ndim:
        return _median(x, dim, keepdim)
    is_nan = x.isnan()
    values = x.masked_fill(is_nan, math.inf).sort(dim).values
    middle = ((~is_nan).sum(dim, keepdim=True) - 1).clamp(min=0) // 2
    median = values.gather(dim, middle).masked_fill(is_nan.all(dim, keepdim=True), math.nan)
    places = (x == median).long().argmax(dim, keepdim=True)
    return (median, places) if keepdim else (median.squeeze(dim), places.squeeze(dim))


@decomposes(_aten.nanmedian.default)
def _nan_median_of_all(x: Tensor) -> Tensor:
    return torch.nanmedian(x.flatten(), 0).values


@decomposes(_aten.mode.default)
def _mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The least of the most frequent numbers, and the last place of it.

    PyTorch does not say which place it gives; it is the last one in rows of up to 16 numbers. NaN
    is the result only where there is nothing else: beside one, PyTorch's depends on its place.
    """
    if not x.ndim:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    rows = x.movedim(dim, -1)
    if x.dtype == torch.bool:
        rows = rows.int()
    counts = (rows.unsqueeze(-1) == rows.unsqueeze(-2)).sum(-1)
    is_frequent = counts == counts.amax(-1, keepdim=True)
    least = torch.where(is_frequent, rows, extreme(rows.dtype, 1)).amin(-1, keepdim=True)
    if x.is_floating_point():
        least = least.masked_fill(rows.isnan().all(-1, keepdim=True), math.nan)
    places = torch.arange(x.shape[dim], device=x.device)
    last = torch.where(rows == least, places, 0).amax(-1, keepdim=True)
    values, last = least.to(x.dtype).movedim(-1, dim), last.movedim(-1, dim)
    return (values, last) if keepdim else (values.squeeze(dim), last.squeeze(dim))


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
