"""Packed weights of matrix products, which the file keeps packed and DequantizeLinear reads.

A checkpoint's quantised weights are lazy tensors that decode. Where such a matrix goes into
products alone, the graph gets what it is decoded from, laid out as the product wants it.

Legend: N rows (out), K columns (in) of a matrix, R and C the rows and columns of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor

from custom_ops.dtypes import KERNEL_FLOATS
from custom_ops.packed_weights import ENCODINGS, PackedWeight
from custom_ops.weight_formats import SCALES, ZERO_POINTS
from dynamo_moe.graph.matching import Writer, typed
from dynamo_moe.weights.lazy_tensors import LazyTensor, computed
from dynamo_moe.weights.packed_tensors import is_decoding, packed_matrix
from dynamo_moe.weights.placeholders import Lazies, as_ir

OPSET = 21
"""The first with integers of 4 bits, and with blocks in DequantizeLinear."""

# The types of the formats that DequantizeLinear reads, and the opset from which it does.
_TYPES = {
    "int4": (ir.DataType.INT4, OPSET),
    "int8": (ir.DataType.INT8, 13),
    "fp8": (ir.DataType.FLOAT8E4M3FN, 19),
}
# Fewer columns to a scale would need as many scales as values.
_LEAST_DEPTH = 8
# Rows of a matrix that are transposed at a time.
_PANEL_ROWS = 1024


def opset_of(lazies: Lazies) -> int:
    """Returns the opset that a model's packed matrices need; 0 if it has none."""
    matrices = (lazy for lazy in lazies.values() if lazy.ndim == 2 and is_decoding(lazy))
    found = filter(None, map(packed_matrix, matrices))
    return max((_opset_of(*matrix) for matrix in found if matrix[0] in _TYPES), default=0)


def dequantize_weights(model: ir.Model) -> set[str]:
    """Puts DequantizeLinear of packed tensors in the place of decoded matrices of products.

    Returns:
        The names of the initializers that hold packed weights.
    """
    graph, writer = model.graph, Writer(model.graph, "dequantized")
    added: set[str] = set()
    for weight in list(graph.initializers.values()):
        decoded = _decoded(weight)
        if decoded is None:
            continue
        try:
            matrix = _matrix_of(weight, decoded, model.opset_imports[""])
        except _LeftError:
            continue
        users = [node for node, _ in weight.uses()]
        inputs = _initializers(str(weight.name), matrix)
        for user in users:
            _dequantize(writer, user, matrix, inputs)
        graph.initializers.pop(str(weight.name))
        for value in inputs:
            graph.register_initializer(value)
            added.add(str(value.name))
    return added


def notes(model: ir.Model) -> list[str]:
    """Returns what a user should know of the packed matrices of a finished graph."""
    return [*_kept(model.graph.initializers), *_left(model)]


def _kept(initializers: Mapping[str, ir.Value]) -> Iterator[str]:
    """Says how many matrices stay packed, and what runtimes do with them."""
    for encoding, (dtype, _) in _TYPES.items():
        packed = [
            name
            for name, value in initializers.items()
            if value.dtype == dtype and f"{name}{SCALES}" in initializers
        ]
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


def _left(model: ir.Model) -> list[str]:
    """Says which packed matrices are decoded, one for each reason."""
    found: dict[str, str] = {}
    for weight in model.graph.initializers.values():
        decoded = _decoded(weight)
        if weight.uses() and decoded is not None:
            try:
                _matrix_of(weight, decoded, model.opset_imports[""])
            except _LeftError as error:
                found.setdefault(str(error), str(weight.name))
    return [f"packed weights such as {name} are decoded: {why}" for why, name in found.items()]


class _LeftError(Exception):
    """A weight stays decoded; the message says why."""


class _Matrix(NamedTuple):
    """A packed matrix, as DequantizeLinear takes it.

    Attributes:
        encoding: Its format.
        packed: Its tensors, of ``[N, K]``.
        dtype: The dtype of its numbers.
    """

    encoding: str
    packed: PackedWeight
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        rows, row_bytes = self.packed.values.shape
        return rows, row_bytes * ENCODINGS[self.encoding].per_byte

    @property
    def block(self) -> tuple[int, int]:
        """The rows and columns that share a scale; of a whole row, or all rows, those it has."""
        rows, columns = self.shape
        found = ENCODINGS[self.encoding].blocks(rows, columns, self.packed.scales.shape)
        return min(found[0][0], rows), min(found[0][1], columns)

    @property
    def depth(self) -> int:
        """The columns that share a scale once a block that is cut off has the others' size.

        TensorRT divides the columns by the scales.
        """
        return math.gcd(self.block[1], self.shape[1])

    @property
    def computes_in(self) -> torch.dtype:
        """A dtype that has the scales' values; what it computes is then cast to the matrix's."""
        scales = self.packed.scales.dtype
        return self.dtype if scales == self.dtype else torch.float32


def _decoded(weight: ir.Value) -> LazyTensor | None:
    """Returns the values of a matrix that is decoded from packed tensors; None if it is not."""
    raw = getattr(weight.const_value, "raw", None)
    is_matrix = isinstance(raw, LazyTensor) and raw.ndim == 2 and is_decoding(raw)
    return raw if is_matrix else None


def _matrix_of(weight: ir.Value, raw: LazyTensor, opset: int) -> _Matrix:
    """Returns the packed matrix of a decoded weight.

    Raises:
        _LeftError: If it cannot take the weight's place.
    """
    uses = {_lies_by_rows(node) if index == 1 else None for node, index in weight.uses()}
    if len(uses) != 1 or None in uses or weight.is_graph_output():
        raise _LeftError("other operators than products use them")
    found = packed_matrix(raw if uses == {True} else raw.permute(1, 0))
    if found is None or raw.dtype not in KERNEL_FLOATS:
        raise _LeftError("they are not in blocks, or were changed")
    encoding, packed = found
    if encoding not in _TYPES:
        raise _LeftError(f"ONNX Runtime's DequantizeLinear does not read {encoding}")
    if _opset_of(encoding, packed) > opset:
        raise _LeftError(f"opset {opset} has no DequantizeLinear of {encoding}, but {OPSET} has")
    matrix = _Matrix(encoding, packed, raw.dtype)
    if matrix.depth < _LEAST_DEPTH:
        raise _LeftError(f"fewer than {_LEAST_DEPTH} columns would share a scale")
    if encoding == "int4" and matrix.shape[0] % 2:
        raise _LeftError("a byte has two rows' numbers, and their number is odd")
    return matrix


def _opset_of(encoding: str, packed: PackedWeight) -> int:
    """Returns the first opset whose DequantizeLinear reads a matrix."""
    return _TYPES[encoding][1] if packed.scales.shape[1] == 1 else OPSET


def _lies_by_rows(node: ir.Node) -> bool | None:
    """Whether a product takes its second operand as ``[N, K]``; None if it is no such product."""
    if node.domain or node.op_type not in ("MatMul", "Gemm"):
        return None
    return bool(node.attributes.get_int("transB", 0))


def _initializers(name: str, matrix: _Matrix) -> list[ir.Value]:
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
        _initializer(name, values, dtype),
        _initializer(f"{name}{SCALES}", _without_one(scales_RC.permute(1, 0))),
    ]
    if zero_points_RC is not None:
        size = zero_points_RC.shape[1], rows // 2
        pairs = computed(_turned_zero_points, (zero_points_RC,), size, torch.int8)
        made.append(_initializer(f"{name}{ZERO_POINTS}", _without_one(pairs), dtype))
    return made


def _initializer(name: str, tensor: Tensor, dtype: ir.DataType | None = None) -> ir.Value:
    weight = as_ir(tensor, name, dtype)
    kind = ir.TensorType(weight.dtype)
    return ir.Value(name=name, shape=ir.Shape(weight.shape), type=kind, const_value=weight)


def _without_one(blocks: Tensor) -> Tensor:
    """Returns scales without the axis along which there is one."""
    return blocks.reshape(-1) if blocks.shape[0] == 1 else blocks


def _dequantize(writer: Writer, user: ir.Node, matrix: _Matrix, inputs: Sequence[ir.Value]) -> None:
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


def _spread(writer: Writer, user: ir.Node, matrix: _Matrix, scales: ir.Value) -> ir.Value:
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
