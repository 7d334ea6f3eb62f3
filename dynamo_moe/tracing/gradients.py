"""Decompositions of the operators that compute gradients, for graphs of training.

PyTorch decomposes most of them itself; these are left. An operator that treats the dimensions of an
image one after another, as averages, resizing and padding do, is a matrix for each of them; its
gradient goes through the transposed ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions import adaptive_windows, decomposes

_aten = torch.ops.aten

# --- Convolution ---


@decomposes(_aten.convolution_backward.default)
def _convolution(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dims = x.ndim - 2
    stride, padding, dilation = (
        [*sizes] * (dims if len(sizes) == 1 else 1) for sizes in (stride, padding, dilation)
    )
    dx = dweight = dbias = None
    if output_mask[0]:
        if transposed:
            nothing = [0] * dims
            dx = _aten.convolution(
                dy, weight, None, stride, padding, dilation, False, nothing, groups
            )
        else:
            dx = _input_gradient(dy, x, weight, stride, padding, dilation, groups)
    if output_mask[1]:
        # A transposed convolution's input and result change places.
        small, large = (x, dy) if transposed else (dy, x)
        dweight = _weight_gradient(small, large, weight, stride, padding, dilation, groups)
    if output_mask[2]:
        dbias = dy.sum([0, *range(2, dy.ndim)])
    return dx, dweight, dbias


def _input_gradient(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    # What the windows do not reach has no gradient, and is less than a step wide.
    rest = [step - 1 for step in stride]
    dx: Tensor = _aten.convolution(dy, weight, None, stride, padding, dilation, True, rest, groups)
    for dim, size in enumerate(x.shape[2:], start=2):
        dx = dx.narrow(dim, 0, size)
    return dx


def _weight_gradient(
    small: Tensor,
    large: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolves ``large [N, G*I, …]`` with ``small [N, G*O, …]``: N, not I, is summed over.

    Legend: N batch, G groups, I and O channels of a group of the convolution's wider and narrower
    side.
    """
    batch, kernel = large.shape[0], weight.shape[2:]
    large = large.unflatten(1, (groups, -1)).transpose(0, 2)  # [I, G, N, …]
    small = small.unflatten(1, (groups, -1)).movedim(0, 2)  # [G, O, N, …]
    large = large.reshape(large.shape[0], groups * batch, *large.shape[3:])
    small = small.flatten(0, 1)
    nothing = [0] * len(kernel)
    gradient: Tensor = _aten.convolution(
        large, small, None, dilation, padding, stride, False, nothing, groups
    )
    # The last places that no window begins at would follow.
    for dim, size in enumerate(kernel, start=2):
        gradient = gradient.narrow(dim, 0, size)
    return gradient.transpose(0, 1)


# --- Maxima: each gradient goes to the place that its value came from ---


def _scattered(dy: Tensor, x: Tensor, indices: Tensor, dims: int) -> Tensor:
    # ONNX Runtime has no sum of float16 here.
    flat = x.new_zeros(x.shape, dtype=_wide(dy)).flatten(-dims)
    gradient = flat.scatter_add(-1, indices.flatten(-dims), dy.to(flat.dtype).flatten(-dims))
    return gradient.view(x.shape).to(dy.dtype)


def _max_pool(dims: int, dy: Tensor, x: Tensor, *arguments: Any) -> Tensor:
    return _scattered(dy, x, arguments[-1], dims)


for _dims in (2, 3):
    for _name in ("max_pool{}d_with_indices_backward", "adaptive_max_pool{}d_backward"):
        _operator = getattr(_aten, _name.format(_dims)).default
        decomposes(_operator)(partial(_max_pool, _dims))


# --- Averages, resizing, padding: a matrix for each dimension ---


def _through(dy: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Multiplies the last dimensions by matrices ``[size of dy, size of x]``."""
    dtype, dy = dy.dtype, dy.to(_wide(dy))
    for number, matrix in enumerate(matrices):
        dim = number - len(matrices)
        dy = dy.movedim(dim, -1)
        # PyTorch's own ways to these shapes read the number of elements, which ONNX does not have.
        rows = dy.flatten(0, -2) @ matrix.to(dy.dtype)
        dy = rows.view(*dy.shape[:-1], matrix.shape[1]).movedim(-1, dim)
    return dy.to(dtype)


def _wide(dy: Tensor) -> torch.dtype:
    return torch.promote_types(dy.dtype, torch.float32)


def _positions(size: Any, like: Tensor) -> Tensor:
    return torch.arange(size, device=like.device)


def _averages(
    dy: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    *,
    dims: int,
) -> Tensor:
    kernels, strides, pads = (
        [*sizes] * (dims if len(sizes) == 1 else 1)
        for sizes in (kernel_size, stride or kernel_size, padding)
    )
    matrices = []
    for number, (kernel, step, pad) in enumerate(zip(kernels, strides, pads, strict=True)):
        size = x.shape[number - dims]
        begins = _positions(dy.shape[number - dims], x) * step - pad
        ends = (begins + kernel).clamp(max=size + pad)  # The last window may pass the padding.
        positions = _positions(size, x)
        inside = (positions >= begins[:, None]) & (positions < ends[:, None])
        if divisor_override is None:
            counted = ends - begins
            if not count_include_pad:
                counted = ends.clamp(max=size) - begins.clamp(min=0)
            matrices.append(inside.to(_wide(dy)) / counted[:, None])
        else:
            matrices.append(inside)
    if divisor_override is not None:
        dy = dy / divisor_override
    return _through(dy, matrices)


def _adaptive_averages(dims: int, dy: Tensor, x: Tensor) -> Tensor:
    matrices = []
    for dim in range(-dims, 0):
        begins, ends = adaptive_windows(x.shape[dim], dy.shape[dim], x)
        positions = _positions(x.shape[dim], x)
        inside = (positions >= begins[:, None]) & (positions < ends[:, None])
        matrices.append(inside.to(_wide(dy)) / (ends - begins)[:, None])
    return _through(dy, matrices)


for _dims in (2, 3):
    decomposes(getattr(_aten, f"avg_pool{_dims}d_backward").default)(partial(_averages, dims=_dims))
    decomposes(getattr(_aten, f"_adaptive_avg_pool{_dims}d_backward").default)(
        partial(_adaptive_averages, _dims)
    )


def _nearest(
    dy: Tensor, output_size: Sequence[int], input_size: Sequence[int], *scales: Any, shift: float
) -> Tensor:
    matrices = []
    for axis, scale in enumerate(_scales_of(scales, len(output_size))):
        size, number = input_size[axis + 2], output_size[axis]
        step = size / number if scale is None else 1 / scale
        chosen = ((_positions(number, dy).to(_wide(dy)) + shift) * step).floor().clamp(max=size - 1)
        matrices.append(_positions(size, dy) == chosen[:, None])
    return _through(dy, matrices)


def _linear(
    dy: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: Any,
) -> Tensor:
    def weights(positions: Tensor, centres: Tensor, last: Any) -> Tensor:
        return (1 - (positions - centres.clamp(0, last)).abs()).clamp(min=0)

    return _resized(dy, output_size, input_size, align_corners, scales, weights)


def _cubic(
    dy: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: Any,
) -> Tensor:
    """By Keys' kernel with a = -0.75, as PyTorch's forward; beyond the border, its pixel."""

    def weights(positions: Tensor, centres: Tensor, last: Any) -> Tensor:
        first = centres.floor()
        total = torch.zeros((), dtype=centres.dtype)
        for offset in (-1, 0, 1, 2):
            distance = (first + offset - centres).abs()
            near = (1.25 * distance - 2.25) * distance * distance + 1
            far = ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
            weight = torch.where(distance <= 1, near, far)
            total = total + torch.where(positions == (first + offset).clamp(0, last), weight, 0.0)
        return total

    return _resized(dy, output_size, input_size, align_corners, scales, weights)


def _resized(
    dy: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales: Sequence[Any],
    weights: Callable[[Tensor, Tensor, Any], Tensor],
) -> Tensor:
    """The gradient of resizing by ``weights``: from places, centres and the last place."""
    matrices = []
    for axis, scale in enumerate(_scales_of(scales, len(output_size))):
        size, number = input_size[axis + 2], output_size[axis]
        at = _positions(number, dy).to(_wide(dy))
        if align_corners:
            centres = at * ((size - 1) / max(number - 1, 1))
        else:
            centres = (at + 0.5) * (size / number if scale is None else 1 / scale) - 0.5
        matrices.append(weights(_positions(size, dy), centres[:, None], size - 1))
    return _through(dy, matrices)


def _scales_of(scales: Sequence[Any], dims: int) -> Sequence[float | None]:
    return scales or [None] * dims


for _dims in (1, 2, 3):
    for _name, _shift in (("upsample_nearest", 0.0), ("_upsample_nearest_exact", 0.5)):
        decomposes(getattr(_aten, f"{_name}{_dims}d_backward").default)(
            partial(_nearest, shift=_shift)
        )
decomposes(
    _aten.upsample_linear1d_backward.default,
    _aten.upsample_bilinear2d_backward.default,
    _aten.upsample_trilinear3d_backward.default,
)(_linear)
decomposes(_aten.upsample_bicubic2d_backward.default)(_cubic)


def _replicated(dy: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    matrices = []
    for dim in range(-(len(padding) // 2), 0):
        before = padding[2 * (-dim - 1)]
        size = x.shape[dim]
        source = (_positions(dy.shape[dim], x) - before).clamp(0, size - 1)
        matrices.append(_positions(size, x) == source[:, None])
    return _through(dy, matrices)


for _dims in (1, 2, 3):
    decomposes(getattr(_aten, f"replication_pad{_dims}d_backward").default)(_replicated)


# --- Normalisation, attention and elements ---


@decomposes(_aten.native_layer_norm.default, when=lambda x, *_: x.dtype is not torch.float32)
def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """ONNX's operator gives the statistics as float32, whatever its input is."""
    dims = [*range(-len(shape), 0)]
    wide = x.to(_wide(x))
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    scale = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    y = centred * scale
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype), mean.to(x.dtype), scale.to(x.dtype)


@decomposes(_aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention(
    dy: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the probabilities, computed again: PyTorch's decomposition gives no logsumexp."""
    if dropout_p:
        raise ValueError(f"attention's dropout must be 0 in an exported graph, got {dropout_p}")
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.mT) * factor
    if is_causal:
        rows, columns = (_positions(size, query) for size in scores.shape[-2:])
        scores = torch.where(columns <= rows[:, None], scores, -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    probabilities = scores.softmax(-1)
    dprobabilities = dy @ value.mT
    inner = (dy * out).sum(-1, keepdim=True)
    dscores = probabilities * (dprobabilities - inner) * factor
    return dscores @ key, dscores.mT @ query, probabilities.mT @ dy


def _shrunk(dy: Tensor, x: Tensor, bound: float) -> Tensor:
    return torch.where(x.abs() <= bound, 0.0, dy)


decomposes(_aten.hardshrink_backward.default, _aten.softshrink_backward.default)(_shrunk)


# --- Windows, norms of weights, distances ---


@decomposes(_aten.unfold_backward.default)
def _unfold(dy: Tensor, input_sizes: Sequence[int], dim: int, size: int, step: int) -> Tensor:
    dim %= len(input_sizes)
    windows = _positions(dy.shape[dim], dy)[:, None] * step + _positions(size, dy)
    dy = dy.movedim(-1, dim + 1).flatten(dim, dim + 1)
    return dy.new_zeros(input_sizes).index_add(dim, windows.flatten(), dy)


@decomposes(_aten._weight_norm_interface_backward.default)
def _weight_norm(
    dw: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    direction = v / norms
    dims = [axis for axis in range(v.ndim) if axis != dim % v.ndim]
    dg = (dw * direction).sum(dims, keepdim=True)
    return g / norms * (dw - direction * dg), dg


@decomposes(_aten._cdist_backward.default)
def _cdist(dy: Tensor, x: Tensor, y: Tensor, p: float, distances: Tensor) -> Tensor:
    """The gradient of x; where a distance is 0, or for p = 0, there is none."""
    difference = x[..., :, None, :] - y[..., None, :, :]
    dy, distances = dy[..., None], distances[..., None]
    if p == 0:
        return torch.zeros_like(x)
    if math.isinf(p):
        share = difference.sign() * (difference.abs() == distances)
    else:
        share = difference.sign() * (difference.abs() / distances) ** (p - 1)
    return torch.where(distances == 0, 0.0, share * dy).sum(-2)


# --- Of any operator's gradient ---


def _by_size(x: Tensor, factor: Any, *_: Any) -> bool:
    return not isinstance(factor, (bool, int, float, complex))


# The exporter takes the number for a constant.
decomposes(_aten.mul.Scalar, when=_by_size)(torch.mul)
decomposes(_aten.div.Scalar, when=_by_size)(torch.div)


@decomposes(_aten.empty_permuted.default)
def _empty(size: Sequence[int], order: Sequence[int], **options: Any) -> Tensor:
    return torch.empty(size, dtype=options["dtype"], device=options["device"])


# --- Views by strides: autograd makes some of whole tensors, for another order in memory ---


def _is_whole(
    x: Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> bool:
    """Whether the view is of all elements in row-major order, as in ONNX."""
    count: Any = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if isinstance(length, int) and length == 1:
            continue
        if step != count:
            return False
        count = count * length
    return not storage_offset and x.is_contiguous() and bool(x.numel() == count)


@decomposes(_aten.as_strided.default, when=_is_whole)
def _view(x: Tensor, size: Sequence[Any], *_: Any) -> Tensor:
    return x.reshape(size)


@decomposes(_aten.as_strided_scatter.default, when=lambda x, source, *view: _is_whole(x, *view))
def _written_view(x: Tensor, source: Tensor, *_: Any) -> Tensor:
    return source.reshape(x.shape)
