"""How closely two implementations of one model must agree: the project's only table."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Bounds on the error of one output.

    Attributes:
        max: On the worst element, relative to the RMS of its row or column, the smaller one.
        rms: On the RMS of the errors, relative to that of what is expected.
    """

    max: float
    rms: float


# By the lowest precision among a model's parameters. Two correct implementations differ in the
# order of summation; in half precision an element can fall on the other side of a rounding.
_BY_DTYPE = {
    torch.float64: Tolerance(max=1e-9, rms=1e-10),
    torch.float32: Tolerance(max=2e-4, rms=2e-5),
    torch.float16: Tolerance(max=1e-2, rms=2e-3),
    torch.bfloat16: Tolerance(max=8e-2, rms=1.5e-2),
}
# ONNX Runtime's MoE computes GELU in its tanh form, up to 5.5e-4 off (seen with 1.31);
# the error passes through one product per layer and shrinks against the residual stream.
_APPROXIMATE_GELU = Tolerance(max=1e-2, rms=2e-3)


def tolerance_for(dtypes: set[torch.dtype], *, approximate_gelu: bool = False) -> Tolerance:
    """Returns the bounds for a model with parameters of these dtypes."""
    bounds = [bound for dtype, bound in _BY_DTYPE.items() if dtype in dtypes]
    if approximate_gelu:
        bounds.append(_APPROXIMATE_GELU)
    return max(bounds or [_BY_DTYPE[torch.float32]], key=lambda bound: bound.max)
