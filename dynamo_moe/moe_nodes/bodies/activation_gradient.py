"""The gradient of an expert's activation, on the rows of one expert.

Legend: R rows, H hidden width, F = H, or 2H when gated.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from custom_ops.options import GATINGS
from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.expert import (
    erf_term,
    mish_terms,
    pointwise,
    quick_gelu_term,
    softcapped_terms,
    split,
    tanh_term,
)
from dynamo_moe.moe_nodes.bodies.ops import Ops


def activate_backward(op: Ops, config: BodyConfig, dh_RH: ir.Value, z_RF: ir.Value) -> ir.Value:
    """The gradient ``[R, F]`` of the pre-activations, from that of the hidden rows ``[R, H]``."""
    if not config.options.gated:
        return _pointwise_backward(op, config, dh_RH, z_RF)
    gate, up = split(op, config, z_RF)
    if config.options.activation == "softcapped_silu":
        dgate, dup = _softcapped_backward(op, config, dh_RH, gate, up)
    elif config.options.activation in GATINGS:
        dgate, dup = _clamped_backward(op, config, dh_RH, gate, up)
    else:
        dgate = _pointwise_backward(op, config, op.Mul(dh_RH, up, out="dh_up"), gate)
        dup = op.Mul(dh_RH, pointwise(op, config, gate), out="dup")
    if not config.options.interleaved:
        return op.Concat(dgate, dup, axis=1, out="dz_RF")
    pairs = op.Concat(
        op.Unsqueeze(dgate, [2], out="dgate_H1"), op.Unsqueeze(dup, [2], out="dup_H1"),
        axis=2, out="dz_H2",
    )  # fmt: skip
    return op.Reshape(pairs, op.Shape(z_RF, out="RF"), allowzero=1, out="dz_RF")


def _clamped_backward(
    op: Ops, config: BodyConfig, dh: ir.Value, gate: ir.Value, up: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Of ``c(gate) * sigmoid(a * c(gate)) * (c(up) + s)``, where c clamps."""
    dtype = config.compute_dtype
    zero, one = op.constant("zero", 0, dtype), op.constant("one", 1, dtype)
    limit = op.real("activation_limit", dtype)
    gate_c = op.Min(gate, limit, out="gate_clamped")
    up_c = op.Max(op.Min(up, limit, out="up_min"), op.Neg(limit, out="low"), out="up_clamped")
    alpha_gate = gate_c
    if config.options.activation == "clamped_swiglu":
        alpha_gate = op.Mul(op.real("activation_alpha", dtype), gate_c, out="alpha_gate")
        up_c = op.Add(up_c, one, out="up_1")
    sigmoid = op.Sigmoid(alpha_gate, out="sigmoid")
    slope = _swish_slope(op, config, sigmoid, alpha_gate)
    dgate = op.Mul(op.Mul(dh, up_c, out="dh_up"), slope, out="dgate_clamped")
    dup = op.Mul(dh, op.Mul(gate_c, sigmoid, out="swish"), out="dup_clamped")
    gate_inside = op.LessOrEqual(gate, limit, out="gate_inside")
    up_inside = op.LessOrEqual(op.Abs(up, out="up_size"), limit, out="up_inside")
    return (
        op.Where(gate_inside, dgate, zero, out="dgate"),
        op.Where(up_inside, dup, zero, out="dup"),
    )


def _softcapped_backward(
    op: Ops, config: BodyConfig, dh: ir.Value, gate: ir.Value, up: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Of ``c(gate) * sigmoid(gate) * c(up)``, where c softcaps."""
    one = op.constant("one", 1, config.compute_dtype)
    gate_tanh, gate_c, up_tanh, up_c = softcapped_terms(op, config, gate, up)
    sigmoid = op.Sigmoid(gate, out="sigmoid")
    rest = op.Mul(gate_c, op.Sub(one, sigmoid, out="other_sigmoid"), out="gate_rest")
    gate_rise = op.Sub(one, op.Mul(gate_tanh, gate_tanh, out="gate_tanh2"), out="gate_rise")
    up_rise = op.Sub(one, op.Mul(up_tanh, up_tanh, out="up_tanh2"), out="up_rise")
    dh_sigmoid = op.Mul(dh, sigmoid, out="dh_sigmoid")
    slope = op.Mul(up_c, op.Add(gate_rise, rest, out="bend"), out="gate_slope")
    return (
        op.Mul(dh_sigmoid, slope, out="dgate"),
        op.Mul(dh_sigmoid, op.Mul(gate_c, up_rise, out="up_slope"), out="dup"),
    )


def _pointwise_backward(op: Ops, config: BodyConfig, dh: ir.Value, z: ir.Value) -> ir.Value:
    dtype = config.compute_dtype
    match config.options.activation:
        case "relu":
            zero = op.constant("zero", 0, dtype)
            return op.Where(op.Greater(z, zero, out="positive"), dh, zero, out="dz")
        case "relu2":
            slope = op.Mul(op.Relu(z, out="relu"), op.constant("two", 2, dtype), out="slope")
        case "silu":
            slope = _swish_slope(op, config, op.Sigmoid(z, out="sigmoid"), z)
        case "quick_gelu":
            term = quick_gelu_term(op, dtype, z)
            slope = _swish_slope(op, config, op.Sigmoid(term, out="sigmoid"), term)
        case "tanh":
            tanh = op.Tanh(z, out="tanh")
            tanh2 = op.Mul(tanh, tanh, out="tanh2")
            slope = op.Sub(op.constant("one", 1, dtype), tanh2, out="slope")
        case "mish":
            slope = _mish_slope(op, dtype, z)
        case "hardswish":
            slope = _hardswish_slope(op, dtype, z)
        case "elu":
            below = op.Min(z, op.constant("zero", 0, dtype), out="z_below")
            slope = op.Exp(below, out="slope")
        case "identity":
            return op.Identity(dh, out="dz")
        case "leaky_relu":
            positive = op.Greater(z, op.constant("zero", 0, dtype), out="positive")
            one, leak = op.constant("one", 1, dtype), op.constant("leak", 0.01, dtype)
            slope = op.Where(positive, one, leak, out="slope")
        case _:
            slope = _gelu_slope(op, config, z)
    return op.Mul(dh, slope, out="dz")


def _swish_slope(op: Ops, config: BodyConfig, sigmoid: ir.Value, z: ir.Value) -> ir.Value:
    """``s * (1 + z * (1 - s))``."""
    one = op.constant("one", 1, config.compute_dtype)
    rest = op.Mul(z, op.Sub(one, sigmoid, out="other_sigmoid"), out="z_rest")
    return op.Mul(sigmoid, op.Add(one, rest, out="bend"), out="slope")


def _mish_slope(op: Ops, dtype: ir.DataType, z: ir.Value) -> ir.Value:
    """``n / (n + 2) + z * 4 e (e + 1) / (n + 2)^2``."""
    one, four = op.constant("one", 1, dtype), op.constant("four", 4, dtype)
    bounded, power, n, n_2 = mish_terms(op, dtype, z)
    rise = op.Mul(op.Mul(power, four, out="power4"), op.Add(power, one, out="power_1"), out="rise")
    bend = op.Div(op.Mul(rise, bounded, out="z_rise"), op.Mul(n_2, n_2, out="n_2_2"), out="bend")
    return op.Add(op.Div(n, n_2, out="factor"), bend, out="slope")


def _hardswish_slope(op: Ops, dtype: ir.DataType, z: ir.Value) -> ir.Value:
    """``z / 3 + 1 / 2`` between -3 and 3."""
    zero, one, three = (
        op.constant(name, number, dtype) for name, number in (("zero", 0), ("one", 1), ("three", 3))
    )
    third = op.Div(z, three, out="z_third")
    ramp = op.Add(third, op.constant("half", 0.5, dtype), out="ramp")
    below = op.LessOrEqual(z, op.Neg(three, out="minus_three"), out="below")
    rising = op.Where(op.Less(z, three, out="inside"), ramp, one, out="rising")
    return op.Where(below, zero, rising, out="slope")


def _gelu_slope(op: Ops, config: BodyConfig, z: ir.Value) -> ir.Value:
    """``c(z) + z * c'(z)``, where GELU is ``z * c(z)``."""
    dtype = config.compute_dtype
    half, one = op.constant("half", 0.5, dtype), op.constant("one", 1, dtype)
    z2 = op.Mul(z, z, out="z2")
    if config.options.activation == "gelu_tanh":
        # The derivative of tanh(u) is (1 - tanh(u)^2) times that of u.
        term = tanh_term(op, dtype, z)
        scale = op.constant("half_sqrt_2_over_pi", math.sqrt(2 / math.pi) / 2, dtype)
        bend = op.Mul(z2, op.constant("bend_3", 3 * 0.044715, dtype), out="z2_bend")
        inner = op.Mul(scale, op.Add(one, bend, out="bend_1"), out="inner")
        outer = op.Sub(one, op.Mul(term, term, out="tanh2"), out="outer")
        density = op.Mul(outer, inner, out="density")
    else:
        term = erf_term(op, dtype, z)
        scale = op.constant("one_over_sqrt_2_pi", 1 / math.sqrt(2 * math.pi), dtype)
        gauss = op.Exp(op.Mul(z2, op.Neg(half, out="minus_half"), out="minus_z2"), out="gauss")
        density = op.Mul(gauss, scale, out="density")
    cdf = op.Mul(op.Add(one, term, out="cdf2"), half, out="cdf")
    return op.Add(cdf, op.Mul(z, density, out="z_density"), out="slope")
