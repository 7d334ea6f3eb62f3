"""The experts' weights and biases, from the tensors that store them to the bodies' compute dtype.

A format of weights that is not plain gets a loader here: see docs/how-to/add_a_weight_format.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype

from custom_ops.packed_weights import E2M1, E8M0, ENCODINGS, WHOLE
from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.ops import Ops

_BIASES = ("b1", "b2")
# The codes of 4 bits of all bytes, and the numbers of all bytes.
_PAIRS = np.array([(byte & 15, byte >> 4) for byte in range(256)])
_TABLES = {
    "e8m0": np.array(E8M0),
    "e4m3": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy(),
}


def stored(config: BodyConfig, name: str) -> dict[str, ir.DataType]:
    """Returns the dtypes of the inputs that hold a weight or a bias, by their names."""
    if name in _BIASES:
        return {name: config.bias_dtype}
    tensors = config.shape.weight_format.stored
    return {f"{name}{tensor.suffix}": from_torch_dtype(tensor.dtype) for tensor in tensors}


def loaded(
    op: Ops,
    config: BodyConfig,
    name: str,
    tensors: Sequence[ir.Value],
    out: str,
    *,
    by_floats: bool = False,
) -> ir.Value:
    """Returns a weight, or a part of one, or a bias, in the compute dtype.

    Args:
        op: Records the nodes.
        config: The layer.
        name: ``w1``, ``b1``, ``w2`` or ``b2``.
        tensors: What holds it, as :func:`stored` lists it.
        out: The result's name, where it is not the tensor itself.
        by_floats: Whether packed bytes are read by DequantizeLinear alone and no integers of 8 bits
            are computed with, as TensorRT requires of constants; a CPU is slower so.
    """
    if name in _BIASES:
        return op.cast(tensors[0], config.bias_dtype, config.compute_dtype, out=out)
    if by_floats:
        dtypes = stored(config, name)
        tensors = [
            _floats(op, value, part) if dtype == ir.DataType.INT8 else value
            for value, (part, dtype) in zip(tensors, dtypes.items(), strict=True)
        ]
    return _LOADERS[config.shape.weight_format.encoding](op, config, tensors, name, out)


def _floats(op: Ops, values: ir.Value, name: str) -> ir.Value:
    unit = op.constant("unit", 1, ir.DataType.FLOAT)
    floats = op.DequantizeLinear(values, unit, out=f"{name}_floats")
    floats.type = ir.TensorType(ir.DataType.FLOAT)
    return floats


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
    if values.dtype == ir.DataType.FLOAT:
        table = op.constant("pairs", _PAIRS, compute)
        pairs = op.Gather(table, _indices(op, values, name), out=f"{name}_pairs")
    else:
        eight_bits = op.Cast(values, to=ir.DataType.UINT8, out=f"{name}_bytes")
        fifteen, four = (op.constant(f"bits_{n}", n, ir.DataType.UINT8) for n in (15, 4))
        low = op.BitwiseAnd(eight_bits, fifteen, out=f"{name}_low")
        high = op.BitShift(eight_bits, four, direction="RIGHT", out=f"{name}_high")
        halves = [op.Unsqueeze(half, [-1], out=f"{half.name}_1") for half in (low, high)]
        pairs = op.Concat(*halves, axis=-1, out=f"{name}_pairs")
    wide = op.Cast(scales, to=compute, out=f"{name}_scales_wide")
    codes = op.Cast(_grouped(op, config, pairs, scales, name), to=compute, out=f"{name}_codes")
    zero = op.constant("eight", 8, compute)
    if zero_points:
        zero = op.Cast(zero_points[0], to=compute, out=f"{name}_zeros")
        zero = op.Unsqueeze(zero, [-1], out=f"{name}_zeros_1")
    centred = op.Sub(codes, zero, out=f"{name}_centred")
    return _scaled(op, config, centred, wide, values, name, out)


def _float4(
    op: Ops, config: BodyConfig, tensors: Sequence[ir.Value], name: str, out: str
) -> ir.Value:
    """Both numbers of a byte, and the number of a scale's, from tables."""
    compute = config.compute_dtype
    encoding = ENCODINGS[config.shape.weight_format.encoding]
    # Zero points are there only so that others may come behind them.
    values, scales, *_ = tensors
    numbers = op.constant("e2m1_pairs", np.array(E2M1)[_PAIRS], compute)
    table = op.constant(encoding.scale_elements, _TABLES[encoding.scale_elements], compute)
    pairs = op.Gather(numbers, _indices(op, values, name), out=f"{name}_pairs")
    wide = op.Gather(table, _indices(op, scales, f"{name}_scales"), out=f"{name}_scales_wide")
    if encoding.has_global_scales:
        factors = op.Cast(tensors[-1], to=compute, out=f"{name}_factors")
        wide = op.Mul(wide, factors, out=f"{name}_scales_all")
    return _scaled(op, config, _grouped(op, config, pairs, scales, name), wide, values, name, out)


def _int8(
    op: Ops, config: BodyConfig, tensors: Sequence[ir.Value], name: str, out: str
) -> ir.Value:
    """Integers times the scale of their group."""
    compute = config.compute_dtype
    values, scales, *_ = tensors
    wide = op.Cast(scales, to=compute, out=f"{name}_scales_wide")
    codes = op.Cast(_grouped(op, config, values, scales, name), to=compute, out=f"{name}_codes")
    return _scaled(op, config, codes, wide, values, name, out)


def _fp8(op: Ops, config: BodyConfig, tensors: Sequence[ir.Value], name: str, out: str) -> ir.Value:
    """Numbers from a table, times the scale of their block, row or matrix."""
    compute = config.compute_dtype
    values, scales, *_ = tensors
    numbers = op.constant("e4m3", _TABLES["e4m3"], compute)
    matrix = op.Gather(numbers, _indices(op, values, name), out=f"{name}_numbers")
    scales = op.Cast(scales, to=compute, out=f"{name}_scales_wide")
    if WHOLE not in config.shape.weight_format.block:
        scales = _spread(op, values, scales, name)
    matrix = op.Mul(matrix, scales, out=f"{name}_matrix")
    matrix = op.cast(matrix, compute, config.operand_dtype, out=f"{name}_rounded")
    return op.cast(matrix, config.operand_dtype, compute, out=out)


def _spread(op: Ops, values: ir.Value, scales: ir.Value, name: str) -> ir.Value:
    """The scales of blocks ``[..., R, C]`` as those of values ``[..., N, K]``."""
    for axis, end, attribute in ((-1, None, "block_size"), (-2, -1, "block_rows")):
        ends = {} if end is None else {"end": end}
        size = op.Shape(values, start=axis, out=f"{name}_size", **ends)
        places = op.Range(0, op.Squeeze(size, [0], out=f"{name}_last"), 1, out=f"{name}_places")
        blocks = op.Div(places, op.size(attribute), out=f"{name}_blocks")
        scales = op.Gather(scales, blocks, axis=axis, out=f"{name}_spread")
    return scales


def _indices(op: Ops, values: ir.Value, name: str) -> ir.Value:
    """The places of bytes in a table of 256."""
    if values.dtype == ir.DataType.FLOAT:
        count = op.constant("bytes", 256, ir.DataType.FLOAT)
        values = op.Mod(op.Add(values, count, out=f"{name}_up"), count, fmod=1, out=f"{name}_u8")
    else:
        values = op.Cast(values, to=ir.DataType.UINT8, out=f"{name}_bytes")
    return op.Cast(values, to=ir.DataType.INT32, out=f"{name}_indices")


def _grouped(
    op: Ops, config: BodyConfig, numbers: ir.Value, scales: ir.Value, name: str
) -> ir.Value:
    """The values, of which the last axes have N times K, as ``[..., N, K / G, G]``."""
    sizes = op.Shape(scales, out=f"{name}_NG")
    if WHOLE not in config.shape.weight_format.block:
        size_1 = op.size("block_size")
    else:
        pair = -2 if _per_byte(config) > 1 else -1
        size_1 = op.ReduceProd(op.Shape(numbers, start=pair, out=f"{name}_row"), out=f"{name}_C")
    groups = op.Concat(sizes, size_1, axis=0, out=f"{name}_NGC")
    return op.Reshape(numbers, groups, allowzero=1, out=f"{name}_q")


def _per_byte(config: BodyConfig) -> int:
    return ENCODINGS[config.shape.weight_format.encoding].per_byte


def _scaled(
    op: Ops,
    config: BodyConfig,
    numbers: ir.Value,
    scales: ir.Value,
    values: ir.Value,
    name: str,
    out: str,
) -> ir.Value:
    """The groups times their scales, ``[..., N, K]``, rounded to the operands' dtype."""
    compute = config.compute_dtype
    scales = op.Unsqueeze(scales, [-1], out=f"{name}_scales_1")
    groups = op.Mul(numbers, scales, out=f"{name}_groups")
    columns_1 = op.Shape(values, start=-1, out=f"{name}_B")
    if _per_byte(config) > 1:
        columns_1 = op.Mul(columns_1, _per_byte(config), out=f"{name}_K")
    rows = op.Concat(op.Shape(values, end=-1, out=f"{name}_N"), columns_1, axis=0, out=f"{name}_NK")
    matrix = op.Reshape(groups, rows, allowzero=1, out=f"{name}_matrix")
    matrix = op.cast(matrix, compute, config.operand_dtype, out=f"{name}_rounded")
    return op.cast(matrix, config.operand_dtype, compute, out=out)


_LOADERS: dict[str, Callable[[Ops, BodyConfig, Sequence[ir.Value], str, str], ir.Value]] = {
    "plain": _plain,
    "int4": _int4,
    "mxfp4": _float4,
    "fp8": _fp8,
    "nvfp4": _float4,
    "int8": _int8,
}
