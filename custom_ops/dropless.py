"""``torch.ops.moe.dropless``: a whole dropless MoE layer, router and experts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Unpack

import torch
from torch import Tensor

from custom_ops import _cuda, _cuda_backward, _grouped
from custom_ops._checks import check_experts, check_router, check_trainable, remembered
from custom_ops._library import (
    LIBRARY,
    below_autograd,
    check_keywords,
    differentiable_once,
    register_autocast,
    rows_of,
    schema_of,
    with_options,
)
from custom_ops.dtypes import accumulation_dtype
from custom_ops.expert_weights import ExpertWeights
from custom_ops.offload import calls as offload_calls
from custom_ops.options import (
    EXPERT_OPTIONS,
    ROUTER_OPTIONS,
    DroplessKeywords,
    ExpertOptions,
    RouterOptions,
)
from custom_ops.routing import route_backward
from custom_ops.tangents import check_no_tangents

_OPTIONS = (*ROUTER_OPTIONS, *EXPERT_OPTIONS)
_ROUTER_NAMES = frozenset(option.name for option in ROUTER_OPTIONS)

_SCHEMA = schema_of(_OPTIONS)
_ARGUMENTS = (
    "Tensor x, Tensor router_weight, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, "
    # Positional, since torch.library's autograd takes no keyword-only tensors.
    f"int top_k, Tensor? router_bias=None, Tensor? selection_bias=None, *, {_SCHEMA}"
)
LIBRARY.define(f"dropless({_ARGUMENTS}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
# With the router's choice, expert_ids [T, K] and expert_weights [T, K], for the backward pass.
LIBRARY.define(
    f"dropless_routed({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag
)
# The gradients of x, router_weight, w1, b1, w2, b2 and router_bias; empty where there is no such
# parameter, those of the experts also without ``parameters``.
LIBRARY.define(
    "dropless_backward(Tensor dy, Tensor x, Tensor expert_ids, Tensor expert_weights, "
    "Tensor router_weight, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor? router_bias, "
    f"bool parameters, *, {_SCHEMA})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


@with_options(_OPTIONS)
def dropless(
    x: Tensor,
    router_weight: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    top_k: int,
    router_bias: Tensor | None = None,
    selection_bias: Tensor | None = None,
    **options: Unpack[DroplessKeywords],
) -> Tensor:
    """Routes each token to its ``top_k`` experts and sums their weighted results.

    Legend: D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.

    The router computes in float32 whatever the dtypes (float64 if ``x`` is float64); ties go to
    the lower expert. The experts compute as in :func:`custom_ops.experts`. No token is dropped.

    Args:
        x: Tokens ``[..., D]``; float32, float16, bfloat16 or float64.
        router_weight: ``[E, D]``, floating.
        w1: ``[E, F, D]``, (out, in) as in ``nn.Linear``; gate rows before up rows when gated. With
            x on CUDA, it and w2 may be in pinned host memory, see
            :func:`custom_ops.offload_experts`; they then have no gradients, nor has x.
        b1: ``[E, F]`` in ``w1``'s dtype, or None.
        w2: ``[E, D, H]`` in ``w1``'s dtype.
        b2: ``[E, D]`` in ``w1``'s dtype, or None.
        top_k: Experts per token, in ``1..E``.
        router_bias: ``[E]`` added to the logits, or None.
        selection_bias: ``[E]`` added to the scores by which experts and groups are chosen, but not
            to the weights, or None: DeepSeek-V3's correction bias. It has no gradient.
        {options}

    Returns:
        ``[..., D]`` in x's dtype, contiguous. Differentiable once in every floating tensor but
        ``selection_bias``; the choice of experts has no gradient.

    Raises:
        ValueError: If a shape, device or option does not fit.
        TypeError: If a dtype is not supported.
        NotImplementedError: If forward-mode derivatives are taken, as in ``torch.func.jvp``.

    Example:
        >>> import torch
        >>> x, router = torch.randn(2, 5, 4), torch.randn(3, 4)
        >>> w1, w2 = torch.randn(3, 8, 4), torch.randn(3, 4, 8)
        >>> dropless(x, router, w1, None, w2, None, top_k=2).shape
        torch.Size([2, 5, 4])
    """
    check_keywords(dropless, {**options})
    check_no_tangents(x, router_weight, w1, w2)
    result: Tensor = torch.ops.moe.dropless(
        x, router_weight, w1, b1, w2, b2, top_k, router_bias, selection_bias, **options
    )
    return result


def _split_options(top_k: int, options: dict[str, Any]) -> tuple[RouterOptions, dict[str, Any]]:
    # The dispatcher leaves out arguments that equal the schema's defaults, which are the records'.
    router = {name: value for name, value in options.items() if name in _ROUTER_NAMES}
    rest = {name: value for name, value in options.items() if name not in _ROUTER_NAMES}
    return RouterOptions(top_k, **router), rest


def _check(
    x: Tensor,
    router_weight: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    top_k: int,
    router_bias: Tensor | None = None,
    selection_bias: Tensor | None = None,
    **options: Any,
) -> tuple[RouterOptions, ExpertOptions]:
    router_options, rest = _split_options(top_k, options)
    expert_options = ExpertOptions(**rest)
    check_experts(x, w1, b1, w2, b2, expert_options)
    check_router(x, router_weight, router_bias, selection_bias, w1.shape[0], router_options)
    return router_options, expert_options


_check_eagerly = remembered(_check)


@torch.library.register_fake("moe::dropless", lib=LIBRARY)
def _dropless_fake(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    _check(x, *arguments, **options)
    return x.new_empty(x.shape)


@torch.library.impl(LIBRARY, "dropless", "CPU")
@torch.library.impl(LIBRARY, "dropless", "CUDA")
def _dropless_forward(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    forward = offload_calls.forward_of(x, arguments[1])
    return forward(*_checked_call(x, *arguments, **options)).view_as(x)


@torch.library.register_fake("moe::dropless_routed", lib=LIBRARY)
def _dropless_routed_fake(x: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    check_trainable(x, arguments[1])
    router_options, _ = _check(x, *arguments, **options)
    size = (x.numel() // x.shape[-1], router_options.top_k)
    return (
        x.new_empty(x.shape),
        x.new_empty(size, dtype=torch.int32),
        x.new_empty(size, dtype=accumulation_dtype(x)),
    )


@torch.library.impl(LIBRARY, "dropless_routed", "CPU")
@torch.library.impl(LIBRARY, "dropless_routed", "CUDA")
def _dropless_routed(x: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    check_trainable(x, arguments[1])
    forward = _cuda.forward_routed if x.is_cuda else _grouped.forward_routed
    y_TD, ids_TK, weights_TK = forward(*_checked_call(x, *arguments, **options))
    return y_TD.view_as(x), ids_TK, weights_TK


def _checked_call(
    x: Tensor,
    router_weight: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    top_k: int,
    router_bias: Tensor | None = None,
    selection_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor | None], ExpertWeights, ExpertOptions, RouterOptions]:
    """Checks a call, and returns the implementations' arguments."""
    router_options, expert_options = _check_eagerly(
        x, router_weight, w1, b1, w2, b2, top_k, router_bias, selection_bias, **options
    )
    routing = {
        "router_weight": router_weight,
        "router_bias": router_bias,
        "selection_bias": selection_bias,
    }
    parameters = ExpertWeights(w1, b1, w2, b2)
    return rows_of(x), routing, parameters, expert_options, router_options


@torch.library.register_fake("moe::dropless_backward", lib=LIBRARY)
def _dropless_backward_fake(
    dy: Tensor,
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    router_weight: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    router_bias: Tensor | None,
    parameters: bool,
    **options: Any,
) -> tuple[Tensor, ...]:
    _check(x, router_weight, w1, b1, w2, b2, expert_ids.shape[-1], router_bias, **options)
    weights = ExpertWeights(w1, b1, w2, b2)
    return (
        x.new_empty(x.shape),
        router_weight.new_empty(router_weight.shape),
        *_grouped.parameter_gradients_fake(weights, needed=parameters),
        router_weight.new_empty(0 if router_bias is None else router_bias.shape),
    )


@torch.library.impl(LIBRARY, "dropless_backward", "CPU")
@torch.library.impl(LIBRARY, "dropless_backward", "CUDA")
def _dropless_backward(
    dy: Tensor,
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    router_weight: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    router_bias: Tensor | None,
    parameters: bool,
    **options: Any,
) -> tuple[Tensor, ...]:
    router_options, expert_options = _split_options(expert_ids.shape[-1], options)
    x_TD, dy_TD = rows_of(x), rows_of(dy)
    backward = _cuda_backward.experts_backward if x.is_cuda else _grouped.experts_backward
    dx_TD, dweights_TK, *dparameters = backward(
        dy_TD,
        x_TD,
        expert_ids,
        expert_weights,
        ExpertWeights(w1, b1, w2, b2),
        ExpertOptions(**expert_options),
        train_parameters=parameters,
    )
    dx_router_TD, drouter_ED, dbias_E = route_backward(
        dweights_TK, x_TD, router_weight, router_bias, expert_ids.long(), router_options
    )
    return (
        (dx_TD + dx_router_TD.to(x.dtype)).view_as(x),
        drouter_ED.to(router_weight.dtype),
        *dparameters,
        router_weight.new_empty(0) if router_bias is None else dbias_E.to(router_bias.dtype),
    )


differentiable_once("dropless_backward")


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, ...],
) -> None:
    _, ids_TK, weights_TK = output
    ctx.mark_non_differentiable(ids_TK, weights_TK)
    _save(ctx, inputs, keyword_only_inputs, ids_TK, weights_TK)


def _save(
    ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], ids_TK: Tensor, weights_TK: Tensor
) -> None:
    *tensors, ctx.top_k, router_bias, _ = inputs
    ctx.save_for_backward(*tensors, router_bias, ids_TK, weights_TK)
    ctx.options = options


def _backward(ctx: Any, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    x, router_weight, w1, b1, w2, b2, router_bias, ids_TK, weights_TK = ctx.saved_tensors
    # A backward called inside a region of autocast would compute in half precision.
    with torch.autocast(x.device.type, enabled=False):
        dx, drouter, dw1, db1, dw2, db2, dbias = torch.ops.moe.dropless_backward(
            dy, x, ids_TK, weights_TK, router_weight, w1, b1, w2, b2, router_bias,
            any(ctx.needs_input_grad[2:6]), **ctx.options,
        )  # fmt: skip
    gradients = (dx, drouter, dw1, db1, dw2, db2, None, dbias, None)
    # Not strict: the dispatcher drops trailing biases from the inputs where they are None.
    return tuple(
        gradient if needed else None
        for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=False)
    )


torch.library.register_autograd(
    "moe::dropless_routed", _backward, setup_context=_setup_context, lib=LIBRARY
)


def _keep_the_choice(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Makes a call that needs gradients one of ``dropless_routed``."""
    # Overloads, since finding the one of an operator costs every call.
    dropless = torch.ops.moe.dropless.default
    dropless_routed = torch.ops.moe.dropless_routed.default

    def autograd(*arguments: Any, **options: Any) -> Tensor:
        y: Tensor
        if torch.is_grad_enabled() and any(
            argument.requires_grad for argument in arguments if isinstance(argument, Tensor)
        ):
            y, _, _ = dropless_routed(*arguments, **options)
            return y
        with context():
            y = dropless(*arguments, **options)
        return y

    LIBRARY.impl("dropless", autograd, "Autograd")


def _choose_again(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    _, *routing = torch.ops.moe.dropless_routed(*inputs, **keyword_only_inputs)
    _save(ctx, inputs, keyword_only_inputs, *routing)


if below_autograd is not None:
    _keep_the_choice(below_autograd)
else:  # The whole forward pass runs again for the router's choice.
    torch.library.register_autograd(
        "moe::dropless", _backward, setup_context=_choose_again, lib=LIBRARY
    )


register_autocast("dropless", parameters=slice(2, 6))
