"""The function for a root mean square normalisation."""

from __future__ import annotations

import onnx_ir as ir

from dynamo_moe.moe_nodes.bodies.ops import Ops

_STANDARD_OPSET = 23
_INPUTS = ("x", "weight")


def rms_norm_body(node: ir.Node, opset: int, *, beside: bool) -> ir.Function:
    """Returns the function for a node ``RMSNorm``, named after its configuration.

    The function is the standard's operator if it replaces the node, so is not ``beside`` it, the
    opset has that operator, and everything is float32. Otherwise it is written out: in half
    precision the standard rounds before the multiplication by the weight and ONNX Runtime 1.31
    after it, and in float64 the standard computes in float32 by default.

    Raises:
        ValueError: If the dtype of an input is unknown.
    """
    x_dtype, weight_dtype = (_dtype(node, position) for position in range(2))
    plus_one, early = (
        bool(node.attributes[name].as_int()) for name in ("weight_plus_one", "round_before_weight")
    )
    op = Ops(opset, beside=beside)
    x_input, weight_input = (op.value(name) for name in _INPUTS)
    x = op.entered(x_input, x_dtype, out="x_entered")
    weight = op.entered(weight_input, weight_dtype, out="weight_entered")
    wide = ir.DataType.DOUBLE if x_dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    factor = op.cast(weight, weight_dtype, wide, out="weight_wide")
    if plus_one:
        factor = op.Add(factor, op.constant("one", 1.0, wide), out="factor")
    standard = not beside and opset >= _STANDARD_OPSET
    if standard and x_dtype == weight_dtype == ir.DataType.FLOAT:
        epsilon = ir.RefAttr("epsilon", "epsilon", ir.AttributeType.FLOAT)
        (y,) = op.record("RMSNormalization", [x, factor], [epsilon], ["y"])
    else:
        normed = _normed(op, op.cast(x, x_dtype, wide, out="x_wide"), wide)
        if early and x_dtype != wide:
            rounded = op.cast(normed, wide, x_dtype, out="normed_rounded")
            normed = op.cast(rounded, x_dtype, wide, out="normed_wide")
        y = op.cast(op.Mul(normed, factor, out="scaled"), wide, x_dtype, out="y")
        y = op.leaving(y, x_input, x_dtype, out="y_leaving")
    parts = {
        x_dtype.short_name(): True,
        weight_dtype.short_name(): weight_dtype != x_dtype,
        "plus_one": plus_one,
        "rounded": early,
    }
    name = "_".join(part for part, present in parts.items() if present)
    graph = ir.Graph(
        [x_input, weight_input], [y], nodes=op.nodes, opset_imports={"": opset}, name=name
    )
    return ir.Function("moe", "RMSNorm", overload=name, graph=graph, attributes=[])


def _normed(op: Ops, x: ir.Value, dtype: ir.DataType) -> ir.Value:
    mean = op.ReduceMean(op.Mul(x, x, out="squares"), [-1], out="mean_square")
    shifted = op.Add(mean, op.real("epsilon", dtype), out="shifted")
    return op.Div(x, op.Sqrt(shifted, out="root"), out="normed")


def _dtype(node: ir.Node, position: int) -> ir.DataType:
    value = node.inputs[position]
    if value is None or value.dtype is None:
        raise ValueError(f"node {node.name!r}: the dtype of input {position} is unknown")
    return value.dtype
