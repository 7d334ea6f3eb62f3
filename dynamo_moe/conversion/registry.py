"""Adapters: each recognises one structure of MoE module and rebuilds it on ``torch.ops.moe``.

They are registered here, and convert a model's modules here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Set
from typing import Protocol

import torch
from torch import nn

from dynamo_moe.conversion.comparison import compare_shapes, equal_scores
from dynamo_moe.conversion.observation import (
    check_no_hooks,
    few_threads,
    has_values,
    in_float32,
    on_any_device,
    preserving_state,
)
from dynamo_moe.conversion.reports import Replacement, Unrecognised
from dynamo_moe.evaluation import evaluating
from dynamo_moe.modules import ConvertedModule
from dynamo_moe.restoring import state_kept


class Adapter(Protocol):
    """Recognises one structure of MoE module, and rebuilds it."""

    name: str

    def recognise(self, module: nn.Module) -> str | None:
        """Returns None if the module has this structure, else the reason why it does not."""

    def convert(self, module: nn.Module) -> ConvertedModule:
        """Returns the replacement, sharing the module's parameters."""

    def example_tokens(self, module: nn.Module) -> torch.Tensor:
        """Returns a few tokens that the module accepts, on its device, to compare the two with."""


_ADAPTERS: dict[str, Adapter] = {}


def register_adapter(adapter: Adapter) -> Adapter:
    """Adds an adapter; the one registered first is asked first.

    An adapter of the same class takes the place of the one before, as where a notebook's cell is
    run again.

    Raises:
        ValueError: If the name is taken by an adapter of another class.
    """
    known = _ADAPTERS.get(adapter.name)
    if known is not None and _class_name(known) != _class_name(adapter):
        raise ValueError(
            f"an adapter named {adapter.name!r} is registered already, of {_class_name(known)}"
        )
    _ADAPTERS[adapter.name] = adapter
    return adapter


def _class_name(adapter: Adapter) -> str:
    return f"{type(adapter).__module__}.{type(adapter).__qualname__}"


def adapters() -> tuple[Adapter, ...]:
    """Returns the registered adapters in the order in which they are asked."""
    return tuple(_ADAPTERS.values())


def matching_adapters(module: nn.Module) -> list[Adapter]:
    """Returns the adapters that recognise a module, in the order in which they are asked."""
    if isinstance(module, ConvertedModule):
        return []
    return [adapter for adapter in adapters() if adapter.recognise(module) is None]


def convert_by_adapters(
    model: nn.Module, modules: Sequence[tuple[str, nn.Module]], handled: Set[nn.Module]
) -> list[Replacement | Unrecognised]:
    """Replaces those of a model's modules that an adapter recognises, except handled ones.

    Raises:
        ValueError: If an adapter would replace the model itself.
    """
    outcomes: list[Replacement | Unrecognised] = []
    done = set(handled)
    for path, module in modules:
        if module in done:
            continue
        name, reasons = type(module).__name__, []
        for adapter in matching_adapters(module):
            try:
                replacement, compared, ties = _replacement(adapter, module)
            except Exception as refusal:  # An adapter is the user's: anything can come out of it.
                kind = "" if isinstance(refusal, ValueError) else f"{type(refusal).__name__}: "
                reasons.append(f"adapter {adapter.name!r}: {kind}{refusal}")
                continue
            _replace(model, module, replacement)
            outcomes.append(Replacement(path, adapter.name, name, compared, ties=ties))
            done.update(module.modules())
            break
        else:
            if reasons:
                outcomes.append(Unrecognised(path, name, "; ".join(reasons)))
    return outcomes


def _replacement(
    adapter: Adapter, module: nn.Module
) -> tuple[ConvertedModule, bool, tuple[str, ...]]:
    """Returns a module's replacement, whether the two were compared, and what scores were equal.

    Raises:
        ValueError: If it has none.
    """
    check_no_hooks(module)
    replacement = adapter.convert(module).train(module.training)
    _check_arguments(module, replacement)
    if not has_values(module):
        return replacement, False, ()
    original = in_float32(module)
    candidate = replacement if original is module else adapter.convert(original)
    kept, modes = state_kept(original), evaluating(original, candidate)
    with kept, modes, preserving_state(original), few_threads(original):
        example = adapter.example_tokens(original)
        compare_shapes(on_any_device(original), candidate, example, adapter.name)
        ties = equal_scores(on_any_device(original), example)
    return replacement, True, ties


def _check_arguments(module: nn.Module, replacement: nn.Module) -> None:
    """Raises ValueError if a replacement's forward takes fewer arguments than the module's."""
    theirs, ours = (
        inspect.signature(compared.forward).parameters for compared in (module, replacement)
    )
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in ours.values()):
        return
    if len(ours) < len(theirs):
        raise ValueError(
            f"its forward takes {', '.join(theirs)}, that of its replacement only {', '.join(ours)}"
        )


def _replace(model: nn.Module, module: nn.Module, replacement: nn.Module) -> None:
    """Replaces a module at every place that holds it."""
    if module is model:
        raise ValueError("the model itself is an MoE module: wrap it, as in nn.Sequential(model)")
    for path, child in list(model.named_modules(remove_duplicate=False)):
        if child is module:
            model.set_submodule(path, replacement)
