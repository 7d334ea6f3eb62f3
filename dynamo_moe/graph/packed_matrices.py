"""The packed matrices of products among a graph's weights.

A checkpoint's quantised weights, and those that ``quantize`` has rounded, are lazy tensors that
decode. Here they are found again, with what they are decoded from.

Legend: N rows (out), K columns (in) of a matrix, R and C the rows and columns of its blocks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import onnx_ir as ir
import torch
from torch import Tensor

from custom_ops.dtypes import KERNEL_FLOATS
from custom_ops.packed_weights import ENCODINGS, PackedWeight, numbers
from dynamo_moe.weights.lazy_tensors import LazyTensor, computed
from dynamo_moe.weights.packed_tensors import is_decoding, packed_matrix
from dynamo_moe.weights.placeholders import Lazies, as_ir


class LeftError(Exception):
    """A weight stays decoded; the message says why."""


class PackedMatrix(NamedTuple):
    """A packed matrix of products.

    Attributes:
        encoding: Its format in the file: ``int4``, ``int8`` or ``fp8``.
        packed: Its tensors, of ``[N, K]``.
        dtype: The dtype of its numbers.
        order: The column ``[K]`` of the matrix for each that the tensors have; None: the same.
    """

    encoding: str
    packed: PackedWeight
    dtype: torch.dtype
    order: Tensor | None = None

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


def packed_matrices(lazies: Lazies) -> list[tuple[str, PackedWeight]]:
    """Returns the format and the tensors, as in a file, of all packed matrices of a model."""
    matrices = (lazy for lazy in lazies.values() if lazy.ndim == 2 and is_decoding(lazy))
    found = (stored for stored in map(packed_matrix, matrices) if stored is not None)
    return [_in_file(stored.encoding, stored.packed) for stored in found]


def decoded(weight: ir.Value) -> LazyTensor | None:
    """Returns the values of a matrix that is decoded from packed tensors; None if it is not."""
    raw = getattr(weight.const_value, "raw", None)
    is_matrix = isinstance(raw, LazyTensor) and raw.ndim == 2 and is_decoding(raw)
    return raw if is_matrix else None


def matrix_of(weight: ir.Value, raw: LazyTensor) -> PackedMatrix:
    """Returns the packed matrix of a decoded weight.

    Raises:
        LeftError: If products are not all that uses the weight, or it is not in blocks.
    """
    uses = {_lies_by_rows(node) if index == 1 else None for node, index in weight.uses()}
    if len(uses) != 1 or None in uses or weight.is_graph_output():
        raise LeftError("other operators than products use them")
    found = packed_matrix(raw if uses == {True} else raw.permute(1, 0))
    if found is None or raw.dtype not in KERNEL_FLOATS:
        raise LeftError("they are not in blocks, or were changed")
    encoding, packed = _in_file(found.encoding, found.packed)
    return PackedMatrix(encoding, packed, raw.dtype, found.order)


def initializer(name: str, tensor: Tensor, dtype: ir.DataType | None = None) -> ir.Value:
    """Returns a weight's part as an initializer; see :func:`as_ir`."""
    weight = as_ir(tensor, name, dtype)
    kind = ir.TensorType(weight.dtype)
    return ir.Value(name=name, shape=ir.Shape(weight.shape), type=kind, const_value=weight)


def _lies_by_rows(node: ir.Node) -> bool | None:
    """Whether a product takes its second operand as ``[N, K]``; None if it is no such product."""
    if node.domain or node.op_type not in ("MatMul", "Gemm"):
        return None
    return bool(node.attributes.get_int("transB", 0))


def _in_file(name: str, packed: PackedWeight) -> tuple[str, PackedWeight]:
    """Returns a matrix in a format that runtimes read, of the same products: E2M1 as integers.

    ONNX Runtime's DequantizeLinear reads no FP4, and what is looked up in a table it decodes while
    it loads the file, as it folds constants. Twice a number of E2M1 is an integer, and half of a
    scale is exact.
    """
    encoding = ENCODINGS[name]
    if encoding.elements != "e2m1":
        return name, packed
    rows, row_bytes = packed.values.shape
    values = computed(_twice, (packed.values,), (rows, row_bytes * encoding.per_byte), torch.int8)
    parts = [part for part in (packed.scales, packed.global_scales) if part is not None]
    halves = partial(_half, elements=encoding.scale_elements)
    scales = computed(halves, parts, tuple(packed.scales.shape), torch.float32)
    return "int8", PackedWeight(values, scales)


def _twice(values_NB: Tensor) -> Tensor:
    """Returns twice the E2M1 numbers of bytes, as integers ``[N, K]``."""
    return (2 * numbers("e2m1", values_NB, torch.float16)).to(torch.int8)


def _half(scales_RC: Tensor, global_scales_N1: Tensor | None = None, *, elements: str) -> Tensor:
    """Returns half of all scales of a number, in float32."""
    scales_RC = numbers(elements, scales_RC, torch.float32)
    return (scales_RC if global_scales_N1 is None else scales_RC * global_scales_N1) / 2
