"""Runs only the experts that tokens have chosen.

A few slots get a copy of their experts' weights, see :mod:`.gathered`. Otherwise the experts run
one after the other, each on the rows of its tokens. If no expert has more rows than ``w2`` has
columns, a Scan visits the experts: nothing else in ONNX Runtime slices weights without a copy. It
needs results of one shape, so each expert's results are padded to the size of the busiest expert's,
which have no more elements than ``w2``; an idle expert costs one test and its zeros. With more
rows, a Loop visits only the active experts and copies the weights of each, which costs little
compared with its products.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k,
N = T*K slots (slot n is choice n % K of token n // K), A active experts, R rows of one expert,
P rows that the Scan has for each expert, I and O inputs and outputs of a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from dynamo_moe.moe_nodes.bodies import gathered
from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.expert import activate, expert_inputs, round_hidden
from dynamo_moe.moe_nodes.bodies.ops import Ops
from dynamo_moe.moe_nodes.bodies.slots import Slots, combine, sort
from dynamo_moe.moe_nodes.bodies.weights import inputs_of, loaded, stored


def experts(
    op: Ops,
    config: BodyConfig,
    parameters: Mapping[str, ir.Value],
    x_TD: ir.Value,
    ids_TK: ir.Value,
    weights_TK: ir.Value,
) -> ir.Value:
    """Returns the sum over K of the experts' weighted results, ``[T, D]`` in the compute dtype."""
    few, many = op.inner(), op.inner()
    y_few = gathered.experts(few, config, parameters, x_TD, ids_TK, weights_TK)
    y_many = one_by_one(many, config, parameters, x_TD, ids_TK, weights_TK)
    y_T1D = op.If(
        gathered.is_cheaper(op, config, ids_TK),
        then_branch=few.graph([], [y_few], "few"),
        else_branch=many.graph([], [y_many], "many"),
        out="y_T1D",
    )
    # A view here; if a branch returned it, it would be a copy.
    return op.Squeeze(y_T1D, [1], out="y_TD")


def one_by_one(
    op: Ops,
    config: BodyConfig,
    parameters: Mapping[str, ir.Value],
    x_TD: ir.Value,
    ids_TK: ir.Value,
    weights_TK: ir.Value,
) -> ir.Value:
    """The same ``[T, 1, D]`` for any number of slots; copies at most one expert's weights."""
    inputs = expert_inputs(op, config, x_TD, weights_TK, op.size("in_features"))
    slots = sort(op, config, ids_TK)
    layer = _Layer(config, parameters, inputs, slots)

    most_1 = op.ReduceMax(slots.counts_E, [0], out="most_1")
    scanned, looped = op.inner(), op.inner()
    y_found, first_E = op.If(
        op.LessOrEqual(most_1, op.size("hidden_features"), out="scans"),
        then_branch=scanned.graph([], _scan(scanned, layer, most_1), "scan"),
        else_branch=looped.graph([], _loop(looped, layer), "loop"),
        out=("y_found", "first_E"),
    )
    # A view here; if a branch returned it, it would be a copy.
    y_rows = op.Reshape(
        y_found, op.Concat([-1], op.size("in_features"), axis=0, out="rows_D"), out="y_rows"
    )
    return combine(op, config, slots, y_rows, first_E, weights_TK)


@dataclass(frozen=True)
class _Layer:
    """The inputs that an expert's results are computed from."""

    config: BodyConfig
    parameters: Mapping[str, ir.Value]
    inputs: ir.Value
    slots: Slots


def _rows(
    op: Ops, layer: _Layer, weights: Mapping[str, ir.Value], begin_1: ir.Value, end_1: ir.Value
) -> ir.Value:
    """An expert's results ``[R, D]`` from its own weights; its slots run from begin to end."""
    config = layer.config

    def linear(in_RI: ir.Value, weight: str, bias: str, out: str) -> ir.Value:
        tensors = {
            name: [
                op.entered(weights[n], d, out=f"{n}_own") for n, d in stored(config, name).items()
            ]
            for name in (weight, *({bias} & weights.keys()))
        }
        wide = [loaded(op, config, name, v, out=f"{v[0].name}_wide") for name, v in tensors.items()]
        return op.Gemm(in_RI, *wide, transB=int(not config.shape.is_transposed(weight)), out=out)

    rows_R = op.Slice(layer.slots.rows_N, begin_1, end_1, [0], out="rows_R")
    z_RF = linear(op.Gather(layer.inputs, rows_R, out="x_RD"), "w1", "b1", "z_RF")
    h_RH = round_hidden(op, config, activate(op, config, z_RF))
    return linear(h_RH, "w2", "b2", "y_RD")


def _scan(op: Ops, layer: _Layer, most_1: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The results of expert e are the rows from ``e * P`` on, padded with zeros."""
    slots, dtype = layer.slots, layer.config.compute_dtype
    names = inputs_of(layer.config, layer.parameters)
    width_1 = op.size("in_features")
    # The last row of an expert is always zero.
    P_1 = op.Add(most_1, 1, out="P_1")
    P = op.Squeeze(P_1, [0], out="P")
    idle_PD = op.zeros(op.Concat(P_1, width_1, axis=0, out="PD"), dtype, out="idle_PD")
    rest_E1 = op.Unsqueeze(op.Sub(P_1, slots.counts_E, out="rest_E"), [1], out="rest_E1")
    visited = {
        "active": op.Greater(slots.counts_E, 0, out="active_E"),
        "begin": op.Unsqueeze(slots.begins_E, [1], out="begins_E1"),
        "end": op.Unsqueeze(slots.ends_E, [1], out="ends_E1"),
        "pads": op.Pad(rest_E1, [0, 2, 0, 1], out="pads_E4"),
    } | {name: layer.parameters[name] for name in names}

    expert = op.inner()
    kinds = {"active": ir.DataType.BOOL} | dict.fromkeys(
        ("begin", "end", "pads"), ir.DataType.INT64
    )
    # The element types follow what the Scan visits, even after a tool has changed its dtype.
    slices = {
        name: expert.value(name, ir.TensorType(kinds[name]) if name in kinds else None)
        for name in visited
    }
    active, idle = expert.inner(), expert.inner()
    weights = {name: slices[name] for name in names}
    y_RD = _rows(active, layer, weights, slices["begin"], slices["end"])
    y_PD = active.Pad(y_RD, slices["pads"], out="y_padded")
    none_PD = idle.Identity(idle_PD, out="none_PD")
    y_PD = expert.If(
        slices["active"],
        then_branch=active.graph([], [y_PD], "active"),
        else_branch=idle.graph([], [none_PD], "idle"),
        out="y_PD",
    )
    y_EPD = op.Scan(
        *visited.values(),
        body=expert.graph(list(slices.values()), [y_PD], "each"),
        num_scan_inputs=len(visited),
        out="y_EPD",
    )
    E = op.Squeeze(op.size("num_experts"), [0], out="E")
    return y_EPD, op.Mul(op.Range(0, E, 1, out="range_E"), P, out="first_scanned")


def _loop(op: Ops, layer: _Layer) -> tuple[ir.Value, ir.Value]:
    """The results in the order of the slots, then a row of zeros."""
    slots, dtype = layer.slots, layer.config.compute_dtype
    active_1A = op.NonZero(slots.counts_E, out="active_1A")
    sequence = op.Loop(
        op.Squeeze(op.Shape(active_1A, start=1, out="A_1"), [0], out="A"),
        op.constant("true", True, ir.DataType.BOOL),
        op.SequenceEmpty(dtype=dtype, out="empty"),
        body=_looped(op, layer, op.Transpose(active_1A, out="active_A1")),
        out="y_by_expert",
    )
    zeros_1D = op.zeros(
        op.Concat([1], op.size("in_features"), axis=0, out="D_2"), dtype, out="zeros_1D"
    )
    sequence = op.SequenceInsert(sequence, zeros_1D, out="y_and_zeros")
    _, first_E = slots.used(op)
    return op.ConcatFromSequence(sequence, axis=0, out="y_looped"), first_E


def _looped(outer: Ops, layer: _Layer, active_A1: ir.Value) -> ir.Graph:
    """The loop's body: appends the i-th active expert's results to the sequence."""
    parameters = {
        name: layer.parameters[name] for name in inputs_of(layer.config, layer.parameters)
    }
    starts = {name: _row_indices(outer, parameters[name], name) for name in ("w1", "w2")}

    op = outer.inner()
    i = op.value("i", ir.TensorType(ir.DataType.INT64), shape=[])
    condition = op.value("condition", ir.TensorType(ir.DataType.BOOL), shape=[])
    results = op.value("results", ir.SequenceType(ir.TensorType(layer.config.compute_dtype)))
    expert_1 = op.Gather(active_A1, i, out="expert_1")
    first_2 = op.Mul(expert_1, [1, 0], out="first_2")
    weights = {}
    for name, value in parameters.items():
        if name in starts:
            # GatherND copies rows on all threads; Gather copies the expert on one.
            rows_O2 = op.Add(starts[name], first_2, out=f"{name}_rows_of_expert")
            weights[name] = op.GatherND(value, rows_O2, out=f"{name}_OI")
        else:
            weights[name] = op.GatherND(value, expert_1, out=f"{name}_O")
    begin_1 = op.Gather(layer.slots.begins_E, expert_1, out="begin_1")
    end_1 = op.Gather(layer.slots.ends_E, expert_1, out="end_1")
    y_RD = _rows(op, layer, weights, begin_1, end_1)
    outputs = [
        op.Identity(condition, out="go_on"),
        op.SequenceInsert(results, y_RD, out="results_next"),
    ]
    return op.graph([i, condition, results], outputs, "expert")


def _row_indices(op: Ops, w_EOI: ir.Value, name: str) -> ir.Value:
    """The indices ``[O, 2]`` of expert 0's rows."""
    size = op.Squeeze(op.Shape(w_EOI, start=1, end=2, out=f"{name}_O1"), [0], out=f"{name}_O")
    rows_O1 = op.Unsqueeze(op.Range(0, size, 1, out=f"{name}_rows"), [1], out=f"{name}_rows_O1")
    return op.Mul(rows_O1, [0, 1], out=f"{name}_rows_O2")
