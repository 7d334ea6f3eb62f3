"""The state of all that a block's code can reach beside its own weights and attributes.

Blocks with equal facts do the same as long as it stays as it is.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from dynamo_moe.private import attributes_of, change_count
from dynamo_moe.tracing.contents import Contents, is_plain
from dynamo_moe.tracing.descriptions import Facts, Place
from dynamo_moe.tracing.equal_blocks import NotSharedError
from dynamo_moe.tracing.library_code import HERE, is_installed_file, is_library, is_library_file
from dynamo_moe.tracing.parts import LISTS, SETS, held_by_function, is_plain_object, parts_of
from dynamo_moe.tracing.values import SIMPLE, are_equal

# Values that a look at what a block reaches gives up after.
_MOST_VALUES = 50_000
_CONTAINERS = (*LISTS, *SETS, Mapping)
_PLAIN_CONTAINERS = (*LISTS, *SETS, dict)
# What reads a field of named tuples.
_FIELD = type(vars(namedtuple("_Named", "field"))["field"])
# What holds the same objects for ever.
_UNCHANGING = (
    _FIELD,
    *(tuple, frozenset, property, staticmethod, classmethod, types.BuiltinFunctionType),
    *(types.GetSetDescriptorType, types.MethodDescriptorType, types.WrapperDescriptorType),
)
# The fact of objects of libraries that have no state.
_CONSTANT = "constant"
# Objects of Python's own that hold whatever they are given.
_NAMESPACES = (types.SimpleNamespace, threading.local)
_WRAPPERS = (
    *(property, staticmethod, classmethod, functools.cached_property, functools.partialmethod),
    *(types.BuiltinMethodType, types.MethodWrapperType, type(functools.cache(len))),
)


@dataclass(frozen=True)
class State:
    """The state of some values and of all that Python reaches from them.

    Attributes:
        facts: What it is.
        has_tensors: Whether tensors are reached.
    """

    facts: Facts
    has_tensors: bool
    _roots: Mapping[Hashable, Any]
    # None where weak references are among it: what they refer to must not be kept alive.
    _held: _Held | None

    def is_unchanged(self, roots: Mapping[Hashable, Any]) -> bool:
        """Whether it is still that of these values, by a look at each of them; False in doubt."""
        same = _are_same(list(self._roots.items()), list(roots.items()))
        return self._held is not None and same and self._held.is_unchanged()


# A value, a fact on its state, and what it holds.
_Look = tuple[Any, Any, Sequence[tuple[Any, Any]]]


class _Held:
    """What values hold: mostly functions, classes and plain containers, of which C sees it."""

    def __init__(self, looks: Sequence[_Look]) -> None:
        self._looks = looks
        plain: list[Any] = []
        constants: list[Any] = []
        owners: list[tuple[Any, list[str]]] = []
        self._others: list[_Look] = []
        for look in looks:
            value, fact, parts = look
            # Classes and functions that hold nothing are such as are not looked into.
            if is_plain(value) and (parts or isinstance(value, _PLAIN_CONTAINERS)):
                plain.append(value)
            elif type(value) is OrderedDict:  # Which can have attributes as well.
                plain.append(value)
                owners.append((value, [*attributes_of(value)]))
            elif fact is _CONSTANT:
                constants.append(value)
            elif is_plain_object(type(value)) and not isinstance(value, _CONTAINERS):
                owners.append((value, [*attributes_of(value)]))
            else:
                self._others.append(look)
        self._contents = Contents(plain, typed=constants, owners=owners)

    def is_unchanged(self) -> bool:
        """Whether each value holds what it held at first."""
        for value, fact, parts in self._others if self._contents.is_unchanged() else self._looks:
            now, held = _held_by(value)
            if now != fact or not _are_same(parts, held):
                return False
        return True


def _are_same(parts: Sequence[tuple[Any, Any]], others: Sequence[tuple[Any, Any]]) -> bool:
    return len(parts) == len(others) and all(
        name == its and (part is other or are_equal(part, other))
        for (name, part), (its, other) in zip(parts, others, strict=True)
    )


def state_of(roots: Mapping[Hashable, Any], others: Collection[int]) -> State:
    """Returns the state of all that Python reaches from some values.

    Args:
        roots: The values, by a name.
        others: The ids of modules and tensors that must not be reached, since code could find
            another block there each time.

    Raises:
        NotSharedError: If one of them is reached, or something whose state cannot be read.
    """
    state: dict[Place, Hashable] = {}
    found: list[_Look] = []
    seen: set[int] = set()
    is_weak = has_tensors = False
    remaining: list[tuple[Place, Any]] = [((place,), root) for place, root in roots.items()]
    while remaining:
        place, value = remaining.pop()
        kind = type(value)
        if kind in SIMPLE:
            state[place] = (kind, repr(value))
            continue
        state[place] = (kind, id(value))
        if id(value) in seen:
            continue
        seen.add(id(value))
        if id(value) in others:
            raise NotSharedError(f"a block reaches another one by way of {_words(place)}")
        if len(seen) > _MOST_VALUES:
            raise NotSharedError("a block reaches too much to look at")
        fact, parts = _held_by(value)
        state[(*place, "state")] = fact
        remaining.extend(((*place, name), part) for name, part in parts)
        is_weak |= isinstance(value, weakref.ref)
        has_tensors |= isinstance(value, Tensor)
        if kind not in _UNCHANGING:
            found.append((value, fact, parts))
    return State(state, has_tensors, roots, None if is_weak else _Held(found))


def _words(place: Place) -> str:
    return " ".join(map(str, place))


def _hidden(value: Any) -> Hashable:
    """Returns the state of an object that is in no attribute; None for other objects."""
    if isinstance(value, Tensor):
        return change_count(value)
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, (bytearray, memoryview, numpy.ndarray)):
        return bytes(value)
    return None


def _held_by(value: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Returns a fact on a value's state, and the values that it holds."""
    kind = type(value)
    if kind is types.FunctionType:
        if value.__code__.co_filename.startswith(HERE):
            return None, []  # What watches the trace.
        return value.__code__, list(enumerate(held_by_function(value)))
    if kind in _PLAIN_CONTAINERS:
        held = _contents(value)
        return len(held), held
    if isinstance(value, types.MethodType | functools.partial):
        parts = parts_of(value)
        return None, list(parts.items) if parts is not None else []
    hidden = _hidden(value)
    if hidden is not None:
        return hidden, []
    if isinstance(value, ContextVar):
        return None, [("value", value.get(None))]
    if isinstance(value, weakref.ref):
        return None, [("referent", value())]
    if isinstance(value, _WRAPPERS):
        names = ("fget", "fset", "fdel", "func", "__func__", "__self__", "__wrapped__")
        of_own = not is_library_file(_file_of_wrapped(value))
        fact = value.cache_info() if of_own and hasattr(value, "cache_info") else None
        return fact, [(name, getattr(value, name, None)) for name in names]
    kind = value if isinstance(value, type) else type(value)
    held = [] if isinstance(value, type) else _contents(value)
    size = len(held)
    if is_library(sys.modules.get(kind.__module__)) and not isinstance(value, nn.Module):
        known = isinstance(value, (type, *_CONTAINERS, *_NAMESPACES)) or _is_constant(kind)
        if not known:
            raise NotSharedError(f"a block reaches a {kind.__name__}, whose state is hidden")
        if not isinstance(value, (*_CONTAINERS, *_NAMESPACES)):
            return _CONSTANT, []
        return size, [*held, *_attributes(value).items()]
    held += _attributes(value).items()
    if isinstance(value, type):
        return size, [*held, *(("base", base) for base in value.__mro__[1:])]
    return size, [*held, *_slots(value), ("class", kind)]


def _attributes(value: Any) -> dict[str, Any]:
    # Those of the thread are not stored in the object itself.
    return vars(value) if isinstance(value, threading.local) else attributes_of(value)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    """Returns what an object keeps in slots.

    Raises:
        NotSharedError: If a class that it inherits from keeps more than that.
    """
    for base in type(value).__mro__:
        known = issubclass(base, nn.Module) or base in (*_CONTAINERS, *_NAMESPACES)
        known = known or not is_library(sys.modules.get(base.__module__)) or _is_constant(base)
        if not known and base.__module__ not in ("collections", "collections.abc", "threading"):
            raise NotSharedError(f"a block reaches a {base.__name__}, whose state is hidden")
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield name, getattr(value, name, None)


def _contents(value: Any) -> list[tuple[Any, Any]]:
    """Returns what a container holds."""
    if value is os.environ:
        return []  # It holds it in a dictionary among its attributes.
    if isinstance(value, Mapping):
        return list(enumerate(part for pair in value.items() for part in pair))
    return list(enumerate(value)) if isinstance(value, (*LISTS, *SETS)) else []


def _file_of_wrapped(value: Any) -> str | None:
    """Returns the file of a function in a wrapper; that of this package for an installed one."""
    code = getattr(getattr(value, "__wrapped__", None), "__code__", None)
    file = getattr(code, "co_filename", None)
    return __file__ if is_installed_file(file) else file


def _is_constant(kind: type) -> bool:
    """Whether objects of a library's class have no state that a model would change."""
    root = kind.__module__.partition(".")[0]
    return kind is _FIELD or (root in _OF_CONSTANTS and not hasattr(kind, "__next__"))


# Functions, descriptors, patterns, locks, operators, loggers.
_OF_CONSTANTS = frozenset(
    {
        *("builtins", "types", "functools", "re", "typing", "_thread", "operator", "logging"),
        *("_abc", "abc", "dataclasses", "enum", "inspect", "pathlib"),
        *("torch", "custom_ops", "dynamo_moe"),
    }
)
