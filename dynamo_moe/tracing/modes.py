"""What operators and code depend on beside what they are given."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from dynamo_moe.private import active_modes, global_hooks

_DEVICES = ("cpu", "cuda", "xpu", "mps")


def modes() -> tuple[Any, ...]:
    """Returns what operators and code depend on that is not given to them."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        active_modes(),
        global_hooks(),
        tuple(
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
            for device in _DEVICES
        ),
    )


def random_states() -> tuple[Any, ...]:
    """Returns what numbers are drawn from; code that reads it and draws none reaches it."""
    _, *numbers = numpy.random.get_state()  # noqa: NPY002  What models draw from.
    return (
        hash(random.getstate()),
        tuple(map(str, numbers[1:])),
        numpy.asarray(numbers[0]).tobytes(),
    )
