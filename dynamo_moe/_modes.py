"""Running a model as in ``eval()``, and leaving every submodule's mode as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Puts the models into evaluation mode, then each of their modules back into its own."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
