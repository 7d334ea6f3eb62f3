"""Nodes for an expert's rows that the bodies share: dtypes, biases and the activation.

Legend: D model width, H hidden width, F = H, or 2H when gated, K = top_k, N = T*K slots (slot n
is choice n % K of token n // K).
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from custom_ops.options import GATINGS
from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.ops import Ops

# erf(z) = 2 z / sqrt(pi) * integral of exp(-(z t)^2) over t in 0..1. For |z| <= 6, beyond which
# erf is 1 in float64, 24 Gauss-Legendre points are accurate to 2e-15.
_ERF_BOUND = 6.0
_ERF_POINTS = 24


def expert_inputs(
    op: Ops, config: BodyConfig, x_TD: ir.Value, weights_TK: ir.Value, width_1: ir.Value
) -> ir.Value:
    """The rows that the first product reads: ``[T, D]``, or ``[N, D]`` if scaled by the weights.

    Tokens are rounded to the experts' dtype, then normalised in the wider dtype of the sums, where
    scaling the rows scales the product.
    """
    compute = config.compute_dtype
    if not config.options.weight_on_input:
        rounded_TD = op.cast(x_TD, config.tokens_dtype, config.operand_dtype, out="x_rounded_TD")
        x_in_TD = op.cast(rounded_TD, config.operand_dtype, compute, out="x_in_TD")
        if config.options.pre_norm == "none":
            return x_in_TD
        return op.Mul(x_in_TD, rms_scale(op, config, x_TD), out="x_normed_TD")
    x_T1D = op.Unsqueeze(
        op.cast(x_TD, config.tokens_dtype, compute, out="x_in_TD"), [1], out="x_T1D"
    )
    x_TKD = op.Mul(x_T1D, op.Unsqueeze(weights_TK, [2], out="weights_TK1"), out="x_TKD")
    x_TKD = _round(op, config, x_TKD, "x_rounded_TKD")
    if config.options.pre_norm != "none":
        scale_T11 = op.Unsqueeze(rms_scale(op, config, x_TD), [1], out="scale_T11")
        x_TKD = op.Mul(x_TKD, scale_T11, out="x_normed_TKD")
    return op.Reshape(x_TKD, op.Concat([-1], width_1, axis=0, out="ND"), out="x_ND")


def rms_scale(op: Ops, config: BodyConfig, x_TD: ir.Value) -> ir.Value:
    """The reciprocal of each token's root mean square, ``[T, 1]``."""
    dtype = config.compute_dtype
    x_TD = op.cast(x_TD, config.tokens_dtype, dtype, out="x_norm_TD")
    # Axis 1, not -1: ONNX Runtime's reductions ignore a negative axis of an empty tensor.
    mean_T1 = op.ReduceMean(op.Mul(x_TD, x_TD, out="x2_TD"), [1], keepdims=1, out="mean_T1")
    squares_T1 = op.Add(mean_T1, op.real("norm_eps", dtype), out="mean_eps_T1")
    return op.Reciprocal(op.Sqrt(squares_T1, out="rms_T1"), out="scale_T1")


def round_hidden(op: Ops, config: BodyConfig, h: ir.Value) -> ir.Value:
    """Hidden rows rounded to ``w2``'s dtype, that of the second product's left operand."""
    return _round(op, config, h, "h_rounded")


def activate(op: Ops, config: BodyConfig, z: ir.Value, *, rank: int = 2) -> ir.Value:
    """Hidden rows ``[..., H]`` from the pre-activations ``[..., F]``, which have ``rank`` axes."""
    if not config.options.gated:
        return pointwise(op, config, z)
    gate, up = split(op, config, z, rank)
    if config.options.activation == "softcapped_silu":
        return _softcapped(op, config, gate, up)
    if config.options.activation in GATINGS:
        return _clamped(op, config, gate, up)
    return op.Mul(pointwise(op, config, gate), up, out="h")


def _round(op: Ops, config: BodyConfig, value: ir.Value, out: str) -> ir.Value:
    rounded = op.cast(value, config.compute_dtype, config.operand_dtype, out=out)
    return op.cast(rounded, config.operand_dtype, config.compute_dtype, out=f"{out}_wide")


def split(op: Ops, config: BodyConfig, z: ir.Value, rank: int = 2) -> tuple[ir.Value, ir.Value]:
    """Gate and up ``[..., H]`` of the pre-activations ``[..., 2H]``."""
    if not config.options.interleaved:
        return op.Split(z, axis=-1, num_outputs=2, out=("gate", "up"))
    # ONNX Runtime takes twice as long for Slice with steps of 2. Zeros are the sizes of z.
    pairs = op.Concat([0] * (rank - 1), op.size("hidden_features"), [2], axis=0, out="pairs")
    z_H2 = op.Reshape(z, pairs, out="z_H2")
    gate_H1, up_H1 = op.Split(z_H2, axis=-1, num_outputs=2, out=("gate_H1", "up_H1"))
    return op.Squeeze(gate_H1, [-1], out="gate"), op.Squeeze(up_H1, [-1], out="up")


def _clamped(op: Ops, config: BodyConfig, gate: ir.Value, up: ir.Value) -> ir.Value:
    dtype = config.compute_dtype
    limit = op.real("activation_limit", dtype)
    gate = op.Min(gate, limit, out="gate_clamped")
    up = op.Max(op.Min(up, limit, out="up_min"), op.Neg(limit, out="low"), out="up_clamped")
    if config.options.activation == "clamped_silu":
        return op.Mul(op.Mul(gate, op.Sigmoid(gate, out="slope"), out="gate_slope"), up, out="h")
    alpha = op.real("activation_alpha", dtype)
    slope = op.Sigmoid(op.Mul(alpha, gate, out="alpha_gate"), out="slope")
    up_1 = op.Add(up, op.constant("one", 1, dtype), out="up_1")
    return op.Mul(op.Mul(gate, slope, out="gate_slope"), up_1, out="h")


def _softcapped(op: Ops, config: BodyConfig, gate: ir.Value, up: ir.Value) -> ir.Value:
    _, gate_c, _, up_c = softcapped_terms(op, config, gate, up)
    sigmoid = op.Sigmoid(gate, out="sigmoid")
    return op.Mul(op.Mul(gate_c, sigmoid, out="gate_slope"), up_c, out="h")


def softcapped_terms(
    op: Ops, config: BodyConfig, gate: ir.Value, up: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """The tanh and the softcapped value of the gate, then both of up."""
    alpha = op.real("activation_alpha", config.compute_dtype)
    limit = op.real("activation_limit", config.compute_dtype)
    gate_tanh = op.Tanh(op.Div(gate, alpha, out="gate_scaled"), out="gate_tanh")
    up_tanh = op.Tanh(op.Div(up, limit, out="up_scaled"), out="up_tanh")
    gate_c = op.Mul(alpha, gate_tanh, out="gate_capped")
    return gate_tanh, gate_c, up_tanh, op.Mul(limit, up_tanh, out="up_capped")


def pointwise(op: Ops, config: BodyConfig, z: ir.Value) -> ir.Value:
    """The activation, if it is a function of one number."""
    dtype = config.compute_dtype
    match config.options.activation:
        case "silu":
            return op.Mul(z, op.Sigmoid(z, out="slope"), out="h")
        case "relu":
            return op.Relu(z, out="h")
        case "relu2":
            relu = op.Relu(z, out="relu")
            return op.Mul(relu, relu, out="h")
        case "quick_gelu":
            return op.Mul(z, op.Sigmoid(quick_gelu_term(op, dtype, z), out="slope"), out="h")
        case "tanh":
            return op.Tanh(z, out="h")
        case "mish":
            _, _, n, n_2 = mish_terms(op, dtype, z)
            return op.Mul(z, op.Div(n, n_2, out="slope"), out="h")
        case "hardswish":
            sixth = op.Mul(z, op.constant("sixth", 1 / 6, dtype), out="z_sixth")
            ramp = op.Add(sixth, op.constant("half", 0.5, dtype), out="ramp")
            zero, one = op.constant("zero", 0, dtype), op.constant("one", 1, dtype)
            slope = op.Min(op.Max(ramp, zero, out="ramp_max"), one, out="slope")
            return op.Mul(z, slope, out="h")
        case "elu":
            return _elu(op, dtype, z)
        case "leaky_relu":
            return op.Max(z, op.Mul(z, op.constant("leak", 0.01, dtype), out="z_leak"), out="h")
        case "identity":
            return op.Identity(z, out="h")
        case _:
            return _gelu(op, config, z)


def _gelu(op: Ops, config: BodyConfig, z: ir.Value) -> ir.Value:
    tanh = config.options.activation == "gelu_tanh"
    dtype = config.compute_dtype
    # ONNX Runtime has no float64 kernel for Gelu.
    if op.opset >= 20 and dtype == ir.DataType.FLOAT:
        return op.Gelu(z, approximate="tanh" if tanh else "none", out="h")
    half, one = op.constant("half", 0.5, dtype), op.constant("one", 1, dtype)
    cdf2 = op.Add(tanh_term(op, dtype, z) if tanh else erf_term(op, dtype, z), one, out="cdf2")
    # In this order, ONNX Runtime recognises the erf form and runs it as one node.
    return op.Mul(op.Mul(z, half, out="z_half"), cdf2, out="h")


def _elu(op: Ops, dtype: ir.DataType, z: ir.Value) -> ir.Value:
    # exp(z) - 1 as tanh(z / 2) * (exp(z) + 1), which is accurate near zero; ONNX Runtime's Elu is
    # not, and has no float64 kernel.
    half, one = op.constant("half", 0.5, dtype), op.constant("one", 1, dtype)
    below = op.Min(z, op.constant("zero", 0, dtype), out="z_below")
    tanh = op.Tanh(op.Mul(below, half, out="half_z"), out="tanh")
    rest = op.Mul(tanh, op.Add(op.Exp(below, out="power"), one, out="power_1"), out="h_below")
    return op.Add(op.Relu(z, out="relu"), rest, out="h")


def quick_gelu_term(op: Ops, dtype: ir.DataType, z: ir.Value) -> ir.Value:
    """What the sigmoid in ``quick_gelu`` is of."""
    return op.Mul(z, op.constant("quick_gelu_slope", 1.702, dtype), out="slope_z")


def mish_terms(
    op: Ops, dtype: ir.DataType, z: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """The terms of ``mish(z) = z * n / (n + 2)``: z up to 20, its exponential e, n and n + 2.

    With softplus(z) = log(1 + e), its tanh is ``((1 + e)^2 - 1) / ((1 + e)^2 + 1)``. From 20 on it
    is 1 in float64 too, and e would overflow. ONNX Runtime has no float64 kernel for Softplus.
    """
    two = op.constant("two", 2, dtype)
    bounded = op.Min(z, op.constant("mish_bound", 20, dtype), out="z_bounded")
    power = op.Exp(bounded, out="power")
    n = op.Mul(power, op.Add(power, two, out="power_2"), out="n")
    return bounded, power, n, op.Add(n, two, out="n_2")


def tanh_term(op: Ops, dtype: ir.DataType, z: ir.Value) -> ir.Value:
    """The tanh in GELU's tanh form."""
    scale = op.constant("sqrt_2_over_pi", math.sqrt(2 / math.pi), dtype)
    cube = op.Mul(op.Mul(z, z, out="z2"), z, out="z3")
    bend = op.Mul(cube, op.constant("bend", 0.044715, dtype), out="z3_bend")
    return op.Tanh(op.Mul(op.Add(z, bend, out="z_bent"), scale, out="z_scaled"), out="tanh")


def erf_term(op: Ops, dtype: ir.DataType, z: ir.Value) -> ir.Value:
    """The error function in GELU."""
    z = op.Div(z, op.constant("sqrt_2", math.sqrt(2), dtype), out="z_over_sqrt2")
    if dtype == ir.DataType.FLOAT:
        return op.Erf(z, out="erf")
    # ONNX Runtime has no float64 kernel for Erf.
    points, weights = np.polynomial.legendre.leggauss(_ERF_POINTS)
    bound = op.constant("erf_bound", _ERF_BOUND, dtype)
    z = op.Max(op.Min(z, bound, out="z_min"), op.Neg(bound, out="low"), out="z_clamped")
    squares = op.Unsqueeze(op.Mul(z, z, out="z2"), [-1], out="z2_1")
    minus_t2 = op.constant("minus_t2", -(((points + 1) / 2) ** 2), dtype)
    gauss = op.Exp(op.Mul(squares, minus_t2, out="minus_z2t2"), out="gauss")
    # A column, because ONNX Runtime's product with a vector fails on zero rows.
    column = op.constant("quadrature", weights[:, None] / math.sqrt(math.pi), dtype)
    integral = op.Squeeze(op.MatMul(gauss, column, out="integral_1"), [-1], out="integral")
    return op.Mul(z, integral, out="erf")
