"""The table of decompositions, by operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo_moe.private.pytorch import OpOverload

Function = Callable[..., Any]


@dataclass(frozen=True)
class Decomposition:
    """A replacement for an operator; returns NotImplemented for a call that does not need it.

    Attributes:
        function: Takes the operator's arguments, and returns its result.
        applies: From a call's arguments to whether it is needed.
    """

    function: Function
    applies: Callable[..., bool]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the decomposition, or declines."""
        return self.function(*args, **kwargs) if self.applies(*args, **kwargs) else NotImplemented


DECOMPOSITIONS: dict[OpOverload, Decomposition] = {}
"""The decompositions, by operator."""


def decomposes(
    *operators: OpOverload, when: Callable[..., bool] = lambda *_, **__: True
) -> Callable[[Function], Function]:
    """Registers a function as the decomposition of operators, for the calls that ``when`` takes."""

    def register(function: Function) -> Function:
        DECOMPOSITIONS.update(dict.fromkeys(operators, Decomposition(function, when)))
        return function

    return register
