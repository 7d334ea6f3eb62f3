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

    Raises:
        ValueError: If the name is taken.
    """
    if adapter.name in _ADAPTERS:
        raise ValueError(f"an adapter named {adapter.name!r} is registered already")
    _ADAPTERS[adapter.name] = adapter
    return adapter


def adapters() -> tuple[Adapter, ...]:
    """Returns the registered adapters in the order they are asked."""
    return tuple(_ADAPTERS.values())
