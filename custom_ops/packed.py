"""``torch.ops.moe.dropless_packed`` and ``experts_packed``: MoE layers with packed weights.

They are operators of their own, since each operator is one node in ONNX, and TensorRT's parser
takes no node that leaves out an input before one that it has: scales come before biases there.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Unpack, cast

import torch
from torch import Tensor

from custom_ops import _grouped
from custom_ops._checks import (
    check_packed_experts,
    check_router,
    check_routing,
    check_trainable,
)
from custom_ops._library import (
    LIBRARY,
    check_keywords,
    differentiable_once,
    register_autocast,
    rows_of,
    schema_of,
    with_options,
)
from custom_ops.expert_weights import PackedExperts
from custom_ops.offload import calls as offload_calls
from custom_ops.options import (
    EXPERT_OPTIONS,
    ROUTER_OPTIONS,
    DroplessKeywords,
    ExpertKeywords,
    ExpertOptions,
    RouterOptions,
)
from custom_ops.packed_weights import PackedMatrices, PackedWeight, encoding_of
from custom_ops.routing import route, route_backward
from custom_ops.tangents import check_no_tangents
from custom_ops.weight_formats import GLOBAL_SCALES, STORED_SUFFIXES, ZERO_POINTS

_ROUTER_NAMES = frozenset(option.name for option in ROUTER_OPTIONS)
_WEIGHTS = "Tensor w1, Tensor w2, Tensor w1_scales, Tensor w2_scales"
_OPTIONAL = ", ".join(
    f"Tensor? {weight}{suffix}=None"
    for suffix in (ZERO_POINTS, GLOBAL_SCALES)
    for weight in ("w1", "w2")
)
_BIASES = "Tensor? b1=None, Tensor? b2=None"
_EXPERTS = (
    "Tensor x, Tensor expert_ids, Tensor expert_weights, "
    f"{_WEIGHTS}, {_OPTIONAL}, {_BIASES}, *, str weight_format, {schema_of(EXPERT_OPTIONS)}"
)
_DROPLESS = (
    f"Tensor x, Tensor router_weight, {_WEIGHTS}, int top_k, {_OPTIONAL}, "
    f"Tensor? router_bias=None, {_BIASES}, Tensor? selection_bias=None, *, "
    f"str weight_format, {schema_of((*ROUTER_OPTIONS, *EXPERT_OPTIONS))}"
)
for _definition in (
    f"experts_packed({_EXPERTS}) -> Tensor",
    f"dropless_packed({_DROPLESS}) -> Tensor",
    # The gradients of x, expert_weights, b1 and b2; empty where there is no bias.
    f"experts_packed_backward(Tensor dy, {_EXPERTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    # The gradients of x, router_weight, router_bias, b1 and b2.
    f"dropless_packed_backward(Tensor dy, {_DROPLESS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
):
    LIBRARY.define(_definition, tags=torch.Tag.pt2_compliant_tag)


@with_options(EXPERT_OPTIONS)
def experts_packed(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    w1_scales: Tensor,
    w2_scales: Tensor,
    w1_zero_points: Tensor | None = None,
    w2_zero_points: Tensor | None = None,
    w1_global_scales: Tensor | None = None,
    w2_global_scales: Tensor | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    weight_format: str,
    **options: Unpack[ExpertKeywords],
) -> Tensor:
    """Computes :func:`custom_ops.experts` with weights that are packed.

    Legend: D model width, H hidden width, F = H, or 2H when gated, E experts, K choices, G values
    of a row that share a scale.

    A weight is decoded in float32 and rounded to x's dtype, never all at once and only for those
    that tokens have chosen. What follows is that of experts of x's dtype.

    Args:
        x: Tokens ``[..., D]``; float32, float16, bfloat16 or float64.
        expert_ids: ``[..., K]`` int32 or int64 in ``0..E-1``, or -1 for no expert.
        expert_weights: ``[..., K]``, floating.
        w1: Bytes ``[E, F, D / 2]`` int8, two values each, the even column in the low bits; in
            ``fp8`` and ``int8`` ``[E, F, D]``, a value each.
        w2: Bytes int8 of ``[E, D, H]``, likewise.
        w1_scales: ``[E, F, D / G]``; float32, float16 or bfloat16, in ``mxfp4`` and ``nvfp4`` bytes
            int8. In ``fp8`` one for each row, ``[E, F, 1]``, for each 32 columns of a row, or for
            each block of R rows and G columns, ``[E, ceil(F / R), ceil(D / G)]``.
        w2_scales: The same of ``[E, D, H]``, in ``w1_scales``' dtype.
        w1_zero_points: In ``int4`` ``[E, F, D / G]`` int8, or ``[E, 1, 1]``; None: 8.
        w2_zero_points: ``[E, D, H / G]`` int8, given where ``w1_zero_points`` is.
        w1_global_scales: In ``nvfp4`` ``[E, F, 1]`` float32: a tensor's second scale, for each row,
            since gate and up projections may have their own. None elsewhere.
        w2_global_scales: ``[E, D, 1]``, likewise.
        b1: ``[E, F]`` in x's dtype, or None.
        b2: ``[E, D]`` in x's dtype, or None.
        weight_format: ``int4``: a value is ``(q - zero_point) * scale`` with q in 0..15;
            ``mxfp4``: E2M1 numbers, times an E8M0 scale for each 32; ``fp8``: E4M3 numbers, times
            a scale; ``nvfp4``: E2M1 numbers, times an E4M3 scale for each 16 and the row's global
            scale; ``int8``: integers with a sign, times a scale.
        {options}

    Returns:
        ``[..., D]`` in x's dtype, contiguous. Differentiable once in x, expert_weights, b1 and b2.

    Raises:
        ValueError: As of :func:`custom_ops.experts`; if the format is unknown, or groups do not
            divide a row or differ between the weights.
        TypeError: If a dtype is not supported.
        NotImplementedError: If forward-mode derivatives are taken, as in ``torch.func.jvp``.

    Example:
        >>> import torch
        >>> x, scales = torch.randn(5, 32), torch.rand(3, 32, 1)
        >>> w1 = w2 = torch.randint(-128, 127, (3, 32, 16), dtype=torch.int8)
        >>> ids, weights = torch.tensor([[0, 2]] * 5), torch.full((5, 2), 0.5)
        >>> experts_packed(x, ids, weights, w1, w2, scales, scales, weight_format="int4").shape
        torch.Size([5, 32])
    """
    check_keywords(experts_packed, {**options})
    check_no_tangents(x, expert_weights)
    result: Tensor = torch.ops.moe.experts_packed(
        x, expert_ids, expert_weights, w1, w2, w1_scales, w2_scales,
        w1_zero_points, w2_zero_points, w1_global_scales, w2_global_scales, b1, b2,
        weight_format=weight_format, **options,
    )  # fmt: skip
    return result


@with_options((*ROUTER_OPTIONS, *EXPERT_OPTIONS))
def dropless_packed(
    x: Tensor,
    router_weight: Tensor,
    w1: Tensor,
    w2: Tensor,
    w1_scales: Tensor,
    w2_scales: Tensor,
    top_k: int,
    w1_zero_points: Tensor | None = None,
    w2_zero_points: Tensor | None = None,
    w1_global_scales: Tensor | None = None,
    w2_global_scales: Tensor | None = None,
    router_bias: Tensor | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    selection_bias: Tensor | None = None,
    *,
    weight_format: str,
    **options: Unpack[DroplessKeywords],
) -> Tensor:
    """Computes :func:`custom_ops.dropless` with weights that are packed.

    Args:
        x: Tokens ``[..., D]``; float32, float16, bfloat16 or float64.
        router_weight: ``[E, D]``, floating.
        w1: As that and the following of :func:`experts_packed`.
        w2: See there.
        w1_scales: See there.
        w2_scales: See there.
        top_k: Experts per token, in ``1..E``.
        w1_zero_points: See there.
        w2_zero_points: See there.
        w1_global_scales: See there.
        w2_global_scales: See there.
        router_bias: ``[E]`` added to the logits, or None.
        b1: ``[E, F]`` in x's dtype, or None.
        b2: ``[E, D]`` in x's dtype, or None.
        selection_bias: ``[E]`` added to the scores by which experts are chosen, or None.
        weight_format: See there.
        {options}

    Returns:
        ``[..., D]`` in x's dtype, contiguous. Differentiable once in x, router_weight, router_bias,
        b1 and b2.

    Raises:
        ValueError: If a shape, device or option does not fit.
        TypeError: If a dtype is not supported.
        NotImplementedError: If forward-mode derivatives are taken, as in ``torch.func.jvp``.
    """
    check_keywords(dropless_packed, {**options})
    check_no_tangents(x, router_weight)
    result: Tensor = torch.ops.moe.dropless_packed(
        x, router_weight, w1, w2, w1_scales, w2_scales, top_k,
        w1_zero_points, w2_zero_points, w1_global_scales, w2_global_scales,
        router_bias, b1, b2, selection_bias, weight_format=weight_format, **options,
    )  # fmt: skip
    return result


class _Call(NamedTuple):
    """A checked call, as the arguments of the implementation."""

    x_TD: Tensor
    routing: dict[str, Any]
    weights: PackedExperts
    options: ExpertOptions
    router: RouterOptions | None = None


_NAMES = {
    function.__name__: [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    for function in (experts_packed, dropless_packed)
}


def _call(op: str, *arguments: Any, weight_format: str, **options: Any) -> _Call:
    """Checks an operator's arguments, of which the dispatcher drops trailing ones that are None."""
    given: dict[str, Any] = dict.fromkeys(_NAMES[op]) | dict(
        zip(_NAMES[op], arguments, strict=False)
    )
    x: Tensor = given["x"]
    of_router = {name: options.pop(name) for name in _ROUTER_NAMES & options.keys()}
    router = RouterOptions(given["top_k"], **of_router) if "top_k" in given else None
    checked, encoding = ExpertOptions(**options), encoding_of(weight_format)
    w1_EFD, w2_EDH = (
        PackedMatrices(
            encoding, PackedWeight(*(given[w + suffix] for suffix in STORED_SUFFIXES)), x.dtype
        )
        for w in ("w1", "w2")
    )
    weights = PackedExperts(w1_EFD, given["b1"], w2_EDH, given["b2"])
    check_packed_experts(x, weights, checked)
    routing: dict[str, Any]
    if router is None:
        ids, choices = given["expert_ids"], given["expert_weights"]
        check_routing(x, ids, choices)
        routing = {"expert_ids": rows_of(ids), "expert_weights": rows_of(choices)}
    else:
        routing = {name: given[name] for name in ("router_weight", "router_bias", "selection_bias")}
        check_router(x, **routing, experts=w1_EFD.shape[0], options=router)
    return _Call(rows_of(x), routing, weights, checked, router)


def _register_forward(op: str) -> None:
    def on_cpu(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return _grouped.forward(*_call(op, x, *arguments, **options)).view_as(x)

    def on_cuda(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        call = _call(op, x, *arguments, **options)
        forward = offload_calls.forward_of(call.x_TD, call.weights.w1.packed.values)
        return forward(*call).view_as(x)

    def fake(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        _call(op, x, *arguments, **options)
        return x.new_empty(x.shape)

    LIBRARY.impl(op, on_cpu, "CPU")
    LIBRARY.impl(op, on_cuda, "CUDA")
    torch.library.register_fake(f"moe::{op}", fake, lib=LIBRARY)


for _op in _NAMES:
    _register_forward(_op)
    register_autocast(_op, parameters=slice(0))  # It computes what it computes without.


@torch.library.impl(LIBRARY, "experts_packed_backward", "CPU")
@torch.library.impl(LIBRARY, "experts_packed_backward", "CUDA")
def _experts_backward(
    dy: Tensor, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    call = _call("experts_packed", x, expert_ids, expert_weights, *rest, **options)
    check_trainable(x, call.weights.w1.packed.values)
    dx_TD, dweights_TK, _, db1_EF, _, db2_ED = _grouped.experts_backward(
        rows_of(dy),
        call.x_TD,
        call.routing["expert_ids"],
        call.routing["expert_weights"],
        call.weights,
        call.options,
        train_parameters=True,
    )
    return dx_TD.view_as(x), dweights_TK.view_as(expert_weights), db1_EF, db2_ED


@torch.library.impl(LIBRARY, "dropless_packed_backward", "CPU")
@torch.library.impl(LIBRARY, "dropless_packed_backward", "CUDA")
def _dropless_backward(dy: Tensor, x: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    call = _call("dropless_packed", x, *rest, **options)
    check_trainable(x, call.weights.w1.packed.values)
    router = cast(RouterOptions, call.router)
    router_weight, router_bias, selection_bias = call.routing.values()
    ids_TK, weights_TK = route(call.x_TD, router_weight, router_bias, router, selection_bias)
    dx_TD, dweights_TK, _, db1_EF, _, db2_ED = _grouped.experts_backward(
        rows_of(dy),
        call.x_TD,
        ids_TK,
        weights_TK,
        call.weights,
        call.options,
        train_parameters=True,
    )
    dx_router_TD, drouter_ED, dbias_E = route_backward(
        dweights_TK, call.x_TD, router_weight, router_bias, ids_TK, router
    )
    return (
        (dx_TD + dx_router_TD.to(x.dtype)).view_as(x),
        drouter_ED.to(router_weight.dtype),
        x.new_empty(0) if router_bias is None else dbias_E.to(router_bias.dtype),
        db1_EF,
        db2_ED,
    )


@torch.library.register_fake("moe::experts_packed_backward", lib=LIBRARY)
def _experts_backward_fake(dy: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    weights = _call("experts_packed", *arguments, **options).weights
    return _like(arguments[0], arguments[2], *_or_empty(arguments[0], weights.b1, weights.b2))


@torch.library.register_fake("moe::dropless_packed_backward", lib=LIBRARY)
def _dropless_backward_fake(dy: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    call = _call("dropless_packed", *arguments, **options)
    x, router_weight = arguments[:2]
    biases = call.routing["router_bias"], call.weights.b1, call.weights.b2
    return _like(x, router_weight, *_or_empty(x, *biases))


def _or_empty(x: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return [x.new_empty(0) if tensor is None else tensor for tensor in tensors]


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors)


def _register_autograd(op: str, differentiated: tuple[str, ...]) -> None:
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
    ) -> None:
        ctx.inputs = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*[v if isinstance(v, Tensor) else None for v in inputs])
        ctx.options = keyword_only_inputs

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = zip(ctx.saved_tensors, ctx.inputs, strict=True)
        arguments = [value if tensor is None else tensor for tensor, value in saved]
        with torch.autocast(dy.device.type, enabled=False):
            results = getattr(torch.ops.moe, f"{op}_backward")(dy, *arguments, **ctx.options)
        gradients = dict(zip(differentiated, results, strict=True))
        # Not strict: the dispatcher drops trailing arguments that are None.
        return tuple(
            gradients.get(name) if needed else None
            for name, needed in zip(_NAMES[op], ctx.needs_input_grad, strict=False)
        )

    torch.library.register_autograd(
        f"moe::{op}", backward, setup_context=setup_context, lib=LIBRARY
    )
    differentiable_once(f"{op}_backward")


_register_autograd("experts_packed", ("x", "expert_weights", "b1", "b2"))
_register_autograd("dropless_packed", ("x", "router_weight", "router_bias", "b1", "b2"))
