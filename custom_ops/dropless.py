"""``torch.ops.moe.dropless``: a whole dropless MoE layer, router and experts."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from custom_ops import _cuda, _grouped
from custom_ops._checks import check_experts, check_router
from custom_ops._grouped import ExpertParameters
from custom_ops._library import LIBRARY, check_keywords, register_autocast, schema_of, with_options
from custom_ops.options import (
    EXPERT_OPTIONS,
    ROUTER_OPTIONS,
    DroplessKeywords,
    ExpertOptions,
    RouterOptions,
)
from custom_ops.routing import route, route_backward

_OPTIONS = (*ROUTER_OPTIONS, *EXPERT_OPTIONS)
_ROUTER_NAMES = frozenset(option.name for option in ROUTER_OPTIONS)

LIBRARY.define(
    "dropless(Tensor x, Tensor router_weight, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, "
    # Positional, since torch.library's autograd takes no keyword-only tensors.
    "int top_k, Tensor? router_bias=None, Tensor? selection_bias=None, *, "
    f"{schema_of(_OPTIONS)}) -> Tensor",
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
        w1: ``[E, F, D]``, (out, in) as in ``nn.Linear``; gate rows before up rows when gated.
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

    Example:
        >>> import torch
        >>> x, router = torch.randn(2, 5, 4), torch.randn(3, 4)
        >>> w1, w2 = torch.randn(3, 8, 4), torch.randn(3, 4, 8)
        >>> dropless(x, router, w1, None, w2, None, top_k=2).shape
        torch.Size([2, 5, 4])
    """
    check_keywords(dropless, {**options})
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
    check_router(x, router_weight, router_bias, selection_bias, w1, router_options)
    return router_options, expert_options


@torch.library.register_fake("moe::dropless", lib=LIBRARY)
def _dropless_fake(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    _check(x, *arguments, **options)
    return x.new_empty(x.shape)


@torch.library.impl(LIBRARY, "dropless", "CPU")
@torch.library.impl(LIBRARY, "dropless", "CUDA")
def _dropless_forward(
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
) -> Tensor:
    router_options, expert_options = _check(
        x, router_weight, w1, b1, w2, b2, top_k, router_bias, selection_bias, **options
    )
    routing = {
        "router_weight": router_weight,
        "router_bias": router_bias,
        "selection_bias": selection_bias,
    }
    forward = _cuda.forward if x.is_cuda else _grouped.forward
    y_TD = forward(
        x.reshape(-1, x.shape[-1]),
        routing,
        ExpertParameters(w1, b1, w2, b2),
        expert_options,
        router_options,
    )
    return y_TD.view(x.shape)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    *tensors, ctx.top_k, router_bias, selection_bias = inputs
    ctx.save_for_backward(*tensors, router_bias, selection_bias)
    ctx.options = keyword_only_inputs


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, router_weight, w1, b1, w2, b2, router_bias, selection_bias = ctx.saved_tensors
    router_options, expert_options = _split_options(ctx.top_k, ctx.options)
    x_TD, dy_TD = x.reshape(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1])
    # A backward called inside a region of autocast would route in half precision.
    with torch.autocast(x.device.type, enabled=False):
        ids_TK, weights_TK = route(x_TD, router_weight, router_bias, router_options, selection_bias)
        dx_TD, dweights_TK, dw1, db1, dw2, db2 = torch.ops.moe.experts_backward(
            dy_TD, x_TD, ids_TK, weights_TK, w1, b1, w2, b2,
            any(ctx.needs_input_grad[2:6]), **expert_options,
        )  # fmt: skip
        dx_router_TD, drouter_ED, dbias_E = route_backward(
            dweights_TK, x_TD, router_weight, router_bias, ids_TK, router_options
        )
    dx = (dx_TD + dx_router_TD.to(x.dtype)).view(x.shape)
    dbias = None if router_bias is None else dbias_E.to(router_bias.dtype)
    gradients = (dx, drouter_ED.to(router_weight.dtype), dw1, db1, dw2, db2, None, dbias, None)
    # Not strict: the dispatcher drops trailing biases from the inputs where they are None.
    return tuple(
        gradient if needed else None
        for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=False)
    )


torch.library.register_autograd(
    "moe::dropless", _backward, setup_context=_setup_context, lib=LIBRARY
)


register_autocast("dropless", parameters=slice(2, 6))
