"""What Python's values are made of, as far as it can be told without their help."""

from __future__ import annotations

import enum
import functools
import types
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynamo_moe.tracing.contents import DICTS, content_of
from dynamo_moe.tracing.values import SIMPLE

# Types that hold others in a row, and without order.
LISTS = (list, tuple, deque)
SETS = (set, frozenset)


@dataclass(frozen=True)
class Same:
    """Equal for one object alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Parts(NamedTuple):
    """What a value is made of: a fact of its own, and values by name."""

    fact: Any
    items: Iterable[tuple[Hashable, Any]] = ()


def parts_of(value: Any) -> Parts | None:
    """Returns what a value is made of; None for what is known by its identity alone."""
    kind = type(value)
    if kind in LISTS or _is_named_tuple(kind):
        return Parts((len(value), getattr(value, "maxlen", None)), enumerate(value))
    if kind in DICTS:
        if kind is not dict and vars(value):
            return None
        if not all(type(key) in SIMPLE or isinstance(key, (type, enum.Enum)) for key in value):
            return None
        # Some keys are equal that show something else, as 0.0 and -0.0.
        keys = ((type(key), repr(key) if type(key) in SIMPLE else key) for key in value)
        return Parts(tuple(keys), enumerate(value.values()))
    if kind in SETS:
        simple = all(type(item) in SIMPLE for item in value)
        return Parts(tuple(map(repr, value))) if simple else None  # In the order of a loop.
    if kind is types.FunctionType:
        names = value.__name__, value.__qualname__, value.__module__
        code = value.__code__, Same(value.__globals__)
        return Parts((*code, *names), enumerate(held_by_function(value)))
    if kind is types.MethodType:
        return Parts("method", enumerate((value.__func__, value.__self__)))
    if kind is functools.partial and not vars(value):
        return Parts("partial", enumerate((value.func, value.args, value.keywords)))
    if is_plain_object(kind):
        return Parts(kind, sorted(vars(value).items()))
    return None


def held_by_function(value: types.FunctionType) -> tuple[Any, ...]:
    """Returns what a function holds beside its code and its module's names."""
    cells = map(content_of, value.__closure__ or ())
    return value.__defaults__, value.__kwdefaults__, vars(value) or None, *cells


def _is_named_tuple(kind: type) -> bool:
    """Whether objects of a class are what their items say, and nothing else."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and not kind.__dictoffset__


class _Plain:
    pass


def _is_slot(value: Any) -> bool:
    """Whether an attribute of a class is where its objects keep something beside ``__dict__``."""
    return isinstance(value, types.MemberDescriptorType)


def is_plain_object(kind: type) -> bool:
    """Whether objects of a class are what their ``__dict__`` says, and nothing else."""
    return (
        not issubclass(kind, type)
        and kind.__basicsize__ == _Plain.__basicsize__
        and kind.__itemsize__ == 0
        and hasattr(kind, "__dict__")
        and "__dict__" in {name for base in kind.__mro__ for name in vars(base)}
        and not any(map(_is_slot, (each for base in kind.__mro__ for each in vars(base).values())))
        and not hasattr(kind, "__next__")
    )
