"""Weights that are packed: an expert's matrix is decoded where a product needs it.

Legend: E experts, N rows (out), K columns (in) of an expert's matrix, G columns of a group, B bytes
of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from custom_ops.dtypes import KERNEL_FLOATS


@dataclass(frozen=True)
class Encoding:
    """How the tensors that store a packed weight make up its numbers.

    Attributes:
        name: The operators' ``weight_format``.
        elements: What a code of the values is: one of :data:`ELEMENTS`.
        scales_dtypes: Dtypes that the scales may have.
        scale_elements: What a scale of int8 is: ``e8m0`` or ``e4m3``; "": scales are numbers.
        has_zero_points: Whether there may be zero points.
        has_global_scales: Whether each row has a float32 by which its scales are multiplied.
        block: Rows and columns that share a scale; None: any number of columns of one row.
        any_of: Other blocks that there may be in place of ``block``.
    """

    name: str
    elements: str
    scales_dtypes: tuple[torch.dtype, ...] = KERNEL_FLOATS
    scale_elements: str = ""
    has_zero_points: bool = False
    has_global_scales: bool = False
    block: tuple[int, int] | None = None
    any_of: tuple[tuple[int, int], ...] = ()

    @property
    def per_byte(self) -> int:
        """Columns of a row that a byte of the values holds."""
        return 8 // ELEMENTS[self.elements]

    def decode(
        self,
        values_NB: Tensor,
        scales_RC: Tensor,
        zero_points_RC: Tensor | None = None,
        global_scales_N1: Tensor | None = None,
        *,
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns ``[..., N, K]`` of a dtype, in which it computes.

        Args:
            values_NB: Bytes.
            scales_RC: The scales.
            zero_points_RC: Zero points, or None.
            global_scales_N1: Global scales, or None.
            dtype: The result's.
        """
        matrix_NK = numbers(self.elements, values_NB, dtype)
        *_, rows, columns = matrix_NK.shape
        block_rows, block_columns = self.blocks(rows, columns, scales_RC.shape[-2:])[0]
        scales_RC = numbers(self.scale_elements, scales_RC, dtype)
        if global_scales_N1 is not None:
            scales_RC = scales_RC * global_scales_N1.to(dtype)
        if block_rows < WHOLE and block_rows > 1:
            scales_RC = scales_RC.repeat_interleave(block_rows, -2)[..., :rows, :]
        if block_columns >= WHOLE or columns % block_columns:
            if block_columns < WHOLE:
                scales_RC = scales_RC.repeat_interleave(block_columns, -1)[..., :columns]
            groups_NGC, scales_NG1 = matrix_NK.unsqueeze(-2), scales_RC.unsqueeze(-2)
        else:
            groups_NGC = matrix_NK.unflatten(-1, (scales_RC.shape[-1], block_columns))
            scales_NG1 = scales_RC.unsqueeze(-1)
        if zero_points_RC is not None:
            groups_NGC.sub_(zero_points_RC.to(dtype).unsqueeze(-1))
        elif self.has_zero_points:
            groups_NGC.sub_(8)
        return groups_NGC.mul_(scales_NG1).flatten(-2)

    def blocks(self, rows: int, columns: int, scales: Sequence[int]) -> list[tuple[int, int]]:
        """Returns which rows and columns may share a scale: several where a matrix is small.

        Args:
            rows: N.
            columns: K.
            scales: The sizes of the scales of one matrix.
        """
        if self.block is None:
            is_group = len(scales) == 2 and scales[0] == rows and scales[1] >= 1
            if not is_group or columns % scales[1]:
                return []
            # A row with one scale may be as long as it likes. What ONNX Runtime's QMoE takes comes
            # first: whole rows of int8, but of int4 groups, of which alone it has zero points.
            found = [(1, columns // scales[1]), *([(1, WHOLE)] if scales[1] == 1 else [])]
            return found if self.has_zero_points else found[::-1]
        return [
            block
            for block in (self.block, *self.any_of)
            if blocks_of(rows, columns, block) == tuple(scales) and divides(block, columns)
        ]

    def scales_of(self, rows: int, columns: int) -> str:
        """Returns in words the sizes that the scales of one matrix may have."""
        if self.block is None:
            return f"[{rows}, G], where G divides {columns}"
        sizes = [
            blocks_of(rows, columns, block)
            for block in (self.block, *self.any_of)
            if divides(block, columns)
        ]
        return " or ".join(f"[{out}, {depth}]" for out, depth in dict.fromkeys(sizes))


def divides(block: tuple[int, int], columns: int) -> bool:
    """Whether no block of a matrix is cut off that may not be: groups of a row divide it."""
    return block[0] != 1 or block[1] >= WHOLE or columns % block[1] == 0


def blocks_of(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """Returns how many blocks a matrix has, some of which may be cut off."""
    return -(-rows // block[0]), -(-columns // block[1])


def numbers(elements: str, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of codes in bytes; of what are numbers already, themselves."""
    if elements in ("uint4", "e2m1"):
        codes = _codes(codes.view(torch.uint8))
    if elements in ("e2m1", "e8m0"):
        table = torch.tensor(E2M1 if elements == "e2m1" else E8M0, dtype=torch.float64)
        return table.to(codes.device, dtype)[codes.view(torch.uint8).int()]
    if elements == "e4m3":
        codes = codes.view(torch.float8_e4m3fn)
    return codes.to(dtype)


def _codes(values_NB: Tensor) -> Tensor:
    """Returns the codes ``[..., N, K]`` of bytes, that of the even column in the low bits."""
    return torch.stack((values_NB & 15, values_NB >> 4), dim=-1).flatten(-2)


#: The numbers of the codes 0..15 of E2M1, and of the bytes of E8M0, both of the OCP Microscaling
#: Formats (MX) Specification 1.0.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0 = (*(2.0 ** (exponent - 127) for exponent in range(255)), math.nan)

#: What a code of packed values may be, and its bits: an integer without or with a sign, or a float.
ELEMENTS = {"uint4": 4, "int8": 8, "e2m1": 4, "e4m3": 8}

#: More rows or columns than a matrix has.
WHOLE = 1 << 40

#: By name.
ENCODINGS: Mapping[str, Encoding] = {
    encoding.name: encoding
    for encoding in (
        Encoding("int4", "uint4", has_zero_points=True),
        Encoding("mxfp4", "e2m1", (torch.int8,), "e8m0", block=(1, 32)),
        Encoding("fp8", "e4m3", block=(128, 128), any_of=((WHOLE, WHOLE), (1, WHOLE), (1, 32))),
        Encoding("nvfp4", "e2m1", (torch.int8,), "e4m3", has_global_scales=True, block=(1, 16)),
        Encoding("int8", "int8"),
    )
}


def encoding_of(weight_format: str) -> Encoding:
    """Returns the encoding of a name.

    Raises:
        ValueError: If there is none.
    """
    if weight_format not in ENCODINGS:
        names = ", ".join(ENCODINGS)
        raise ValueError(f"weight_format must be one of {names}; got {weight_format!r}")
    return ENCODINGS[weight_format]


class PackedWeight(NamedTuple):
    """The tensors that store one weight of all experts; see :func:`custom_ops.experts_packed`.

    Attributes:
        values: ``[E, N, B]`` int8, the bytes.
        scales: ``[E, N, K / G]``.
        zero_points: ``[E, N, K / G]`` int8, or ``[E, 1, 1]``; None for the format's default.
        global_scales: ``[E, N, 1]`` float32; None where the format has none.
    """

    values: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    global_scales: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> PackedWeight:
        """Returns what a function makes of each tensor that there is."""
        values, scales, *others = self
        changed = (None if tensor is None else function(tensor) for tensor in others)
        return PackedWeight(function(values), function(scales), *changed)

    @classmethod
    def stacked(cls, matrices: Sequence[PackedWeight]) -> PackedWeight:
        """Returns the weight of experts whose matrices are packed alike."""
        values, scales, *others = (list(tensors) for tensors in zip(*matrices, strict=True))
        stacks = (None if tensors[0] is None else torch.stack(tensors) for tensors in others)
        return cls(torch.stack(values), torch.stack(scales), *stacks)


@dataclass(frozen=True)
class PackedMatrices:
    """The matrices ``[E, N, K]`` of one weight, read as a tensor of them is: ``w[expert]``.

    Attributes:
        encoding: How they are packed.
        packed: The tensors that store them.
        dtype: Dtype of a matrix once it is decoded, that of a product's operands.
    """

    encoding: Encoding
    packed: PackedWeight
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """``[E, N, K]``."""
        experts, rows, row_bytes = self.packed.values.shape
        return torch.Size((experts, rows, row_bytes * self.encoding.per_byte))

    def new_empty(self, size: int) -> Tensor:
        """Returns a tensor without values of the decoded dtype."""
        return self.packed.values.new_empty(size, dtype=self.dtype)

    def __getitem__(self, expert: int) -> Tensor:
        """Returns a matrix ``[N, K]``, decoded in float32 or wider and rounded once."""
        wide = torch.promote_types(self.dtype, torch.float32)
        packed = self.packed.each(lambda tensor: tensor[expert])
        return self.encoding.decode(*packed, dtype=wide).to(self.dtype)
