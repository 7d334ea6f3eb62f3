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
    dtype: tl.constexpr,
):
    """Returns ``act(gate)``, times up if GATED, or a gating's own, in dtype; NaN stays NaN."""
    if ACTIVATION == "clamped_swiglu" or ACTIVATION == "clamped_silu":
        gate, up = clamp_gates(gate, up, LIMIT)
        if ACTIVATION == "clamped_swiglu":
            h = gate * tl.sigmoid(ALPHA * gate) * (up + 1)
        else:
            h = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "softcapped_silu":
        h = ALPHA * _tanh(gate * (1 / ALPHA)) * tl.sigmoid(gate) * (LIMIT * _tanh(up * (1 / LIMIT)))
    else:
        h = pointwise(gate, ACTIVATION, dtype)
        if GATED:
            h *= up
    return h.to(dtype)


@triton.jit
def clamp_gates(gate, up, LIMIT: tl.constexpr):
    """Returns gate, at most the limit, and up within both; NaN stays NaN."""
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate, up


@triton.jit
def _gelu_for_halves(z):
    """Returns ``z * Phi(z)`` with an error below 3e-7, and below 2e-4 of it down to z = -6.

    It is ``max(z, 0) - |z| * Phi(-|z|)``, and Phi's tail is ``exp(-z^2 / 2)`` times a polynomial in
    ``t = 1 / (1 + 0.2863782 |z|)``: the form of Abramowitz and Stegun 7.1.26, one degree higher,
    fitted to both bounds. It takes 16 instructions, libdevice's erf 32 (sm_90).
    """
    # Beyond, the tail is zero; infinity times zero would be NaN.
    size = tl.minimum(tl.abs(z), 16.0)
    u = 1 + 0.286378246319404 * size
    t = tl.rsqrt(u * u)  # 1 / u takes six instructions more.
    tail = -0.09391274 * t + 0.31661185
    tail = tail * t - 0.13345826
    tail = tail * t + 0.20187443
    tail = tail * t + 0.09280077
    tail = tail * t + 0.11608398
    tail = tail * t * tl.exp2(-0.7213475204444817 * (size * size))
    return tl.where(z < 0, 0.0, z) - size * tail


@triton.jit
def _expm1(z):
    """Returns ``exp(z) - 1`` for z up to 0, with an error below 1e-6 of it; NaN stays NaN."""
    # exp(z) - 1 is a rounding error near zero; six terms of the series are not, down to -1/4.
    series = 1 + z * (1 / 4) * (1 + z * (1 / 5) * (1 + z * (1 / 6)))
    series = z * (1 + z * (1 / 2) * (1 + z * (1 / 3) * series))
    return tl.where(z > -0.25, series, tl.exp(z) - 1)


@triton.jit
def _tanh(z):
    """Returns ``tanh(z)``; NaN stays NaN."""
    below = _expm1(-2 * tl.abs(z))
    size = below / (below + 2)
    return tl.where(z < 0, size, -size)


@triton.jit
def mish_terms(z):
    """Returns the terms of ``mish(z) = z * n / (n + 2)``: z up to 20, its exponential e, and n.

    With softplus(z) = log(1 + e), its tanh is ``((1 + e)^2 - 1) / ((1 + e)^2 + 1)``. From 20 on it
    is 1, and e would overflow.
    """
    bounded = tl.where(z > 20, 20.0, z)
    e = tl.exp(bounded)
    return bounded, e, e * (e + 2)


@triton.jit
def pointwise(z, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Returns the activation, if it is a function of one number; dtype is that of the result."""
    if ACTIVATION == "gelu":
        if dtype == tl.float32:
            h = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
        else:
            h = _gelu_for_halves(z)
    elif ACTIVATION == "gelu_tanh":
        # 1 + tanh(u) = 2 sigmoid(2 u)
        h = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACTIVATION == "silu":
        h = z * tl.sigmoid(z)
    elif ACTIVATION == "quick_gelu":
        h = z * tl.sigmoid(1.702 * z)
    elif ACTIVATION == "tanh":
        h = _tanh(z)
    elif ACTIVATION == "mish":
        _, _, n = mish_terms(z)
        h = z * (n / (n + 2))
    elif ACTIVATION == "hardswish":
        h = z * tl.where(z < -3, 0.0, tl.where(z > 3, 1.0, z * (1 / 6) + 0.5))
    elif ACTIVATION == "elu":
        h = tl.where(z > 0, z, _expm1(tl.where(z > 0, 0.0, z)))
    elif ACTIVATION == "leaky_relu":
        h = tl.where(z < 0, 0.01 * z, z)
    elif ACTIVATION == "identity":
        h = z
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        h = tl.where(z < 0, 0.0, z)
        if ACTIVATION == "relu2":
            h = h * h
    return h
