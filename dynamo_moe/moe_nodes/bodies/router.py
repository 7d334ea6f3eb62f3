"""The router, or what replaces it: from tokens to the experts' indices and weights.

Legend: T tokens, D model width, E experts, K = top_k.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from custom_ops.routing import RENORMALIZE_EPS
from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.ops import Ops


def route(
    op: Ops, config: BodyConfig, inputs: Mapping[str, ir.Value], x_TD: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Returns each token's expert ids ``[T, K]`` and their weights in the compute dtype."""
    return (_route if config.router else _given)(op, config, inputs, x_TD)


def logits(op: Ops, config: BodyConfig, inputs: Mapping[str, ir.Value], x_TD: ir.Value) -> ir.Value:
    """Returns the router's logits ``[T, E]`` in the routing dtype."""
    dtype = config.routing_dtype

    def parameter(name: str) -> ir.Value:
        own = op.entered(inputs[name], config.router_dtype, out=f"{name}_entered")
        return op.cast(own, config.router_dtype, dtype, out=f"{name}_wide")

    return op.Gemm(
        op.cast(x_TD, config.x_dtype, dtype, out="x_wide_TD"),
        parameter("router_weight"),
        parameter("router_bias") if config.has_router_bias else None,
        transB=1,
        out="logits_TE",
    )


def _route(
    op: Ops, config: BodyConfig, inputs: Mapping[str, ir.Value], x_TD: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Each token's experts, the lower one in a tie, and their weights in the compute dtype."""
    dtype = config.routing_dtype
    logits_TE = logits(op, config, inputs, x_TD)
    scores_TE = logits_TE
    if config.scoring == "softmax":
        scores_TE = op.Softmax(logits_TE, axis=-1, out="scores_TE")
    top_TK, ids_TK = op.TopK(scores_TE, op.size("top_k"), out=("top_TK", "ids_TK"))
    if config.scoring == "sigmoid":
        top_TK = op.Sigmoid(top_TK, out="sigmoid_TK")
    if config.scoring == "topk_softmax":
        top_TK = op.Softmax(top_TK, axis=-1, out="softmax_TK")
    if config.renormalizes:
        # Axis 1, not -1: ONNX Runtime's ReduceSum ignores a negative axis of an empty tensor.
        total_T1 = op.ReduceSum(top_TK, [1], keepdims=1, out="total_T1")
        epsilon = op.constant("epsilon", RENORMALIZE_EPS, dtype)
        top_TK = op.Div(top_TK, op.Add(total_T1, epsilon, out="divisor_T1"), out="normalized_TK")
    weights_TK = op.Mul(top_TK, op.real("routed_scaling", dtype), out="weights_TK")
    return ids_TK, op.cast(weights_TK, dtype, config.compute_dtype, out="weights_wide_TK")


def _given(
    op: Ops, config: BodyConfig, inputs: Mapping[str, ir.Value], x_TD: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The node's own ids and weights; the weight for no expert is 0, even if it was NaN."""
    dtype = config.compute_dtype
    TK = op.Concat([-1], op.size("top_k"), axis=0, out="TK")
    ids_TK = op.cast(
        op.Reshape(inputs["expert_ids"], TK, out="given_ids_TK"),
        config.ids_dtype,
        ir.DataType.INT64,
        out="ids_TK",
    )
    weights_TK = op.cast(
        op.entered(
            op.Reshape(inputs["expert_weights"], TK, out="given_weights_TK"),
            config.router_dtype,
            out="entered_weights_TK",
        ),
        config.router_dtype,
        dtype,
        out="wide_weights_TK",
    )
    none_TK = op.Less(ids_TK, 0, out="none_TK")
    return ids_TK, op.Where(none_TK, op.constant("zero", 0, dtype), weights_TK, out="weights_TK")
