"""Decompositions of operators of each element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.half_precision import in_float32, is_half, widened_half
from dynamo_moe.tracing.decompositions.table import Function, decomposes

_aten = torch.ops.aten
_prims = torch.ops.prims

# --- Other names, which the exporter does not promote the dtypes of ---

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
    ("__and__", "bitwise_and"),
    ("__or__", "bitwise_or"),
    ("__xor__", "bitwise_xor"),
):
    for _overload in ("Tensor", "Scalar"):
        decomposes(getattr(getattr(_aten, _other), _overload))(
            getattr(getattr(_aten, _name), _overload)
        )
decomposes(_aten.max.other)(_aten.maximum.default)
decomposes(_aten.min.other)(_aten.minimum.default)


# --- Numbers ---


# Where a number comes first, or makes real numbers of integers, the exporter has no promotion.


def _promoted(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    dtype, device = torch.result_type(x, y), (x if isinstance(x, Tensor) else y).device
    first, second = (
        value.to(dtype)
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=dtype, device=device)
        for value in (x, y)
    )
    return first, second


@decomposes(_aten.rsub.Scalar)
def _subtract_from(x: Tensor, number: float, alpha: float = 1) -> Any:
    x, first = _promoted(x, number)
    return torch.sub(first, x, alpha=alpha)


@decomposes(
    _aten.floor_divide.default,
    _aten.floor_divide.Scalar,
    when=lambda x, y: (
        not isinstance(x, Tensor) or (isinstance(y, float) and not x.is_floating_point())
    ),
)
def _floor_divide(x: Any, y: Any) -> Any:
    return torch.floor_divide(*_promoted(x, y))


def _is_of_a_size(x: Any, y: Any) -> bool:
    return any(isinstance(value, torch.SymInt | torch.SymFloat) for value in (x, y))


def _of_promoted(function: Function, x: Any, y: Any) -> Any:
    return function(*_promoted(x, y))


# The exporter takes known numbers alone beside tensors in these, or computes with the wrong dtype.
for _of_tensors, _overloads in {
    _aten.remainder.Tensor: (_aten.remainder.Scalar, _aten.remainder.Scalar_Tensor),
    _aten.pow.Tensor_Tensor: (_aten.pow.Tensor_Scalar, _aten.pow.Scalar),
    _aten.bitwise_and.Tensor: (_aten.bitwise_and.Scalar, _aten.bitwise_and.Scalar_Tensor),
    _aten.bitwise_or.Tensor: (_aten.bitwise_or.Scalar, _aten.bitwise_or.Scalar_Tensor),
    _aten.bitwise_xor.Tensor: (_aten.bitwise_xor.Scalar, _aten.bitwise_xor.Scalar_Tensor),
    _aten.bitwise_left_shift.Tensor: (
        _aten.__lshift__.Scalar,
        _aten.bitwise_left_shift.Tensor_Scalar,
        _aten.bitwise_left_shift.Scalar_Tensor,
    ),
    _aten.bitwise_right_shift.Tensor: (
        _aten.__rshift__.Scalar,
        _aten.bitwise_right_shift.Tensor_Scalar,
        _aten.bitwise_right_shift.Scalar_Tensor,
    ),
}.items():
    decomposes(*_overloads, when=_is_of_a_size)(partial(_of_promoted, _of_tensors))


# The exporter adds 1 and takes it off again, which leaves nothing of small numbers.


@decomposes(_aten.log1p.default, when=lambda x: x.is_floating_point())
def _log1p(x: Tensor) -> Tensor:
    """The logarithm of the rounded sum, and what the rounding took, to first order."""
    wide = widened_half(x)
    whole = wide + 1
    lost = torch.where(wide.abs() < 0.5, (wide - (whole - 1)) / whole, 0)
    return (whole.log() + lost).to(x.dtype)


@decomposes(_aten.expm1.default, when=lambda x: x.is_floating_point())
def _expm1(x: Tensor) -> Tensor:
    wide = widened_half(x)
    return ((wide / 2).tanh() * (wide.exp() + 1)).to(x.dtype)


# The exporter takes exponentials of what they are asked of, which overflow or vanish.


@decomposes(_aten.log_sigmoid.default)
def _log_sigmoid(x: Tensor) -> Tensor:
    wide = widened_half(x)
    return (wide.clamp(max=0) - (-wide.abs()).exp().log1p()).to(x.dtype)


@decomposes(_aten.logaddexp.default)
def _log_add_exp(x: Tensor, y: Tensor) -> Tensor:
    x, y = _promoted(x, y)
    first, second = widened_half(x), widened_half(y)
    apart = torch.where(first == second, 0, first - second)  # Infinities have no difference.
    return (first.maximum(second) + (-apart.abs()).exp().log1p()).to(x.dtype)


# The exporter's steps between are rounded in half precision.
for _steps in (_aten.log2.default, _aten.log10.default, _aten.sinc.default):
    decomposes(_steps, when=is_half)(partial(in_float32, _steps))


def _is_not_one(x: Tensor, dim: int) -> bool:
    """Whether a trace does not know that a dimension is 1."""
    return not x.ndim or not isinstance(x.shape[dim], int) or x.shape[dim] != 1


# PyTorch keeps other dimensions than those of 1; ONNX has no Squeeze of them.
@decomposes(_aten.squeeze.dim, when=_is_not_one)
def _squeeze_nothing(x: Tensor, dim: int) -> Tensor:
    return x.view_as(x)


@decomposes(_aten.squeeze.dims)
def _squeeze(x: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in sorted((dim % max(x.ndim, 1) for dim in dims), reverse=True):
        x = x.squeeze(dim)
    return x if dims else x.view_as(x)


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


def _ignoring_nan(choose: Function, x: Tensor, y: Tensor) -> Any:
    if not x.is_floating_point():
        return choose(x, y)
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, choose(x, y)))


decomposes(_prims.fmax.default)(partial(_ignoring_nan, torch.maximum))
decomposes(_prims.fmin.default)(partial(_ignoring_nan, torch.minimum))


@decomposes(_prims.hypot.default)
def _hypot(x: Tensor, y: Tensor) -> Tensor:
    """Scaled by the larger one, as squares overflow early."""
    larger, smaller = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    ratio = torch.where(larger == smaller, 1.0, smaller / larger)
    return torch.where(larger == 0, larger, larger * (1 + ratio * ratio).sqrt())


_WIDE_INTEGERS = {torch.int32, torch.int64}  # The exporter divides integers in float32.


def _of_wide_integers(x: Tensor, y: Any, **_: Any) -> bool:
    return torch.result_type(x, y) in _WIDE_INTEGERS


@decomposes(
    _aten.div.Tensor_mode,
    _aten.div.Scalar_mode,
    when=lambda x, y, *, rounding_mode: bool(rounding_mode) and _of_wide_integers(x, y),
)
def _divide_integers(x: Tensor, y: Any, *, rounding_mode: str) -> Any:
    x, y = _promoted(x, y)
    if rounding_mode == "floor":
        return torch.floor_divide(x, y)
    return _prims.div(*torch.broadcast_tensors(x, y))  # ONNX's, which is towards 0.


@decomposes(_aten.fmod.Tensor, _aten.fmod.Scalar, when=_of_wide_integers)
def _remainder_of_integers(x: Tensor, y: Any) -> Any:
    """ONNX Runtime computes it in float64."""
    return x - _divide_integers(x, y, rounding_mode="trunc") * y


# ONNX has these for floating point only.
_of_integers = partial(decomposes, when=lambda x: not x.is_floating_point())
_of_integers(*(getattr(_aten, name).default for name in ("ceil", "floor", "round", "trunc")))(
    torch.clone
)
_of_integers(_aten.relu.default)(partial(torch.clamp, min=0))
_of_integers(_aten.isnan.default, _aten.isinf.default)(partial(torch.zeros_like, dtype=torch.bool))
_of_integers(_aten.isfinite.default)(partial(torch.ones_like, dtype=torch.bool))


def _converts_integers(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> bool:
    return dtype is not None and not x.is_floating_point()


def _of_converted(function: Function, x: Tensor, dim: int, dtype: torch.dtype) -> Any:
    return function(x.to(dtype), dim)


for _operator, _function in (
    (_aten.softmax.int, torch.softmax),
    (_aten.log_softmax.int, torch.log_softmax),
):
    decomposes(_operator, when=_converts_integers)(partial(_of_converted, _function))


# --- Masks and complex numbers ---


@decomposes(_aten.masked_fill.Scalar, when=lambda x, *_: x.dtype == torch.bool)
def _masked_fill(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return x | mask if value else x & ~mask  # ONNX Runtime has no Where of booleans.


@decomposes(_aten._conj_physical.default, when=lambda x: x.is_complex())
def _conjugate(x: Tensor) -> Tensor:
    real, imaginary = torch.view_as_real(x).unbind(-1)
    return torch.view_as_complex(torch.stack([real, -imaginary], -1))
