"""The plain values that an object holds, by which two objects are compared.

No method of an object's class runs: it could compute anything, or count that it was asked.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynamo_moe.modules import ParameterCache
from dynamo_moe.private.pytorch import attributes_of

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# How deep objects within objects are read; they may refer to each other.
_DEPTH = 8
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class PlainValues:
    """Objects that have been read: many hold the same configuration."""

    def __init__(self) -> None:
        # By id and depth. An object is kept, and with it its id.
        self._read: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._paths: dict[int, str] = {}

    def of_modules(self, modules: Iterable[tuple[str, nn.Module]]) -> dict[Any, Any]:
        """Returns what modules' own attributes hold, by path and name.

        Where they refer to one of the modules, it is its path; another one is itself.
        """
        modules = list(modules)
        self._paths = {id(module): path for path, module in modules}
        return {
            (path, name): self.of(value)
            for path, module in modules
            for name, value in attributes_of(module).items()
            if name not in _OF_EVERY_MODULE
        }

    def of(self, value: Any, depth: int = _DEPTH) -> Any:
        """Returns a plain value, or by name those that an object holds; None for a tensor.

        What cannot be read is equal to itself alone.
        """
        kind = type(value)
        if issubclass(kind, np.generic):  # Unlike isinstance, it does not ask the object.
            value = value.item()
            kind = type(value)
        if kind in _PLAIN:
            return value
        if issubclass(kind, Tensor):
            return None
        if issubclass(kind, ParameterCache):  # Which calls came first is nothing of the model's.
            return kind
        if issubclass(kind, nn.Module) and id(value) in self._paths:
            return "module", self._paths[id(value)]
        if depth == 0 or issubclass(kind, _NOT_READ):
            return _alone(value)
        if (id(value), depth) not in self._read:
            self._read[id(value), depth] = value, self._parts(value, depth)
        return self._read[id(value), depth][1]

    def _parts(self, value: Any, depth: int) -> Any:
        """Returns by name what an object consists of."""
        kind = type(value)
        has_attributes = any("__dict__" in vars(base) for base in kind.__mro__)
        read = next((read for base, read in _PARTS.items() if issubclass(kind, base)), _slots)
        parts = read(value)
        if parts is None and not has_attributes:
            return _alone(value)
        plain = {name: self.of(part, depth - 1) for name, part in (parts or {}).items()}
        if issubclass(kind, (set, frozenset)):
            plain = {frozenset: _unordered(plain.values())}
        if has_attributes:
            plain[vars] = self.of(attributes_of(value), depth - 1)
        return {type: kind, **plain}


def _alone(value: Any) -> tuple[str, int]:
    return "itself", id(value)


def _unordered(members: Iterable[Any]) -> frozenset[Any] | tuple[str, int]:
    """Returns members as a set; those of objects' parts are equal to themselves alone."""
    members = list(members)
    if all(isinstance(member, (*_PLAIN, tuple)) for member in members):
        return frozenset(members)
    return _alone(members)


def _slots(value: Any) -> dict[str, Any] | None:
    kinds = [kind for kind in type(value).__mro__ if "__slots__" in vars(kind)]
    slots = {}
    for kind in kinds:
        for name, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # It may be empty.
                    slots[name] = slot.__get__(value)
    return slots if kinds else None


def _of_dictionary(dictionary: dict[Any, Any]) -> dict[Any, Any]:
    """Keys that are no text are values too: what hashes them could be the user's."""
    items = list(dict.items(dictionary))
    if all(type(key) is str for key, _ in items):
        return dict(items)
    return dict(enumerate(items))


def _of_function(function: FunctionType) -> dict[str, Any]:
    return {
        "code": function.__code__,
        "cells": function.__closure__,
        "defaults": function.__defaults__,
        "keyword defaults": function.__kwdefaults__,
    }


def _of_cell(cell: CellType) -> dict[str, Any]:
    with contextlib.suppress(ValueError):  # It may be empty.
        return {"contents": cell.cell_contents}
    return {}


def _of_array(array: np.ndarray[Any, Any]) -> dict[str, Any] | None:
    if array.dtype.hasobject:
        return None
    digest = hashlib.sha256(array.tobytes()).digest()
    return {"shape": array.shape, "dtype": array.dtype.str, "digest": digest}


# Whatever attributes they have, they are something else.
_NOT_READ = (type, ModuleType, nn.Module, *_PLAIN)
_PARTS: dict[type | tuple[type, ...], Callable[[Any], dict[Any, Any] | None]] = {
    dict: _of_dictionary,
    list: lambda value: dict(enumerate(list.__iter__(value))),
    tuple: lambda value: dict(enumerate(tuple.__iter__(value))),
    deque: lambda value: dict(enumerate(deque.__iter__(value))),
    set: lambda value: dict(enumerate(set.__iter__(value))),
    frozenset: lambda value: dict(enumerate(frozenset.__iter__(value))),
    slice: lambda value: {"start": value.start, "stop": value.stop, "step": value.step},
    functools.partial: lambda value: dict(enumerate((value.func, value.args, value.keywords))),
    (operator.itemgetter, operator.attrgetter, operator.methodcaller): lambda value: dict(
        enumerate(value.__reduce__())
    ),
    weakref.ref: lambda value: {"referent": weakref.ref.__call__(value)},
    MethodType: lambda value: {"function": value.__func__, "self": value.__self__},
    FunctionType: _of_function,
    CellType: _of_cell,
    np.ndarray: _of_array,
}
