"""How far a model in half precision is from the same model in float32, and a file may be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_moe import pytree
from dynamo_moe.private.pytorch import tensors_replaced
from dynamo_moe.tolerances import Tolerance
from dynamo_moe.weights.packed_linear import packed_layers

_HALF = {torch.float16, torch.bfloat16}
# Two runs that round alike, in another order, are about as far from the exact result.
_TIMES_AS_FAR = 2
# Beyond so many tolerances, a model's own results are noise that much else is near to.
_MOST_TOLERANCES = 10


def is_half(model: nn.Module) -> bool:
    """Whether any weight of a model is in half precision."""
    return any(tensor.dtype in _HALF for tensor in (*model.parameters(), *model.buffers()))


def widened_case(case: Any) -> Any:
    """Returns inputs with float32 in place of half precision."""
    return pytree.tree_map(_widened, case)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Lets a model compute in float32, with its own weights as they are rounded."""
    packed = [each for each in packed_layers(model).values() if each.weight_dtype in _HALF]
    try:
        for layer in packed:
            layer.is_widened = True
        with tensors_replaced(model, lambda _, tensor: _widened(tensor)):
            yield
    finally:
        for layer in packed:
            layer.is_widened = False


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def allowed(of_model: tuple[float, float], bound: Tolerance) -> Tolerance | None:
    """Returns the bounds on a file's errors, relative to the model in float32.

    Args:
        of_model: The model's own errors, of the worst element and the RMS.
        bound: The tolerance for files of this precision.

    Returns:
        Twice the model's own errors, but no less than the tolerance; None if they are too large for
        anything to be said.
    """
    max_error, rms_error = of_model
    near = max_error <= _MOST_TOLERANCES * bound.max and rms_error <= _MOST_TOLERANCES * bound.rms
    if not near:  # Or they are no numbers.
        return None
    return Tolerance(
        max=max(bound.max, _TIMES_AS_FAR * max_error), rms=max(bound.rms, _TIMES_AS_FAR * rms_error)
    )
