"""Argument checks that every path of an op runs: eager, fake, compiled.

Legend: D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from custom_ops.dtypes import FLOATS, IDS, dtype_name
from custom_ops.expert_weights import PackedExperts
from custom_ops.options import ExpertOptions, RouterOptions
from custom_ops.packed_weights import WHOLE, PackedMatrices
from custom_ops.weight_formats import STORED_SUFFIXES

R = TypeVar("R")
_REMEMBERED = 1024


def remembered(check: Callable[..., R]) -> Callable[..., R]:
    """Makes a check of an operator's arguments return at once what it returned for such before.

    It must depend on the tensors' shapes, dtypes and devices alone, and these be no traced ones.
    The checks of a call take about 20 us, more than the launch of all its kernels.
    """
    results: dict[Any, R] = {}

    @wraps(check)
    def checked(*arguments: Any, **options: Any) -> R:
        looks = [(a.shape, a.dtype, a.device) if isinstance(a, Tensor) else a for a in arguments]
        key = (*looks, *options.items())
        result = results.get(key)
        if result is None:
            result = check(*arguments, **options)
            if len(results) >= _REMEMBERED:
                results.clear()
            results[key] = result
        return result

    return checked


def check_experts(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, options: ExpertOptions
) -> None:
    """Checks tokens and expert parameters; with x on CUDA, w1 and w2 may be in host memory.

    Raises:
        ValueError: If a shape or a device does not fit.
        TypeError: If a dtype is not supported or differs where it must not.
    """
    _check_float("x", x)
    _check_value(x.ndim >= 1, lambda: "x must have at least 1 dimension [..., D], got 0")
    _check_ndim("w1", w1, "[E, F, D]")
    _check_ndim("w2", w2, "[E, D, H]")
    experts, rows, width = w1.shape
    hidden = w2.shape[2]
    for size in (experts, width, hidden):
        _check_value(
            size >= 1,
            lambda: f"E, D and H must be at least 1, got w1 {_text(w1)} and w2 {_text(w2)}",
        )
    _check_value(
        x.shape[-1] == width,
        lambda: f"x's last dimension must be D = {width} as in w1 [E, F, D], got {x.shape[-1]}",
    )
    _check_shape("w2", w2, "[E, D, H]", (experts, width, hidden))
    _check_value(
        rows == options.rows_per_hidden * hidden,
        lambda: (
            f"w1 [E, F, D] must have F = {'2H' if options.gated else 'H'} = "
            f"{options.rows_per_hidden * hidden} rows (H = {hidden} from w2 [E, D, H], "
            f"gated={options.gated}), got {rows}"
        ),
    )
    _check_float("w1", w1)
    for name, tensor, form, shape in (
        ("b1", b1, "[E, F]", (experts, rows)),
        ("b2", b2, "[E, D]", (experts, width)),
    ):
        if tensor is not None:
            _check_shape(name, tensor, form, shape)
    for name, tensor in (("w2", w2), ("b1", b1), ("b2", b2)):
        if tensor is not None:
            _check_dtype(name, tensor, (w1.dtype,), "as w1")
    if _is_offloaded(x, w1):
        _check_value(
            w2.device == w1.device,
            lambda: f"w2 must be on w1's device {w1.device}, got {w2.device}",
        )
        _check_devices(x, b1=b1, b2=b2)
    else:
        _check_devices(x, w1=w1, b1=b1, w2=w2, b2=b2)


def check_packed_experts(x: Tensor, weights: PackedExperts, options: ExpertOptions) -> None:
    """Checks tokens and the parameters of packed experts.

    Raises:
        ValueError: If a shape or a device does not fit.
        TypeError: If a dtype is not supported or differs where it must not.
    """
    w1, b1, w2, b2 = weights
    _check_float("x", x)
    _check_value(x.ndim >= 1, lambda: "x must have at least 1 dimension [..., D], got 0")
    _check_ndim("w1", w1.packed.values, "[E, F, B]")
    experts, rows, _ = w1.packed.values.shape
    per_hidden, width = options.rows_per_hidden, x.shape[-1]
    _check_value(
        experts >= 1 and rows >= 1 and rows % per_hidden == 0,
        lambda: (
            f"w1 [E, F, B] must have F = {'2H' if options.gated else 'H'} rows of at least one "
            f"expert (gated={options.gated}), got {_text(w1.packed.values)}"
        ),
    )
    hidden = rows // per_hidden
    first = _check_packed_weight("w1", w1, "[E, F, D", (experts, rows, width))
    second = _check_packed_weight("w2", w2, "[E, D, H", (experts, width, hidden))
    one, two = w1.packed, w2.packed
    _check_dtype("w2_scales", two.scales, (one.scales.dtype,), "as w1_scales")
    _check_value(
        any(block in second for block in first),  # Sizes may be symbols, which have no hash.
        lambda: (
            "the scales of w1 and w2 must be of blocks of one size (rows, columns), got "
            f"{_block_text(first[0])} and {_block_text(second[0])}"
        ),
    )
    _check_value(
        (one.zero_points is None) == (two.zero_points is None),
        lambda: "w1_zero_points and w2_zero_points must be given together",
    )
    points = [weight.zero_points for weight in (one, two) if weight.zero_points is not None]
    are_one = [tuple(tensor.shape[1:]) == (1, 1) for tensor in points]
    _check_value(
        all(are_one) or not any(are_one) or one.scales.shape[1:] == (1, 1),
        lambda: (
            "w1_zero_points and w2_zero_points must both have one for each scale, or both be "
            f"[E, 1, 1]; got {' and '.join(map(_text, points))}"
        ),
    )
    for name, tensor, form, shape in (
        ("b1", b1, "[E, F]", (experts, rows)),
        ("b2", b2, "[E, D]", (experts, width)),
    ):
        if tensor is not None:
            _check_shape(name, tensor, form, shape)
            _check_dtype(name, tensor, (x.dtype,), "as x")
    _check_devices(x, b1=b1, b2=b2)
    near = w1.packed.values if _is_offloaded(x, w1.packed.values) else x
    for name, weight in (("w1", w1), ("w2", w2)):
        tensors = zip(STORED_SUFFIXES, weight.packed, strict=True)
        _check_devices(near, **{name + suffix: tensor for suffix, tensor in tensors})


def _block_text(block: tuple[int, int]) -> str:
    rows, columns = ("all" if size == WHOLE else size for size in block)
    return f"({rows}, {columns})"


def _check_packed_weight(
    name: str, weight: PackedMatrices, axes: str, shape: tuple[int, int, int]
) -> list[tuple[int, int]]:
    """Checks a weight, and returns its blocks."""
    values, scales, zero_points, global_scales = weight.packed
    *rows, columns = shape
    per_byte = weight.encoding.per_byte
    _check_dtype(name, values, (torch.int8,))
    _check_value(
        columns >= 1 and columns % per_byte == 0,
        lambda: f"{axes[-1]} must be a multiple of {per_byte} where it is packed, got {columns}",
    )
    _check_shape(name, values, f"{axes} / {per_byte}]", (*rows, columns // per_byte))
    _check_dtype(f"{name}_scales", scales, weight.encoding.scales_dtypes)
    experts, out = rows
    _check_value(
        scales.ndim == 3 and scales.shape[0] == experts,
        lambda: f"{name}_scales must be [E, ...] = [{experts}, ...], got {_text(scales)}",
    )
    blocks = weight.encoding.blocks(out, columns, scales.shape[1:])
    _check_value(
        bool(blocks),
        lambda: (
            f"the scales of an expert in {name}_scales must have the shape "
            f"{weight.encoding.scales_of(out, columns)} in {weight.encoding.name}, got "
            f"{_text(tuple(scales.shape[1:]))}"
        ),
    )
    _check_value(
        zero_points is None or weight.encoding.has_zero_points,
        lambda: f"{name}_zero_points must be None: {weight.encoding.name} has none",
    )
    if zero_points is not None:
        _check_dtype(f"{name}_zero_points", zero_points, (torch.int8,))
        if tuple(zero_points.shape) != (experts, 1, 1):
            groups = tuple(scales.shape)
            _check_shape(f"{name}_zero_points", zero_points, f"{axes} / G]", groups)
    _check_value(
        (global_scales is not None) == weight.encoding.has_global_scales,
        lambda: (
            f"{name}_global_scales must be given in {weight.encoding.name}"
            if global_scales is None
            else f"{name}_global_scales must be None: {weight.encoding.name} has none"
        ),
    )
    if global_scales is not None:
        _check_dtype(f"{name}_global_scales", global_scales, (torch.float32,))
        form = f"{axes.rpartition(',')[0]}, 1]"
        _check_shape(f"{name}_global_scales", global_scales, form, (*rows, 1))
    return blocks


def check_trainable(x: Tensor, w1: Tensor) -> None:
    """Checks that a call that needs gradients has its experts on the tokens' device.

    Raises:
        NotImplementedError: If they are in host memory.
    """
    if _is_offloaded(x, w1):
        raise NotImplementedError(
            f"experts in host memory have no gradients (x is on {x.device}, w1 on {w1.device}): "
            "call the layer under torch.no_grad(), or move its experts to x's device"
        )


def check_router(
    x: Tensor,
    router_weight: Tensor,
    router_bias: Tensor | None,
    selection_bias: Tensor | None,
    experts: int,
    options: RouterOptions,
) -> None:
    """Checks the router's parameters against the experts'; call :func:`check_experts` first.

    Raises:
        ValueError: If a shape or a device does not fit, ``top_k`` exceeds the experts that a token
            can choose from, or the groups do not divide them.
        TypeError: If a dtype is not supported.
    """
    _check_shape("router_weight", router_weight, "[E, D]", (experts, x.shape[-1]))
    _check_float("router_weight", router_weight)
    biases = {"router_bias": router_bias, "selection_bias": selection_bias}
    for name, bias in biases.items():
        if bias is not None:
            _check_shape(name, bias, "[E]", (experts,))
            _check_float(name, bias)
    for condition, message in options.rules(experts):
        _check_value(condition, message.__str__)
    _check_devices(x, router_weight=router_weight, **biases)


def check_routing(x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> None:
    """Checks a routing decision made outside the op against the tokens.

    Raises:
        ValueError: If a shape or a device does not fit.
        TypeError: If ``expert_ids`` is not int32/int64 or ``expert_weights`` not floating.
    """
    _check_value(
        expert_ids.ndim == x.ndim and expert_ids.shape[-1] >= 1,
        lambda: (
            f"expert_ids must be [..., K] with x's leading dimensions and K >= 1, got "
            f"{_text(expert_ids)} for x {_text(x)}"
        ),
    )
    _check_shape("expert_ids", expert_ids, "[..., K]", (*x.shape[:-1], expert_ids.shape[-1]))
    _check_shape("expert_weights", expert_weights, "[..., K]", tuple(expert_ids.shape))
    _check_dtype("expert_ids", expert_ids, IDS)
    _check_float("expert_weights", expert_weights)
    _check_devices(x, expert_ids=expert_ids, expert_weights=expert_weights)


def check_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """Checks the arguments of the RMS norm.

    Raises:
        ValueError: If a shape, a device or ``eps`` does not fit.
        TypeError: If a dtype is not supported.
    """
    _check_float("x", x)
    _check_float("weight", weight)
    _check_value(x.ndim >= 1, lambda: "x must have at least 1 dimension [..., D], got 0")
    _check_value(x.shape[-1] >= 1, lambda: f"D must be at least 1, got x {_text(x)}")
    _check_shape("weight", weight, "[D]", (x.shape[-1],))
    _check_value(eps >= 0, lambda: f"eps must be at least 0, got {eps}")
    _check_device("weight", weight, x)


# torch._check for other errors than RuntimeError: not documented. Without them the sizes that are
# traced decide whether a condition on symbolic ones holds.
_CHECKS: dict[type[Exception], Callable[..., None] | None] = {
    ValueError: getattr(torch, "_check_value", None),
    TypeError: getattr(torch, "_check_type", None),
}


def _check_value(condition: bool, message: Callable[[], str]) -> None:
    _check(ValueError, condition, message)


def _check_type(condition: bool, message: Callable[[], str]) -> None:
    _check(TypeError, condition, message)


def _check(error: type[Exception], condition: bool, message: Callable[[], str]) -> None:
    # Eager conditions are plain bools: skipping torch's checks for them saves 70 us a call.
    if condition is True:
        return
    check = _CHECKS[error]
    if check is not None:
        check(condition, message)
    elif not condition:
        raise error(message())


def _check_ndim(name: str, tensor: Tensor, form: str) -> None:
    _check_value(
        tensor.ndim == form.count(",") + 1, lambda: f"{name} must be {form}, got {_text(tensor)}"
    )


def _check_shape(name: str, tensor: Tensor, form: str, shape: tuple[int, ...]) -> None:
    def message() -> str:
        return f"{name} must be {form} = {_text(shape)}, got {_text(tensor)}"

    _check_value(tensor.ndim == len(shape), message)
    for size, expected in zip(tensor.shape, shape, strict=True):
        _check_value(size == expected, message)


def _check_float(name: str, tensor: Tensor) -> None:
    _check_dtype(name, tensor, FLOATS)


def _check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], why: str = "") -> None:
    def message() -> str:
        names = ", ".join(dtype_name(dtype) for dtype in dtypes)
        one_of = "one of " if len(dtypes) > 1 else ""
        return f"{name} must be {one_of}{names}{why and ' '}{why}, got {dtype_name(tensor.dtype)}"

    _check_type(tensor.dtype in dtypes, message)


def _is_offloaded(x: Tensor, w1: Tensor) -> bool:
    """Whether the experts are in host memory, from which the device takes those it needs."""
    return w1.device.type == "cpu" and x.device.type == "cuda"


def _check_devices(x: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            _check_device(name, tensor, x)


def _check_device(name: str, tensor: Tensor, x: Tensor) -> None:
    _check_value(
        tensor.device == x.device,
        lambda: f"{name} must be on x's device {x.device}, got {tensor.device}",
    )


def _text(shape: Tensor | tuple[int, ...]) -> str:
    sizes = shape.shape if isinstance(shape, Tensor) else shape
    return f"[{', '.join(map(str, sizes))}]"
