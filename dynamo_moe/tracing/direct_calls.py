"""Calls of a method whose arguments are seen by nothing but the method, read from the code.

In ``cache.update(keys, values, self.layer_idx)`` Python reads the method, then the arguments, and
calls. If there is nothing else between, no other code gets hold of the method or of the attribute.
"""

from __future__ import annotations

import dis
import functools
import sys
from types import CodeType, FrameType
from typing import NamedTuple

# What puts local variables and constants on the stack: how many.
_PUSHES = {
    "LOAD_FAST": 1,
    "LOAD_FAST_BORROW": 1,
    "LOAD_FAST_LOAD_FAST": 2,
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": 2,
    "LOAD_CONST": 1,
    "LOAD_SMALL_INT": 1,
}
_NOTHING = frozenset({"EXTENDED_ARG", "KW_NAMES", "PRECALL"})
# Before Python 3.12, methods are read by an instruction of their own.
_READS_METHODS = "LOAD_METHOD" if sys.version_info < (3, 12) else "LOAD_ATTR"


class DirectCall(NamedTuple):
    """A call of a method.

    Attributes:
        call: Where in the code it is.
        attributes: Where attributes of local variables are read that are arguments of it.
    """

    call: int
    attributes: frozenset[int]


def place_in(frame: FrameType) -> int:
    """Returns where a frame's code is: the offset of the instruction that runs."""
    return max(each.offset for each in _instructions(frame.f_code) if each.offset <= frame.f_lasti)


def direct_call(frame: FrameType, name: str) -> DirectCall | None:
    """Returns the call of a method that a frame is about to read; None if it is not as plain.

    Args:
        frame: The frame.
        name: The method's name.
    """
    return _direct_call(frame.f_code, place_in(frame), name)


@functools.lru_cache
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


@functools.lru_cache
def _direct_call(code: CodeType, start: int, name: str) -> DirectCall | None:
    first, *others = (each for each in _instructions(code) if each.offset >= start)
    if first.opname != _READS_METHODS or first.argval != name:
        return None
    if _READS_METHODS == "LOAD_ATTR" and not _is_method(first):
        return None
    arguments, attributes = 0, set[int]()
    previous = ""
    for instruction in others:
        operation = instruction.opname
        if operation in _NOTHING:
            continue
        if operation in _PUSHES:
            arguments += _PUSHES[operation]
        elif operation == "LOAD_ATTR" and previous in _PUSHES and not _is_method(instruction):
            attributes.add(instruction.offset)
        elif operation in ("CALL", "CALL_KW"):
            names = operation == "CALL_KW"  # Are an argument of the instruction, too.
            taken = (instruction.arg or 0) + names
            return (
                DirectCall(instruction.offset, frozenset(attributes))
                if taken == arguments
                else None
            )
        else:
            return None
        previous = operation
    return None


def _is_method(instruction: dis.Instruction) -> bool:
    """Whether an instruction reads an attribute to call it."""
    return sys.version_info >= (3, 12) and bool((instruction.arg or 0) & 1)
