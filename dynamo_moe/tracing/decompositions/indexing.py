"""Decompositions of what takes, writes and repeats elements by their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.half_precision import in_float32, is_half
from dynamo_moe.tracing.decompositions.table import decomposes

_aten = torch.ops.aten

# ONNX indexes several dimensions by int64 alone.
_NARROW = {torch.int8, torch.int16, torch.int32}


def _has_narrow(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in _NARROW for index in indices)


def _widened(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [i.long() if i is not None and i.dtype in _NARROW else i for i in indices]


@decomposes(_aten.index.Tensor, when=lambda x, indices: _has_narrow(indices))
def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    return _aten.index(x, _widened(indices))


# ONNX Runtime scatters sums and products in float32, but not in half precision.


@decomposes(
    _aten.index_put.default,
    when=lambda x, indices, _, accumulate=False: (
        _has_narrow(indices) or (accumulate and is_half(x))
    ),
)
def _index_put(x: Tensor, indices: Any, source: Tensor, accumulate: bool = False) -> Any:
    if _has_narrow(indices):
        return _aten.index_put(x, _widened(indices), source, accumulate)
    return _aten.index_put(x.float(), indices, source.float(), accumulate).to(x.dtype)


# ONNX cannot scatter into a scalar, which the exporter's translation does not consider.
@decomposes(_aten.scatter_add.default, when=lambda x, *_: not x.ndim or is_half(x))
def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    if is_half(x):
        return in_float32(torch.scatter_add, x, dim, index, src)
    return x.scatter_reduce(dim, index, src, "sum")


# ONNX's ScatterElements has no reduction "mean".
@decomposes(
    _aten.scatter_reduce.two,
    when=lambda x, _, __, ___, reduce, **____: reduce == "mean" or is_half(x),
)
def _scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    if is_half(x):
        options = {"include_self": include_self}
        return in_float32(torch.scatter_reduce, x, dim, index, src, reduce, **options)
    counts = torch.zeros_like(x).scatter_reduce(dim, index, torch.ones_like(src), "sum")
    base = x if include_self else torch.where(counts > 0, 0, x)
    total = base.scatter_reduce(dim, index, src, "sum")
    counts = counts + 1 if include_self else counts.clamp(min=1)
    return total.div(counts, rounding_mode=None if x.is_floating_point() else "floor")


# PyTorch multiplies the sizes; with symbolic ones the exporter cannot.
@decomposes(
    _aten.flatten.using_ints,
    when=lambda x, start_dim=0, end_dim=-1: start_dim == 0 and end_dim in {-1, x.ndim - 1},
)
def _flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    return x.reshape(-1)


@decomposes(_aten.masked_select.default)
def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    return x[mask] if x.ndim else x.reshape(1)[mask.reshape(1)]


# ONNX Runtime takes a scalar for a vector of one element.
@decomposes(_aten.nonzero.default, when=lambda x: x.ndim == 0)
def _nonzero_of_scalar(x: Tensor) -> Tensor:
    return x.reshape(1).nonzero()[:, :0]


# The exporter makes a sequence, whose folding fails.
@decomposes(
    _aten.split.Tensor,
    when=lambda x, split_size, dim=0: not isinstance(split_size, int),
)
def _split_by_size(x: Tensor, split_size: int, dim: int = 0) -> list[Tensor]:
    size = x.shape[dim]
    last = max(1, int((size + split_size - 1) // split_size)) - 1  # A result has so many tensors.
    begins = [number * split_size for number in range(last + 1)]
    sizes = [*[split_size] * last, size - begins[-1]]
    return [x.narrow(dim, *part) for part in zip(begins, sizes, strict=True)]


# The exporter's translation takes no size.
@decomposes(
    _aten.repeat_interleave.Tensor,
    when=lambda repeats, *, output_size=None: output_size is not None,
)
def _repeat_interleave(repeats: Tensor, *, output_size: int) -> Tensor:
    return torch.repeat_interleave(repeats)


@decomposes(
    _aten.roll.default,
    when=lambda x, shifts, dims=(): not all(isinstance(shift, int) for shift in shifts),
)
def _roll_by_size(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """The exporter takes numbers alone."""
    if not dims:
        return _roll_by_size(x.reshape(-1), shifts, (0,)).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        begin = size - shift % size
        x = torch.cat((x.narrow(dim, begin, size - begin), x.narrow(dim, 0, begin)), dim)
    return x


@decomposes(
    _aten.repeat_interleave.self_int,
    when=lambda x, repeats, *_, **__: not isinstance(repeats, int),
)
def _repeat_interleave_by_size(
    x: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """The exporter's translation repeats along the wrong dimension."""
    if dim is None:
        x, dim = x.reshape(-1), 0
    dim %= x.ndim
    before, size, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    repeated = x.unsqueeze(dim + 1).expand(*before, size, repeats, *after)
    return repeated.reshape(*before, size * repeats, *after)
