"""``torch.ops.moe.experts``: the experts of a dropless MoE layer whose router is its own."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from custom_ops import _cuda_backward, _grouped
from custom_ops._checks import check_experts, check_routing, check_trainable, remembered
from custom_ops._library import (
    LIBRARY,
    check_keywords,
    differentiable_once,
    register_autocast,
    rows_of,
    schema_of,
    with_options,
)
from custom_ops.expert_weights import ExpertWeights
from custom_ops.offload import calls as offload_calls
from custom_ops.options import EXPERT_OPTIONS, ExpertKeywords, ExpertOptions
from custom_ops.tangents import check_no_tangents

_ARGUMENTS = (
    "Tensor x, Tensor expert_ids, Tensor expert_weights, "
    "Tensor w1, Tensor? b1, Tensor w2, Tensor? b2"
)
_SCHEMA = schema_of(EXPERT_OPTIONS)
LIBRARY.define(f"experts({_ARGUMENTS}, *, {_SCHEMA}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(
    f"experts_backward(Tensor dy, {_ARGUMENTS}, bool parameters, *, {_SCHEMA})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


@with_options(EXPERT_OPTIONS)
def experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    **options: Unpack[ExpertKeywords],
) -> Tensor:
    """Runs each token through its chosen experts and sums their weighted results.

    Legend: D model width, H hidden width, F = H, or 2H when gated, E experts, K choices.

    Rows are cast to ``w1``'s dtype; both products accumulate in float32 (float64 if ``x`` or
    ``w1`` is float64), where bias, activation, weighting and the sum over K in slot order happen
    too; the hidden rows are rounded to ``w2``'s dtype in between.

    Args:
        x: Tokens ``[..., D]``; float32, float16, bfloat16 or float64.
        expert_ids: ``[..., K]`` int32 or int64 in ``0..E-1``, or -1 for no expert.
        expert_weights: ``[..., K]``, floating.
        w1: ``[E, F, D]``, (out, in) as in ``nn.Linear``; gate rows before up rows when gated. With
            x on CUDA, it and w2 may be in pinned host memory, see
            :func:`custom_ops.offload_experts`; they then have no gradients, nor has x.
        b1: ``[E, F]`` in ``w1``'s dtype, or None.
        w2: ``[E, D, H]`` in ``w1``'s dtype.
        b2: ``[E, D]`` in ``w1``'s dtype, or None.
        {options}

    Returns:
        ``[..., D]`` in x's dtype, contiguous. Differentiable once in x, expert_weights, w1, b1,
        w2 and b2.

    Raises:
        ValueError: If a shape, device or option does not fit, or an id lies outside ``-1..E-1``
            (ids are looked at on the CPU only; on other devices such an id is undefined).
        TypeError: If a dtype is not supported.
        NotImplementedError: If forward-mode derivatives are taken, as in ``torch.func.jvp``.

    Example:
        >>> import torch
        >>> x, w1, w2 = torch.randn(5, 4), torch.randn(3, 8, 4), torch.randn(3, 4, 8)
        >>> ids, weights = torch.tensor([[0, 2]] * 5), torch.full((5, 2), 0.5)
        >>> experts(x, ids, weights, w1, None, w2, None, activation="silu").shape
        torch.Size([5, 4])
    """
    check_keywords(experts, {**options})
    check_no_tangents(x, expert_weights, w1, w2)
    result: Tensor = torch.ops.moe.experts(x, expert_ids, expert_weights, w1, b1, w2, b2, **options)
    return result


def _check(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, *parameters: Any, **options: Any
) -> ExpertOptions:
    checked = ExpertOptions(**options)
    check_experts(x, *ExpertWeights(*parameters), checked)
    check_routing(x, expert_ids, expert_weights)
    return checked


_check_eagerly = remembered(_check)


@torch.library.register_fake("moe::experts", lib=LIBRARY)
def _experts_fake(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    _check(x, *arguments, **options)
    return x.new_empty(x.shape)


@torch.library.impl(LIBRARY, "experts", "CPU")
@torch.library.impl(LIBRARY, "experts", "CUDA")
def _experts_forward(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, *parameters: Any, **options: Any
) -> Tensor:
    checked = _check_eagerly(x, expert_ids, expert_weights, *parameters, **options)
    forward = offload_calls.forward_of(x, parameters[0])
    y_TD = forward(
        rows_of(x),
        {"expert_ids": rows_of(expert_ids), "expert_weights": rows_of(expert_weights)},
        ExpertWeights(*parameters),
        checked,
    )
    return y_TD.view_as(x)


@torch.library.register_fake("moe::experts_backward", lib=LIBRARY)
def _experts_backward_fake(dy: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    *tensors, needed = arguments
    _check(*tensors, **options)
    x, _, expert_weights, *parameters = tensors
    return (
        x.new_empty(x.shape),
        expert_weights.new_empty(expert_weights.shape),
        *_grouped.parameter_gradients_fake(ExpertWeights(*parameters), needed=needed),
    )


@torch.library.impl(LIBRARY, "experts_backward", "CPU")
@torch.library.impl(LIBRARY, "experts_backward", "CUDA")
def _experts_backward(
    dy: Tensor, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    *parameters, needed = rest
    backward = _cuda_backward.experts_backward if x.is_cuda else _grouped.experts_backward
    dx, dweights, *dparameters = backward(
        rows_of(dy),
        rows_of(x),
        rows_of(expert_ids),
        rows_of(expert_weights),
        ExpertWeights(*parameters),
        ExpertOptions(**options),
        train_parameters=needed,
    )
    return dx.view_as(x), dweights.view_as(expert_weights), *dparameters


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    check_trainable(inputs[0], inputs[3])
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, expert_ids, expert_weights, w1, b1, w2, b2 = ctx.saved_tensors
    with torch.autocast(x.device.type, enabled=False):
        dx, dweights, dw1, db1, dw2, db2 = torch.ops.moe.experts_backward(
            dy, x, expert_ids, expert_weights, w1, b1, w2, b2,
            any(ctx.needs_input_grad[3:]), **ctx.options,
        )  # fmt: skip
    gradients = (dx, None, dweights, dw1, db1, dw2, db2)
    return tuple(
        gradient if needed else None
        for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=True)
    )


torch.library.register_autograd(
    "moe::experts", _backward, setup_context=_setup_context, lib=LIBRARY
)


differentiable_once("experts_backward")
register_autocast("experts", parameters=slice(3, 7))
