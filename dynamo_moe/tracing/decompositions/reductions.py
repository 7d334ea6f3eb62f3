"""Operators that add up, multiply, compare or average many elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.registry import decomposes

__all__: list[str] = []

_aten = torch.ops.aten
_prims = torch.ops.prims


@decomposes(_prims.prod.default)
def _prod(x: Tensor, dims: Sequence[int] | None, *, output_dtype: Any = None) -> Tensor:
    for dim in sorted(range(x.ndim) if dims is None else dims, reverse=True):
        x = x.prod(dim, dtype=output_dtype)
    return x


def _over_all(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> bool:
    return not dim or not x.ndim


@decomposes(_aten.amax.default, when=_over_all)
def _amax(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    return x.amax([*range(x.ndim)], keepdim) if x.ndim else x.clone()


@decomposes(_aten.amin.default, when=_over_all)
def _amin(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    return x.amin([*range(x.ndim)], keepdim) if x.ndim else x.clone()


# The exporter's translation forgets that ONNX scatters into no scalars.
@decomposes(_aten.scatter_add.default, when=lambda x, *_: not x.ndim)
def _scatter_add_to_scalar(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return x.scatter_reduce(dim, index, src, "sum")


# ONNX has no mean among what it scatters by.
@decomposes(_aten.scatter_reduce.two, when=lambda *arguments, **_: "mean" in arguments[4:5])
def _scatter_mean(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    counts = torch.zeros_like(x).scatter_reduce(dim, index, torch.ones_like(src), "sum")
    own = x if include_self else torch.where(counts > 0, 0, x)
    total = own.scatter_reduce(dim, index, src, "sum")
    counts = counts + 1 if include_self else counts.clamp(min=1)
    return total.div(counts, rounding_mode=None if x.is_floating_point() else "floor")


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
