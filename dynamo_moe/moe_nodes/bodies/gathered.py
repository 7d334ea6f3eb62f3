"""For few slots: one batched product with a copy of the weights that each slot needs.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, K = top_k, O outputs of a
product.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.expert import activate, expert_inputs, round_hidden
from dynamo_moe.moe_nodes.bodies.ops import Ops
from dynamo_moe.moe_nodes.bodies.slots import weighted_sum
from dynamo_moe.moe_nodes.bodies.weights import loaded, stored

# This many weights are copied in the time that a Scan takes to pass an idle expert, as long as the
# copies stay in the caches (float32, ONNX Runtime 1.31; benchmarks/cpu/function_bodies.py).
WEIGHTS_PER_VISIT = 1 << 15
MOST_WEIGHTS = 1 << 23


def is_cheaper(op: Ops, config: BodyConfig, ids_TK: ir.Value) -> ir.Value:
    """Whether copying the slots' weights takes less time than visiting all experts, ``[1]``."""
    DH_1 = op.Mul(op.size("in_features"), op.size("hidden_features"), out="DH")
    expert_1 = op.Mul(DH_1, 3 if config.options.gated else 2, out="expert_size")
    copied_1 = op.Mul(op.Size(ids_TK, out="slots"), expert_1, out="copied")
    visits_1 = op.Mul(op.size("num_experts"), WEIGHTS_PER_VISIT, out="worth_visits")
    return op.LessOrEqual(copied_1, op.Min(visits_1, MOST_WEIGHTS, out="most"), out="few_slots")


def experts(
    op: Ops,
    config: BodyConfig,
    parameters: Mapping[str, ir.Value],
    x_TD: ir.Value,
    ids_TK: ir.Value,
    weights_TK: ir.Value,
) -> ir.Value:
    """The sum over K of the experts' weighted results, ``[T, 1, D]`` in the compute dtype."""
    dtype, width_1 = config.compute_dtype, op.size("in_features")
    inputs = expert_inputs(op, config, x_TD, weights_TK, width_1)
    # A matrix that lies as (out, in) is multiplied by columns, one that lies as (in, out) by rows.
    if config.options.weight_on_input:
        TK = op.Shape(ids_TK, out="TK")
        column_or_row = ([1], width_1) if config.shape.layout.w1_transposed else (width_1, [1])
        TKD1 = op.Concat(TK, *column_or_row, axis=0, out="TKD1")
        vectors = op.Reshape(inputs, TKD1, allowzero=1, out="x_TKD1")
    else:
        vectors = op.Unsqueeze(
            inputs, [1, 2 if config.shape.layout.w1_transposed else 3], out="x_T1D1"
        )

    def chosen(name: str) -> ir.Value:
        # Slots of no expert, -1, get the last expert's weights.
        tensors = []
        for part, part_dtype in stored(config, name).items():
            gathered = op.Gather(parameters[part], ids_TK, axis=0, out=f"{part}_TK")
            tensors.append(op.entered(gathered, part_dtype, out=f"{part}_TK_entered"))
        return loaded(op, config, name, tensors, out=f"{name}_TK_wide")

    def linear(vectors: ir.Value, weight: str, bias: str, out: str) -> ir.Value:
        weights, axis = chosen(weight), -1
        operands = (weights, vectors)
        if config.shape.is_transposed(weight):
            operands, axis = (vectors, weights), -2
        y_TKO1 = op.MatMul(*operands, out=f"{out}1")
        y_TKO = op.Squeeze(y_TKO1, [axis], out=out)
        return op.Add(y_TKO, chosen(bias), out=f"{out}_biased") if bias in parameters else y_TKO

    z_TKF = linear(vectors, "w1", "b1", "z_TKF")
    h_TKH = round_hidden(op, config, activate(op, config, z_TKF, rank=3))
    vectors = op.Unsqueeze(h_TKH, [-2 if config.shape.layout.w2_transposed else -1], out="h_TKH1")
    y_TKD = linear(vectors, "w2", "b2", "y_TKD")
    idle_TK1 = op.Unsqueeze(op.Less(ids_TK, 0, out="idle_TK"), [2], out="idle_TK1")
    y_TKD = op.Where(idle_TK1, op.constant("nothing", 0, dtype), y_TKD, out="y_used_TKD")
    return weighted_sum(op, config, y_TKD, weights_TK)
