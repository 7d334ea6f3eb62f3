"""How the experts' weights are stored, and the dtypes that they are computed in.

Whatever depends on it asks the :class:`WeightFormat` of a layer: the kernels' tile loader and
buffers, the ONNX body's loader, a bundle's record. docs/how-to/add_a_weight_format.md says what a
further format needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch

from custom_ops.dtypes import FLOATS, KERNEL_FLOATS, dtype_name
from custom_ops.packed_weights import ENCODINGS, WHOLE, Encoding, encoding_of

#: Suffixes of the tensors beside the packed values.
SCALES, ZERO_POINTS, GLOBAL_SCALES = "_scales", "_zero_points", "_global_scales"
#: Those of the tensors that store a weight, in their order.
STORED_SUFFIXES = ("", SCALES, ZERO_POINTS, GLOBAL_SCALES)
#: The block of a tensor where it is the format's :attr:`WeightFormat.block`.
OPEN = (0, 0)
#: The block of a tensor that has one element for an expert's whole matrix.
WHOLE_MATRIX = (WHOLE, WHOLE)


def suffixes_of(encoding: Encoding | None) -> tuple[str, ...]:
    """Returns those of the tensors that a weight may have, in their order; None: a plain one."""
    if encoding is None:
        return ("",)
    has = {ZERO_POINTS: encoding.has_zero_points, GLOBAL_SCALES: encoding.has_global_scales}
    return tuple(suffix for suffix in STORED_SUFFIXES if has.get(suffix, True))


@dataclass(frozen=True)
class StoredTensor:
    """One of the tensors that store a weight.

    Attributes:
        suffix: Appended to the weight's name; ``""`` for the first tensor.
        dtype: Dtype of its elements.
        block: The (out, in) sizes of the part of an expert's matrix that an element stands for;
            :data:`OPEN` where formats of one name differ in them.
    """

    suffix: str
    dtype: torch.dtype
    block: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class WeightFormat:
    """How w1 and w2 are stored. Their logical shape is the operators', whatever the format.

    Attributes:
        name: Its name in records and on the command line.
        operand_dtype: Dtype of both operands of the products: what tokens and hidden rows are
            rounded to, and what a tile of the weights has once it is loaded.
        stored: The tensors that store a weight, that of the values first.
        encoding: How the tensors make up a weight: what loads it in the kernels
            (``custom_ops.kernels.weights``) and in ONNX bodies has an entry of this name.
        block: The block of the tensors that leave it open, such as the group of an int4 scale.

    Raises:
        ValueError: If there is a block and no tensor leaves it open, or the other way around.
    """

    name: str
    operand_dtype: torch.dtype
    stored: tuple[StoredTensor, ...]
    encoding: str = "plain"
    block: tuple[int, int] = OPEN

    def __post_init__(self) -> None:
        if (self.block != OPEN) != any(tensor.block == OPEN for tensor in self.stored):
            raise ValueError(
                f"block must be given where a tensor leaves it open, and nowhere else: {self!r}"
            )

    @property
    def bias_dtype(self) -> torch.dtype:
        """Dtype of b1 and b2."""
        return self.operand_dtype

    @property
    def values_dtype(self) -> torch.dtype:
        """Dtype of the tensor that holds the values: of the operators' w1 and w2."""
        return self.stored[0].dtype

    @property
    def is_plain(self) -> bool:
        """Whether a weight is one tensor of the operands' dtype, as the operators take it."""
        return self.stored == (StoredTensor("", self.operand_dtype),)

    @property
    def scales_dtype(self) -> torch.dtype | None:
        """Dtype of the scales; None where there are none."""
        return next((tensor.dtype for tensor in self.stored if tensor.suffix == SCALES), None)

    @property
    def zero_points_block(self) -> tuple[int, int] | None:
        """What shares a zero point: :attr:`block`, or a matrix; None where there are none."""
        blocks = (self._block_of(tensor) for tensor in self.stored if tensor.suffix == ZERO_POINTS)
        return next(blocks, None)

    @property
    def has_global_scales(self) -> bool:
        """Whether each row has a scale by which its scales are multiplied."""
        return any(tensor.suffix == GLOBAL_SCALES for tensor in self.stored)

    def canonical(self) -> WeightFormat:
        """Returns the format without zero points that have no effect.

        An ONNX node has some only so that biases may come behind them.
        """
        if self.zero_points_block is None or encoding_of(self.encoding).has_zero_points:
            return self
        used = tuple(tensor for tensor in self.stored if tensor.suffix != ZERO_POINTS)
        return replace(self, stored=used)

    def shape_of(self, tensor: StoredTensor, rows: int, columns: int) -> tuple[int, int]:
        """Returns a tensor's sizes for one expert's matrix of ``rows`` by ``columns``."""
        block_rows, block_columns = self._block_of(tensor)
        return -(-rows // block_rows), -(-columns // block_columns)

    def expert_bytes(self, rows: int, columns: int) -> int:
        """Returns the bytes of one expert's matrix of ``rows`` by ``columns``, all its tensors."""
        return sum(
            prod(self.shape_of(tensor, rows, columns)) * tensor.dtype.itemsize
            for tensor in self.stored
        )

    def to_dict(self) -> dict[str, int | str]:
        """The format in the words of a bundle's record, where a block of 0 rows has all of them."""
        words: dict[str, int | str] = {"weight_format": self.name}
        if self.is_plain:
            return words
        rows, columns = (0 if size == WHOLE else size for size in self.block)
        block = self.zero_points_block
        zero_points = "none" if block is None else "experts" if block == WHOLE_MATRIX else "scales"
        return words | {"block_rows": rows, "block_columns": columns, "zero_points": zero_points}

    def _block_of(self, tensor: StoredTensor) -> tuple[int, int]:
        return self.block if tensor.block == OPEN else tensor.block

    def __str__(self) -> str:
        return self.name


@cache
def plain_format(dtype: torch.dtype) -> WeightFormat:
    """Returns the format whose weights are one tensor of the operands' dtype.

    Raises:
        TypeError: If the operators do not take the dtype.
    """
    if dtype not in FLOATS:
        names = ", ".join(map(dtype_name, FLOATS))
        raise TypeError(f"the experts' weights must be one of {names}; got {dtype_name(dtype)}")
    return WeightFormat(dtype_name(dtype), dtype, (StoredTensor("", dtype),))


def packed_format(
    encoding: str,
    operand_dtype: torch.dtype,
    scales_dtype: torch.dtype,
    block: tuple[int, int],
    *,
    zero_points_block: tuple[int, int] | None = None,
) -> WeightFormat:
    """Returns the format of packed weights.

    Args:
        encoding: One of :data:`custom_ops.packed_weights.ENCODINGS`.
        operand_dtype: Dtype of the tokens, in which the products compute.
        scales_dtype: Dtype of the scales.
        block: The rows and columns of a matrix that share a scale.
        zero_points_block: Those that share a zero point: ``block``, or
            :data:`WHOLE_MATRIX`; None: there are no zero points.

    Raises:
        ValueError: If there is no such encoding, or it has no such blocks.
        TypeError: If the encoding does not have scales of the dtype.
    """
    known = encoding_of(encoding)
    if scales_dtype not in known.scales_dtypes:
        names = ", ".join(map(dtype_name, known.scales_dtypes))
        raise TypeError(
            f"the scales of {encoding} must be one of {names}; got {dtype_name(scales_dtype)}"
        )
    taken = (known.block, *known.any_of)
    if min(block) < 1 or (block not in taken if known.block else block[0] != 1):
        raise ValueError(f"{encoding} has no scales of {block[0]} rows and {block[1]} columns")
    stored = [StoredTensor("", torch.int8, (1, known.per_byte))]
    stored.append(StoredTensor(SCALES, scales_dtype, OPEN))
    if zero_points_block not in (None, block, WHOLE_MATRIX):
        raise ValueError(f"zero points must be as the scales, or one; got {zero_points_block}")
    if zero_points_block is not None:
        open_or_one = OPEN if zero_points_block == block else WHOLE_MATRIX
        stored.append(StoredTensor(ZERO_POINTS, torch.int8, open_or_one))
    if known.has_global_scales:
        stored.append(StoredTensor(GLOBAL_SCALES, torch.float32, (1, WHOLE)))
    return WeightFormat(encoding, operand_dtype, tuple(stored), encoding, block)


#: The formats that there are kernels for, by name. A name's place, from 1 on, is its code in a
#: bundle: a new one comes last.
FORMAT_NAMES = (*map(dtype_name, KERNEL_FLOATS), *ENCODINGS)
