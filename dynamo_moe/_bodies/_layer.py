"""The layer around the experts: tokens in, router, result out; and the function that holds it.

Legend: T tokens, D model width, E experts, K = top_k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from dynamo_moe._bodies import _dense, _dropless, _onnxruntime
from dynamo_moe._bodies._config import MIN_OPSET, BodyConfig
from dynamo_moe._bodies._ops import Ops

__all__ = ["body", "dense_body", "function", "onnxruntime_body"]

Experts = Callable[
    [Ops, BodyConfig, Mapping[str, ir.Value], ir.Value, ir.Value, ir.Value], ir.Value
]

# Keeps sigmoid scores that all underflowed from dividing zero by zero.
_RENORMALIZE_EPS = 1e-20


def body(config: BodyConfig, opset: int, *, domain: str = "moe") -> ir.Function:
    """The operator as a loop over its active experts.

    Args:
        config: What the node computes.
        opset: Version of the standard operators, which must be the model's; at least 18.
        domain: The node's domain. A function is found by domain and name, so a file with several
            configurations needs several domains.

    Returns:
        A function of ``config.inputs`` and ``config.attributes``.

    Raises:
        ValueError: If the opset is too old.
    """
    return function(config, opset, domain, _dropless.experts)


def dense_body(config: BodyConfig, opset: int, *, domain: str = "moe") -> ir.Function:
    """The operator as every expert on every token; see :func:`body`."""
    return function(config, opset, domain, _dense.experts)


def onnxruntime_body(config: BodyConfig, opset: int, *, domain: str = "moe") -> ir.Function:
    """The operator as ONNX Runtime's ``com.microsoft::MoE``; see :func:`body`."""
    result = function(config, opset, domain, _onnxruntime.experts)
    result.opset_imports[_onnxruntime.DOMAIN] = 1
    return result


def function(config: BodyConfig, opset: int, domain: str, experts: Experts) -> ir.Function:
    """The operator with a given way to run its experts; see :func:`body`."""
    if opset < MIN_OPSET:
        raise ValueError(f"the body needs opset {MIN_OPSET} or later, got {opset}")
    op = Ops(opset)
    inputs = {name: op.value(name) for name in config.inputs}
    y = _layer(op, config, inputs, experts)
    graph = ir.Graph(
        list(inputs.values()), [y], nodes=op.nodes, opset_imports={"": opset}, name=config.overload
    )
    # The type only has to be defined: without a value just the name is stored.
    attributes = [ir.Attr(name, ir.AttributeType.INT, None) for name in config.attributes]
    return ir.Function(domain, config.op_type, graph=graph, attributes=attributes)


def _layer(
    op: Ops, config: BodyConfig, inputs: Mapping[str, ir.Value], experts: Experts
) -> ir.Value:
    x = inputs["x"]
    x_TD = op.Reshape(x, op.Concat([-1], op.size("in_features"), axis=0, out="TD"), out="x_TD")
    ids_TK, weights_TK = (_route if config.router else _given)(op, config, inputs, x_TD)
    y_TD = experts(op, config, inputs, x_TD, ids_TK, weights_TK)
    y_TD = op.cast(y_TD, config.compute_dtype, config.x_dtype, out="y_rounded_TD")
    return op.Reshape(y_TD, op.Shape(x, out="x_shape"), allowzero=1, out="y")


def _route(
    op: Ops, config: BodyConfig, inputs: Mapping[str, ir.Value], x_TD: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Each token's experts, ties to the lower one, and their weights in the compute dtype."""
    dtype = config.routing_dtype

    def parameter(name: str) -> ir.Value:
        return op.cast(inputs[name], config.router_dtype, dtype, out=f"{name}_wide")

    logits_TE = op.Gemm(
        op.cast(x_TD, config.x_dtype, dtype, out="x_wide_TD"),
        parameter("router_weight"),
        parameter("router_bias") if config.has_router_bias else None,
        transB=1,
        out="logits_TE",
    )
    scores_TE = logits_TE
    if config.scoring == "softmax":
        scores_TE = op.Softmax(logits_TE, axis=-1, out="scores_TE")
    elif config.scoring == "sigmoid":
        scores_TE = op.Sigmoid(logits_TE, out="scores_TE")
    top_TK, ids_TK = op.TopK(scores_TE, op.size("top_k"), out=("top_TK", "ids_TK"))
    if config.scoring == "topk_softmax":
        top_TK = op.Softmax(top_TK, axis=-1, out="softmax_TK")
    if config.renormalizes:
        # Axis 1, not -1: ONNX Runtime's ReduceSum ignores a negative axis of an empty tensor.
        total_T1 = op.ReduceSum(top_TK, [1], keepdims=1, out="total_T1")
        epsilon = op.constant("epsilon", _RENORMALIZE_EPS, dtype)
        top_TK = op.Div(top_TK, op.Add(total_T1, epsilon, out="divisor_T1"), out="normalized_TK")
    weights_TK = op.Mul(top_TK, op.real("routed_scaling", dtype), out="weights_TK")
    return ids_TK, op.cast(weights_TK, dtype, config.compute_dtype, out="weights_wide_TK")


def _given(
    op: Ops, config: BodyConfig, inputs: Mapping[str, ir.Value], x_TD: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The node's own ids and weights; the weight of no expert is 0, even where it was NaN."""
    dtype = config.compute_dtype
    TK = op.Concat([-1], op.size("top_k"), axis=0, out="TK")
    ids_TK = op.cast(
        op.Reshape(inputs["expert_ids"], TK, out="given_ids_TK"),
        config.ids_dtype,
        ir.DataType.INT64,
        out="ids_TK",
    )
    weights_TK = op.cast(
        op.Reshape(inputs["expert_weights"], TK, out="given_weights_TK"),
        config.router_dtype,
        dtype,
        out="wide_weights_TK",
    )
    none_TK = op.Less(ids_TK, 0, out="none_TK")
    return ids_TK, op.Where(none_TK, op.constant("zero", 0, dtype), weights_TK, out="weights_TK")
