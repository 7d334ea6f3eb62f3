"""The registry of adapters: each recognises one shape of MoE module and rebuilds it on our ops."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from dynamo_moe.modules import ConvertedModule

__all__ = ["Adapter", "adapters", "register_adapter"]


class Adapter(Protocol):
    """Recognises one shape of MoE module, by its structure, and rebuilds it."""

    name: str

    def recognise(self, module: nn.Module) -> str | None:
        """Returns None if the module has this shape, else what speaks against it."""

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
    """Returns the registered adapters in the order they are asked."""
    return tuple(_ADAPTERS.values())
