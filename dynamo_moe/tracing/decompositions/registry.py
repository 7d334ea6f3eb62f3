"""Which operators have a decomposition here, and for which of their calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

__all__ = ["DECOMPOSITIONS", "Decomposition", "decomposes"]

Function = Callable[..., Any]


@dataclass(frozen=True)
class Decomposition:
    """What takes an operator's place; called for nothing, it returns NotImplemented.

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
"""By operator."""


def decomposes(
    *operators: OpOverload, when: Callable[..., bool] = lambda *_, **__: True
) -> Callable[[Function], Function]:
    """Registers a function as the decomposition of operators, of their calls ``when`` is true."""

    def register(function: Function) -> Function:
        DECOMPOSITIONS.update(dict.fromkeys(operators, Decomposition(function, when)))
        return function

    return register
