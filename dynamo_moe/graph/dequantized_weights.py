"""Packed weights of matrix products, which the file keeps packed and DequantizeLinear reads.

Where a matrix that decodes goes into products alone, the graph gets what it is decoded from: as
the operator of a runtime that multiplies packed matrices, or laid out for DequantizeLinear and the
product.

Legend: N rows (out), K columns (in) of a matrix, R and C the rows and columns of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor

from custom_ops.weight_formats import SCALES, ZERO_POINTS
from dynamo_moe.graph.matching import Writer, dimensions, typed
from dynamo_moe.graph.matmul_nbits import multiply_packed, operands, takes
from dynamo_moe.graph.packed_matrices import (
    LeftError,
    PackedMatrix,
    decoded,
    initializer,
    matrix_of,
    packed_matrices,
)
from dynamo_moe.operators.foreign import ForeignOperator
from dynamo_moe.weights.lazy_tensors import computed
from dynamo_moe.weights.placeholders import Lazies

OPSET = 21
"""The first with integers of 4 bits, and with blocks in DequantizeLinear."""

# The types of the formats that DequantizeLinear reads, and the opset from which it does.
_TYPES = {
    "int4": (ir.DataType.INT4, OPSET),
    "int8": (ir.DataType.INT8, 13),
    "fp8": (ir.DataType.FLOAT8E4M3FN, 19),
}
# The first opset with scales in half precision.
_HALF_SCALES = 19
# Fewer columns to a scale would need as many scales as values.
_LEAST_DEPTH = 8
# Rows of a matrix that are transposed at a time.
_PANEL_ROWS = 1024


def opset_of(lazies: Lazies) -> int:
    """Returns the opset that a model's packed matrices need; 0 if it has none."""
    found = packed_matrices(lazies)
    return max((_opset_of(name, packed.scales) for name, packed in found), default=0)


def dequantize_weights(model: ir.Model, product: ForeignOperator | None = None) -> set[str]:
    """Puts what decoded matrices of products are decoded from in their place.

    Args:
        model: The graph, simplified.
        product: A runtime's operator that multiplies packed matrices; what it does not take, and
            without it all, DequantizeLinear reads.

    Returns:
        The names of the initializers that hold packed weights.
    """
    graph, writer = model.graph, Writer(model.graph, "dequantized")
    added: set[str] = set()
    for weight in list(graph.initializers.values()):
        raw, users = decoded(weight), [node for node, _ in weight.uses()]
        if raw is None:
            continue
        try:
            matrix = matrix_of(weight, raw)
            is_multiplied = product is not None and takes(matrix, users)
            if not is_multiplied:
                _check(matrix, model.opset_imports[""])
        except LeftError:
            continue
        made = operands if is_multiplied else _initializers
        inputs = made(str(weight.name), matrix)
        order = None
        if matrix.order is not None:
            order = initializer(f"{weight.name}_order", matrix.order)
        for user in users:
            if order is not None:
                _order_columns(writer, user, order)
            if product is not None and is_multiplied:
                multiply_packed(writer, user, matrix, inputs, product)
                model.opset_imports.setdefault(product.domain, 1)
            else:
                _dequantize(writer, user, matrix, inputs)
        graph.initializers.pop(str(weight.name))
        for value in (*inputs, *filter(None, [order])):
            graph.register_initializer(value)
            added.add(str(value.name))
    return added


def notes(model: ir.Model) -> list[str]:
    """Returns what a user should know of the packed matrices of a finished graph."""
    return [*_kept(model.graph.initializers), *_left(model)]


def _kept(initializers: Mapping[str, ir.Value]) -> Iterator[str]:
    """Says how many matrices stay packed, and what runtimes do with them."""
    if multiplied := _packed(initializers, ir.DataType.UINT8):
        yield f"{len(multiplied)} weights of products stay packed, for MatMulNBits"
    for encoding, (dtype, _) in _TYPES.items():
        packed = _packed(initializers, dtype)
        if not packed:
            continue
        rounding = (
            ": ONNX Runtime on a CPU rounds their tokens to 8 bits, unless the session's entry "
            "session.qdq_matmulnbits_accuracy_level is 1"
        )
        is_fused = dtype != ir.DataType.FLOAT8E4M3FN
        yield f"{len(packed)} weights of products stay packed ({encoding}){rounding * is_fused}"
        if any(f"{name}{ZERO_POINTS}" in initializers for name in packed):
            yield "packed weights have zero points, which TensorRT refuses: opset=20 decodes them"


def _packed(initializers: Mapping[str, ir.Value], dtype: ir.DataType) -> list[str]:
    """Returns the weights of a type that have scales of a matrix beside them; experts' have E."""
    scales = {name: initializers.get(f"{name}{SCALES}") for name in initializers}
    return [
        name
        for name, beside in scales.items()
        if initializers[name].dtype == dtype
        and beside is not None
        and beside.shape is not None
        and beside.shape.rank() <= 2
    ]


def _left(model: ir.Model) -> list[str]:
    """Says which packed matrices are decoded, one for each reason."""
    found: dict[str, str] = {}
    for weight in model.graph.initializers.values():
        raw = decoded(weight)
        if weight.uses() and raw is not None:
            try:
                _check(matrix_of(weight, raw), model.opset_imports[""])
            except LeftError as error:
                found.setdefault(str(error), str(weight.name))
    return [f"packed weights such as {name} are decoded: {why}" for why, name in found.items()]


def _check(matrix: PackedMatrix, opset: int) -> None:
    """Checks that DequantizeLinear reads a matrix.

    Raises:
        LeftError: If it does not.
    """
    encoding = matrix.encoding
    if _opset_of(encoding, matrix.packed.scales) > opset:
        raise LeftError(f"opset {opset} has no DequantizeLinear of {encoding}, but {OPSET} has")
    if matrix.depth < _LEAST_DEPTH:
        raise LeftError(f"fewer than {_LEAST_DEPTH} columns would share a scale")
    if encoding == "int4" and matrix.shape[0] % 2:
        raise LeftError("a byte has two rows' numbers, and their number is odd")


def _opset_of(encoding: str, scales_RC: Tensor) -> int:
    """Returns the first opset whose DequantizeLinear reads a matrix with these scales."""
    if scales_RC.shape[1] > 1:
        return OPSET
    _, opset = _TYPES[encoding]
    return opset if scales_RC.dtype == torch.float32 else max(opset, _HALF_SCALES)


def _initializers(name: str, matrix: PackedMatrix) -> list[ir.Value]:
    """Returns the values, the scales and, where there are some, the zero points of a weight."""
    rows, columns = matrix.shape
    dtype, _ = _TYPES[matrix.encoding]
    values, scales_RC, zero_points_RC, _ = matrix.packed
    if matrix.encoding == "int4":
        values = computed(_turned_pairs, (values,), (columns, rows // 2), torch.int8)
    elif matrix.encoding == "fp8":
        values = values.view(torch.float8_e4m3fn).permute(1, 0)
    else:
        values = values.permute(1, 0)
    made = [
        initializer(name, values, dtype),
        initializer(f"{name}{SCALES}", _without_one(scales_RC.permute(1, 0))),
    ]
    if zero_points_RC is not None:
        size = zero_points_RC.shape[1], rows // 2
        pairs = computed(_turned_zero_points, (zero_points_RC,), size, torch.int8)
        made.append(initializer(f"{name}{ZERO_POINTS}", _without_one(pairs), dtype))
    return made


def _without_one(blocks: Tensor) -> Tensor:
    """Returns scales without the axis along which there is one."""
    return blocks.reshape(-1) if blocks.shape[0] == 1 else blocks


def _dequantize(
    writer: Writer, user: ir.Node, matrix: PackedMatrix, inputs: Sequence[ir.Value]
) -> None:
    """Gives a product the matrix that is read from a weight's initializers."""
    sizes = matrix.shape[::-1]
    values, scales, *zero_points = inputs
    wide, narrow = map(from_torch_dtype, (matrix.computes_in, matrix.dtype))

    def cast(value: ir.Value, dtype: ir.DataType) -> ir.Value:
        if value.dtype == dtype:
            return value
        result = writer.node(user, "Cast", [value], {"to": dtype}).outputs[0]
        result.type, result.shape = ir.TensorType(dtype), value.shape
        return result

    scales = _spread(writer, user, matrix, cast(scales, wide))
    by_rows = matrix.packed.scales.shape[1] == 1
    blocks = {"axis": 1} if by_rows else {"axis": 0, "block_size": matrix.depth}
    read = [values, scales, *zero_points]
    result = writer.node(user, "DequantizeLinear", read, blocks).outputs[0]
    user.replace_input_with(1, cast(typed(result, scales, sizes), narrow))
    user.attributes.pop("transB", None)


def _order_columns(writer: Writer, user: ir.Node, order_K: ir.Value) -> None:
    """Gives a product its first operand with columns in the order of its packed weight's."""
    x: ir.Value = user.inputs[0]  # type: ignore[assignment]  # A product has two.
    axis = 0 if user.attributes.get_int("transA", 0) else -1
    ordered = writer.node(user, "Gather", [x, order_K], {"axis": axis}).outputs[0]
    user.replace_input_with(0, typed(ordered, x, dimensions(x)))


def _spread(writer: Writer, user: ir.Node, matrix: PackedMatrix, scales: ir.Value) -> ir.Value:
    """Returns scales of which each row has its own, and blocks as many columns each."""
    rows, columns = matrix.shape
    of_rows, of_columns = matrix.packed.scales.shape
    block_rows, block_columns = matrix.block

    def gathered(count: int, block: int, axis: int, sizes: tuple[int, ...]) -> ir.Value:
        places = writer.constant(np.arange(count, dtype=np.int32) // block)
        node = writer.node(user, "Gather", [scales, places], {"axis": axis})
        return typed(node.outputs[0], scales, sizes)

    if of_columns > 1 and matrix.depth != block_columns:
        of_columns = columns // matrix.depth
        scales = gathered(of_columns, block_columns // matrix.depth, 0, (of_columns, of_rows))
    if of_rows != rows:
        sizes = (of_columns, rows) if of_columns > 1 else (rows,)
        scales = gathered(rows, block_rows, len(sizes) - 1, sizes)
    return scales


# --- Bytes ---


def _turned_pairs(values_NB: Tensor) -> Tensor:
    """Returns integers with a sign ``[K, N / 2]``, two to a byte, of codes ``[N, K / 2]``."""
    rows, row_bytes = values_NB.shape
    turned = torch.empty(2 * row_bytes, rows // 2, dtype=torch.int8)
    for first in range(0, rows, _PANEL_ROWS):
        panel_NB = values_NB[first : first + _PANEL_ROWS].view(torch.uint8)
        codes_NK = torch.stack((panel_NB & 15, panel_NB >> 4), dim=-1).flatten(1)
        turned[:, first // 2 : (first + _PANEL_ROWS) // 2] = _signed_pairs(codes_NK.t())
    return turned


def _turned_zero_points(zero_points_NG: Tensor) -> Tensor:
    """Returns integers with a sign ``[G, N / 2]``, two to a byte, of codes ``[N, G]``."""
    return _signed_pairs(zero_points_NG.view(torch.uint8).t())


def _signed_pairs(codes_KN: Tensor) -> Tensor:
    """Returns codes less 8, two neighbours to a byte, that of the even one in its low bits."""
    signed_KN = codes_KN ^ 8
    return (signed_KN[:, ::2] | signed_KN[:, 1::2] << 4).view(torch.int8)
