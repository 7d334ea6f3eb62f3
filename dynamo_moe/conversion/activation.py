"""An expert's activation between its two products, found by its numbers, not by its name.

Legend: R rows, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from custom_ops.activations import activate
from custom_ops.options import CLAMPED, POINTWISE, ExpertOptions

# The most common one first: an attempt can cost a run of all experts.
_UNCLAMPED = sorted(POINTWISE, key="silu".__ne__)
_RARE = frozenset(POINTWISE) - {"silu", "gelu", "gelu_tanh", "relu", "relu2"}
# Every regime of an activation: around zero, at the clamps, far beyond them.
_MAGNITUDES = (0.0, 0.01, 0.3, 1.0, 2.5, 6.0, 8.0, 12.0, 40.0, 3e2, 1e4)
_TOLERANCE = 1e-5


def identify_activation(
    function: Callable[[Tensor], Any],
    *,
    gated: bool = False,
    interleaved: bool = False,
    limits: Iterable[float] = (),
    alphas: Iterable[float] = (),
) -> ExpertOptions:
    """Returns the options of an activation, or of a function of gate and up rows.

    Args:
        function: From ``[R, H]``, or ``[R, 2H]`` when gated, to ``[R, H]``.
        gated: Whether it is a function of gate and up rows.
        interleaved: Gate is ``::2`` and up ``1::2``; otherwise gate comes first.
        limits: Numbers that a clamp may have.
        alphas: Numbers that the slope of a sigmoid may have.

    Raises:
        ValueError: If ``torch.ops.moe`` has no such activation.
    """
    kind = "gating" if gated else "activation"
    probe = torch.tensor([*(-value for value in reversed(_MAGNITUDES)), *_MAGNITUDES])
    if gated:
        pairs = torch.cartesian_prod(probe, probe)
        probe = pairs.ravel() if interleaved else pairs.mT.ravel()
    try:
        with torch.no_grad():
            expected = function(probe[None])
    except Exception as failure:  # The function is the model's own: anything can come out of it.
        raise ValueError(f"its {kind} fails on a row of numbers: {failure}") from failure
    for options in possible_activations(
        gated=gated, interleaved=interleaved, limits=limits, alphas=alphas
    ):
        result = activate(probe[None], options)
        if isinstance(expected, Tensor) and torch.allclose(
            result, expected.to(result.dtype), rtol=_TOLERANCE, atol=_TOLERANCE
        ):
            return options
    raise ValueError(f"its {kind} is none that torch.ops.moe computes")


def is_rare(options: ExpertOptions) -> bool:
    """Whether an activation is to be tried after all others in every layout of the weights."""
    return options.activation in _RARE


def possible_activations(
    *, gated: bool, interleaved: bool, limits: Iterable[float], alphas: Iterable[float]
) -> Iterator[ExpertOptions]:
    """Yields the options of every activation, the clamped ones with each of the numbers."""
    for activation in _UNCLAMPED:
        yield ExpertOptions(activation, gated=gated, interleaved=interleaved)
    for activation in CLAMPED if gated else ():
        slopes = alphas if activation == "clamped_swiglu" else (1.0,)
        for limit, alpha in product(limits, slopes):
            yield ExpertOptions(
                activation, gated=True, interleaved=interleaved, alpha=alpha, limit=limit
            )
