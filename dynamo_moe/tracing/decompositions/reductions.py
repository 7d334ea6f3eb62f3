"""Decompositions of sums and extremes along dimensions, cumulative ones too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.half_precision import in_float32, is_half, widened_half
from dynamo_moe.tracing.decompositions.orders import extreme
from dynamo_moe.tracing.decompositions.table import Function, decomposes

_aten = torch.ops.aten
_prims = torch.ops.prims


# The exporter's translation takes the mean in the tensor's own dtype, which may be an integer.
@decomposes(
    _aten.mean.dim,
    when=lambda x, dim=None, keepdim=False, *, dtype=None: dtype not in {None, x.dtype},
)
def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype) -> Any:
    return x.to(dtype).mean(dim, keepdim)


def _cumulative(reduce: Function, sign: int, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Compares each element with all up to it; of equal ones PyTorch takes the last."""
    if not x.ndim:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    places = torch.arange(x.shape[dim], device=x.device)
    rows = x.movedim(dim, -1).unsqueeze(-2)
    seen = places <= places[:, None]
    values = reduce(torch.where(seen, rows, extreme(x.dtype, sign)), -1)
    chosen = seen & (rows == values.unsqueeze(-1))
    indices = torch.where(chosen, places, 0).amax(-1)
    return values.movedim(-1, dim), indices.movedim(-1, dim)


decomposes(_aten.cummax.default)(partial(_cumulative, torch.amax, -1))
decomposes(_aten.cummin.default)(partial(_cumulative, torch.amin, 1))


@decomposes(_prims.prod.default)
def _prod(x: Tensor, dims: Sequence[int] | None, *, output_dtype: Any = None) -> Tensor:
    for dim in sorted(range(x.ndim) if dims is None else dims, reverse=True):
        x = x.prod(dim, dtype=output_dtype)
    return x


def _over_all(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> bool:
    return not dim or not x.ndim


def _over_every(reduce: Function, x: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
    return reduce(x, [*range(x.ndim)], keepdim) if x.ndim else x.clone()


decomposes(_aten.amax.default, when=_over_all)(partial(_over_every, torch.amax))
decomposes(_aten.amin.default, when=_over_all)(partial(_over_every, torch.amin))


@decomposes(_aten._cdist_forward.default)
def _cdist(x: Tensor, y: Tensor, p: float, compute_mode: int | None = None) -> Tensor:
    differences = (x.unsqueeze(-2) - y.unsqueeze(-3)).abs()
    if p == 0:
        return (differences != 0).to(x.dtype).sum(-1)
    if p == 1:
        return differences.sum(-1)
    if p == 2:
        return differences.square().sum(-1).sqrt()
    if p == math.inf:
        return differences.amax(-1)
    return differences.pow(p).sum(-1).pow(1 / p)


@decomposes(_aten.pdist.default, _aten._pdist_forward.default)
def _pdist(x: Tensor, p: float = 2.0) -> Any:
    """The distances above the diagonal of all, row by row."""
    rows = x.shape[0]
    column = torch.arange(rows, device=x.device)
    row = column[:, None]
    places = torch.where(row < column, row * rows + column, rows * rows).reshape(-1).sort().values
    distances = _cdist(x, x, p).reshape(-1)
    return distances.index_select(0, places.narrow(0, 0, rows * (rows - 1) // 2))


def _takes_a_root(x: Tensor, order: float = 2, *_: Any, dtype: Any = None) -> bool:
    return is_half(x) and order not in {0, 1, 2, math.inf, -math.inf} and dtype is None


decomposes(_aten.linalg_vector_norm.default, when=_takes_a_root)(
    partial(in_float32, _aten.linalg_vector_norm.default)
)


@decomposes(_aten.logcumsumexp.default)
def _log_cum_sum_exp(x: Tensor, dim: int) -> Tensor:
    """Each sum is taken beside its own greatest term, which takes the square of the length."""
    if not x.ndim:
        return x
    rows = widened_half(x).movedim(dim, -1)
    places = torch.ones_like(rows, dtype=torch.int64).cumsum(-1)
    summed = places.unsqueeze(-2) <= places.unsqueeze(-1)
    terms = torch.where(summed, rows.unsqueeze(-2), -math.inf)
    return terms.logsumexp(-1).movedim(-1, dim).to(x.dtype)
