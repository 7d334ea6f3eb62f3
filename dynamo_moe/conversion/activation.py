"""An expert's activation between its two products, found by its numbers, not by its name.

Legend: R rows, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from custom_ops.activations import activate
from custom_ops.options import POINTWISE, SOFTCAP, ExpertOptions

# The most common one first: an attempt can cost a run of all experts.
_POINTWISE = sorted(POINTWISE, key="silu".__ne__)
_RARE = frozenset(POINTWISE) - {"silu", "gelu", "gelu_tanh", "relu", "relu2"}
# Every regime of an activation: around zero, at the clamps, far beyond them.
_MAGNITUDES = (0.0, 0.01, 0.3, 1.0, 2.5, 6.0, 8.0, 12.0, 40.0, 3e2, 1e4)
_TOLERANCE = 1e-5


class GatingNumbers(NamedTuple):
    """The numbers that a module's gating may have.

    Attributes:
        limits: Those of a clamp.
        alphas: Those of the slope of a clamped gating's sigmoid.
        softcaps: Those of a softcap.
    """

    limits: Sequence[float] = ()
    alphas: Sequence[float] = ()
    softcaps: Sequence[float] = ()


NO_NUMBERS = GatingNumbers()


def numbers_named(modules: Iterable[nn.Module], words: Iterable[str]) -> set[float]:
    """Returns the positive numbers among modules' attributes whose names contain one of the words.

    Each module is looked at by itself: pass those inside it, too.
    """
    return {
        float(value)
        for module in modules
        for name, value in vars(module).items()
        if type(value) in (int, float) and value > 0 and any(word in name for word in words)
    }


def softcaps_of(modules: Iterable[nn.Module]) -> list[float]:
    """Returns the numbers that modules' attributes call softcaps, without unusable ones."""
    return sorted(filter(SOFTCAP.contain, numbers_named(modules, ("softcap", "soft_cap"))))


def identify_activation(
    function: Callable[..., Any],
    *,
    gated: bool = False,
    interleaved: bool = False,
    numbers: GatingNumbers = NO_NUMBERS,
) -> ExpertOptions:
    """Returns the options of an activation, or of a function of gate and up rows.

    Args:
        function: From ``[R, H]``, or ``[R, 2H]`` when gated, to ``[R, H]``.
        gated: Whether it is a function of gate and up rows.
        interleaved: Gate is ``::2`` and up ``1::2``; otherwise gate comes first.
        numbers: What the numbers of a gating may be.

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
    for options in possible_activations(gated=gated, interleaved=interleaved, numbers=numbers):
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
    *, gated: bool, interleaved: bool, numbers: GatingNumbers
) -> Iterator[ExpertOptions]:
    """Yields the options of every activation, the gatings with each of their numbers."""
    for activation in _POINTWISE:
        yield ExpertOptions(activation, gated=gated, interleaved=interleaved)
    if not gated:
        return
    pairs = {
        "clamped_swiglu": product(numbers.alphas, numbers.limits),
        "clamped_silu": product((1.0,), numbers.limits),
        "softcapped_silu": product(numbers.softcaps, repeat=2),
    }
    for activation, alphas_and_limits in pairs.items():
        for alpha, limit in alphas_and_limits:
            yield ExpertOptions(
                activation, gated=True, interleaved=interleaved, alpha=alpha, limit=limit
            )
