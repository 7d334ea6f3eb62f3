"""The experts as two batched products: every expert on every token, no control flow.

Legend: T tokens (or T*K slots), D model width, H hidden width, F = H, or 2H when gated,
E experts, K = top_k.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.expert import activate, expert_inputs, round_hidden
from dynamo_moe.moe_nodes.bodies.ops import Ops
from dynamo_moe.moe_nodes.bodies.weights import loaded, stored


def experts(
    op: Ops,
    config: BodyConfig,
    parameters: Mapping[str, ir.Value],
    x_TD: ir.Value,
    ids_TK: ir.Value,
    weights_TK: ir.Value,
) -> ir.Value:
    """Returns the sum over K of the experts' weighted results, ``[T, D]`` in the compute dtype."""
    dtype, width_1 = config.compute_dtype, op.size("in_features")
    x_TD = expert_inputs(op, config, x_TD, weights_TK, width_1)
    if config.options.weight_on_input:
        # Experts are not linear in their input: each slot is a token with one choice of weight 1.
        slots = ids_TK
        ids_TK = op.Reshape(ids_TK, [-1, 1], out="ids_N1")
        weights_TK = op.Expand(op.constant("one", 1, dtype), op.Shape(ids_TK, out="N1"), out="ones")

    def parameter(name: str) -> ir.Value:
        tensors = [parameters[part] for part in stored(config, name)]
        return loaded(op, config, name, tensors, out=f"{name}_wide", by_floats=True)

    def product(rows_ETI: ir.Value, weight: str, bias: str, out: str) -> ir.Value:
        w_EOI = parameter(weight)
        y_ETO = op.MatMul(rows_ETI, op.Transpose(w_EOI, perm=[0, 2, 1], out=f"{weight}_t"), out=out)
        if bias not in parameters:
            return y_ETO
        b_EO = parameter(bias)
        return op.Add(y_ETO, op.Unsqueeze(b_EO, [1], out=f"{bias}_E1"), out=f"{out}_biased")

    z_ETF = product(x_TD, "w1", "b1", out="z_ETF")
    h_ETH = round_hidden(op, config, activate(op, config, z_ETF, rank=3))
    y_ETD = product(h_ETH, "w2", "b2", out="y_ETD")
    chosen_ET1, weights_ET1 = _by_expert(op, dtype, ids_TK, weights_TK)
    weighted_ETD = op.Mul(y_ETD, weights_ET1, out="weighted")
    # Times a weight of zero, what is not finite would be NaN.
    zero = op.constant("not_chosen", 0, dtype)
    weighted_ETD = op.Where(chosen_ET1, weighted_ETD, zero, out="weighted_if_chosen")
    y_TD = op.ReduceSum(weighted_ETD, [0], keepdims=0, out="y_TD")
    if not config.options.weight_on_input:
        return y_TD
    TKD = op.Concat(op.Shape(slots, out="TK"), width_1, axis=0, out="TKD")
    y_TKD = op.Reshape(y_TD, TKD, allowzero=1, out="y_TKD")
    return op.ReduceSum(y_TKD, [1], keepdims=0, out="y_summed_TD")


def _by_expert(
    op: Ops, dtype: ir.DataType, ids_TK: ir.Value, weights_TK: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Returns whether each token chose each expert, and its weight for it, both ``[E, T, 1]``.

    A token's choices of one expert add up. TensorRT for RTX 1.7 refuses a ScatterElements that
    adds.
    """
    E = op.Squeeze(op.size("num_experts"), [0], out="E")
    experts_E11 = op.Unsqueeze(op.Range(0, E, 1, out="range_E"), [1, 2], out="experts_E11")
    chosen_ETK = op.Equal(ids_TK, experts_E11, out="chosen_ETK")
    zero, one = op.constant("not_chosen", 0, dtype), op.constant("chosen", 1, dtype)
    weights_ETK = op.Where(chosen_ETK, weights_TK, zero, out="weights_ETK")
    choices_ETK = op.Where(chosen_ETK, one, zero, out="choices_ETK")
    choices_ET1 = op.ReduceSum(choices_ETK, [2], keepdims=1, out="choices_ET1")
    return (
        op.Greater(choices_ET1, zero, out="chosen_ET1"),
        op.ReduceSum(weights_ETK, [2], keepdims=1, out="weights_ET1"),
    )
