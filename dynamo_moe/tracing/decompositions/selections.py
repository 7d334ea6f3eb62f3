"""Operators that choose elements, or say where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.registry import decomposes

__all__: list[str] = []

_aten = torch.ops.aten


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


# The exporter's translation takes no size.
@decomposes(
    _aten.repeat_interleave.Tensor,
    when=lambda repeats, *, output_size=None: output_size is not None,
)
def _repeat_interleave(repeats: Tensor, *, output_size: int) -> Tensor:
    return torch.repeat_interleave(repeats)


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
def _bucketize(
    x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    above = boundaries > x.unsqueeze(-1) if right else boundaries >= x.unsqueeze(-1)
    return (~above).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)
