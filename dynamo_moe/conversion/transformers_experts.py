"""transformers' experts interface: the experts become ``torch.ops.moe.experts``.

Every model of transformers >= 5.0 whose experts carry ``use_experts_implementation`` keeps its own
modules, router included: an experts implementation is registered and selected. What an experts
module computes between its two products is found by its numbers, not by its name. A plain router
joins its experts when the model is exported (``tracing.router_fusion``).

Legend: T tokens, D model width, H hidden width, E experts, K choices.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import custom_ops
from custom_ops.options import ExpertOptions
from dynamo_moe.conversion import activation, private
from dynamo_moe.conversion.comparing import check_comparable, compare, has_values, random_tokens

__all__ = [
    "ADAPTER",
    "IMPLEMENTATION",
    "decide",
    "experts_parameters",
    "is_experts",
    "is_selected",
    "select",
]

ADAPTER = "transformers-experts"
IMPLEMENTATION = "dynamo_moe"
"""The name under which transformers knows this implementation."""

# A module that transformers decorated, known by what it has.
Experts = Any

_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
_OPTIONS, _FALLBACK = "_dynamo_moe_options", "_dynamo_moe_fallback"


def is_experts(module: nn.Module) -> bool:
    """Whether transformers dispatches this module's forward through its experts interface."""
    return private.has_interface(module) and all(
        hasattr(module, name) for name in (*_FLAGS, "down_proj")
    )


def is_selected(module: nn.Module) -> bool:
    """Whether :func:`select` has said what the module computes, and that is in force."""
    known = getattr(module, _OPTIONS, None) or getattr(module, _FALLBACK, None)
    if known is None or not is_experts(module):
        return False
    return private.implementation(module) == IMPLEMENTATION


def decide(module: Experts) -> tuple[ExpertOptions, bool]:
    """Returns how ``torch.ops.moe.experts`` computes a module, and whether both were compared.

    Raises:
        ValueError: If it cannot; with the reason.
    """
    check_comparable(module)
    options = _identify(module)
    if not has_values(module):
        return options, False
    if any(parameter.dtype.itemsize < 4 for parameter in module.parameters()):
        module = copy.deepcopy(module).float()
    inputs = _example_inputs(module)
    compare(_original(module), partial(_compute, module, options), inputs, ADAPTER)
    return options, True


def _identify(module: Experts) -> ExpertOptions:
    if module.has_post_expert_norm:
        raise ValueError("it normalises each expert's result before it is weighted")
    if private.is_expert_parallel(module):
        raise ValueError("its experts are spread over devices (expert parallelism)")
    if not module.has_gate:
        return activation.plain(module.act_fn)
    # The names that transformers' models give the two numbers.
    return activation.gating(
        private.gate_function(module),
        interleaved=not module.is_concatenated,
        limits=_numbers(module, "limit", "swiglu_limit"),
        alphas=[*_numbers(module, "alpha", "swiglu_alpha"), 1.0],
    )


def select(module: Experts, options: ExpertOptions | None, fallback: str | None = None) -> None:
    """Makes the module, and all that share its config, compute through this implementation.

    Args:
        module: An experts module.
        options: What :func:`identify` found; None: the module is computed by ``fallback``.
        fallback: Another registered implementation; None: the module's own forward.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
    if fallback is not None and fallback not in ALL_EXPERTS_FUNCTIONS:
        known = ", ".join(sorted(ALL_EXPERTS_FUNCTIONS.keys()))
        raise ValueError(f"fallback must be one of {known}; got {fallback!r}")
    setattr(module, _OPTIONS, options)
    setattr(module, _FALLBACK, fallback)
    private.select_implementation(module, IMPLEMENTATION)


def _original(module: Experts) -> Callable[..., Tensor]:
    """Returns the module's own forward, whatever implementation is selected."""
    return partial(type(module).forward.__wrapped__, module)


def experts_parameters(module: Experts) -> dict[str, nn.Parameter]:
    """Returns the experts' parameters by attribute."""
    names = (_first(module), f"{_first(module)}_bias", "down_proj", "down_proj_bias")
    found = {name: getattr(module, name, None) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, nn.Parameter)}


def _example_inputs(module: Experts) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens ``[T, D]``, ids ``[T, 2]`` and weights ``[T, 2]`` that reach every expert."""
    weight = getattr(module, _first(module))
    experts, width = weight.shape[0], weight.shape[1 if module.is_transposed else 2]
    tokens = max(4, math.ceil(experts / 2))
    x_TD = random_tokens(tokens, width, weight)
    ids_TK = torch.arange(2 * tokens).reshape(tokens, 2) % experts
    weights_TK = torch.linspace(0.1, 1, 2 * tokens).reshape(tokens, 2)
    return x_TD, ids_TK.to(weight.device), weights_TK.to(weight.device, weight.dtype)


def _first(module: Experts) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _forward(
    self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts implementation: ``[T, D]``, ``[T, K]`` and ``[T, K]`` to ``[T, D]``."""
    options = getattr(self, _OPTIONS, None)
    if options is None:
        return _fall_back(self)(hidden_states, top_k_index, top_k_weights)
    return _compute(self, options, hidden_states, top_k_index, top_k_weights)


def _compute(
    module: Experts, options: ExpertOptions, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    def parameter(name: str) -> Tensor:
        weight: Tensor = getattr(module, name)
        return weight.mT if module.is_transposed else weight

    first = _first(module)
    return custom_ops.experts(
        x_TD,
        ids_TK,
        weights_TK,
        parameter(first),
        getattr(module, f"{first}_bias") if module.has_bias else None,
        parameter("down_proj"),
        module.down_proj_bias if module.has_bias else None,
        activation=options.activation,
        gated=options.gated,
        interleaved=options.interleaved,
        alpha=options.alpha,
        limit=options.limit,
    )


def _fall_back(module: Experts) -> Callable[..., Tensor]:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name = getattr(module, _FALLBACK, None)
    return _original(module) if name is None else partial(ALL_EXPERTS_FUNCTIONS[name], module)


def _numbers(module: Experts, *names: str) -> list[float]:
    values = (getattr(module, name, None) for name in names)
    return [float(value) for value in values if isinstance(value, (int, float)) and value > 0]
