"""Private names of transformers: its interface for experts.

Where they have moved, experts of transformers are converted by what they compute, like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dynamo_moe.private.pytorch import has_attribute

# The function of an experts module that combines gate and up projections.
_GATE = "_apply_gate"
# The attribute of a config that names the implementation its modules' forward dispatches to. The
# public ``set_experts_implementation`` takes a whole model, and refuses names that are not its own.
_IMPLEMENTATION = "_experts_implementation"
# Whether an experts module holds only some of the experts.
_PARALLEL = "_is_expert_parallel"


def has_interface(module: Any) -> bool:
    """Whether transformers dispatches this module's forward through its experts interface."""
    config = has_attribute(module, _GATE) and getattr(module, "config", None)
    return hasattr(config, _IMPLEMENTATION)


def gate_function(module: Any) -> Callable[..., Any]:
    """Returns the function that combines an experts module's gate and up projections."""
    function: Callable[..., Any] = getattr(module, _GATE)
    return function


def implementation(module: Any) -> str | None:
    """Returns the name of the implementation that an experts module dispatches to."""
    name: str | None = getattr(module.config, _IMPLEMENTATION)
    return name


def select_implementation(module: Any, name: str) -> None:
    """Makes an experts module, and all that share its config, dispatch to an implementation."""
    setattr(module.config, _IMPLEMENTATION, name)


def is_expert_parallel(module: Any) -> bool:
    """Whether an experts module holds only some of the experts, and other processes the rest."""
    return bool(getattr(module, _PARALLEL, False))


# --- Vision towers ---

# The attribute of a config that names the implementation of its modules' attention. The public
# ``set_attn_implementation`` checks whether packages of that name are installed.
_ATTENTION = "_attn_implementation"
# A function: which entries of a table lie about a place on an axis, and how near they are.
_TAPS = "_interpolation_axis_taps_weights"
# The method of a decoder that adds a picture's features to the hidden states behind a layer.
_ADDED_FEATURES = "_deepstack_process"


@contextmanager
def attention_selected(module: Any, name: str) -> Iterator[None]:
    """Makes the modules of a model that has its own config dispatch to an implementation."""
    configs = {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}
    before = [(config, getattr(config, _ATTENTION, None)) for config in configs.values()]
    for config, _ in before:
        setattr(config, _ATTENTION, name)
    try:
        yield
    finally:
        for config, original in before:
            setattr(config, _ATTENTION, original)


def interpolation_taps() -> Callable[..., Any]:
    """Returns the function of transformers that interpolates on an axis."""
    from transformers import vision_utils

    function: Callable[..., Any] = getattr(vision_utils, _TAPS)
    return function


@contextmanager
def features_added(decoder: Any, add: Callable[..., Any]) -> Iterator[None]:
    """Replaces what a decoder does with a picture's features behind its first layers."""
    setattr(decoder, _ADDED_FEATURES, add)
    try:
        yield
    finally:
        delattr(decoder, _ADDED_FEATURES)
