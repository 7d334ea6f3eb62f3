"""Packed matrices as ONNX Runtime's ``com.microsoft::MatMulNBits`` multiplies them.

It takes codes without a sign as they lie in a checkpoint, ``[N, K]``, in blocks of 16 to 256
columns. At its accuracy level 0 it computes with the tokens as they are.

Legend: N rows (out), K columns (in) of a matrix, G its groups of columns, B bytes of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch import Tensor

from custom_ops.weight_formats import SCALES, ZERO_POINTS
from dynamo_moe.graph.matching import Writer, dimensions
from dynamo_moe.graph.packed_matrices import PackedMatrix, initializer
from dynamo_moe.operators.foreign import ForeignOperator
from dynamo_moe.weights.lazy_tensors import computed

_BITS = {"int4": 4, "int8": 8}
# Columns of a block, by matmul_nbits.cc of ONNX Runtime 1.31.
_BLOCKS = (256, 128, 64, 32, 16)


def takes(matrix: PackedMatrix, users: Sequence[ir.Node]) -> bool:
    """Whether the operator multiplies a matrix in the place of all products that use it.

    On a CPU it has kernels of float32 and float16, whose scales have the tokens' dtype.
    """
    narrow = matrix.dtype == torch.float16 and matrix.packed.scales.dtype == torch.float16
    return (
        matrix.encoding in _BITS
        and (matrix.dtype == torch.float32 or narrow)
        and _block(matrix) > 0
        and all(_is_taken(user, matrix.shape[0]) for user in users)
    )


def operands(name: str, matrix: PackedMatrix) -> list[ir.Value]:
    """Returns the codes, the scales and, where there are some, the zero points of a weight."""
    (rows, columns), block = matrix.shape, _block(matrix)
    values, scales, zero_points, _ = matrix.packed
    if matrix.encoding == "int8":
        values = computed(_unsigned, (values,), (rows, columns), torch.uint8)
    values = values.view(torch.uint8).view(rows, columns // block, -1)
    repeats = columns // block // scales.shape[1]
    if scales.dtype != matrix.dtype:
        scales = scales.to(matrix.dtype)
    if repeats > 1:
        scales = scales.repeat_interleave(repeats, 1)
    made = [initializer(name, values), initializer(f"{name}{SCALES}", scales)]
    if zero_points is not None:
        if repeats > 1:
            zero_points = zero_points.repeat_interleave(repeats, 1)
        size = rows, -(-columns // block // 2)
        pairs = computed(_pairs, (zero_points,), size, torch.uint8)
        made.append(initializer(f"{name}{ZERO_POINTS}", pairs))
    return made


def multiply_packed(
    writer: Writer,
    user: ir.Node,
    matrix: PackedMatrix,
    inputs: Sequence[ir.Value],
    operator: ForeignOperator,
) -> None:
    """Puts the operator in the place of a product, with :func:`operands` of its weight."""
    rows, columns = matrix.shape
    attributes = {
        "K": columns,
        "N": rows,
        "bits": _BITS[matrix.encoding],
        "block_size": _block(matrix),
        "accuracy_level": 0,
    }
    x, bias = user.inputs[0], user.inputs[2] if len(user.inputs) > 2 else None
    given = [x, *inputs]
    if bias is not None:
        given += [None] * (5 - len(given)) + [bias]
    node = writer.node(user, operator.op_type, given, attributes, domain=operator.domain)
    writer.replace(user.outputs[0], node.outputs[0])
    writer.graph.remove(user, safe=True)


def _block(matrix: PackedMatrix) -> int:
    """Returns the columns of a block, all of which share a scale; 0 if there are too few."""
    return next((block for block in _BLOCKS if matrix.depth % block == 0), 0)


def _is_taken(user: ir.Node, rows: int) -> bool:
    """Whether a product is one of tokens ``[..., K]``, to which a bias ``[N]`` may be added."""
    if user.op_type == "MatMul":
        return len(dimensions(user.inputs[0])) >= 2
    is_plain = (
        user.attributes.get_float("alpha", 1.0) == 1
        and user.attributes.get_float("beta", 1.0) == 1
        and user.attributes.get_int("transA", 0) == 0
    )
    bias = user.inputs[2] if len(user.inputs) > 2 else None
    return is_plain and (bias is None or dimensions(bias) == (rows,))


def _unsigned(values_NK: Tensor) -> Tensor:
    """Returns codes that are 128 more than integers with a sign."""
    return values_NK.view(torch.uint8) ^ 128


def _pairs(codes_NG: Tensor) -> Tensor:
    """Returns codes of 4 bits, two neighbours to a byte, that of the even one in its low bits."""
    rows, groups = codes_NG.shape
    even_NG = torch.zeros(rows, groups + groups % 2, dtype=torch.uint8)
    even_NG[:, :groups] = codes_NG.view(torch.uint8)
    return even_NG[:, ::2] | even_NG[:, 1::2] << 4
