"""The derivative of the expert's non-linearity inside a kernel, in float32.

Its torch reference is :func:`custom_ops.activations.activate_backward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from custom_ops.kernels.activation import clamp_gates, mish_terms, pointwise


@triton.jit
def activate_gradient(
    dh,
    gate,
    up,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Returns the gradients of gate and up for that of ``h``; up's is meaningless if not GATED."""
    if ACTIVATION == "clamped_swiglu" or ACTIVATION == "clamped_silu":
        slope: tl.constexpr = ALPHA if ACTIVATION == "clamped_swiglu" else 1.0
        shift: tl.constexpr = 1.0 if ACTIVATION == "clamped_swiglu" else 0.0
        clamped_gate, clamped_up = clamp_gates(gate, up, LIMIT)
        sigmoid = tl.sigmoid(slope * clamped_gate)
        dswish = sigmoid * (1 + slope * clamped_gate * (1 - sigmoid))
        dgate = tl.where(gate > LIMIT, 0.0, dh * (clamped_up + shift) * dswish)
        dup = tl.where(tl.abs(up) > LIMIT, 0.0, dh * clamped_gate * sigmoid)
    elif ACTIVATION == "softcapped_silu":
        # The forward's tanh() again, whose values would be kept for it, spills on sm_80.
        gate_tanh = 2 * tl.sigmoid(gate * (2 / ALPHA)) - 1
        up_tanh = 2 * tl.sigmoid(up * (2 / LIMIT)) - 1
        sigmoid = tl.sigmoid(gate)
        dh *= sigmoid
        slope = 1 - gate_tanh * gate_tanh + ALPHA * gate_tanh * (1 - sigmoid)
        dgate = dh * (LIMIT * up_tanh) * slope
        dup = dh * (ALPHA * gate_tanh) * (1 - up_tanh * up_tanh)
    else:
        h, dh_by_dz = _pointwise(gate, ACTIVATION)
        dup = dh * h
        dgate = dh * dh_by_dz
        if GATED:
            dgate *= up
    return dgate, dup


@triton.jit
def _pointwise(z, ACTIVATION: tl.constexpr):
    """Returns the value and the derivative."""
    if ACTIVATION == "gelu":
        # The normal distribution and its density.
        below = 0.5 * (1 + tl.erf(z * 0.7071067811865476))
        h = z * below
        slope = below + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACTIVATION == "gelu_tanh":
        # h = z * sigmoid(2 u)
        sigmoid = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        h = z * sigmoid
        du = 1.5957691216057308 * (1 + 0.134145 * z * z)
        slope = sigmoid + h * (1 - sigmoid) * du
    elif ACTIVATION == "silu" or ACTIVATION == "quick_gelu":
        alpha: tl.constexpr = 1.702 if ACTIVATION == "quick_gelu" else 1.0
        sigmoid = tl.sigmoid(alpha * z)
        h = z * sigmoid
        slope = sigmoid + alpha * h * (1 - sigmoid)
    else:
        h = pointwise(z, ACTIVATION, tl.float32)
        if ACTIVATION == "relu2":
            slope = 2 * tl.where(z < 0, 0.0, z)
        elif ACTIVATION == "tanh":
            slope = 1 - h * h
        elif ACTIVATION == "mish":
            bounded, e, n = mish_terms(z)
            slope = n / (n + 2) + 4 * e * (e + 1) * bounded / ((n + 2) * (n + 2))
        elif ACTIVATION == "hardswish":
            slope = tl.where(z <= -3, 0.0, tl.where(z < 3, z * (1 / 3) + 0.5, 1.0))
        elif ACTIVATION == "elu":
            slope = tl.exp(tl.where(z > 0, 0.0, z))
        elif ACTIVATION == "identity":
            slope = tl.full(z.shape, 1.0, tl.float32)
        else:
            tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "leaky_relu")
            slope = tl.where(z <= 0, 0.01 if ACTIVATION == "leaky_relu" else 0.0, 1.0)
    return h, slope
