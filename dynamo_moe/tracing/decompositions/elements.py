"""Operators of one element each, and those that have other names."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.registry import decomposes

__all__: list[str] = []

_aten = torch.ops.aten
_prims = torch.ops.prims


# --- Other names of operators, which the exporter does not promote the dtypes of ---

for _other, _name in (
    ("divide", "div"),
    ("true_divide", "div"),
    ("subtract", "sub"),
    ("multiply", "mul"),
    ("greater", "gt"),
    ("greater_equal", "ge"),
    ("less", "lt"),
    ("less_equal", "le"),
    ("not_equal", "ne"),
):
    for _overload in ("Tensor", "Scalar"):
        decomposes(getattr(getattr(_aten, _other), _overload))(
            getattr(getattr(_aten, _name), _overload)
        )


# --- Elements ---


@decomposes(_prims.view_of.default)
def _view_of(x: Tensor) -> Tensor:
    return x.view_as(x)


@decomposes(_prims.scalar_tensor.default)
def _scalar_tensor(value: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


@decomposes(_prims.signbit.default)
def _signbit(x: Tensor) -> Tensor:
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.is_floating_point() else x < 0


@decomposes(_aten.atan2.default)
def _atan2(y: Tensor, x: Tensor) -> Tensor:
    """The exporter's translation takes the angle of a negative number for minus pi."""
    dtype = torch.result_type(y, x)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    y, x = y.to(dtype), x.to(dtype)
    half = torch.where(_signbit(y), -math.pi, math.pi).to(dtype)
    angle = (y / x).atan()
    angle = torch.where(_signbit(x), angle + half, angle)
    at_zero = torch.where(_signbit(x), half, torch.zeros_like(half))
    return torch.where((x == 0) & (y == 0), at_zero, torch.where(x == 0, half / 2, angle))


@decomposes(_prims.fmax.default)
def _fmax(x: Tensor, y: Tensor) -> Tensor:
    if not x.is_floating_point():
        return torch.maximum(x, y)
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.maximum(x, y)))


@decomposes(_prims.fmin.default)
def _fmin(x: Tensor, y: Tensor) -> Tensor:
    if not x.is_floating_point():
        return torch.minimum(x, y)
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.minimum(x, y)))


@decomposes(_prims.hypot.default)
def _hypot(x: Tensor, y: Tensor) -> Tensor:
    """Scaled by the larger one, as squares overflow early."""
    larger, smaller = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    ratio = torch.where(larger == smaller, 1.0, smaller / larger)
    return torch.where(larger == 0, larger, larger * (1 + ratio * ratio).sqrt())


# ONNX has these for floating point only.
@decomposes(
    *(getattr(_aten, name).default for name in ("ceil", "floor", "round", "trunc")),
    when=lambda x: not x.is_floating_point(),
)
def _integers(x: Tensor) -> Tensor:
    return x.clone()


@decomposes(_aten.isnan.default, _aten.isinf.default, when=lambda x: not x.is_floating_point())
def _never(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.bool)


@decomposes(_aten.isfinite.default, when=lambda x: not x.is_floating_point())
def _always(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


@decomposes(_aten.relu.default, when=lambda x: not x.is_floating_point())
def _relu_of_integers(x: Tensor) -> Tensor:
    return x.clamp(min=0)


def _of_integers(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> bool:
    return dtype is not None and not x.is_floating_point()


@decomposes(_aten.softmax.int, when=_of_integers)
def _softmax_of_integers(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).softmax(dim)


@decomposes(_aten.log_softmax.int, when=_of_integers)
def _log_softmax_of_integers(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).log_softmax(dim)
