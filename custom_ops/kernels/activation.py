"""The expert's non-linearity inside a kernel, in float32.

Its torch reference is :func:`custom_ops.activations.activate`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(
    gate,
    up,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Returns ``act(gate)``, times up if GATED, or a clamped gating; NaN stays NaN."""
    if ACTIVATION == "clamped_swiglu" or ACTIVATION == "clamped_silu":
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        if ACTIVATION == "clamped_swiglu":
            h = gate * tl.sigmoid(ALPHA * gate) * (up + 1)
        else:
            h = gate * tl.sigmoid(gate) * up
    else:
        h = _pointwise(gate, ACTIVATION)
        if GATED:
            h *= up
    return h


@triton.jit
def _pointwise(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        h = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 1 + tanh(u) = 2 sigmoid(2 u)
        h = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACTIVATION == "silu":
        h = z * tl.sigmoid(z)
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        h = tl.where(z < 0, 0.0, z)
        if ACTIVATION == "relu2":
            h = h * h
    return h
