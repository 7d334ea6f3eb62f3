"""The experts as one loop over those that have rows.

An expert without rows costs nothing: the loop does not visit it, its weights are not read. Each
visited expert's weights are copied once, by Gather; a copy-free slice exists in no operator of
ONNX Runtime but Scan, which visits all experts.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k,
N = T*K slots (slot n is choice n % K of token n // K), A active experts, R rows of one expert.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from dynamo_moe._bodies._config import BodyConfig
from dynamo_moe._bodies._expert import activate, expert_inputs, round_hidden
from dynamo_moe._bodies._ops import Ops

__all__ = ["experts"]


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
    inputs = expert_inputs(op, config, x_TD, weights_TK, width_1)

    # Bucket 0 holds the slots of no expert. TopK gives ties to the lower index: a stable sort.
    buckets_N = op.Add(op.Reshape(ids_TK, [-1], out="ids_N"), 1, out="buckets_N")
    N = op.Shape(buckets_N, out="N")
    _, slots_N = op.TopK(buckets_N, N, axis=0, largest=0, out=("sorted_N", "slots_N"))
    unused_1, active_A, sizes_A = _parts(op, buckets_N, N)

    rows_N = slots_N
    if not config.weight_on_input:
        rows_N = op.Div(slots_N, op.size("top_k"), out="tokens_N")
    used_rows = op.Slice(rows_N, unused_1, [np.iinfo(np.int64).max], [0], out="used_rows")
    rows_by_expert = op.SplitToSequence(used_rows, sizes_A, axis=0, out="rows_by_expert")

    # The zeros of the slots of no expert come first, so that the sequence is never empty.
    zeros_UD = op.zeros(op.Concat(unused_1, width_1, axis=0, out="UD"), dtype, out="zeros_UD")
    sequence = op.Loop(
        op.Squeeze(op.Shape(active_A, out="A_1"), [0], out="A"),
        op.constant("true", True, ir.DataType.BOOL),
        op.SequenceConstruct(zeros_UD, out="first"),
        body=_loop_body(op, config, parameters, inputs, active_A, rows_by_expert),
        out="y_by_expert",
    )
    y_ND = op.ConcatFromSequence(sequence, axis=0, out="y_ND")

    y_TKD = _unsort(op, y_ND, slots_N, ids_TK)
    if not config.weight_on_input:
        y_TKD = op.Mul(y_TKD, op.Unsqueeze(weights_TK, [2], out="weights_TK1"), out="weighted_TKD")
    return op.ReduceSum(y_TKD, [1], keepdims=0, out="y_TD")


def _parts(op: Ops, buckets_N: ir.Value, N: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The number of slots of no expert ``[1]``, the active experts and their numbers of slots."""
    experts_1 = op.size("num_experts")
    zeros = op.zeros(op.Add(experts_1, 1, out="buckets"), ir.DataType.INT64, out="no_slots")
    counts = op.ScatterElements(
        zeros, buckets_N, op.Expand(1, N, out="ones_N"), axis=0, reduction="add", out="counts"
    )
    unused_1, counts_E = op.Split(
        counts, op.Concat([1], experts_1, axis=0, out="split"), axis=0, out=("unused", "counts_E")
    )
    active_A = op.Squeeze(op.NonZero(counts_E, out="active_1A"), [0], out="active_A")
    return unused_1, active_A, op.Gather(counts_E, active_A, out="sizes_A")


def _loop_body(
    outer: Ops,
    config: BodyConfig,
    parameters: Mapping[str, ir.Value],
    inputs: ir.Value,
    active_A: ir.Value,
    rows_by_expert: ir.Value,
) -> ir.Graph:
    op = Ops(outer.opset, outer)
    dtype = config.compute_dtype
    i = op.value("i", ir.TensorType(ir.DataType.INT64), shape=[])
    condition = op.value("condition", ir.TensorType(ir.DataType.BOOL), shape=[])
    results = op.value("results", ir.SequenceType(ir.TensorType(dtype)))

    expert = op.Gather(active_A, i, out="expert")

    def of_expert(name: str, out: str) -> ir.Value | None:
        if name not in parameters:
            return None
        own = op.Gather(parameters[name], expert, axis=0, out=out)
        return op.cast(own, config.w_dtype, dtype, out=f"{out}_wide")

    x_RD = op.Gather(inputs, op.SequenceAt(rows_by_expert, i, out="rows_R"), axis=0, out="x_RD")
    z_RF = op.Gemm(x_RD, of_expert("w1", "w1_FD"), of_expert("b1", "b1_F"), transB=1, out="z_RF")
    h_RH = round_hidden(op, config, activate(op, config, z_RF))
    y_RD = op.Gemm(h_RH, of_expert("w2", "w2_DH"), of_expert("b2", "b2_D"), transB=1, out="y_RD")
    return ir.Graph(
        [i, condition, results],
        [
            op.Identity(condition, out="go_on"),
            op.SequenceInsert(results, y_RD, out="results_next"),
        ],
        nodes=op.nodes,
        name="expert",
    )


def _unsort(op: Ops, y_ND: ir.Value, slots_N: ir.Value, ids_TK: ir.Value) -> ir.Value:
    """Rows in slot order: slot ``slots_N[n]`` is row n."""
    N = op.Squeeze(op.Shape(slots_N, out="N_1"), [0], out="N")
    places_N = op.Range(0, N, 1, out="places_N")
    place_N = op.ScatterElements(slots_N, slots_N, places_N, axis=0, out="place_N")
    place_TK = op.Reshape(place_N, op.Shape(ids_TK, out="TK"), allowzero=1, out="place_TK")
    return op.Gather(y_ND, place_TK, axis=0, out="y_TKD")
