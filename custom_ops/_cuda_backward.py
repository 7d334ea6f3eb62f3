"""The gradients of the experts on CUDA tensors, by Triton kernels.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from custom_ops import _grouped
from custom_ops._cuda import aligned, layer_fields, layer_on, readable
from custom_ops.expert_weights import ExpertWeights
from custom_ops.options import ExpertOptions

if TYPE_CHECKING:
    from custom_ops.kernels.spec import ForwardPlan

_NAMES = ("w1", "b1", "w2", "b2")


def experts_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    parameters: ExpertWeights,
    options: ExpertOptions,
    *,
    train_parameters: bool,
) -> tuple[Tensor, ...]:
    """Computes the same as :func:`custom_ops._grouped.experts_backward`."""
    routing = {"expert_ids": ids_TK, "expert_weights": weights_TK}
    fields = layer_fields(x_TD, routing, parameters, options)
    plan = _plan(x_TD.device, train_parameters, **fields)
    if plan is None or x_TD.shape[0] > plan.ranges[-1].last:
        return _grouped.experts_backward(
            dy_TD, x_TD, ids_TK, weights_TK, parameters, options, train_parameters=train_parameters
        )

    from custom_ops.kernels.launch import launch

    read = readable(x_TD, routing, parameters)
    # The kernels do not start for no token.
    empty = torch.empty_like if x_TD.shape[0] else torch.zeros_like
    trained = {name: empty(read[name]) for name in _NAMES if train_parameters and name in read}
    dx_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    dweights_TK = torch.empty_like(weights_TK, memory_format=torch.contiguous_format)
    tensors = {
        **read,
        "dy": aligned(dy_TD),
        "dx": dx_TD,
        "dweights": dweights_TK,
        **{f"d{name}": gradient for name, gradient in trained.items()},
    }
    with torch.cuda.device(x_TD.get_device()):
        launch(plan, tensors)
    for name, is_transposed in zip(("w1", "w2"), fields["transposed"], strict=True):
        if is_transposed and train_parameters:
            trained[name] = trained[name].mT
    return (
        dx_TD,
        dweights_TK,
        *(
            parameters.w1.new_empty(0)
            if parameter is None or not train_parameters
            else _with_strides_of(parameter, trained[name])
            for name, parameter in zip(_NAMES, parameters, strict=True)
        ),
    )


def _with_strides_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


@lru_cache(maxsize=1024)
def _plan(device: torch.device, train_parameters: bool, **fields: Any) -> ForwardPlan | None:
    known = layer_on(device, **fields)
    if known is None:
        return None

    from custom_ops.kernels.backward_plan import backward_plan

    return backward_plan(*known, train_parameters=train_parameters)
