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
    slots_N: ir.Value
    """The slots' indices in the tokens' order."""
    rows_N: ir.Value
    """For each slot, its row in the experts' inputs."""
    counts_E: ir.Value
    begins_E: ir.Value
    ends_E: ir.Value

    def used(self, op: Ops) -> tuple[ir.Value, ir.Value]:
        """The first slot with an expert ``[1]``, and each expert's first slot relative to it."""
        unused_1 = op.Slice(self.begins_E, [0], [1], [0], out="unused_1")
        return unused_1, op.Sub(self.begins_E, unused_1, out="first_used")


def sort(op: Ops, config: BodyConfig, ids_TK: ir.Value) -> Slots:
    """Sorts the slots of the tokens' choices by expert."""
    # Bucket 0 holds slots of no expert. TopK puts the lower index first in a tie: a stable sort.
    buckets_N = op.Add(op.Reshape(ids_TK, [-1], out="ids_N"), 1, out="buckets_N")
    N = op.Shape(buckets_N, out="N")
    _, slots_N = op.TopK(buckets_N, N, axis=0, largest=0, out=("sorted_N", "slots_N"))
    zeros = op.zeros(
        op.Add(op.size("num_experts"), 1, out="buckets"), ir.DataType.INT64, out="no_slots"
    )
    counts = op.ScatterElements(
        zeros, buckets_N, op.Expand(1, N, out="ones_N"), axis=0, reduction="add", out="counts"
    )
    counts_E = op.Slice(counts, [1], [_END], [0], out="counts_E")
    ends_E = op.Slice(op.CumSum(counts, 0, out="ends"), [1], [_END], [0], out="ends_E")
    rows_N = slots_N
    if not config.weight_on_input:
        rows_N = op.Div(slots_N, op.size("top_k"), out="tokens_N")
    begins_E = op.Sub(ends_E, counts_E, out="begins_E")
    return Slots(ids_TK, slots_N, rows_N, counts_E, begins_E, ends_E)


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
    y_TKD = op.Gather(y_rows, _places(op, slots, first_E), axis=0, out="y_TKD")
    return weighted_sum(op, config, y_TKD, weights_TK)


def weighted_sum(op: Ops, config: BodyConfig, y_TKD: ir.Value, weights_TK: ir.Value) -> ir.Value:
    """The sum over K of the results ``[T, K, D]``, weighted unless the inputs were."""
    if config.weight_on_input:
        return op.ReduceSum(y_TKD, [1], keepdims=1, out="y_T1D")
    return op.MatMul(op.Unsqueeze(weights_TK, [1], out="weights_T1K"), y_TKD, out="y_T1D")


def _places(op: Ops, slots: Slots, first_E: ir.Value) -> ir.Value:
    """The rows ``[T, K]`` of the slots' results; -1, the last row, for slots of no expert."""
    TK = op.Shape(slots.ids_TK, out="TK")
    N = op.Squeeze(op.Shape(slots.slots_N, out="N_1"), [0], out="N_0")
    range_N = op.Range(0, N, 1, out="range_N")
    order_N = op.ScatterElements(slots.slots_N, slots.slots_N, range_N, axis=0, out="order_N")
    order_TK = op.Reshape(order_N, TK, allowzero=1, out="order_TK")
    shift_E = op.Sub(first_E, slots.begins_E, out="shift_E")
    shift_TK = op.Gather(shift_E, slots.ids_TK, out="shift_TK")
    place_TK = op.Add(order_TK, shift_TK, out="shifted_TK")
    return op.Where(op.Less(slots.ids_TK, 0, out="idle_TK"), -1, place_TK, out="place_TK")
