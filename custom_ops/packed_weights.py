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
        per_byte: Columns of a row that a byte holds.
        scales_dtypes: Dtypes that the scales may have.
        has_zero_points: Whether there may be zero points.
        decode: Returns ``[..., N, K]`` of a dtype, in which it computes, from the values
            ``[..., N, B]`` as uint8, the scales, and the zero points or None.
        block: Rows and columns that share a scale; None: any number of columns of one row.
        any_of: Other blocks that there may be in place of ``block``.
    """

    name: str
    per_byte: int
    scales_dtypes: tuple[torch.dtype, ...]
    has_zero_points: bool
    decode: Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
    block: tuple[int, int] | None = None
    any_of: tuple[tuple[int, int], ...] = ()

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
            # A row with one scale may be as long as it likes.
            return [(1, columns // scales[1]), *([(1, WHOLE)] if scales[1] == 1 else [])]
        blocks = (self.block, *self.any_of)
        return [block for block in blocks if blocks_of(rows, columns, block) == tuple(scales)]

    def scales_of(self, rows: int, columns: int) -> str:
        """Returns in words the sizes that the scales of one matrix may have."""
        if self.block is None:
            return f"[{rows}, G], where G divides {columns}"
        sizes = [blocks_of(rows, columns, block) for block in (self.block, *self.any_of)]
        return " or ".join(f"[{out}, {depth}]" for out, depth in dict.fromkeys(sizes))


def _decode_int4(
    values_NB: Tensor, scales_NG: Tensor, zero_points_NG: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns ``(q - zero point) * scale``, where a byte holds two q of 0..15."""
    q_NGC = _codes(values_NB).unflatten(-1, (scales_NG.shape[-1], -1)).to(dtype)
    zero_points = 8 if zero_points_NG is None else zero_points_NG.to(dtype).unsqueeze(-1)
    matrix_NGC: Tensor = q_NGC.sub_(zero_points).mul_(scales_NG.to(dtype).unsqueeze(-1))
    return matrix_NGC.flatten(-2)


def _decode_mxfp4(
    values_NB: Tensor, scales_NG: Tensor, zero_points_NG: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns the E2M1 numbers that a byte holds two of, times E8M0 scales."""
    numbers = torch.tensor(E2M1, dtype=dtype, device=values_NB.device)
    powers = torch.tensor(E8M0, dtype=torch.float64, device=values_NB.device).to(dtype)
    values_NGC = numbers[_codes(values_NB).int()].unflatten(-1, (scales_NG.shape[-1], -1))
    scales_NG1 = powers[scales_NG.view(torch.uint8).int()].unsqueeze(-1)
    matrix_NGC: Tensor = values_NGC.mul_(scales_NG1)
    return matrix_NGC.flatten(-2)


def _decode_fp8(
    values_NK: Tensor, scales_RC: Tensor, zero_points: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns E4M3 numbers times the scale of their block, row or matrix."""
    matrix_NK = values_NK.view(torch.float8_e4m3fn).to(dtype)
    *_, rows, columns = matrix_NK.shape
    block_rows, block_columns = ENCODINGS["fp8"].blocks(rows, columns, scales_RC.shape[-2:])[0]
    scales = scales_RC.to(dtype)
    if block_rows < WHOLE and block_rows > 1:
        scales = scales.repeat_interleave(block_rows, -2)[..., :rows, :]
    if block_columns < WHOLE:
        scales = scales.repeat_interleave(block_columns, -1)[..., :columns]
    return matrix_NK.mul_(scales)


def blocks_of(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """Returns how many blocks a matrix has, some of which may be cut off."""
    return -(-rows // block[0]), -(-columns // block[1])


def _codes(values_NB: Tensor) -> Tensor:
    """Returns the codes ``[..., N, K]`` of bytes, that of the even column in the low bits."""
    return torch.stack((values_NB & 15, values_NB >> 4), dim=-1).flatten(-2)


#: The numbers of the codes 0..15 of E2M1, and of the bytes of E8M0, both of the OCP Microscaling
#: Formats (MX) Specification 1.0.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0 = (*(2.0 ** (exponent - 127) for exponent in range(255)), math.nan)

#: More rows or columns than a matrix has.
WHOLE = 1 << 40

#: By name.
ENCODINGS: Mapping[str, Encoding] = {
    encoding.name: encoding
    for encoding in (
        Encoding("int4", 2, KERNEL_FLOATS, has_zero_points=True, decode=_decode_int4),
        Encoding(
            "mxfp4", 2, (torch.int8,), has_zero_points=False, decode=_decode_mxfp4, block=(1, 32)
        ),
        Encoding(
            "fp8",
            1,
            KERNEL_FLOATS,
            has_zero_points=False,
            decode=_decode_fp8,
            block=(128, 128),
            any_of=((WHOLE, WHOLE), (1, WHOLE)),
        ),
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
    """

    values: Tensor
    scales: Tensor
    zero_points: Tensor | None = None


@dataclass(frozen=True)
class PackedMatrices:
    """The matrices ``[E, N, K]`` of one weight, read as a tensor of them is: ``w[expert]``.

    Attributes:
        encoding: How they are packed.
        values: As those of :class:`PackedWeight`.
        scales: See there.
        zero_points: See there.
        dtype: Dtype of a matrix once it is decoded, that of a product's operands.
    """

    encoding: Encoding
    values: Tensor
    scales: Tensor
    zero_points: Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """``[E, N, K]``."""
        experts, rows, row_bytes = self.values.shape
        return torch.Size((experts, rows, row_bytes * self.encoding.per_byte))

    def new_empty(self, size: int) -> Tensor:
        """Returns a tensor without values of the decoded dtype."""
        return self.values.new_empty(size, dtype=self.dtype)

    def __getitem__(self, expert: int) -> Tensor:
        """Returns a matrix ``[N, K]``, decoded in float32 or wider and rounded once."""
        zero_points = None if self.zero_points is None else self.zero_points[expert]
        wide = torch.promote_types(self.dtype, torch.float32)
        bytes_NB = self.values[expert].view(torch.uint8)
        return self.encoding.decode(bytes_NB, self.scales[expert], zero_points, wide).to(self.dtype)
