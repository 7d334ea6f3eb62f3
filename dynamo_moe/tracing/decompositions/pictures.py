"""Decompositions of pooling, resizing, padding and cropping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.table import decomposes

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
) -> Any:
    """The sum in each window, divided by a given number."""
    kernels = kernel_size if len(kernel_size) > 1 else [*kernel_size] * (x.ndim - 2)
    pool = _aten.avg_pool2d if len(kernels) == 2 else _aten.avg_pool3d
    result = pool(x, kernels, stride, padding, ceil_mode, count_include_pad)
    pads: list[int] = []
    dims = len(kernels)
    for axis, kernel in enumerate(kernels):
        step = (stride or kernels)[axis % len(stride or kernels)]
        before = padding[axis % len(padding)]
        end = (result.shape[axis - dims] - 1) * step + kernel
        pads = [before, end - before - x.shape[axis - dims], *pads]
    x = _aten.constant_pad_nd(x, pads)
    return pool(x, kernels, stride) * (math.prod(kernels) / divisor_override)


def adaptive_windows(size: int, number: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where each of the windows of an adaptive pool begins and ends."""
    indices = torch.arange(number, device=like.device)
    return indices * size // number, ((indices + 1) * size + number - 1) // number


def _has_unknown_windows(x: Tensor, output_size: Sequence[int]) -> bool:
    # PyTorch's decomposition asks whether they divide the size, and fixes it.
    sizes = zip(x.shape[-len(output_size) :], output_size, strict=True)
    return any(number != 1 and not isinstance(size, int) for size, number in sizes)


@decomposes(_aten._adaptive_avg_pool3d.default)
@decomposes(
    _aten.adaptive_avg_pool1d.default,
    _aten.adaptive_avg_pool2d.default,
    _aten._adaptive_avg_pool2d.default,
    when=_has_unknown_windows,
)
def _adaptive_average(x: Tensor, output_size: Sequence[int]) -> Tensor:
    for dim, number in enumerate(output_size, -len(output_size)):
        size = x.shape[dim]
        begins, ends = adaptive_windows(size, number, x)
        positions = torch.arange(size, device=x.device)[:, None]
        inside = ((positions >= begins) & (positions < ends)).to(x.dtype)
        x = (x.movedim(dim, -1) @ (inside / (ends - begins).to(x.dtype))).movedim(-1, dim)
    return x


@decomposes(_aten.adaptive_max_pool2d.default)
def _adaptive_max_pool2d(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    height, width = x.shape[-2:]
    windows = []
    for size, number in zip((height, width), output_size, strict=True):
        longest = (size + number - 1) // number
        if not isinstance(size, int) or size % number:
            longest += 1
        begins, ends = adaptive_windows(size, number, x)
        window = begins[:, None] + torch.arange(longest, device=x.device)
        # A place twice changes no maximum.
        windows.append(torch.minimum(window, ends[:, None] - 1))
    rows, columns = windows
    gathered = x[..., rows, :][..., columns].transpose(-3, -2).flatten(-2)
    values, chosen = gathered.max(-1)
    flat = (rows[:, None, :, None] * width + columns[None, :, None, :]).flatten(-2)
    indices = flat.expand(gathered.shape).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return values, indices


# --- Resizing ---


def _is_exact(scale: float) -> bool:
    """Whether a position divided by it, as by Resize, or times its inverse is one whole number."""
    return scale in {0.125, 0.25, 0.5} or (scale.is_integer() and scale <= 32)


def _may_round_otherwise(
    x: Tensor, output_size: Sequence[int] | None, scales: Sequence[float] | None
) -> bool:
    sizes = zip(output_size or (), x.shape[2:], strict=False)
    given = scales or [
        number / size if isinstance(number, int) and isinstance(size, int) else math.nan
        for number, size in sizes
    ]
    return not all(map(_is_exact, given))


def _nearest(
    offset: float,
    x: Tensor,
    output_size: Any,
    scales: Sequence[float] | None,
) -> Tensor:
    """Takes the elements that PyTorch takes, by its arithmetic in float32."""
    for dim in range(2, x.ndim):
        size = x.shape[dim]
        if scales:
            number, step = torch.sym_int(size * scales[dim - 2]), 1 / scales[dim - 2]
        else:
            number = output_size[dim - 2]
            step = size / number
        positions = torch.arange(number, dtype=torch.float32, device=x.device)
        chosen = ((positions + offset) * step).floor().long()
        x = x.index_select(dim, chosen.clamp(max=size - 1))
    return x


for _dims in (1, 2, 3):
    for _name, _offset in (("upsample_nearest", 0.0), ("_upsample_nearest_exact", 0.5)):
        decomposes(getattr(_aten, f"{_name}{_dims}d").vec, when=_may_round_otherwise)(
            partial(_nearest, _offset)
        )


def _by_scale(x: Tensor, size: Sequence[int], align_corners: bool, *scales: float | None) -> bool:
    return align_corners or any(scale is not None for scale in scales)


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
    for dim, number, requested_scale in zip(
        (-2, -1), output_size, scales or (None, None), strict=True
    ):
        size = x.shape[dim]
        if align_corners:
            scale = (size - 1) / (number - 1) if number > 1 else 0.0
        else:
            scale = 1 / requested_scale if requested_scale else size / number
        stretch = torch.sym_max(scale, 1.0)
        centres = scale * (torch.arange(number, dtype=x.dtype, device=x.device) + 0.5)[:, None]
        positions = torch.arange(size, dtype=x.dtype, device=x.device)
        first = (centres - radius * stretch + 0.5).floor()
        end = (centres + radius * stretch + 0.5).floor()
        weights = kernel((positions - centres + 0.5) / stretch)
        weights = torch.where((positions >= first) & (positions < end), weights, 0.0)
        weights = weights / weights.sum(-1, keepdim=True)
        x = (x.movedim(dim, -1) @ weights.mT).movedim(-1, dim)
    return x.to(dtype)


# --- Padding and cropping ---


def _crops_or_wraps(
    x: Tensor, pad: Sequence[Any], mode: str = "constant", value: float | None = None
) -> bool:
    # ONNX Runtime crops only where it pads with a constant, and does not wrap.
    return mode == "circular" or (
        mode != "constant" and any(isinstance(size, int) and size < 0 for size in pad)
    )


@decomposes(_aten.pad.default, when=_crops_or_wraps)
def _pad(x: Tensor, pad: Sequence[int], mode: str, value: float | None = None) -> Tensor:
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        if before == after == 0:
            continue
        dim = x.ndim - 1 - number
        last = x.shape[dim] - 1
        index = torch.arange(last + 1 + before + after, device=x.device) - before
        if mode == "circular":  # Around what cropping leaves.
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
