"""Whether a module and what is to stand for it give the same numbers on a few random tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dynamo_moe.lazy_tensors import LazyTensor

__all__ = ["compare", "has_values", "random_tokens", "check_comparable"]

# Relative to the RMS of the original's result, both in at least float32: a different activation or
# routing differs by 1e-1, another order of summation by 1e-6.
TOLERANCE = 1e-4


def random_tokens(count: int, width: int, like: Tensor) -> Tensor:
    """Returns ``[count, width]``, the same every time, large enough to tell activations apart."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(count, width, generator=generator) * 2).to(like.device, like.dtype)


def has_values(module: nn.Module) -> bool:
    """Whether the module can be run: none of its parameters is on the meta device, or on disk."""
    return not any(p.is_meta or isinstance(p, LazyTensor) for p in module.parameters())


def check_comparable(module: nn.Module) -> None:
    """Raises ValueError if a module does more than its forward says."""
    if any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
        raise ValueError("it has forward hooks, which its replacement would not run")


def compare(
    original: Callable[..., Any], candidate: Callable[..., Any], inputs: Sequence[Tensor], kind: str
) -> None:
    """Runs both, without gradients.

    Raises:
        ValueError: If they do not give the same numbers; with what speaks against it.
    """
    shape = f"it has the shape of {kind} but"
    try:
        with torch.no_grad():
            expected, result = original(*inputs), candidate(*inputs)
    except Exception as failure:  # The module is the user's: anything can come out of it.
        raise ValueError(f"{shape} fails on tokens [T, D]: {failure}") from failure
    expected, structure = pytree.tree_flatten(expected)
    result, replaced = pytree.tree_flatten(result)
    if structure != replaced or [x.shape for x in expected] != [x.shape for x in result]:
        raise ValueError(f"{shape} returns something else")
    for pair in zip(result, expected, strict=True):
        error = _error(*pair)
        if not error <= TOLERANCE:  # NaN too.
            raise ValueError(
                f"{shape} computes something else: relative error {error:.1e} on random tokens, "
                f"above {TOLERANCE:.0e}"
            )


def _error(result: Tensor, expected: Tensor) -> float:
    """Returns the largest error, relative to the RMS of what is expected."""
    scale = expected.double().square().mean().sqrt().clamp_min(1e-30)
    return float((expected.double() - result.double()).abs().max() / scale)
