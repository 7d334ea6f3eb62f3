"""Decompositions of Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.private import tracer
from dynamo_moe.tracing.decompositions.table import decomposes

_aten = torch.ops.aten


def _is_of_symbolic_length(_: Tensor, dims: Sequence[int], normalization: int, length: Any) -> bool:
    return not tracer.has_static_value(length)


@decomposes(_aten._fft_c2r.default, when=_is_of_symbolic_length)
def _real_inverse(half: Tensor, dims: Sequence[int], normalization: int, length: int) -> Tensor:
    """By the inverse of the whole spectrum, whose second half is the conjugate of the first.

    ONNX Runtime takes the length of a DFT that is another than its operand's for the operand's.
    """
    *others, last = dims
    if others:
        half = _aten._fft_c2c.default(half, others, normalization, False)
    dim = last % half.ndim
    numbers = torch.arange(length, device=half.device)
    is_second = numbers > length // 2
    source = torch.where(is_second, length - numbers, numbers)
    parts = torch.view_as_real(half).index_select(dim, source)
    signs = torch.where(is_second, -1.0, 1.0).to(parts.dtype)
    signs = torch.stack([torch.ones_like(signs), signs], -1)
    signs = signs.reshape([*(-1 if each == dim else 1 for each in range(half.ndim)), 2])
    whole = torch.view_as_complex(parts * signs)
    return torch.view_as_real(_aten._fft_c2c.default(whole, [dim], normalization, False))[..., 0]
