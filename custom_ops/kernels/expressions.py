"""Integer expressions over a layer's sizes, such as ``cdiv(T * K, 64)``.

Sizes of workspace buffers and grids are written once, as expressions. The Python launcher
evaluates them; a bundle holds their postfix form for the C++ launcher.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

_BINARY: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "cdiv": lambda a, b: -(-a // b),
    "min": min,
    "max": max,
}
#: An operation's place is its code in a bundle.
OPERATIONS = ("const", "symbol", *_BINARY)


@dataclass(frozen=True)
class Expression:
    """An integer expression; write it with ``+ - * //``, :func:`cdiv` and the like.

    Attributes:
        operation: One of :data:`OPERATIONS`.
        operands: The two operands; ``const`` and ``symbol`` have none.
        value: A constant's value, or a symbol's name.
    """

    operation: str
    operands: tuple[Expression, ...] = ()
    value: int | str = 0

    _TEXT: ClassVar[dict[str, str]] = {
        "add": "({} + {})",
        "sub": "({} - {})",
        "mul": "{} * {}",
        "floordiv": "({} // {})",
    }

    @classmethod
    def of(cls, value: IntLike) -> Expression:
        """Returns an expression as it is, and an integer as a constant."""
        return value if isinstance(value, Expression) else cls("const", value=value)

    def __add__(self, other: IntLike) -> Expression:
        return _operation("add", self, other)

    def __sub__(self, other: IntLike) -> Expression:
        return _operation("sub", self, other)

    def __mul__(self, other: IntLike) -> Expression:
        return _operation("mul", self, other)

    def __floordiv__(self, other: IntLike) -> Expression:
        return _operation("floordiv", self, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: int) -> Expression:
        return _operation("sub", other, self)

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """Returns the value for sizes such as ``{"T": 5, "E": 8, …}``.

        Raises:
            ZeroDivisionError: If a divisor is below 1.
        """
        if self.operation == "const":
            return int(self.value)
        if self.operation == "symbol":
            return sizes[str(self.value)]
        a, b = (operand.evaluate(sizes) for operand in self.operands)
        return _apply(self.operation, a, b)

    def postfix(self) -> Iterator[Expression]:
        """Yields the parts so that operands come before their operation."""
        for operand in self.operands:
            yield from operand.postfix()
        yield self

    def __str__(self) -> str:
        if not self.operands:
            return str(self.value)
        form = self._TEXT.get(self.operation, f"{self.operation}({{}}, {{}})")
        return form.format(*self.operands)


IntLike = Expression | int


def cdiv(a: IntLike, b: IntLike) -> Expression:
    """``a / b`` rounded up; ``b`` at least 1."""
    return _operation("cdiv", a, b)


def minimum(a: IntLike, b: IntLike) -> Expression:
    """The smaller of two."""
    return _operation("min", a, b)


def maximum(a: IntLike, b: IntLike) -> Expression:
    """The larger of two."""
    return _operation("max", a, b)


# The number of tokens, and a layer's sizes.
T, E, K, D, H = (Expression("symbol", value=name) for name in "TEKDH")
# The index of a wave, for the launches in it.
W_INDEX = Expression("symbol", value="wave")


def _operation(operation: str, a: IntLike, b: IntLike) -> Expression:
    operands = (Expression.of(a), Expression.of(b))
    if all(operand.operation == "const" for operand in operands):
        return Expression("const", value=_apply(operation, *(int(o.value) for o in operands)))
    return Expression(operation, operands)


def _apply(operation: str, a: int, b: int) -> int:
    if operation not in _BINARY:
        raise ValueError(f"unknown operation {operation!r}")
    if operation in ("floordiv", "cdiv") and b < 1:
        raise ZeroDivisionError(f"{operation} needs a divisor of at least 1, got {b}")
    return _BINARY[operation](a, b)
