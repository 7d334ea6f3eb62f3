"""Matrices rounded to the nearest that a packed format has.

All that is done to a matrix here can be done to a lazy one, whose packed tensors are lazy then.

Legend: N rows (out), K columns (in) of a matrix, R and C their blocks that share a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from custom_ops.packed_weights import WHOLE, Encoding, PackedWeight, blocks_of

_HALF = (torch.float16, torch.bfloat16)
# The greatest numbers of floats, and half of the codes of integers.
_GREATEST = {"e2m1": 6.0, "e4m3": 448.0, "uint4": 7.5, "int8": 127.5}


def rounded(
    matrix_NK: Tensor,
    encoding: Encoding,
    block: tuple[int, int],
    *,
    zero_points: bool = False,
    scales: Tensor | None = None,
) -> PackedWeight:
    """Returns the nearest matrix in a format; of a lazy one, lazy tensors.

    Args:
        matrix_NK: ``[N, K]``.
        encoding: The format.
        block: The rows and columns that share a scale.
        zero_points: Whether blocks have one, in ``int4``.
        scales: ``[R, C]``, numbers of :func:`scales_dtype`; None: from the greatest and least value
            of each block.
    """
    wide_NK = matrix_NK.float()
    if zero_points:
        return _with_zero_points(wide_NK, block, scales_dtype(encoding, matrix_NK.dtype), scales)
    greatest_RC = _greatest(wide_NK, block)
    factors_N1, factor = None, torch.ones(())
    if encoding.has_global_scales:
        # So that the greatest scale is the greatest of its elements.
        most = _GREATEST[encoding.elements] * _GREATEST[encoding.scale_elements]
        factor = _not_zero(greatest_RC.amax() / most)
        factors_N1 = factor.expand(wide_NK.shape[0], 1)
    if encoding.scale_elements == "e8m0":
        # An exponent of two less: that of E2M1's greatest number.
        exponents = greatest_RC.view(torch.int32) >> 23
        codes = torch.where(exponents == 255, 255, (exponents - 2).clamp(min=0))  # 255: NaN.
        scales, used_RC = _bytes(codes), torch.ldexp(torch.ones_like(greatest_RC), codes - 127)
    elif encoding.scale_elements == "e4m3":
        numbers = (greatest_RC / (_GREATEST[encoding.elements] * factor)).to(torch.float8_e4m3fn)
        scales, used_RC = numbers.view(torch.int8), _not_zero(numbers.float() * factor)
    elif scales is None:
        scales = _not_zero(greatest_RC / _GREATEST[encoding.elements])
        scales = scales.to(scales_dtype(encoding, matrix_NK.dtype))
        used_RC = scales.float()
    else:
        used_RC = scales.float()
    in_steps_NK = wide_NK / _spread(used_RC, block, *matrix_NK.shape)
    return PackedWeight(_codes(in_steps_NK, encoding.elements), scales, None, factors_N1)


def _with_zero_points(
    wide_NK: Tensor, block: tuple[int, int], dtype: torch.dtype, scales: Tensor | None
) -> PackedWeight:
    """Returns a matrix in ``int4`` whose codes' 0 and 15 are a block's least and greatest."""
    low_NG = -_greatest((-wide_NK).clamp(min=0), block)
    if scales is None:
        scales = (_greatest(wide_NK.clamp(min=0), block) - low_NG) / 15
        scales = _not_zero(scales.to(dtype))
    zeros_NG = (-low_NG / scales.float()).round().clamp(0, 15)
    wide_scales_NK, zeros_NK = (
        _spread(tensor, block, *wide_NK.shape) for tensor in (scales.float(), zeros_NG)
    )
    values = packed_pairs(((wide_NK / wide_scales_NK).round() + zeros_NK).clamp(0, 15))
    return PackedWeight(values, scales, zeros_NG.to(torch.int8))


def scales_dtype(encoding: Encoding, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of scales that are numbers, of weights of a dtype."""
    # Of floats a matrix has few scales.
    return dtype if dtype in _HALF and encoding.elements != "e4m3" else torch.float32


def _not_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


def _greatest(matrix_NK: Tensor, block: tuple[int, int]) -> Tensor:
    """Returns the greatest magnitude of each block ``[R, C]``."""
    rows, columns = matrix_NK.shape
    out, depth = min(block[0], rows), min(block[1], columns)
    blocks = blocks_of(rows, columns, (out, depth))
    padding = (0, blocks[1] * depth - columns, 0, blocks[0] * out - rows)
    magnitudes = matrix_NK.abs()
    if any(padding):
        magnitudes = functional.pad(magnitudes, padding)
    return magnitudes.reshape(blocks[0], out, blocks[1], depth).amax(dim=(1, 3))


def _spread(scales_RC: Tensor, block: tuple[int, int], rows: int, columns: int) -> Tensor:
    """Returns ``[N, K]``, or what broadcasts to it."""
    if 1 < block[0] < WHOLE:
        scales_RC = scales_RC.repeat_interleave(block[0], 0)[:rows]
    if scales_RC.shape[1] > 1:
        scales_RC = scales_RC.repeat_interleave(block[1], 1)[:, :columns]
    return scales_RC


def _codes(in_steps_NK: Tensor, elements: str) -> Tensor:
    """Returns the bytes of the nearest numbers."""
    if elements == "e4m3":
        most = _GREATEST[elements]
        return in_steps_NK.clamp(-most, most).to(torch.float8_e4m3fn).view(torch.int8)
    if elements == "int8":
        return in_steps_NK.round().clamp(-128, 127).to(torch.int8)
    if elements == "uint4":
        return packed_pairs((in_steps_NK.round() + 8).clamp(0, 15))
    # E2M1: steps of 0.5 below 2, of 1 below 4, of 2 from there on.
    magnitudes = in_steps_NK.abs().clamp(max=_GREATEST[elements])
    octaves = (magnitudes >= 2).float() + (magnitudes >= 4).float()
    codes = (magnitudes / torch.exp2(octaves - 1)).round() + 2 * octaves
    return packed_pairs(codes + 8 * (in_steps_NK < 0).float())


def packed_pairs(codes_NK: Tensor) -> Tensor:
    """Returns the bytes ``[..., N, K / 2]`` of codes of 4 bits, that of the even column low."""
    pairs = codes_NK.to(torch.int16).reshape(*codes_NK.shape[:-1], -1, 2)
    return _bytes(pairs[..., 0] + pairs[..., 1] * 16)


def _bytes(codes: Tensor) -> Tensor:
    """Returns the codes 0..255 as int8 of the same bits."""
    return torch.where(codes < 128, codes, codes - 256).to(torch.int8)
