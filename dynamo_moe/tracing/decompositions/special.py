"""Decompositions of special functions, by approximations to the precision of float32."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.half_precision import widened_half
from dynamo_moe.tracing.decompositions.table import decomposes

_aten = torch.ops.aten


def _is_narrow(x: Tensor) -> bool:
    """Whether a call's result is no more precise than float32."""
    dtype = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
    return dtype != torch.float64 and not x.is_complex()


def _real(x: Tensor) -> Tensor:
    return widened_half(x) if x.is_floating_point() else x.to(torch.get_default_dtype())


def _rounded(result: Tensor, x: Tensor) -> Tensor:
    return result.to(x.dtype) if x.is_floating_point() else result


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Sums powers; the highest one's coefficient comes first."""
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


# Giles, "Approximating the erfinv function", GPU Computing Gems Jade Edition, 2011: by powers of
# w - 2.5 where w = -log(1 - x^2) is below 5, and of sqrt(w) - 3 beyond.
_CENTRAL = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


@decomposes(_aten.erfinv.default, when=_is_narrow)
def _erfinv(x: Tensor) -> Tensor:
    wide = _real(x)
    w = -((1 - wide) * (1 + wide)).log()
    central, tail = _polynomial(w - 2.5, _CENTRAL), _polynomial(w.sqrt() - 3, _TAIL)
    result = wide * torch.where(w < 5, central, tail)
    return _rounded(torch.where(wide.abs() == 1, wide * math.inf, result), x)


# Abramowitz and Stegun, 9.8.1 and 9.8.2: by powers of (x / 3.75)^2 below 3.75, and of 3.75 / x
# beyond.
_NEAR = (0.0045813, 0.0360768, 0.2659732, 1.2067492, 3.0899424, 3.5156229, 1.0)
_FAR = (
    0.00392377,
    -0.01647633,
    0.02635537,
    -0.02057706,
    0.00916281,
    -0.00157565,
    0.00225319,
    0.01328592,
    0.39894228,
)


@decomposes(_aten.i0.default, when=_is_narrow)
def _i0(x: Tensor) -> Tensor:
    wide = _real(x).abs()
    near = _polynomial((wide / 3.75).square(), _NEAR)
    far = wide.clamp(min=3.75)
    beyond = far.exp() * _polynomial(3.75 / far, _FAR) / far.sqrt()
    return _rounded(torch.where(wide < 3.75, near, beyond), x)
