"""Padding and cropping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.registry import decomposes

__all__: list[str] = []

_aten = torch.ops.aten


def _crops_or_wraps(
    x: Tensor, pad: Sequence[Any], mode: str = "constant", value: float | None = None
) -> bool:
    # ONNX Runtime crops only where it pads with a constant, and does not wrap.
    return mode == "circular" or (
        mode != "constant" and any(isinstance(size, int) and size < 0 for size in pad)
    )


@decomposes(_aten.pad.default, when=_crops_or_wraps)
def _pad(x: Tensor, pad: Sequence[int], mode: str, value: float | None = None) -> Tensor:
    for place, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        if before == after == 0:
            continue
        dim = x.ndim - 1 - place
        last = x.shape[dim] - 1
        index = torch.arange(last + 1 + before + after, device=x.device) - before
        if mode == "circular":  # Of what is left.
            begin, end = max(-before, 0), last - max(-after, 0)
            index = torch.where(index < begin, index + (end - begin + 1), index)
            index = torch.where(index > end, index - (end - begin + 1), index)
        elif mode == "reflect":
            index = last - (last - index.abs()).abs()
        x = x.index_select(dim, index.clamp(0, last))
    return x


@decomposes(_aten.constant_pad_nd.default, when=lambda x, *_: x.is_complex())
def _pad_complex(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    parts = [_aten.constant_pad_nd(torch.view_as_real(x)[..., 0], pad, value)]
    parts += [_aten.constant_pad_nd(torch.view_as_real(x)[..., 1], pad, 0)]
    return torch.view_as_complex(torch.stack(parts, -1))


@decomposes(_aten._conj_physical.default, when=lambda x: x.is_complex())
def _conjugate(x: Tensor) -> Tensor:
    real, imaginary = torch.view_as_real(x).unbind(-1)
    return torch.view_as_complex(torch.stack([real, -imaginary], -1))
