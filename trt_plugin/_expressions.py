"""Integer expressions as a bundle stores them: a postfix program over a layer's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trt_plugin._records import OPERATIONS, SYMBOLS

__all__ = ["MAX_STACK", "Expression", "Instruction"]

MAX_STACK = 16
_INT64 = range(-(2**63), 2**63)
_TEXT = {"add": "({} + {})", "sub": "({} - {})", "mul": "{} * {}", "floordiv": "({} // {})"}

#: Opcode, value.
Instruction = tuple[int, int]


@dataclass(frozen=True)
class Expression:
    """A size or a number of programs.

    Attributes:
        instructions: In postfix order, each an opcode (see docs/reference/bundle.md) and a value.

    Raises:
        ValueError: If they do not leave one value on a stack of at most 16.
    """

    instructions: tuple[Instruction, ...]

    def __post_init__(self) -> None:
        depth = 0
        for at, (opcode, value) in enumerate(self.instructions):
            where = f"instruction {at}"
            if not 0 <= opcode < len(OPERATIONS):
                raise ValueError(
                    f"{where}: the opcode must be below {len(OPERATIONS)}, got {opcode}"
                )
            if opcode == 1 and not 0 <= value < len(SYMBOLS):
                raise ValueError(f"{where}: the symbol must be below {len(SYMBOLS)}, got {value}")
            if opcode > 1 and value:
                raise ValueError(f"{where}: an operation's value must be 0, got {value}")
            if opcode > 1 and depth < 2:
                raise ValueError(f"{where}: {OPERATIONS[opcode]} needs 2 values, there are {depth}")
            depth += 1 if opcode < 2 else -1
            if depth > MAX_STACK:
                raise ValueError(f"{where}: the stack must not pass {MAX_STACK} values")
        if depth != 1:
            raise ValueError(f"an expression must leave 1 value, it leaves {depth}")

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """Returns the value for sizes such as ``{"T": 5, "E": 8, …}``.

        Raises:
            ZeroDivisionError: If a divisor is below 1.
            OverflowError: If a value does not fit 64 bits.
        """
        stack: list[int] = []
        for opcode, value in self.instructions:
            if opcode == 0:
                stack.append(value)
                continue
            if opcode == 1:
                stack.append(sizes[SYMBOLS[value]])
                continue
            b, a = stack.pop(), stack.pop()
            stack.append(_apply(OPERATIONS[opcode], a, b))
            if stack[-1] not in _INT64:
                raise OverflowError(f"{self} does not fit 64 bits for {dict(sizes)}")
        return stack[0]

    def __str__(self) -> str:
        stack: list[str] = []
        for opcode, value in self.instructions:
            if opcode < 2:
                stack.append(SYMBOLS[value] if opcode else str(value))
                continue
            b, a = stack.pop(), stack.pop()
            name = OPERATIONS[opcode]
            stack.append(_TEXT.get(name, f"{name}({{}}, {{}})").format(a, b))
        return stack[0]


def _apply(operation: str, a: int, b: int) -> int:
    if operation in ("floordiv", "cdiv") and b < 1:
        raise ZeroDivisionError(f"{operation} needs a divisor of at least 1, got {b}")
    match operation:
        case "add":
            return a + b
        case "sub":
            return a - b
        case "mul":
            return a * b
        case "floordiv":
            return a // b
        case "cdiv":
            return -(-a // b)
        case "min":
            return min(a, b)
    return max(a, b)
