"""The experts' weights and biases, from the tensors that store them to the bodies' compute dtype.

A format of weights that is not plain gets a loader here: see docs/how-to/add_a_weight_format.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import onnx_ir as ir
from onnx_ir.tensor_adapters import from_torch_dtype

from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.ops import Ops

_BIASES = ("b1", "b2")


def stored(config: BodyConfig, name: str) -> dict[str, ir.DataType]:
    """Returns the dtypes of the inputs that hold a weight or a bias, by their names."""
    if name in _BIASES:
        return {name: config.bias_dtype}
    tensors = config.shape.weight_format.stored
    return {f"{name}{tensor.suffix}": from_torch_dtype(tensor.dtype) for tensor in tensors}


def loaded(
    op: Ops, config: BodyConfig, name: str, tensors: Sequence[ir.Value], out: str
) -> ir.Value:
    """Returns a weight, or a part of one, or a bias, in the compute dtype.

    Args:
        op: Records the nodes.
        config: The layer.
        name: ``w1``, ``b1``, ``w2`` or ``b2``.
        tensors: What holds it, as :func:`stored` lists it.
        out: The result's name, where it is not the tensor itself.
    """
    if name in _BIASES:
        return op.cast(tensors[0], config.bias_dtype, config.compute_dtype, out=out)
    return _LOADERS[config.shape.weight_format.encoding](op, config, tensors, name, out)


def inputs_of(config: BodyConfig, parameters: Collection[str]) -> list[str]:
    """Returns the inputs that hold the layer's weights and biases, among a node's inputs."""
    names = [part for name in ("w1", "b1", "w2", "b2") for part in stored(config, name)]
    return [name for name in names if name in parameters]


def _plain(
    op: Ops, config: BodyConfig, tensors: Sequence[ir.Value], name: str, out: str
) -> ir.Value:
    return op.cast(tensors[0], config.operand_dtype, config.compute_dtype, out=out)


def _int4(
    op: Ops, config: BodyConfig, tensors: Sequence[ir.Value], name: str, out: str
) -> ir.Value:
    """``(q - zero point) * scale`` in groups of the last axis, rounded to the operands' dtype."""
    compute = config.compute_dtype
    values, scales, *zero_points = tensors
    eight_bits = op.Cast(values, to=ir.DataType.UINT8, out=f"{name}_bytes")
    fifteen, four = (op.constant(f"bits_{n}", n, ir.DataType.UINT8) for n in (15, 4))
    low = op.BitwiseAnd(eight_bits, fifteen, out=f"{name}_low")
    high = op.BitShift(eight_bits, four, direction="RIGHT", out=f"{name}_high")
    halves = [op.Unsqueeze(half, [-1], out=f"{half.name}_1") for half in (low, high)]
    pairs = op.Concat(*halves, axis=-1, out=f"{name}_pairs")
    scales = op.Unsqueeze(_wide(op, scales, compute), [-1], out=f"{name}_scales_1")
    groups = op.Concat(op.Shape(scales, end=-1, out=f"{name}_NG"), [-1], axis=0, out=f"{name}_NGC")
    codes = op.Cast(op.Reshape(pairs, groups, out=f"{name}_q"), to=compute, out=f"{name}_codes")
    zero = op.constant("eight", 8, compute)
    if zero_points:
        zero = op.Cast(zero_points[0], to=compute, out=f"{name}_zeros")
        zero = op.Unsqueeze(zero, [-1], out=f"{name}_zeros_1")
    numbers = op.Mul(op.Sub(codes, zero, out=f"{name}_centred"), scales, out=f"{name}_groups")
    rows = op.Concat(op.Shape(values, end=-1, out=f"{name}_N"), [-1], axis=0, out=f"{name}_NK")
    matrix = op.Reshape(numbers, rows, out=f"{name}_matrix")
    matrix = op.cast(matrix, compute, config.operand_dtype, out=f"{name}_rounded")
    return op.cast(matrix, config.operand_dtype, compute, out=out)


def _wide(op: Ops, scales: ir.Value, compute: ir.DataType) -> ir.Value:
    return op.Cast(scales, to=compute, out=f"{scales.name}_wide")


_LOADERS: dict[str, Callable[[Ops, BodyConfig, Sequence[ir.Value], str, str], ir.Value]] = {
    "plain": _plain,
    "int4": _int4,
}
