"""Assigns rows to experts before the products, and sums a token's results after them.

Legend: T tokens, D model width, E experts, K = top_k, N = T*K slots (slot n is choice n % K of
token n // K).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.ops import Ops

_END = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Slots:
    """The slots sorted by expert, beginning with those of no expert."""

    ids_TK: ir.Value
    places_N: ir.Value
    """Each slot's place in that order."""
    rows_N: ir.Value
    """In that order, the rows in the experts' inputs."""
    counts_E: ir.Value
    begins_E: ir.Value
    ends_E: ir.Value

    def used(self, op: Ops) -> tuple[ir.Value, ir.Value]:
        """The first slot with an expert ``[1]``, and each expert's first slot relative to it."""
        unused_1 = op.Slice(self.begins_E, [0], [1], [0], out="unused_1")
        return unused_1, op.Sub(self.begins_E, unused_1, out="first_used")


def sort(op: Ops, config: BodyConfig, ids_TK: ir.Value) -> Slots:
    """Sorts the slots of the tokens' choices by expert.

    A slot's place is the number of slots before it: those of lower experts, and those of its own
    that come earlier. One CumSum over a table of experts by slots counts both. TensorRT for RTX
    1.7 takes it for any number of slots, but no TopK of more than 3840.
    """
    # In the table, row 0 is for slots of no expert. Column 0 is one such slot more, so that a row
    # has a last column, which counts up to its expert's end, even if there are no slots.
    ids_N = op.Reshape(ids_TK, [-1], out="ids_N")
    columns = op.Concat([-1], ids_N, axis=0, out="columns")
    width_1 = op.Shape(columns, out="width_1")
    E = op.Squeeze(op.size("num_experts"), [0], out="E")
    rows_1 = op.Unsqueeze(op.Range(-1, E, 1, out="rows"), [1], out="rows_1")
    chosen = op.Reshape(op.Equal(rows_1, columns, out="chosen"), [-1], out="chosen_flat")
    # ONNX Runtime adds up 32 bits faster than 64.
    counts = op.CumSum(op.Cast(chosen, to=ir.DataType.INT32, out="ones"), 0, out="counts")
    table = op.Reshape(counts, op.Concat([-1], width_1, axis=0, out="table_shape"), out="table")
    last_1 = op.Cast(
        op.Slice(table, [-1], [_END], [1], out="last_column"), to=ir.DataType.INT64, out="last_1"
    )
    ends = op.Sub(op.Squeeze(last_1, [1], out="last"), 1, out="ends")
    begins_E = op.Slice(ends, [0], [-1], [0], out="begins_E")
    ends_E = op.Slice(ends, [1], [_END], [0], out="ends_E")
    counts_E = op.Sub(ends_E, begins_E, out="counts_E")

    N = op.Squeeze(op.Shape(ids_N, out="N_1"), [0], out="N")
    range_N = op.Range(0, N, 1, out="range_N")
    row_N = op.Mul(op.Add(ids_N, 1, out="row"), width_1, out="row_N")
    own_N = op.Add(row_N, op.Add(range_N, 1, out="column_N"), out="own_N")
    count_N = op.Cast(op.Gather(counts, own_N, out="count"), to=ir.DataType.INT64, out="count_N")
    places_N = op.Sub(count_N, 2, out="places_N")
    rows_N = range_N
    if not config.options.weight_on_input:
        rows_N = op.Div(range_N, op.size("top_k"), out="tokens_N")
    rows_N = op.ScatterElements(rows_N, places_N, rows_N, axis=0, out="sorted_rows_N")
    return Slots(ids_TK, places_N, rows_N, counts_E, begins_E, ends_E)


def combine(
    op: Ops,
    config: BodyConfig,
    slots: Slots,
    y_rows: ir.Value,
    first_E: ir.Value,
    weights_TK: ir.Value,
) -> ir.Value:
    """The sum over K of the weighted results, ``[T, 1, D]``.

    ``y_rows`` holds all results and zeros in its last row. An expert's results are in the order of
    its slots, from row ``first_E`` on.
    """
    y_TKD = op.Gather(y_rows, _result_rows(op, slots, first_E), axis=0, out="y_TKD")
    return weighted_sum(op, config, y_TKD, weights_TK)


def weighted_sum(op: Ops, config: BodyConfig, y_TKD: ir.Value, weights_TK: ir.Value) -> ir.Value:
    """The sum over K of the results ``[T, K, D]``, weighted unless the inputs were."""
    if config.options.weight_on_input:
        return op.ReduceSum(y_TKD, [1], keepdims=1, out="y_T1D")
    return op.MatMul(op.Unsqueeze(weights_TK, [1], out="weights_T1K"), y_TKD, out="y_T1D")


def _result_rows(op: Ops, slots: Slots, first_E: ir.Value) -> ir.Value:
    """The rows ``[T, K]`` of the slots' results; -1, the last row, for slots of no expert."""
    TK = op.Shape(slots.ids_TK, out="TK")
    order_TK = op.Reshape(slots.places_N, TK, allowzero=1, out="order_TK")
    shift_E = op.Sub(first_E, slots.begins_E, out="shift_E")
    shift_TK = op.Gather(shift_E, slots.ids_TK, out="shift_TK")
    shifted_TK = op.Add(order_TK, shift_TK, out="shifted_TK")
    return op.Where(op.Less(slots.ids_TK, 0, out="idle_TK"), -1, shifted_TK, out="place_TK")
