"""Checking that a model is a module, unwrapping it, evaluation mode, and running on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.jit import ScriptModule
from torch.optim.swa_utils import AveragedModel

from dynamo_moe.private.pytorch import compiled_module, modules_by_path
from dynamo_moe.process_state import ProcessState


def check_model(model: object) -> None:
    """Checks that a model is a module with its modules still in it.

    Raises:
        TypeError: If it is anything else, such as what ``torch.export`` or TorchScript made of it.
    """
    # The modules of exported programs are graphs that refuse eval().
    traced = isinstance(model, fx.GraphModule) and "eval" in vars(model)
    if traced or isinstance(model, (ExportedProgram, ScriptModule)):
        raise TypeError(
            f"model must be the torch.nn.Module itself, not the {type(model).__name__} that "
            "torch.export or TorchScript made of it, which no longer has its MoE modules"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Puts the models into evaluation mode, then each of their modules back into its own."""
    modules = [module for model in models for _, module in modules_by_path(model)]
    modes = [(module, module.training) for module in modules]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            if module.training is not training:
                module.training = training


@contextmanager
def _without_more_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


one_thread = ProcessState(_without_more_threads)
"""Runs the block's operators on one thread, whatever PyTorch's setting."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module that ``torch.compile`` or ``AveragedModel`` has wrapped."""
    while True:
        inner = model.module if isinstance(model, AveragedModel) else compiled_module(model)
        if inner is None:
            return model
        model = inner
