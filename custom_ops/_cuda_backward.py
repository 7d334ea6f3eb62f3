"""What training needs on CUDA tensors: the router's choice, and the gradients of the experts.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from custom_ops import _grouped
from custom_ops._grouped import ExpertParameters
from custom_ops.options import ExpertOptions, RouterOptions
from custom_ops.routing import route as route_in_torch

if TYPE_CHECKING:
    from custom_ops.kernels.architectures import Architecture
    from custom_ops.kernels.layer import Layer


_NAMES = ("w1", "b1", "w2", "b2")


def route(
    x_TD: Tensor,
    router_weight_ED: Tensor,
    router_bias_E: Tensor | None,
    router: RouterOptions,
    parameters: ExpertParameters,
    options: ExpertOptions,
) -> tuple[Tensor, Tensor]:
    """Chooses the experts by the kernels of the whole layer's forward pass.

    Returns:
        ``expert_ids [T, K]`` int32 and ``expert_weights [T, K]`` in float32, or float64 where
        ``x_TD`` is float64.
    """
    layer = _layer(
        x_TD,
        parameters,
        options,
        top_k=router.top_k,
        router=router,
        routing_dtype=router_weight_ED.dtype,
        weights_dtype=None if router_bias_E is None else router_bias_E.dtype,
    )
    if layer is None:
        ids_TK, weights_TK = route_in_torch(x_TD, router_weight_ED, router_bias_E, router)
        return ids_TK.int(), weights_TK

    from custom_ops.kernels.backward_plan import route_plan
    from custom_ops.kernels.launch import launch

    chosen = x_TD.shape[0], router.top_k
    ids_TK = x_TD.new_empty(chosen, dtype=torch.int32)
    weights_TK = x_TD.new_empty(chosen, dtype=torch.float32)
    tensors = {
        **_contiguous(x=x_TD, router_weight=router_weight_ED, router_bias=router_bias_E),
        "expert_ids": ids_TK,
        "expert_weights": weights_TK,
    }
    with torch.cuda.device(x_TD.device):
        launch(route_plan(layer, _architecture()), tensors)
    return ids_TK, weights_TK


def experts_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    parameters: ExpertParameters,
    options: ExpertOptions,
    *,
    train_parameters: bool,
) -> tuple[Tensor, ...]:
    """Computes what :func:`custom_ops._grouped.experts_backward` computes."""
    layer = _layer(
        x_TD,
        parameters,
        options,
        top_k=ids_TK.shape[1],
        routing_dtype=ids_TK.dtype,
        weights_dtype=weights_TK.dtype,
        tf32=torch.backends.cuda.matmul.fp32_precision == "tf32",
    )
    if layer is None:
        return _grouped.experts_backward(
            dy_TD, x_TD, ids_TK, weights_TK, parameters, options, train_parameters=train_parameters
        )

    from custom_ops.kernels.backward_plan import backward_plan
    from custom_ops.kernels.launch import launch

    w1_EFD, b1_EF, w2_EDH, b2_ED = parameters
    read = _contiguous(b1=b1_EF, b2=b2_ED) | {"w1": _readable(w1_EFD), "w2": _readable(w2_EDH)}
    # The kernels do not start for no token.
    empty = torch.empty_like if x_TD.shape[0] else torch.zeros_like
    trained = {name: empty(read[name]) for name in read if train_parameters}
    dx_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    dweights_TK = torch.empty_like(weights_TK, memory_format=torch.contiguous_format)
    tensors = {
        **_contiguous(x=x_TD, dy=dy_TD, expert_ids=ids_TK, expert_weights=weights_TK),
        **read,
        "dx": dx_TD,
        "dweights": dweights_TK,
        **{f"d{name}": gradient for name, gradient in trained.items()},
    }
    with torch.cuda.device(x_TD.device):
        plan = backward_plan(layer, _architecture(), train_parameters=train_parameters)
        launch(plan, tensors)
    for name, parameter in zip(_NAMES, parameters, strict=True):
        if train_parameters and parameter is not None and read[name] is not parameter:
            trained[name] = torch.empty_like(parameter).copy_(trained[name])
    return dx_TD, dweights_TK, *(trained.get(name, w1_EFD.new_empty(0)) for name in _NAMES)


def _layer(
    x_TD: Tensor, parameters: ExpertParameters, options: ExpertOptions, **routing: Any
) -> Layer | None:
    """Returns the layer, or None where there are no kernels for it."""
    from custom_ops.kernels.layer import Layer, NoKernelsError

    w1_EFD, b1_EF, w2_EDH, b2_ED = parameters
    try:
        return Layer(
            experts=w1_EFD.shape[0],
            width=w1_EFD.shape[2],
            hidden=w2_EDH.shape[2],
            tokens_dtype=x_TD.dtype,
            experts_dtype=w1_EFD.dtype,
            options=options,
            b1=b1_EF is not None,
            b2=b2_ED is not None,
            w1_transposed=_is_transposed(w1_EFD),
            w2_transposed=_is_transposed(w2_EDH),
            **routing,
        )
    except (NoKernelsError, TypeError):
        return None


def _architecture() -> Architecture:
    from custom_ops.kernels.architectures import nearest_architecture

    return nearest_architecture(*torch.cuda.get_device_capability())


def _contiguous(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: each.contiguous() for name, each in tensors.items() if each is not None}


def _is_transposed(weight: Tensor) -> bool:
    return not weight.is_contiguous() and weight.mT.is_contiguous()


def _readable(weight: Tensor) -> Tensor:
    """Returns the weight as it is if it lies as (out, in) or (in, out), else a copy."""
    return weight if _is_transposed(weight) else weight.contiguous()
