"""Pooling and resizing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.registry import decomposes

__all__: list[str] = []

_aten = torch.ops.aten


# --- Pooling ---


@decomposes(
    _aten.avg_pool2d.default,
    _aten.avg_pool3d.default,
    when=lambda *arguments, divisor_override=None: (
        divisor_override is not None or arguments[6:] not in {(), (None,)}
    ),
)
def _divided_pool(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int = 1,
) -> Tensor:
    """The sum in each window, divided by a given number."""
    kernels = kernel_size if len(kernel_size) > 1 else [*kernel_size] * (x.ndim - 2)
    pool = _aten.avg_pool2d if len(kernels) == 2 else _aten.avg_pool3d
    result = pool(x, kernels, stride, padding, ceil_mode, count_include_pad)
    pads: list[int] = []
    dims = len(kernels)
    for place, kernel in enumerate(kernels):
        step = (stride or kernels)[place % len(stride or kernels)]
        before = padding[place % len(padding)]
        end = (result.shape[place - dims] - 1) * step + kernel
        pads = [before, end - before - x.shape[place - dims], *pads]
    x = _aten.constant_pad_nd(x, pads)
    average: Tensor = pool(x, kernels, stride)
    return average * (math.prod(kernels) / divisor_override)


def _windows(size: int, number: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where each of the windows of an adaptive pool begins and ends."""
    places = torch.arange(number, device=like.device)
    return places * size // number, ((places + 1) * size + number - 1) // number


@decomposes(_aten._adaptive_avg_pool3d.default)
def _adaptive_avg_pool3d(x: Tensor, output_size: Sequence[int]) -> Tensor:
    for dim, number in zip((-3, -2, -1), output_size, strict=True):
        size = x.shape[dim]
        begins, ends = _windows(size, number, x)
        places = torch.arange(size, device=x.device)[:, None]
        inside = ((places >= begins) & (places < ends)).to(x.dtype)
        x = (x.movedim(dim, -1) @ (inside / (ends - begins).to(x.dtype))).movedim(-1, dim)
    return x


@decomposes(_aten.adaptive_max_pool2d.default)
def _adaptive_max_pool2d(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    height, width = x.shape[-2:]
    places = []
    for size, number in zip((height, width), output_size, strict=True):
        longest = (size + number - 1) // number
        if not isinstance(size, int) or size % number:
            longest += 1
        begins, ends = _windows(size, number, x)
        window = begins[:, None] + torch.arange(longest, device=x.device)
        # A place twice changes no maximum.
        places.append(torch.minimum(window, ends[:, None] - 1))
    rows, columns = places
    gathered = x[..., rows, :][..., columns].transpose(-3, -2).flatten(-2)
    values, chosen = gathered.max(-1)
    flat = (rows[:, None, :, None] * width + columns[None, :, None, :]).flatten(-2)
    indices = flat.expand(gathered.shape).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return values, indices


# --- Resizing ---


def _by_scale(
    x: Tensor,
    output_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> bool:
    return align_corners or scales_h is not None or scales_w is not None


@decomposes(_aten._upsample_bilinear2d_aa.default, when=_by_scale)
def _antialiased_bilinear(x: Tensor, *arguments: Any) -> Tensor:
    return _antialiased(x, lambda t: (1 - t.abs()).clamp(min=0), 1, *arguments)


@decomposes(_aten._upsample_bicubic2d_aa.default, when=_by_scale)
def _antialiased_bicubic(x: Tensor, *arguments: Any) -> Tensor:
    def cubic(t: Tensor) -> Tensor:
        t = t.abs()
        near = (1.5 * t - 2.5) * t * t + 1
        far = ((-0.5 * t + 2.5) * t - 4) * t + 2
        return torch.where(t < 1, near, torch.where(t < 2, far, 0.0))

    return _antialiased(x, cubic, 2, *arguments)


def _antialiased(
    x: Tensor,
    kernel: Callable[[Tensor], Tensor],
    radius: int,
    output_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
) -> Tensor:
    """Resizes by the scales that are given, where the exporter takes those of the sizes."""
    dtype, x = x.dtype, x.float()
    for dim, number, given in zip((-2, -1), output_size, scales or (None, None), strict=True):
        size = x.shape[dim]
        if align_corners:
            scale = (size - 1) / (number - 1) if number > 1 else 0.0
        else:
            scale = 1 / given if given else size / number
        stretch = torch.sym_max(scale, 1.0)
        centres = scale * (torch.arange(number, dtype=x.dtype, device=x.device) + 0.5)[:, None]
        places = torch.arange(size, dtype=x.dtype, device=x.device)
        first = (centres - radius * stretch + 0.5).floor()
        end = (centres + radius * stretch + 0.5).floor()
        weights = kernel((places - centres + 0.5) / stretch)
        weights = torch.where((places >= first) & (places < end), weights, 0.0)
        weights = weights / weights.sum(-1, keepdim=True)
        x = (x.movedim(dim, -1) @ weights.mT).movedim(-1, dim)
    return x.to(dtype)
