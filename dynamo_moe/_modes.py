"""A model as it is to be run: in ``eval()``, without what PyTorch wraps around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim.swa_utils import AveragedModel

__all__ = ["evaluating", "unwrapped"]


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


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module that ``torch.compile`` or ``AveragedModel`` has wrapped."""
    while True:
        # _orig_mod is the wrapped module of torch.compile's OptimizedModule.
        inner = (
            model.module if isinstance(model, AveragedModel) else model._modules.get("_orig_mod")
        )
        if inner is None:
            return model
        model = inner
