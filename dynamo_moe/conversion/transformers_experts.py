"""Experts of transformers' models, which compute through transformers' experts interface.

Every model of transformers >= 5.0 whose experts carry ``use_experts_implementation`` keeps its own
modules, router included: an experts implementation is registered and selected. What an experts
module computes between its two products is found by its numbers, not by its name. A plain router
joins its experts when the model is exported (``tracing.router_fusion``).

Legend: T tokens, D model width, E experts, K choices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from custom_ops.expert_weights import ExpertWeights
from custom_ops.options import ExpertOptions
from dynamo_moe import packed_experts
from dynamo_moe.conversion.activation import GatingNumbers, identify_activation, softcaps_of
from dynamo_moe.conversion.comparison import compare
from dynamo_moe.conversion.equal_layers import layer_key
from dynamo_moe.conversion.observation import (
    check_no_hooks,
    few_threads,
    has_values,
    in_float32,
    random_tokens,
)
from dynamo_moe.conversion.reports import Replacement, Unrecognised
from dynamo_moe.private import transformers

_NAME = "transformers-experts"
# The name under which transformers knows the implementation here.
_IMPLEMENTATION = "dynamo_moe"

# A module that transformers decorated, known by its attributes.
Experts = Any

# What every module did in versions of transformers without the attribute: 5.0 has but ``has_bias``
# and ``is_transposed``.
_BEFORE = {"has_gate": True, "has_post_expert_norm": False}
# A factor on tokens with which clamps show.
_LARGE = 20.0
# The attributes that say how the implementation computes a module.
_OPTIONS, _FALLBACK = "_dynamo_moe_options", "_dynamo_moe_fallback"


def convert_experts(
    model: nn.Module, experts: Mapping[str, Experts], fallback: str | None
) -> list[Replacement | Unrecognised]:
    """Selects the implementation here for a model's experts, where it is exact, else the fallback.

    Raises:
        ValueError: If transformers knows no implementation ``fallback``.
    """
    unselected = [(path, module) for path, module in experts.items() if not is_selected(module)]
    if not unselected:
        return []
    known: dict[type, _Identified] = {}
    outcomes: list[Replacement | Unrecognised] = []
    decisions: list[tuple[Experts, ExpertOptions | None]] = []
    for path, module in unselected:
        kind, name, options = type(module), type(module).__name__, None
        try:
            with few_threads(module):
                known[kind] = _identify(module, known.get(kind))
            options = known[kind].options
            outcomes.append(Replacement(path, _NAME, name, has_values(module)))
        except ValueError as refusal:
            computed = "left as it is" if fallback is None else f"computed by {fallback!r}"
            outcomes.append(Unrecognised(path, name, f"{refusal}; {computed}"))
        decisions.append((module, options))
    # Modules of one config share its implementation, so all of them must know what to compute.
    useful = {id(module.config) for module, options in decisions if options is not None or fallback}
    for module, options in decisions:
        if id(module.config) in useful:
            _select(module, options, fallback)
    return outcomes


def is_experts(module: nn.Module) -> bool:
    """Whether transformers dispatches this module's forward through its experts interface."""
    return transformers.has_interface(module) and all(
        hasattr(module, name) for name in ("has_bias", "is_transposed", "down_proj")
    )


def is_selected(module: nn.Module) -> bool:
    """Whether a module is one of experts, is converted, and the implementation is in force."""
    known = getattr(module, _OPTIONS, None) or getattr(module, _FALLBACK, None)
    return (
        known is not None
        and is_experts(module)
        and transformers.implementation(module) == _IMPLEMENTATION
    )


def experts_parameters(module: Experts) -> dict[str, nn.Parameter]:
    """Returns the experts' parameters by attribute."""
    first = _first_weight(module)
    names = (first, f"{first}_bias", "down_proj", "down_proj_bias")
    attributes = {name: getattr(module, name, None) for name in names}
    return {name: value for name, value in attributes.items() if isinstance(value, nn.Parameter)}


def experts_weights(module: Experts) -> ExpertWeights:
    """Returns the experts' weights as the operators take them: views."""
    w1, w2 = (getattr(module, name) for name in (_first_weight(module), "down_proj"))
    if module.is_transposed:
        w1, w2 = w1.mT, w2.mT
    b1 = getattr(module, f"{_first_weight(module)}_bias") if module.has_bias else None
    return ExpertWeights(w1, b1, w2, module.down_proj_bias if module.has_bias else None)


def experts_options(module: Experts) -> ExpertOptions | None:
    """Returns the options of converted experts; None of those that a fallback computes."""
    options: ExpertOptions | None = getattr(module, _OPTIONS, None)
    return options


def _first_weight(module: Experts) -> str:
    return "gate_up_proj" if _flag(module, "has_gate") else "up_proj"


def _flag(module: Experts, name: str) -> bool:
    return bool(getattr(module, name, _BEFORE[name]))


# --- Identifying a module ---


@dataclass(frozen=True)
class _Identified:
    """A module that was identified.

    Attributes:
        options: How ``torch.ops.moe.experts`` computes it.
        key: The key that layers like it share.
        example: An ordinary token and a large one for its last expert, in float32.
    """

    options: ExpertOptions
    key: Hashable
    example: Sequence[Tensor]


def _identify(module: Experts, known: _Identified | None) -> _Identified:
    """Identifies a module, compared if it has weights; tries a known one's options first.

    Raises:
        ValueError: If ``torch.ops.moe.experts`` does not compute it; with the reason.
    """
    check_no_hooks(module)
    key = layer_key(module, experts_parameters(module).keys())
    if known is not None and known.key == key:
        with suppress(Exception):  # The comparison of all experts says the reason.
            _compare_last(module, known)
            return known
    count = _num_experts(module)
    options = identify_options(module)
    if has_values(module):
        expert_ids = [slot % count for slot in range(max(8, count + count % 2))]
        _compare(module, options, _example(module, expert_ids, 2))
    x_TD, *routing = _example(module, [count - 1] * 2, 1)
    x_TD[1] *= _LARGE
    return _Identified(options, key, (x_TD, *routing))


def _compare_last(module: Experts, known: _Identified) -> None:
    """Compares the last expert of a module that looks like one of which all were compared.

    Raises:
        ValueError: If it does not give the same numbers.
    """
    if has_values(module):
        _compare(module, known.options, known.example)


def _compare(module: Experts, options: ExpertOptions, example: Sequence[Tensor]) -> None:
    """Compares a module with the operator."""
    tried = in_float32(module)
    dtype = getattr(tried, _first_weight(tried)).dtype
    inputs = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in example]
    compare(_own_forward(tried), partial(_compute, tried, options), inputs, _NAME)


def identify_options(module: Experts) -> ExpertOptions:
    """Returns a module's options, by its activation alone.

    Raises:
        ValueError: If ``torch.ops.moe.experts`` has none for it; with the reason.
    """
    if _flag(module, "has_post_expert_norm"):
        raise ValueError("it normalises each expert's result before it is weighted")
    if transformers.is_expert_parallel(module):
        raise ValueError("its experts are spread over devices (expert parallelism)")
    if not _flag(module, "has_gate"):
        return identify_activation(module.act_fn)
    # The names that transformers' models give the numbers of clamps.
    numbers = GatingNumbers(
        limits=_numbers(module, "limit", "swiglu_limit"),
        alphas=[*_numbers(module, "alpha", "swiglu_alpha"), 1.0],
        softcaps=softcaps_of(module.modules()),
    )
    identify = partial(
        identify_activation, transformers.gate_function(module), gated=True, numbers=numbers
    )
    if hasattr(module, "is_concatenated"):
        return identify(interleaved=not module.is_concatenated)
    with suppress(ValueError):
        return identify(interleaved=True)
    return identify(interleaved=False)


def _numbers(module: Experts, *names: str) -> list[float]:
    values = (getattr(module, name, None) for name in names)
    return [float(value) for value in values if isinstance(value, (int, float)) and value > 0]


def _num_experts(module: Experts) -> int:
    return int(getattr(module, _first_weight(module)).shape[0])


def _example(module: Experts, experts: list[int], k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns float32 tokens ``[T, D]``, ids ``[T, K]`` of some experts, and weights ``[T, K]``."""
    weight = getattr(module, _first_weight(module))
    width = weight.shape[1 if module.is_transposed else 2]
    device = "cpu" if weight.is_meta else weight.device
    ids_TK = torch.tensor(experts, device=device).reshape(-1, k)
    weights_TK = torch.linspace(0.1, 1, len(experts), device=device).reshape(-1, k)
    return random_tokens(len(ids_TK), width, like=weights_TK), ids_TK, weights_TK


# --- The implementation ---


def _select(module: Experts, options: ExpertOptions | None, fallback: str | None) -> None:
    """Makes a module, and all that share its config, compute through the implementation here.

    Without options ``fallback`` computes it, and without that its own forward.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _forward)
    if fallback is not None and fallback not in ALL_EXPERTS_FUNCTIONS:
        known = ", ".join(sorted(ALL_EXPERTS_FUNCTIONS.keys()))
        raise ValueError(f"fallback must be one of {known}; got {fallback!r}")
    setattr(module, _OPTIONS, options)
    setattr(module, _FALLBACK, fallback)
    transformers.select_implementation(module, _IMPLEMENTATION)


def _forward(
    self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts implementation: ``[T, D]``, ``[T, K]`` and ``[T, K]`` to ``[T, D]``."""
    options = getattr(self, _OPTIONS, None)
    if options is not None:
        return _compute(self, options, hidden_states, top_k_index, top_k_weights)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name = getattr(self, _FALLBACK, None)
    fallback = _own_forward(self) if name is None else partial(ALL_EXPERTS_FUNCTIONS[name], self)
    return fallback(hidden_states, top_k_index, top_k_weights)


def _compute(
    module: Experts, options: ExpertOptions, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    weights = partial(experts_weights, module)
    return packed_experts.experts(module, weights, x_TD, ids_TK, weights_TK, **vars(options))


def _own_forward(module: Experts) -> Callable[..., Tensor]:
    """Returns the module's own forward, whatever implementation is selected."""
    return partial(type(module).forward.__wrapped__, module)
