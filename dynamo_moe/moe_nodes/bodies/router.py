"""The router, or what replaces it: from tokens to the experts' indices and weights.

Legend: T tokens, D model width, E experts, K = top_k, G groups of S experts, of
which a token chooses C with M = C*S members.
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
    return _route(op, config, inputs, x_TD) if config.router else given_routing(op, config, inputs)


def logits(op: Ops, config: BodyConfig, inputs: Mapping[str, ir.Value], x_TD: ir.Value) -> ir.Value:
    """Returns the router's logits ``[T, E]`` in the dtype that it computes in."""
    dtype = config.router_compute_dtype

    def parameter(name: str) -> ir.Value:
        weight = op.entered(inputs[name], config.routing_dtype, out=f"{name}_entered")
        return op.cast(weight, config.routing_dtype, dtype, out=f"{name}_wide")

    logits_TE = op.Gemm(
        op.cast(x_TD, config.tokens_dtype, dtype, out="x_wide_TD"),
        parameter("router_weight"),
        parameter("router_bias") if config.has_router_bias else None,
        transB=1,
        out="logits_TE",
    )
    if config.router_options.logits_dtype == "tokens":
        logits_TE = _rounded(op, config, logits_TE, out="logits_rounded_TE")
    return logits_TE


def sigmoid(op: Ops, logits: ir.Value, dtype: ir.DataType, out: str) -> ir.Value:
    """Returns ``1 / (1 + exp(-logits))``.

    ONNX Runtime 1.31's own Sigmoid of float32 is 0.2 % off at -10, 13 % at -14 and 0 below -18, and
    divided by their sum, small weights are as large as any.
    """
    one = op.constant("one", 1, dtype)
    exponential = op.Exp(op.Neg(logits, out=f"{out}_negated"), out=f"{out}_exp")
    return op.Reciprocal(op.Add(one, exponential, out=f"{out}_divisor"), out=out)


def _route(
    op: Ops, config: BodyConfig, inputs: Mapping[str, ir.Value], x_TD: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Each token's experts, the lower one in a tie, and their weights in the compute dtype."""
    dtype = config.router_compute_dtype
    logits_TE = logits(op, config, inputs, x_TD)
    # Sigmoids are chosen by the logits where that is the same: those of large ones are all one.
    plain = not config.has_selection_bias and config.router_options.group_scoring == "none"
    scores_TE = logits_TE
    if config.router_options.scoring == "softmax":
        scores_TE = op.Softmax(logits_TE, axis=-1, out="scores_TE")
    elif config.router_options.scoring == "sigmoid" and not plain:
        scores_TE = sigmoid(op, logits_TE, dtype, out="scores_TE")
    ranked_TE = scores_TE
    if config.has_selection_bias:
        stored = op.entered(
            inputs["selection_bias"], config.selection_dtype, out="selection_bias_entered"
        )
        bias = op.cast(stored, config.selection_dtype, dtype, out="selection_bias_wide")
        ranked_TE = op.Add(scores_TE, bias, out="biased_TE")
    if config.router_options.group_scoring == "none":
        top_TK, ids_TK = op.TopK(ranked_TE, op.size("top_k"), out=("top_TK", "ids_TK"))
    else:
        members_TM = _members_of_best_groups(op, config, ranked_TE)
        ranked_TM = op.GatherElements(ranked_TE, members_TM, axis=1, out="ranked_TM")
        top_TK, places_TK = op.TopK(ranked_TM, op.size("top_k"), out=("top_TK", "places_TK"))
        ids_TK = op.GatherElements(members_TM, places_TK, axis=1, out="ids_TK")
    if config.has_selection_bias:
        top_TK = op.GatherElements(scores_TE, ids_TK, axis=1, out="chosen_TK")
    if config.router_options.scoring == "sigmoid" and plain:
        top_TK = sigmoid(op, top_TK, dtype, out="sigmoid_TK")
    if config.router_options.scoring == "topk_softmax":
        top_TK = op.Softmax(top_TK, axis=-1, out="softmax_TK")
    if config.renormalizes:
        # Axis 1, not -1: ONNX Runtime's ReduceSum ignores a negative axis of an empty tensor.
        total_T1 = op.ReduceSum(top_TK, [1], keepdims=1, out="total_T1")
        epsilon = op.constant("epsilon", RENORMALIZE_EPS, dtype)
        top_TK = op.Div(top_TK, op.Add(total_T1, epsilon, out="divisor_T1"), out="normalized_TK")
    weights_TK = op.Mul(top_TK, op.real("routed_scaling", dtype), out="weights_TK")
    if config.router_options.routing_weights_dtype == "tokens":
        weights_TK = _rounded(op, config, weights_TK, out="weights_rounded_TK")
    return ids_TK, op.cast(weights_TK, dtype, config.compute_dtype, out="weights_wide_TK")


def _rounded(op: Ops, config: BodyConfig, value: ir.Value, out: str) -> ir.Value:
    """Returns a value in the dtype that the router computes in, rounded to that of the tokens."""
    dtype = config.router_compute_dtype
    rounded = op.cast(value, dtype, config.tokens_dtype, out=out)
    return op.cast(rounded, config.tokens_dtype, dtype, out=f"{out}_wide")


def _members_of_best_groups(op: Ops, config: BodyConfig, ranked_TE: ir.Value) -> ir.Value:
    """Returns the experts ``[T, M]`` of each token's best groups, in ascending order."""
    groups_1 = op.size("n_group")
    size_1 = op.Div(op.size("num_experts"), groups_1, out="S")
    # The 0 stands for the tokens, of which there may be none.
    TGS = op.Concat([0], groups_1, size_1, axis=0, out="TGS")
    ranked_TGS = op.Reshape(ranked_TE, TGS, out="ranked_TGS")
    best = [2 if config.router_options.group_scoring == "top2_sum" else 1]
    best_TGB, _ = op.TopK(ranked_TGS, best, out=("best_TGB", "best_of_group"))
    score_TG = op.ReduceSum(best_TGB, [2], keepdims=0, out="score_TG")
    _, chosen_TC = op.TopK(score_TG, op.size("topk_group"), out=("chosen_scores", "chosen_TC"))
    groups_TC, _ = op.TopK(
        chosen_TC, op.size("topk_group"), largest=0, out=("groups_TC", "order_TC")
    )
    expert_E = op.Range(0, op.Squeeze(op.size("num_experts"), [0], out="E"), 1, out="expert_E")
    expert_GS = op.Reshape(expert_E, op.Concat(groups_1, size_1, axis=0, out="GS"), out="expert_GS")
    members_TCS = op.Gather(expert_GS, groups_TC, axis=0, out="members_TCS")
    return op.Flatten(members_TCS, axis=1, out="members_TM")


def given_routing(
    op: Ops, config: BodyConfig, inputs: Mapping[str, ir.Value]
) -> tuple[ir.Value, ir.Value]:
    """The node's own ids and weights; the weight for no expert is 0, even if it was NaN."""
    dtype, own_dtype = config.compute_dtype, config.weights_dtype
    TK = op.Concat([-1], op.size("top_k"), axis=0, out="TK")
    ids_TK = op.cast(
        op.Reshape(inputs["expert_ids"], TK, out="given_ids_TK"),
        config.routing_dtype,
        ir.DataType.INT64,
        out="ids_TK",
    )
    weights_TK = op.cast(
        op.entered(
            op.Reshape(inputs["expert_weights"], TK, out="given_weights_TK"),
            own_dtype,
            out="entered_weights_TK",
        ),
        own_dtype,
        dtype,
        out="wide_weights_TK",
    )
    none_TK = op.Less(ids_TK, 0, out="none_TK")
    return ids_TK, op.Where(none_TK, op.constant("zero", 0, dtype), weights_TK, out="weights_TK")
