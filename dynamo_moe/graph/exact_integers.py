"""Sums and products of integers in forms that ONNX Runtime computes exactly.

ONNX Runtime 1.31 reduces int32 and int64 in float64: beyond 2^53 it rounds, and where PyTorch wraps
around it saturates. Its CumSum and Mul do as PyTorch does. The last element of a CumSum is there
no later than the ReduceSum: after 9 microseconds instead of 18 for 8 rows of 512. TensorRT for RTX
1.7 builds it.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from dynamo_moe.graph.matching import Dimension, Writer, dimensions, integers, maker, operand

# What float64 and the dtype hold.
_LIMITS = {ir.DataType.INT64: 2**53, ir.DataType.INT32: 2**31 - 1}
_MAGNITUDES = {
    ir.DataType.BOOL: 1,
    ir.DataType.UINT8: 2**8,
    ir.DataType.INT8: 2**7,
    ir.DataType.INT16: 2**15,
    ir.DataType.INT32: 2**31,
}
# Operators that give elements of their first input, or its elements in another dtype.
_SAME = (
    *("Cast", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape"),
    *("Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
)
# Constants of more elements are not read.
_READ_SIZE = 1024
# A size that only has a name is taken for one of at most these.
_MANY = 2**22


def reduce_integers_exactly(model: ir.Model) -> None:
    """Replaces sums and products that may be large, in place.

    Products over axes whose sizes only have names stay as they are.
    """
    writers: dict[int, Writer] = {}
    for node in list(model.graph.all_nodes()):
        graph, axes = node.graph, _axes(node)
        if not axes or not isinstance(graph, ir.Graph) or _is_exact(node, axes):
            continue
        sizes = dimensions(node.inputs[0])
        if node.op_type == "ReduceProd" and not all(isinstance(sizes[a], int) for a in axes):
            continue
        writer = writers.setdefault(id(graph), Writer(graph, f"exact_{len(writers)}"))
        result = operand(node, 0)
        for axis in reversed(axes):
            along = _sum if node.op_type == "ReduceSum" else _product
            result = along(writer, node, result, axis, sizes[axis])
        writer.replace(node.outputs[0], result)
        graph.remove(node, safe=True)


def _axes(node: ir.Node) -> list[int]:
    """Returns the axes of a sum or a product of integers; none for another node."""
    x = node.inputs[0] if node.inputs else None
    if node.domain or node.op_type not in ("ReduceSum", "ReduceProd") or x is None:
        return []
    if x.dtype not in _LIMITS or x.shape is None:
        return []
    axes = integers(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else []
    if not axes and axes is not None and not node.attributes.get_int("noop_with_empty_axes", 0):
        axes = [*range(x.shape.rank())]
    return sorted(axis % x.shape.rank() for axis in axes or [])


def _is_exact(node: ir.Node, axes: list[int]) -> bool:
    """Whether float64 holds the result, whatever the inputs."""
    x = operand(node, 0)
    sizes = dimensions(x)
    count = math.prod(size if isinstance(size := sizes[axis], int) else _MANY for axis in axes)
    largest, limit = _magnitude(x), _LIMITS[x.dtype or ir.DataType.INT64]
    if not count:
        return True
    if node.op_type == "ReduceSum":
        return largest * count <= limit
    return largest <= 1 or math.log2(largest) * count <= math.log2(limit)


def _magnitude(value: ir.Value | None) -> float:
    """Returns what no absolute value of an integer is above; infinity if that is not known."""
    if value is None:
        return math.inf
    known = _MAGNITUDES.get(value.dtype, math.inf) if value.dtype else math.inf
    constant = ir.convenience.get_const_tensor(value)
    if constant is not None and constant.size <= _READ_SIZE:
        numbers = integers(value)
        return known if numbers is None else max(map(abs, numbers), default=0)
    if (node := maker(value, *_SAME, "Where", "OneHot", "ArgMax", "ArgMin")) is None:
        return known
    match node.op_type:
        case "Where":
            return min(known, max(_magnitude(node.inputs[1]), _magnitude(node.inputs[2])))
        case "OneHot":
            return min(known, _magnitude(node.inputs[2]))
        case "ArgMax" | "ArgMin":
            return _MANY
    return min(known, _magnitude(node.inputs[0]))


def _sum(writer: Writer, node: ir.Node, x: ir.Value, axis: int, size: Dimension) -> ir.Value:
    """Returns the sum along an axis."""
    if not isinstance(size, int):  # There may be no element.
        pads = [x, writer.ints([1, 0]), None, writer.ints([axis])]
        x = writer.node(node, "Pad", pads).outputs[0]
    sums = writer.node(node, "CumSum", [x, writer.constant(np.array(axis))]).outputs[0]
    last = writer.constant(np.array([-1] if node.attributes.get_int("keepdims", 1) else -1))
    return writer.node(node, "Gather", [sums, last], {"axis": axis}).outputs[0]


def _product(writer: Writer, node: ir.Node, x: ir.Value, axis: int, size: Dimension) -> ir.Value:
    """Returns the product along an axis: that of its halves, as often as it takes."""
    rest: list[ir.Value] = []
    while isinstance(size, int) and size > 1:
        half, odd = divmod(size, 2)
        sizes = writer.ints([half, half, *[1] * odd])
        parts = writer.node(node, "Split", [x, sizes], {"axis": axis}, results=2 + odd).outputs
        x, size = writer.node(node, "Mul", parts[:2]).outputs[0], half
        rest += parts[2:]
    for factor in rest:
        x = writer.node(node, "Mul", [x, factor]).outputs[0]
    if node.attributes.get_int("keepdims", 1):
        return x
    return writer.node(node, "Squeeze", [x, writer.ints([axis])]).outputs[0]
