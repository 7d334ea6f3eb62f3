"""The functions for a layer's nodes in training: the forward with its choice, and the gradients.

The gradients visit the experts in a Scan, which slices their weights without a copy and stacks
their gradients. An expert's rows are the slots that have chosen it, and each slot has a gradient of
its own; a token's is their sum. So no two results are added to one element in an order left open.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k,
N = T*K slots (slot n is choice n % K of token n // K), R rows of one expert.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from custom_ops.routing import RENORMALIZE_EPS
from dynamo_moe.moe_nodes.bodies import dropless
from dynamo_moe.moe_nodes.bodies.activation_gradient import activate_backward
from dynamo_moe.moe_nodes.bodies.config import GradientConfig, RoutedConfig
from dynamo_moe.moe_nodes.bodies.expert import activate, expert_inputs, rms_scale, round_hidden
from dynamo_moe.moe_nodes.bodies.layer import as_function, recorder, result, tokens
from dynamo_moe.moe_nodes.bodies.ops import Ops
from dynamo_moe.moe_nodes.bodies.router import given_routing, logits, route, sigmoid
from dynamo_moe.moe_nodes.bodies.slots import sort

_PARAMETERS = ("w1", "b1", "w2", "b2")

Inputs = Mapping[str, ir.Value]


def routed_body(config: RoutedConfig, opset: int, *, domain: str = "moe") -> ir.Function:
    """``DroplessMoERouted``: the layer's result, and the experts that its router chose."""
    op = recorder(opset, beside=True)
    inputs = {name: op.value(name) for name in config.inputs}
    x_TD = tokens(op, config, inputs["x"])
    ids_TK, weights_TK = route(op, config, inputs, x_TD)
    y_TD = dropless.experts(op, config, inputs, x_TD, ids_TK, weights_TK)
    outputs = [
        result(op, config, inputs["x"], x_TD, y_TD),
        op.Cast(ids_TK, to=ir.DataType.INT32, out="expert_ids"),
        # Where it is no cast, the output needs a name of its own.
        op.Cast(weights_TK, to=config.weights_dtype, out="expert_weights"),
    ]
    return as_function(op, config, domain, inputs, outputs)


def gradient_body(config: GradientConfig, opset: int, *, domain: str = "moe") -> ir.Function:
    """``DroplessMoEGrad`` and ``DroplessMoEExpertsGrad``: the gradients of a layer's inputs."""
    op = recorder(opset)
    inputs = {name: op.value(name) for name in config.inputs}
    dtype = config.compute_dtype
    x_TD = tokens(op, config, inputs["x"])
    dy_TD = op.cast(tokens(op, config, inputs["dy"]), config.tokens_dtype, dtype, out="dy_wide_TD")
    ids_TK, weights_TK = given_routing(op, config, inputs)
    dx_TD, dweights_TK, gradients = _experts_backward(
        op, config, inputs, dy_TD, x_TD, ids_TK, weights_TK
    )
    dweights_TK = op.Cast(dweights_TK, to=config.weights_dtype, out="dweights_rounded_TK")
    none = op.constant("none", [], config.operand_dtype)
    parameters = [gradients.get(name) or op.Identity(none, out=f"d{name}") for name in _PARAMETERS]
    if config.router:
        dx_router_TD, drouter_ED, dbias_E = _route_backward(
            op, config, inputs, dweights_TK, x_TD, ids_TK
        )
        dx_router_TD = op.cast(
            dx_router_TD, config.router_compute_dtype, dtype, out="dx_router_wide_TD"
        )
        dx_TD = op.Add(dx_TD, dx_router_TD, out="dx_sum_TD")
        outputs = [drouter_ED, *parameters, dbias_E]
    else:
        shape = op.Shape(inputs["expert_weights"], out="weights_shape")
        dweights = op.Reshape(dweights_TK, shape, allowzero=1, out="dexpert_weights")
        outputs = [dweights, *parameters]
    dx_TD = op.cast(dx_TD, dtype, config.tokens_dtype, out="dx_rounded_TD")
    dx = op.Reshape(dx_TD, op.Shape(inputs["x"], out="x_shape"), allowzero=1, out="dx")
    return as_function(op, config, domain, inputs, [dx, *outputs])


# --- The experts ---


def _experts_backward(
    op: Ops,
    config: GradientConfig,
    inputs: Inputs,
    dy_TD: ir.Value,
    x_TD: ir.Value,
    ids_TK: ir.Value,
    weights_TK: ir.Value,
) -> tuple[ir.Value, ir.Value, dict[str, ir.Value]]:
    """The gradients of tokens ``[T, D]``, weights ``[T, K]`` and parameters that have one."""
    dtype, width_1 = config.compute_dtype, op.size("in_features")
    rows = expert_inputs(op, config, x_TD, weights_TK, width_1)
    TK = op.Shape(ids_TK, out="TK_given")
    TKD = op.Concat(TK, width_1, axis=0, out="TKD")
    din_ND, dweights_N, gradients = _visit(op, config, inputs, dy_TD, rows, ids_TK, weights_TK)
    din_TKD = op.Reshape(din_ND, TKD, allowzero=1, out="din_TKD")
    dweights_TK = op.Reshape(dweights_N, TK, allowzero=1, out="dweights_TK")
    x_wide_TD = op.cast(x_TD, config.tokens_dtype, dtype, out="x_full_TD")
    normed = config.options.pre_norm == "rms"
    if normed:
        scale_T1 = rms_scale(op, config, x_TD)
        rows_TKD = (
            op.Reshape(rows, TKD, allowzero=1, out="rows_TKD")
            if config.options.weight_on_input
            else op.Unsqueeze(rows, [1], out="rows_T1D")
        )
        inner_T1 = op.ReduceSum(
            op.Mul(din_TKD, rows_TKD, out="din_rows"), [1, 2], keepdims=0, out="inner_T"
        )
        inner_T1 = op.Unsqueeze(inner_T1, [1], out="inner_T1")
        din_TKD = op.Mul(din_TKD, op.Unsqueeze(scale_T1, [1], out="scale_T11"), out="din_scaled")
    if config.options.weight_on_input:
        x_T1D = op.Unsqueeze(x_wide_TD, [1], out="x_full_T1D")
        dweights_TK = op.ReduceSum(
            op.Mul(din_TKD, x_T1D, out="din_x"), [2], keepdims=0, out="dweights_on_input_TK"
        )
        weights_TK1 = op.Unsqueeze(weights_TK, [2], out="weights_TK1")
        din_TKD = op.Mul(din_TKD, weights_TK1, out="din_weighted")
    dx_TD = op.ReduceSum(din_TKD, [1], keepdims=0, out="dx_experts_TD")
    if config.options.residual:
        dx_TD = op.Add(dx_TD, dy_TD, out="dx_residual_TD")
    if normed:
        # With n = scale * x, the scale's part of the gradient is -n * sum(dn * n) * scale / D.
        width = op.Cast(width_1, to=dtype, out="width")
        scale2_T1 = op.Mul(scale_T1, scale_T1, out="scale2_T1")
        share_T1 = op.Div(op.Mul(inner_T1, scale2_T1, out="inner_scaled"), width, out="share_T1")
        dx_TD = op.Sub(dx_TD, op.Mul(x_wide_TD, share_T1, out="x_share"), out="dx_normed_TD")
    return dx_TD, dweights_TK, gradients


def _visit(
    op: Ops,
    config: GradientConfig,
    inputs: Inputs,
    dy_TD: ir.Value,
    rows: ir.Value,
    ids_TK: ir.Value,
    weights_TK: ir.Value,
) -> tuple[ir.Value, ir.Value, dict[str, ir.Value]]:
    """The Scan's results: of each slot the gradients of its input and weight, zeros for no expert.

    The gradient of a weight is that of a weight on the result.
    """
    dtype = config.compute_dtype
    slots = sort(op, config, ids_TK)
    weights_N = op.Reshape(weights_TK, [-1], out="weights_N")
    N_1 = op.Shape(weights_N, out="N_1D")
    every_N = op.Range(0, op.Squeeze(N_1, [0], out="N"), 1, out="every_N")
    order_N = op.ScatterElements(every_N, slots.places_N, every_N, axis=0, out="order_N")
    ND = op.Concat(N_1, op.size("in_features"), axis=0, out="ND_state")
    states = [op.zeros(ND, dtype, out="no_din_ND"), op.zeros(N_1, dtype, out="no_dweights_N")]
    present = [name for name in _PARAMETERS if getattr(config, f"has_{name}", True)]
    visited = [
        op.Unsqueeze(slots.begins_E, [1], out="begins_E1"),
        op.Unsqueeze(slots.ends_E, [1], out="ends_E1"),
        *(inputs[name] for name in present),
    ]

    expert = op.inner()
    din_ND = expert.value("din_ND", ir.TensorType(dtype))
    dweights_N = expert.value("dweights_N", ir.TensorType(dtype))
    begin_1, end_1 = (
        expert.value(name, ir.TensorType(ir.DataType.INT64)) for name in ("begin", "end")
    )
    weights = {
        name: expert.value(f"{name}_own", ir.TensorType(config.operand_dtype)) for name in present
    }
    wide = {
        name: expert.cast(value, config.operand_dtype, dtype, out=f"{name}_wide")
        for name, value in weights.items()
    }

    slots_R = expert.Slice(order_N, begin_1, end_1, [0], out="slots_R")
    slots_R1 = expert.Unsqueeze(slots_R, [1], out="slots_R1")
    tokens_R = expert.Div(slots_R, op.size("top_k"), out="tokens_R")
    dy_RD = expert.Gather(dy_TD, tokens_R, out="dy_RD")
    x_RD = expert.Gather(rows, slots_R if config.options.weight_on_input else tokens_R, out="x_RD")
    z_RF = expert.Gemm(x_RD, wide["w1"], wide.get("b1"), transB=1, out="z_RF")
    h_RH = round_hidden(expert, config, activate(expert, config, z_RF))
    dh_RH = expert.MatMul(dy_RD, wide["w2"], out="dh_RH")
    if not config.options.weight_on_input:
        # The product of dy and h @ w2.mT + b2.
        dweights_R = expert.ReduceSum(
            expert.Mul(dh_RH, h_RH, out="dh_h"), [1], keepdims=0, out="dweights_R"
        )
        if "b2" in wide:
            of_bias_R = expert.ReduceSum(
                expert.Mul(dy_RD, wide["b2"], out="dy_b2"), [1], keepdims=0, out="of_bias_R"
            )
            dweights_R = expert.Add(dweights_R, of_bias_R, out="dweights_biased_R")
        dweights_next = expert.ScatterND(dweights_N, slots_R1, dweights_R, out="dweights_next")
        weight_R1 = expert.Gather(weights_N, slots_R1, out="weight_R1")
        dy_RD = expert.Mul(dy_RD, weight_R1, out="dy_weighted_RD")
        dh_RH = expert.Mul(dh_RH, weight_R1, out="dh_weighted_RH")
    else:
        dweights_next = expert.Identity(dweights_N, out="dweights_next")
    dz_RF = activate_backward(expert, config, dh_RH, z_RF)
    din_RD = expert.MatMul(dz_RF, wide["w1"], out="din_RD")
    results = [expert.ScatterND(din_ND, slots_R1, din_RD, out="din_next"), dweights_next]

    trained = present if config.train_parameters else []
    for name in trained:
        left, right = (dz_RF, x_RD) if name in ("w1", "b1") else (dy_RD, h_RH)
        gradient = (
            expert.ReduceSum(left, [0], keepdims=0, out=f"d{name}_wide")
            if name.startswith("b")
            else expert.Gemm(left, right, transA=1, out=f"d{name}_wide")
        )
        results.append(expert.Cast(gradient, to=config.operand_dtype, out=f"d{name}_own"))

    body = expert.graph([din_ND, dweights_N, begin_1, end_1, *weights.values()], results, "each")
    names = ["din_ND", "dweights_N", *(f"d{name}" for name in trained)]
    outputs = op.Scan(*states, *visited, body=body, num_scan_inputs=len(visited), out=names)
    return outputs[0], outputs[1], dict(zip(trained, outputs[2:], strict=True))


# --- The router ---


def _route_backward(
    op: Ops,
    config: GradientConfig,
    inputs: Inputs,
    dweights_TK: ir.Value,
    x_TD: ir.Value,
    ids_TK: ir.Value,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The gradients of tokens ``[T, D]``, router weight ``[E, D]`` and bias ``[E]`` or ``[0]``."""
    dtype = config.router_compute_dtype
    logits_TE = logits(op, config, inputs, x_TD)
    dlogits_TE = _logits_backward(op, config, logits_TE, dweights_TK, ids_TK)
    wide_ED = op.cast(inputs["router_weight"], config.routing_dtype, dtype, out="router_wide_ED")
    x_wide_TD = op.cast(x_TD, config.tokens_dtype, dtype, out="x_routed_TD")
    drouter_ED = op.Gemm(dlogits_TE, x_wide_TD, transA=1, out="drouter_wide")
    dbias_E = (
        op.ReduceSum(dlogits_TE, [0], keepdims=0, out="dbias_wide")
        if config.has_router_bias
        else op.constant("no_bias", [], dtype)
    )
    return (
        op.MatMul(dlogits_TE, wide_ED, out="dx_router_TD"),
        op.Cast(drouter_ED, to=config.routing_dtype, out="drouter_weight"),
        op.Cast(dbias_E, to=config.routing_dtype, out="drouter_bias"),
    )


def _logits_backward(
    op: Ops, config: GradientConfig, logits_TE: ir.Value, dweights_TK: ir.Value, ids_TK: ir.Value
) -> ir.Value:
    """The gradient of the router's logits ``[T, E]``, as ``route_backward`` of custom_ops."""
    dtype = config.router_compute_dtype
    dtop_TK = op.Mul(dweights_TK, op.real("routed_scaling", dtype), out="dscaled_TK")
    zeros_TE = op.zeros(op.Shape(logits_TE, out="TE"), dtype, out="zeros_TE")
    if config.router_options.scoring == "topk_softmax":
        top_TK = op.GatherElements(logits_TE, ids_TK, axis=1, out="top_TK")
        p_TK = op.Softmax(top_TK, axis=-1, out="p_TK")
        dtop_TK = _softmax_backward(op, dtop_TK, p_TK)
        return op.ScatterElements(zeros_TE, ids_TK, dtop_TK, axis=1, out="dlogits_TE")
    is_sigmoid = config.router_options.scoring == "sigmoid"
    scores_TE = (
        sigmoid(op, logits_TE, dtype, out="scores_TE")
        if is_sigmoid
        else op.Softmax(logits_TE, axis=-1, out="scores_TE")
    )
    if config.renormalizes:
        top_TK = op.GatherElements(scores_TE, ids_TK, axis=1, out="top_TK")
        sum_T1 = op.ReduceSum(top_TK, [1], keepdims=1, out="sum_T1")
        total_T1 = op.Add(sum_T1, op.constant("epsilon", RENORMALIZE_EPS, dtype), out="total_T1")
        product_T1 = op.ReduceSum(
            op.Mul(dtop_TK, top_TK, out="dtop_top"), [1], keepdims=1, out="product_T1"
        )
        inner_T1 = op.Div(product_T1, total_T1, out="inner_router_T1")
        dtop_TK = op.Div(op.Sub(dtop_TK, inner_T1, out="dtop_less"), total_T1, out="dtop_TK")
    dscores_TE = op.ScatterElements(zeros_TE, ids_TK, dtop_TK, axis=1, out="dscores_TE")
    if not is_sigmoid:
        return _softmax_backward(op, dscores_TE, scores_TE)
    rest_TE = op.Sub(op.constant("one", 1, dtype), scores_TE, out="rest_TE")
    slope_TE = op.Mul(scores_TE, rest_TE, out="slope_TE")
    return op.Mul(dscores_TE, slope_TE, out="dlogits_TE")


def _softmax_backward(op: Ops, dp: ir.Value, p: ir.Value) -> ir.Value:
    inner = op.ReduceSum(op.Mul(dp, p, out="dp_p"), [1], keepdims=1, out="dp_inner")
    return op.Mul(p, op.Sub(dp, inner, out="dp_less"), out="softmax_gradient")
