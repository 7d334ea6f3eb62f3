"""The experts as one loop over those that have rows.

An expert without rows costs nothing: the loop does not visit it, its weights are not read. A
visited expert's weights are copied once: in ONNX Runtime only Scan slices without a copy, and it
visits every expert.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k,
N = T*K slots (slot n is choice n % K of token n // K), U slots of no expert, A active experts,
R rows of one expert, I and O inputs and outputs of a product.
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
        body=_expert(op, config, parameters, inputs, active_A, rows_by_expert),
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


def _expert(
    outer: Ops,
    config: BodyConfig,
    parameters: Mapping[str, ir.Value],
    inputs: ir.Value,
    active_A: ir.Value,
    rows_by_expert: ir.Value,
) -> ir.Graph:
    """The loop's body: the i-th active expert's results join the sequence."""
    active_A2 = outer.Mul(outer.Unsqueeze(active_A, [1], out="active_A1"), [1, 0], out="active_A2")
    rows = {name: _rows(outer, parameters[name], name) for name in ("w1", "w2")}

    op, dtype = Ops(outer.opset, outer), config.compute_dtype
    i = op.value("i", ir.TensorType(ir.DataType.INT64), shape=[])
    condition = op.value("condition", ir.TensorType(ir.DataType.BOOL), shape=[])
    results = op.value("results", ir.SequenceType(ir.TensorType(dtype)))
    expert, expert_2 = op.Gather(active_A, i, out="expert"), op.Gather(active_A2, i, out="first")

    def linear(in_RI: ir.Value, weight: str, bias: str, out: str) -> ir.Value:
        # GatherND copies rows on all threads, Gather the expert on one: with 2048 x 1536 and
        # 2048 x 768 weights one token takes 8 instead of 30 ms on two threads.
        rows_O2 = op.Add(rows[weight], expert_2, out=f"{weight}_rows_of_expert")
        w_OI = op.GatherND(parameters[weight], rows_O2, out=f"{weight}_OI")
        w_OI = op.cast(w_OI, config.w_dtype, dtype, out=f"{weight}_wide")
        if bias not in parameters:
            return op.Gemm(in_RI, w_OI, transB=1, out=out)
        b_O = op.Gather(parameters[bias], expert, out=f"{bias}_O")
        b_O = op.cast(b_O, config.w_dtype, dtype, out=f"{bias}_wide")
        return op.Gemm(in_RI, w_OI, b_O, transB=1, out=out)

    x_RD = op.Gather(inputs, op.SequenceAt(rows_by_expert, i, out="rows_R"), out="x_RD")
    h_RH = activate(op, config, linear(x_RD, "w1", "b1", out="z_RF"))
    y_RD = linear(round_hidden(op, config, h_RH), "w2", "b2", out="y_RD")
    outputs = [
        op.Identity(condition, out="go_on"),
        op.SequenceInsert(results, y_RD, out="results_next"),
    ]
    return ir.Graph([i, condition, results], outputs, nodes=op.nodes, name="expert")


def _rows(op: Ops, w_EOI: ir.Value, name: str) -> ir.Value:
    """The indices ``[O, 2]`` of expert 0's rows."""
    size = op.Squeeze(op.Shape(w_EOI, start=1, end=2, out=f"{name}_O1"), [0], out=f"{name}_O")
    rows_O1 = op.Unsqueeze(op.Range(0, size, 1, out=f"{name}_rows"), [1], out=f"{name}_rows_O1")
    return op.Mul(rows_O1, [0, 1], out=f"{name}_rows_O2")


def _unsort(op: Ops, y_ND: ir.Value, slots_N: ir.Value, ids_TK: ir.Value) -> ir.Value:
    """Rows in slot order: slot ``slots_N[n]`` is row n."""
    N = op.Squeeze(op.Shape(slots_N, out="N_1"), [0], out="N")
    places_N = op.Range(0, N, 1, out="places_N")
    place_N = op.ScatterElements(slots_N, slots_N, places_N, axis=0, out="place_N")
    place_TK = op.Reshape(place_N, op.Shape(ids_TK, out="TK"), allowzero=1, out="place_TK")
    return op.Gather(y_ND, place_TK, axis=0, out="y_TKD")
