"""What an expert computes between its two products, found by its numbers, not by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from custom_ops.activations import activate
from custom_ops.options import CLAMPED, POINTWISE, ExpertOptions

__all__ = ["plain", "gating"]

# Every regime of an activation: around zero, at the clamps, far beyond them.
_PROBE = (0.0, 0.01, 0.3, 1.0, 2.5, 6.0, 8.0, 12.0, 40.0, 3e2, 1e4)
_TOLERANCE = 1e-5


def plain(function: Callable[[Tensor], Any]) -> ExpertOptions:
    """Returns the options of an activation without gating.

    Raises:
        ValueError: If ``torch.ops.moe`` has no such activation.
    """
    candidates = (ExpertOptions(activation) for activation in POINTWISE)
    return _first(function, _values(), candidates, "activation")


def gating(
    function: Callable[[Tensor], Any],
    *,
    interleaved: bool = False,
    limits: Iterable[float] = (),
    alphas: Iterable[float] = (),
) -> ExpertOptions:
    """Returns the options of a function of rows of gate and up.

    Args:
        function: From ``[1, 2H]`` to ``[1, H]``.
        interleaved: Gate is ``::2`` and up ``1::2``; otherwise gate comes first.
        limits: Numbers that a clamp may have.
        alphas: Numbers that the slope of a sigmoid may have.

    Raises:
        ValueError: If ``torch.ops.moe`` has no such gating.
    """

    def candidates() -> Iterator[ExpertOptions]:
        for activation in POINTWISE:
            yield ExpertOptions(activation, gated=True, interleaved=interleaved)
        for activation, limit, alpha in product(CLAMPED, limits, alphas):
            yield ExpertOptions(
                activation, gated=True, interleaved=interleaved, alpha=alpha, limit=limit
            )

    gate, up = torch.cartesian_prod(_values(), _values()).unbind(1)
    rows = torch.stack([gate, up], 1).ravel() if interleaved else torch.cat([gate, up])
    return _first(function, rows, candidates(), "gating")


def _values() -> Tensor:
    return torch.tensor([*(-value for value in reversed(_PROBE)), *_PROBE])


def _first(
    function: Callable[[Tensor], Any],
    probe: Tensor,
    candidates: Iterable[ExpertOptions],
    kind: str,
) -> ExpertOptions:
    try:
        with torch.no_grad():
            expected = function(probe[None])
    except Exception as failure:  # The function is the model's own: anything can come out of it.
        raise ValueError(f"its {kind} fails on a row of numbers: {failure}") from failure
    for options in candidates:
        result = activate(probe[None], options)
        if isinstance(expected, Tensor) and torch.allclose(
            result, expected.to(result.dtype), rtol=_TOLERANCE, atol=_TOLERANCE
        ):
            return options
    raise ValueError(f"its {kind} is none that torch.ops.moe computes")
