"""Norms as one node.

Root Mean Square Layer Normalization, Zhang and Sennrich, 2019.
Layer Normalization, Ba et al., 2016.
"""

from __future__ import annotations

import onnx_ir as ir

from dynamo_moe.graph.matching import (
    Writer,
    both_orders,
    dimensions,
    maker,
    only_use,
    operand,
    reduces_last_axis,
    scalar,
)


def fuse_norms(writer: Writer) -> None:
    """Makes ``weight * x / sqrt(mean(x * x) + epsilon)`` one RMSNormalization each.

    Where x is less its mean, that is a LayerNormalization.
    """
    for node in list(writer.graph):
        if node.domain or node.op_type != "Mul":
            continue
        for weight, normed in both_orders(node):
            found = _normalized(normed)
            if found is None:
                continue
            x, epsilon = found
            if dimensions(weight) != dimensions(x)[-1:] or weight.dtype != normed.dtype:
                continue
            whole = _uncentred(x)
            kind = "RMSNormalization" if whole is None else "LayerNormalization"
            inputs = [x if whole is None else whole, weight]
            norm = writer.node(node, kind, inputs, {"axis": -1, "epsilon": epsilon})
            writer.replace(node.outputs[0], norm.outputs[0])
            break


def _uncentred(value: ir.Value) -> ir.Value | None:
    """Returns x if a value is ``x - mean(x)`` over the last axis."""
    difference = maker(value, "Sub")
    mean = None if difference is None else maker(difference.inputs[1], "ReduceMean")
    if difference is None or mean is None or mean.inputs[0] is not difference.inputs[0]:
        return None
    return operand(difference, 0) if reduces_last_axis(mean, value) else None


def _normalized(value: ir.Value) -> tuple[ir.Value, float] | None:
    """Returns x and epsilon of ``x / sqrt(mean(x * x) + epsilon)``, in float32.

    In half precision runtimes round in other places than a model, and float64 they compute in
    float32.
    """
    division = _over_root(value) if value.dtype == ir.DataType.FLOAT else None
    if division is None:
        return None
    x, total = division
    epsilon = _epsilon(total, x)
    return None if epsilon is None else (x, epsilon)


def _over_root(value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Returns x and y of ``x / sqrt(y)``, which may be written ``x * y**-0.5``."""
    division = only_use(value, "Div")
    root = None if division is None else maker(division.inputs[1], "Sqrt")
    if division is not None and root is not None:
        return operand(division, 0), operand(root, 0)
    for x, factor in both_orders(only_use(value, "Mul")):
        power = maker(factor, "Pow")
        if power is not None and scalar(power.inputs[1]) == -0.5:
            return x, operand(power, 0)
    return None


def _epsilon(total: ir.Value, x: ir.Value) -> float | None:
    """Returns epsilon if a value is ``mean(x * x) + epsilon`` over the last axis."""
    for mean, epsilon in both_orders(maker(total, "Add")):
        reduce = maker(mean, "ReduceMean")
        if reduce is None or scalar(epsilon) is None or not reduces_last_axis(reduce, x):
            continue
        if _is_square(reduce.inputs[0], x):
            return scalar(epsilon)
    return None


def _is_square(value: ir.Value | None, x: ir.Value) -> bool:
    power = maker(value, "Pow")
    if power is not None:
        return power.inputs[0] is x and scalar(power.inputs[1]) == 2
    product = maker(value, "Mul")
    return product is not None and product.inputs[0] is x and product.inputs[1] is x
