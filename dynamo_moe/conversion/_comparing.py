"""Whether a module and what is to stand for it give the same numbers on a few random tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_moe.lazy_tensors import LazyTensor

__all__ = ["compare", "has_values", "random_tokens", "why_not_comparable"]

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


def why_not_comparable(module: nn.Module) -> str | None:
    """Returns what forbids to look at a module's numbers, or None."""
    if any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
        return "it has forward hooks, which its replacement would not run"
    return None


def compare(
    original: Callable[..., Any], candidate: Callable[..., Any], inputs: Sequence[Tensor], kind: str
) -> str | None:
    """Runs both, without gradients, and returns what speaks against the candidate, or None."""
    try:
        with torch.no_grad():
            expected, result = original(*inputs), candidate(*inputs)
    except Exception as failure:  # The module is the user's: anything can come out of it.
        return f"it has the shape of {kind} but fails on tokens [T, D]: {failure}"
    if not isinstance(expected, Tensor) or expected.shape != result.shape:
        return f"it has the shape of {kind} but does not return one tensor [T, D]"
    scale = expected.double().square().mean().sqrt().clamp_min(1e-30)
    error = float((expected.double() - result.double()).abs().max() / scale)
    if error <= TOLERANCE:
        return None
    return (
        f"it has the shape of {kind} but computes something else: "
        f"relative error {error:.1e} on random tokens, above {TOLERANCE:.0e}"
    )
