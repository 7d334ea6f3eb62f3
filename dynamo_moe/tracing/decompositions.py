"""Decompositions of operators that PyTorch's exporter has no translation for, or a wrong one.

They are written in operators that it translates rightly (seen with torch 2.13, onnxscript 0.7.2 and
ONNX Runtime 1.31: PyTorch's own samples of each). Sizes may be symbolic, so none depends on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamo_moe.private.pytorch import OpOverload

_aten = torch.ops.aten
_prims = torch.ops.prims

Function = Callable[..., Any]


@dataclass(frozen=True)
class Decomposition:
    """A replacement for an operator; returns NotImplemented for a call that does not need it.

    Attributes:
        function: Takes the operator's arguments, and returns its result.
        applies: From a call's arguments to whether it is needed.
    """

    function: Function
    applies: Callable[..., bool]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the decomposition, or declines."""
        return self.function(*args, **kwargs) if self.applies(*args, **kwargs) else NotImplemented


DECOMPOSITIONS: dict[OpOverload, Decomposition] = {}
"""The decompositions, by operator."""


def decomposes(
    *operators: OpOverload, when: Callable[..., bool] = lambda *_, **__: True
) -> Callable[[Function], Function]:
    """Registers a function as the decomposition of operators, for the calls that ``when`` takes."""

    def register(function: Function) -> Function:
        DECOMPOSITIONS.update(dict.fromkeys(operators, Decomposition(function, when)))
        return function

    return register


# --- Half precision ---


def _is_half(x: Tensor, *_: Any, **__: Any) -> bool:
    return x.dtype in {torch.float16, torch.bfloat16}


def _widened_half(x: Tensor) -> Tensor:
    return x.float() if _is_half(x) else x


def _in_float32(operator: Function, x: Tensor, *args: Any, **options: Any) -> Any:
    wide = [_widened_half(a) if isinstance(a, Tensor) else a for a in (x, *args)]
    return operator(*wide, **options).to(x.dtype)


# --- Other names of operators, which the exporter does not promote the dtypes of ---

for _other, _name in (
    ("divide", "div"),
    ("true_divide", "div"),
    ("subtract", "sub"),
    ("multiply", "mul"),
    ("greater", "gt"),
    ("greater_equal", "ge"),
    ("less", "lt"),
    ("less_equal", "le"),
    ("not_equal", "ne"),
    ("__and__", "bitwise_and"),
    ("__or__", "bitwise_or"),
    ("__xor__", "bitwise_xor"),
):
    for _overload in ("Tensor", "Scalar"):
        decomposes(getattr(getattr(_aten, _other), _overload))(
            getattr(getattr(_aten, _name), _overload)
        )
decomposes(_aten.max.other)(_aten.maximum.default)
decomposes(_aten.min.other)(_aten.minimum.default)


# --- Elements ---


# Where a number comes first, or makes real numbers of integers, the exporter has no promotion.


def _promoted(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    dtype, device = torch.result_type(x, y), (x if isinstance(x, Tensor) else y).device
    first, second = (
        value.to(dtype)
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=dtype, device=device)
        for value in (x, y)
    )
    return first, second


@decomposes(_aten.rsub.Scalar)
def _subtract_from(x: Tensor, number: float, alpha: float = 1) -> Any:
    x, first = _promoted(x, number)
    return torch.sub(first, x, alpha=alpha)


@decomposes(
    _aten.floor_divide.default,
    _aten.floor_divide.Scalar,
    when=lambda x, y: (
        not isinstance(x, Tensor) or (isinstance(y, float) and not x.is_floating_point())
    ),
)
def _floor_divide(x: Any, y: Any) -> Any:
    return torch.floor_divide(*_promoted(x, y))


# The exporter adds 1 and takes it off again, which leaves nothing of small numbers.


@decomposes(_aten.log1p.default, when=lambda x: x.is_floating_point())
def _log1p(x: Tensor) -> Tensor:
    """The logarithm of the rounded sum, and what the rounding took, to first order."""
    wide = _widened_half(x)
    whole = wide + 1
    lost = torch.where(wide.abs() < 0.5, (wide - (whole - 1)) / whole, 0)
    return (whole.log() + lost).to(x.dtype)


@decomposes(_aten.expm1.default, when=lambda x: x.is_floating_point())
def _expm1(x: Tensor) -> Tensor:
    wide = _widened_half(x)
    return ((wide / 2).tanh() * (wide.exp() + 1)).to(x.dtype)


# The exporter takes exponentials of what they are asked of, which overflow or vanish.


@decomposes(_aten.log_sigmoid.default)
def _log_sigmoid(x: Tensor) -> Tensor:
    wide = _widened_half(x)
    return (wide.clamp(max=0) - (-wide.abs()).exp().log1p()).to(x.dtype)


@decomposes(_aten.logaddexp.default)
def _log_add_exp(x: Tensor, y: Tensor) -> Tensor:
    x, y = _promoted(x, y)
    first, second = _widened_half(x), _widened_half(y)
    apart = torch.where(first == second, 0, first - second)  # Infinities have no difference.
    return (first.maximum(second) + (-apart.abs()).exp().log1p()).to(x.dtype)


@decomposes(_aten.logcumsumexp.default)
def _log_cum_sum_exp(x: Tensor, dim: int) -> Tensor:
    """Each sum is taken beside its own greatest term, which takes the square of the length."""
    if not x.ndim:
        return x
    rows = _widened_half(x).movedim(dim, -1)
    places = torch.ones_like(rows, dtype=torch.int64).cumsum(-1)
    summed = places.unsqueeze(-2) <= places.unsqueeze(-1)
    terms = torch.where(summed, rows.unsqueeze(-2), -math.inf)
    return terms.logsumexp(-1).movedim(-1, dim).to(x.dtype)


# The exporter's steps between are rounded in half precision.
for _steps in (_aten.log2.default, _aten.log10.default, _aten.sinc.default):
    decomposes(_steps, when=_is_half)(partial(_in_float32, _steps))


def _takes_a_root(x: Tensor, order: float = 2, *_: Any, dtype: Any = None) -> bool:
    return _is_half(x) and order not in {0, 1, 2, math.inf, -math.inf} and dtype is None


decomposes(_aten.linalg_vector_norm.default, when=_takes_a_root)(
    partial(_in_float32, _aten.linalg_vector_norm.default)
)


def _is_not_one(x: Tensor, dim: int) -> bool:
    """Whether a trace does not know that a dimension is 1."""
    return not x.ndim or not isinstance(x.shape[dim], int) or x.shape[dim] != 1


# PyTorch keeps other dimensions than those of 1; ONNX has no Squeeze of them.
@decomposes(_aten.squeeze.dim, when=_is_not_one)
def _squeeze_nothing(x: Tensor, dim: int) -> Tensor:
    return x.view_as(x)


@decomposes(_aten.squeeze.dims)
def _squeeze(x: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in sorted((dim % max(x.ndim, 1) for dim in dims), reverse=True):
        x = x.squeeze(dim)
    return x if dims else x.view_as(x)


@decomposes(_prims.view_of.default)
def _view_of(x: Tensor) -> Tensor:
    return x.view_as(x)


@decomposes(_prims.scalar_tensor.default)
def _scalar_tensor(value: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


@decomposes(_prims.signbit.default)
def _signbit(x: Tensor) -> Tensor:
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.is_floating_point() else x < 0


@decomposes(_aten.atan2.default)
def _atan2(y: Tensor, x: Tensor) -> Tensor:
    """The exporter's translation takes the angle of a negative number for minus pi."""
    dtype = torch.result_type(y, x)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    y, x = y.to(dtype), x.to(dtype)
    half = torch.where(_signbit(y), -math.pi, math.pi).to(dtype)
    angle = (y / x).atan()
    angle = torch.where(_signbit(x), angle + half, angle)
    at_zero = torch.where(_signbit(x), half, torch.zeros_like(half))
    return torch.where((x == 0) & (y == 0), at_zero, torch.where(x == 0, half / 2, angle))


def _ignoring_nan(choose: Function, x: Tensor, y: Tensor) -> Any:
    if not x.is_floating_point():
        return choose(x, y)
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, choose(x, y)))


decomposes(_prims.fmax.default)(partial(_ignoring_nan, torch.maximum))
decomposes(_prims.fmin.default)(partial(_ignoring_nan, torch.minimum))


@decomposes(_prims.hypot.default)
def _hypot(x: Tensor, y: Tensor) -> Tensor:
    """Scaled by the larger one, as squares overflow early."""
    larger, smaller = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    ratio = torch.where(larger == smaller, 1.0, smaller / larger)
    return torch.where(larger == 0, larger, larger * (1 + ratio * ratio).sqrt())


_WIDE_INTEGERS = {torch.int32, torch.int64}  # The exporter divides integers in float32.


def _of_wide_integers(x: Tensor, y: Any, **_: Any) -> bool:
    return torch.result_type(x, y) in _WIDE_INTEGERS


@decomposes(
    _aten.div.Tensor_mode,
    _aten.div.Scalar_mode,
    when=lambda x, y, *, rounding_mode: bool(rounding_mode) and _of_wide_integers(x, y),
)
def _divide_integers(x: Tensor, y: Any, *, rounding_mode: str) -> Any:
    x, y = _promoted(x, y)
    if rounding_mode == "floor":
        return torch.floor_divide(x, y)
    return _prims.div(*torch.broadcast_tensors(x, y))  # ONNX's, which is towards 0.


@decomposes(_aten.fmod.Tensor, _aten.fmod.Scalar, when=_of_wide_integers)
def _remainder_of_integers(x: Tensor, y: Any) -> Any:
    """ONNX Runtime computes it in float64."""
    return x - _divide_integers(x, y, rounding_mode="trunc") * y


# ONNX has these for floating point only.
_of_integers = partial(decomposes, when=lambda x: not x.is_floating_point())
_of_integers(*(getattr(_aten, name).default for name in ("ceil", "floor", "round", "trunc")))(
    torch.clone
)
_of_integers(_aten.relu.default)(partial(torch.clamp, min=0))
_of_integers(_aten.isnan.default, _aten.isinf.default)(partial(torch.zeros_like, dtype=torch.bool))
_of_integers(_aten.isfinite.default)(partial(torch.ones_like, dtype=torch.bool))


def _converts_integers(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> bool:
    return dtype is not None and not x.is_floating_point()


def _of_converted(function: Function, x: Tensor, dim: int, dtype: torch.dtype) -> Any:
    return function(x.to(dtype), dim)


for _operator, _function in (
    (_aten.softmax.int, torch.softmax),
    (_aten.log_softmax.int, torch.log_softmax),
):
    decomposes(_operator, when=_converts_integers)(partial(_of_converted, _function))


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


# --- Embedding, normalisation and attention ---


@decomposes(_aten.embedding_bag.default, _aten.embedding_bag.padding_idx)
def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, None, None, None]:
    """The exporter makes a loop over the bags, with a sequence, which TensorRT does not take.

    The three other results are for the backward pass.
    """
    if include_last_offset:
        offsets = offsets[:-1]
    # Several bags can begin at one place, also behind the last index; all but the last are empty.
    begins = offsets.new_zeros(indices.shape[0] + 1).index_add(0, offsets, torch.ones_like(offsets))
    bags = begins.cumsum(0)[:-1] - 1
    rows = weight[indices]
    kept = torch.ones_like(indices, dtype=torch.bool)
    if padding_idx is not None:
        kept = indices != (padding_idx + weight.shape[0] if padding_idx < 0 else padding_idx)
    counts = weight.new_zeros(offsets.shape[0]).index_add(0, bags, kept.to(weight.dtype))
    if mode == 2:
        least = rows.new_full((offsets.shape[0], weight.shape[1]), -math.inf)
        rows = rows.masked_fill(~kept[:, None], -math.inf)
        most = least.scatter_reduce(0, bags[:, None].expand(rows.shape), rows, "amax")
        return torch.where(counts[:, None] > 0, most, 0.0), None, None, None
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    result = weight.new_zeros(offsets.shape[0], weight.shape[1])
    result = result.index_add(0, bags, rows * kept[:, None])
    if mode == 1:
        result = result / counts.clamp(min=1)[:, None]
    return result, None, None, None


def _in_training(*arguments: Any) -> bool:
    return bool(arguments[5])


class _Normalized(NamedTuple):
    """A batch norm's result in its input's dtype, and the batch's statistics in the weight's."""

    y: Tensor
    mean: Tensor
    variance: Tensor
    scale: Tensor


def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Tensor | None, eps: float
) -> _Normalized:
    """Normalises by the statistics of the batch, in float32 if x is in half precision.

    As in PyTorch: squares beyond 65504 are infinite in float16.
    """
    dims, shape = [0, *range(2, x.ndim)], [-1] + [1] * (x.ndim - 2)
    wide = _widened_half(x)
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    variance = centred.square().mean(dims, keepdim=True)
    scale = (variance + eps).rsqrt()
    y = centred * scale
    if weight is not None:
        y = y * weight.reshape(shape)
    if bias is not None:
        y = y + bias.reshape(shape)
    like = next((tensor for tensor in (weight, running) if tensor is not None), x)
    statistics = (value.reshape(-1).to(like.dtype) for value in (mean, variance, scale))
    return _Normalized(y.to(x.dtype), *statistics)


@decomposes(
    _aten.native_batch_norm.default, _aten._native_batch_norm_legit.default, when=_in_training
)
def _native_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """By the statistics of the batch; the running ones matter to training alone."""
    *_, eps = arguments
    normalized = _normalized(x, weight, bias, running_mean, eps)
    return normalized.y, normalized.mean, normalized.scale


@decomposes(_aten.batch_norm.default, when=_in_training)
def _batch_norm(*arguments: Any) -> Any:
    return _native_batch_norm(*arguments[:-1])[0]  # The last: whether cuDNN is enabled.


@decomposes(_aten._native_batch_norm_legit_functional.default, when=_in_training)
def _functional_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """The running variance is without bias, which that of ONNX's operator has."""
    y, mean, variance, scale = _normalized(x, weight, bias, running_mean, eps)
    count = x.shape[0] * math.prod(x.shape[2:])
    unbiased = variance * (count / (count - 1))
    return (
        y,
        mean,
        scale,
        running_mean + momentum * (mean - running_mean),
        running_var + momentum * (unbiased - running_var),
    )


@decomposes(
    _aten.scaled_dot_product_attention.default, when=lambda query, *_, **__: query.ndim != 4
)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
    attention = _aten._scaled_dot_product_attention_math
    return attention(query, key, value, attn_mask, 0.0, is_causal, **options)[0]


# --- Masks ---


@decomposes(_aten.masked_fill.Scalar, when=lambda x, *_: x.dtype == torch.bool)
def _masked_fill(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return x | mask if value else x & ~mask  # ONNX Runtime has no Where of booleans.


# --- Choices ---


@decomposes(_aten.sort.stable)
def _stable_sort(
    x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    # Becomes TopK, which the standard has take the lower index first.
    values, indices = torch.sort(x, dim, descending)
    return values, indices


@decomposes(_aten.kthvalue.default)
def _kth_value(x: Tensor, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(x.reshape(1) if not x.ndim else x, dim)
    place = torch.zeros(1, dtype=torch.int64, device=x.device) + (k - 1)
    kth = values.index_select(dim, place), indices.index_select(dim, place)
    if keepdim and x.ndim:
        return kth
    return kth[0].squeeze(dim), kth[1].squeeze(dim)


@decomposes(_aten.median.dim)
def _median(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    middle = (x.shape[dim] + 1) // 2 if x.ndim else 1
    values, indices = _kth_value(x, middle, dim, keepdim)  # PyTorch's operator fixes k.
    if not x.is_floating_point():
        return values, indices
    is_nan = x.isnan()
    has_nan = is_nan.any(dim, keepdim)
    places = is_nan.long().argmax(dim, keepdim)
    return values.masked_fill(has_nan, math.nan), torch.where(has_nan, places, indices)


@decomposes(_aten.median.default)
def _median_of_all(x: Tensor) -> Tensor:
    return torch.median(x.flatten(), 0).values


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


@decomposes(_aten._conj_physical.default, when=lambda x: x.is_complex())
def _conjugate(x: Tensor) -> Tensor:
    real, imaginary = torch.view_as_real(x).unbind(-1)
    return torch.view_as_complex(torch.stack([real, -imaginary], -1))


# --- Reductions ---


# The exporter's translation takes the mean in the tensor's own dtype, which may be an integer.
@decomposes(
    _aten.mean.dim,
    when=lambda x, dim=None, keepdim=False, *, dtype=None: dtype not in {None, x.dtype},
)
def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype) -> Any:
    return x.to(dtype).mean(dim, keepdim)


def _cumulative(reduce: Function, sign: int, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Compares each element with all up to it; of equal ones PyTorch takes the last."""
    if not x.ndim:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    places = torch.arange(x.shape[dim], device=x.device)
    rows = x.movedim(dim, -1).unsqueeze(-2)
    seen = places <= places[:, None]
    bounds = None if x.is_floating_point() else torch.iinfo(x.dtype)
    unseen = sign * math.inf if bounds is None else (bounds.max if sign > 0 else bounds.min)
    values = reduce(torch.where(seen, rows, unseen), -1)
    chosen = seen & (rows == values.unsqueeze(-1))
    indices = torch.where(chosen, places, 0).amax(-1)
    return values.movedim(-1, dim), indices.movedim(-1, dim)


decomposes(_aten.cummax.default)(partial(_cumulative, torch.amax, -1))
decomposes(_aten.cummin.default)(partial(_cumulative, torch.amin, 1))


@decomposes(_prims.prod.default)
def _prod(x: Tensor, dims: Sequence[int] | None, *, output_dtype: Any = None) -> Tensor:
    for dim in sorted(range(x.ndim) if dims is None else dims, reverse=True):
        x = x.prod(dim, dtype=output_dtype)
    return x


def _over_all(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> bool:
    return not dim or not x.ndim


def _over_every(reduce: Function, x: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
    return reduce(x, [*range(x.ndim)], keepdim) if x.ndim else x.clone()


decomposes(_aten.amax.default, when=_over_all)(partial(_over_every, torch.amax))
decomposes(_aten.amin.default, when=_over_all)(partial(_over_every, torch.amin))


# ONNX indexes several dimensions by int64 alone.
_NARROW = {torch.int8, torch.int16, torch.int32}


def _has_narrow(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in _NARROW for index in indices)


def _widened(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [i.long() if i is not None and i.dtype in _NARROW else i for i in indices]


@decomposes(_aten.index.Tensor, when=lambda x, indices: _has_narrow(indices))
def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    return _aten.index(x, _widened(indices))


# ONNX Runtime scatters sums and products in float32, but not in half precision.


@decomposes(
    _aten.index_put.default,
    when=lambda x, indices, _, accumulate=False: (
        _has_narrow(indices) or (accumulate and _is_half(x))
    ),
)
def _index_put(x: Tensor, indices: Any, source: Tensor, accumulate: bool = False) -> Any:
    if _has_narrow(indices):
        return _aten.index_put(x, _widened(indices), source, accumulate)
    return _aten.index_put(x.float(), indices, source.float(), accumulate).to(x.dtype)


# ONNX cannot scatter into a scalar, which the exporter's translation does not consider.
@decomposes(_aten.scatter_add.default, when=lambda x, *_: not x.ndim or _is_half(x))
def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    if _is_half(x):
        return _in_float32(torch.scatter_add, x, dim, index, src)
    return x.scatter_reduce(dim, index, src, "sum")


# ONNX's ScatterElements has no reduction "mean".
@decomposes(
    _aten.scatter_reduce.two,
    when=lambda x, _, __, ___, reduce, **____: reduce == "mean" or _is_half(x),
)
def _scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    if _is_half(x):
        options = {"include_self": include_self}
        return _in_float32(torch.scatter_reduce, x, dim, index, src, reduce, **options)
    counts = torch.zeros_like(x).scatter_reduce(dim, index, torch.ones_like(src), "sum")
    base = x if include_self else torch.where(counts > 0, 0, x)
    total = base.scatter_reduce(dim, index, src, "sum")
    counts = counts + 1 if include_self else counts.clamp(min=1)
    return total.div(counts, rounding_mode=None if x.is_floating_point() else "floor")


@decomposes(_aten._cdist_forward.default)
def _cdist(x: Tensor, y: Tensor, p: float, compute_mode: int | None = None) -> Tensor:
    differences = (x.unsqueeze(-2) - y.unsqueeze(-3)).abs()
    if p == 0:
        return (differences != 0).to(x.dtype).sum(-1)
    if p == 1:
        return differences.sum(-1)
    if p == 2:
        return differences.square().sum(-1).sqrt()
    if p == math.inf:
        return differences.amax(-1)
    return differences.pow(p).sum(-1).pow(1 / p)


# --- Selections ---


# PyTorch multiplies the sizes; with symbolic ones the exporter cannot.
@decomposes(
    _aten.flatten.using_ints,
    when=lambda x, start_dim=0, end_dim=-1: start_dim == 0 and end_dim in {-1, x.ndim - 1},
)
def _flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    return x.reshape(-1)


@decomposes(_aten.masked_select.default)
def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    return x[mask] if x.ndim else x.reshape(1)[mask.reshape(1)]


# ONNX Runtime takes a scalar for a vector of one element.
@decomposes(_aten.nonzero.default, when=lambda x: x.ndim == 0)
def _nonzero_of_scalar(x: Tensor) -> Tensor:
    return x.reshape(1).nonzero()[:, :0]


# The exporter makes a sequence, whose folding fails.
@decomposes(
    _aten.split.Tensor,
    when=lambda x, split_size, dim=0: not isinstance(split_size, int),
)
def _split_by_size(x: Tensor, split_size: int, dim: int = 0) -> list[Tensor]:
    size = x.shape[dim]
    last = max(1, int((size + split_size - 1) // split_size)) - 1  # A result has so many tensors.
    begins = [number * split_size for number in range(last + 1)]
    sizes = [*[split_size] * last, size - begins[-1]]
    return [x.narrow(dim, *part) for part in zip(begins, sizes, strict=True)]


# The exporter's translation takes no size.
@decomposes(
    _aten.repeat_interleave.Tensor,
    when=lambda repeats, *, output_size=None: output_size is not None,
)
def _repeat_interleave(repeats: Tensor, *, output_size: int) -> Tensor:
    return torch.repeat_interleave(repeats)


@decomposes(
    _aten.roll.default,
    when=lambda x, shifts, dims=(): not all(isinstance(shift, int) for shift in shifts),
)
def _roll_by_size(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """The exporter takes numbers alone."""
    if not dims:
        return _roll_by_size(x.reshape(-1), shifts, (0,)).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        begin = size - shift % size
        x = torch.cat((x.narrow(dim, begin, size - begin), x.narrow(dim, 0, begin)), dim)
    return x


@decomposes(
    _aten.repeat_interleave.self_int,
    when=lambda x, repeats, *_, **__: not isinstance(repeats, int),
)
def _repeat_interleave_by_size(
    x: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """The exporter's translation repeats along the wrong dimension."""
    if dim is None:
        x, dim = x.reshape(-1), 0
    dim %= x.ndim
    before, size, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    repeated = x.unsqueeze(dim + 1).expand(*before, size, repeats, *after)
    return repeated.reshape(*before, size * repeats, *after)


@decomposes(_aten.searchsorted.Tensor, _aten.searchsorted.Scalar)
def _searchsorted(
    boundaries: Tensor,
    x: Tensor | float,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Counts the boundaries below each value: all of them, as ONNX has no binary search."""
    if sorter is not None:
        boundaries = boundaries.gather(-1, sorter)
    if isinstance(x, Tensor):
        x = x.unsqueeze(-1)
    if boundaries.ndim > 1:
        boundaries = boundaries.unsqueeze(-2)
    above = boundaries > x if right or side == "right" else boundaries >= x
    return (~above).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


@decomposes(_aten.bucketize.Tensor)
def _bucketize(x: Tensor, boundaries: Tensor, **options: bool) -> Any:
    return _searchsorted(boundaries, x, **options)
