"""Runs the experts as separate products, a pair for each expert.

A runtime that knows the weights when it loads the file can then convert each expert's weights to
the form that its products need, as ONNX Runtime does. This is faster if an expert gets few rows,
but the file loads more slowly and takes a copy of the weights. Such a body serves one number of
experts.

Legend: D model width, H hidden width, F = H, or 2H when gated, E experts, M slots that have an
expert, R rows of one expert, I and O inputs and outputs of a product.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.expert import activate, expert_inputs, round_hidden
from dynamo_moe.moe_nodes.bodies.ops import Ops
from dynamo_moe.moe_nodes.bodies.slots import combine, sort
from dynamo_moe.moe_nodes.bodies.weights import loaded, stored


def experts(
    op: Ops,
    config: BodyConfig,
    parameters: Mapping[str, ir.Value],
    x_TD: ir.Value,
    ids_TK: ir.Value,
    weights_TK: ir.Value,
    *,
    num_experts: int,
) -> ir.Value:
    """Returns the sum over K of the experts' weighted results, ``[T, D]`` in the compute dtype."""
    dtype = config.compute_dtype
    inputs = expert_inputs(op, config, x_TD, weights_TK, op.size("in_features"))
    slots = sort(op, config, ids_TK)
    unused_1, first_E = slots.used(op)
    end = [np.iinfo(np.int64).max]
    rows_M = op.Slice(slots.rows_N, unused_1, end, [0], out="rows_M")
    x_MD = op.Gather(inputs, rows_M, out="x_MD")

    def parameter(name: str) -> ir.Value:
        tensors = [
            op.entered(parameters[part], part_dtype, out=f"{part}_entered")
            for part, part_dtype in stored(config, name).items()
        ]
        return loaded(op, config, name, tensors, out=f"{name}_wide")

    def products(in_MI: ir.Value, weight: str, bias: str, width: str, out: str) -> list[ir.Value]:
        parts = _split(op, in_MI, slots.counts_E, num_experts)
        transposed = config.shape.is_transposed(weight)
        columns_1 = (
            op.Shape(parameters[weight], start=2, out=f"{weight}_columns")
            if transposed
            else op.size(width)
        )
        flat = op.Concat([-1], columns_1, axis=0, out=f"{weight}_flat")
        rows = op.Reshape(parameter(weight), flat, out=f"{weight}_rows")
        operands = [_split(op, rows, None, num_experts)]
        if bias in parameters:
            flat_b = op.Reshape(parameter(bias), [-1], out=f"{bias}_flat")
            operands.append(_split(op, flat_b, None, num_experts))
        return [
            op.Gemm(in_RI, *weights, transB=int(not transposed), out=out)
            for in_RI, *weights in zip(parts, *operands, strict=True)
        ]

    z_MF = op.Concat(*products(x_MD, "w1", "b1", "in_features", "z_RF"), axis=0, out="z_MF")
    h_MH = round_hidden(op, config, activate(op, config, z_MF))
    y_RDs = products(h_MH, "w2", "b2", "hidden_features", "y_RD")
    D_2 = op.Concat([1], op.size("in_features"), axis=0, out="D_2")
    zeros_1D = op.zeros(D_2, dtype, out="zeros_1D")
    y_rows = op.Concat(*y_RDs, zeros_1D, axis=0, out="y_rows")
    y_T1D = combine(op, config, slots, y_rows, first_E, weights_TK)
    return op.Squeeze(y_T1D, [1], out="y_TD")


def _split(op: Ops, value: ir.Value, sizes_E: ir.Value | None, num_experts: int) -> list[ir.Value]:
    """Splits into each expert's rows: parts of the given sizes, or equal parts."""
    names = [f"{value.name}_{expert}" for expert in range(num_experts)]
    if sizes_E is None:
        return op.Split(value, axis=0, num_outputs=num_experts, out=names)
    return op.Split(value, sizes_E, axis=0, out=names)
