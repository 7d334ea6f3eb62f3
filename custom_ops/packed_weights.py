"""Weights that are packed: an expert's matrix is decoded where a product needs it.

Legend: E experts, N rows (out), K columns (in) of an expert's matrix, G columns of a group, B bytes
of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        decode: Returns ``[..., N, K]`` of a dtype, in which it computes, from the values
            ``[..., N, B]`` as uint8, and the scales and zero points ``[..., N, K / G]``.
    """

    name: str
    per_byte: int
    scales_dtypes: tuple[torch.dtype, ...]
    decode: Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor]


def _decode_int4(
    values_NB: Tensor, scales_NG: Tensor, zero_points_NG: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns ``(q - zero point) * scale``, where a byte holds two q of 0..15."""
    q_NK = torch.stack((values_NB & 15, values_NB >> 4), dim=-1).flatten(-2)
    q_NGC = q_NK.unflatten(-1, (scales_NG.shape[-1], -1)).to(dtype)
    zero_points = 8 if zero_points_NG is None else zero_points_NG.to(dtype).unsqueeze(-1)
    matrix_NGC: Tensor = q_NGC.sub_(zero_points).mul_(scales_NG.to(dtype).unsqueeze(-1))
    return matrix_NGC.flatten(-2)


#: By name.
ENCODINGS: Mapping[str, Encoding] = {"int4": Encoding("int4", 2, KERNEL_FLOATS, _decode_int4)}


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
