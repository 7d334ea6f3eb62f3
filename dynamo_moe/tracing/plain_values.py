"""The plain values that an object holds, by which two objects are compared.

No method of an object's class runs: it could compute anything, or count that it was asked.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynamo_moe.private.pytorch import attributes_of

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# How deep objects within objects are read; they may refer to each other.
_DEPTH = 4
# Bytes from which on an array is not read.
_LARGE_ARRAY = 2**16
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class PlainValues:
    """Objects that have been read: many hold the same configuration."""

    def __init__(self) -> None:
        # By id and depth. An object is kept, and with it its id.
        self._read: dict[tuple[int, int], tuple[Any, Any]] = {}

    def of_module(self, module: nn.Module) -> dict[Any, Any]:
        """Returns by name what a module's own attributes hold; not its tensors and submodules."""
        return {
            name: self.of(value)
            for name, value in attributes_of(module).items()
            if name not in _OF_EVERY_MODULE
        }

    def of(self, value: Any, depth: int = _DEPTH) -> Any:
        """Returns a plain value, or by name those that an object holds; None for a tensor.

        What cannot be read is equal to itself alone.
        """
        if issubclass(type(value), np.generic):  # Unlike isinstance, it does not ask the object.
            value = value.item()
        if type(value) in _PLAIN:
            return value
        if issubclass(type(value), Tensor):
            return None
        if (id(value), depth) not in self._read:
            parts = _parts(value) if depth else None
            plain: Any = ("itself", id(value))
            if parts is not None:
                plain = {name: self.of(part, depth - 1) for name, part in parts.items()}
                plain[type] = type(value).__qualname__
            self._read[id(value), depth] = value, plain
        return self._read[id(value), depth][1]


def _parts(value: Any) -> dict[Any, Any] | None:
    """Returns by name what an object consists of; None if that cannot be read."""
    for kind, parts in _PARTS.items():
        if issubclass(type(value), kind):
            return parts(value)
    if not any(name in vars(kind) for kind in type(value).__mro__ for name in _TABLES):
        return None
    return {**attributes_of(value), **_slots(value)}


# In which an object of a class that is written in Python keeps what it consists of.
_TABLES = ("__dict__", "__slots__")


def _slots(value: Any) -> dict[str, Any]:
    slots = {}
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(slot, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # It may be empty.
                    slots[name] = slot.__get__(value)
    return slots


def _of_function(function: FunctionType) -> dict[Any, Any]:
    return {
        **attributes_of(function),
        "code": function.__code__,
        "cells": function.__closure__,
        "defaults": function.__defaults__,
        "keyword defaults": function.__kwdefaults__,
    }


def _of_cell(cell: CellType) -> dict[Any, Any]:
    with contextlib.suppress(ValueError):  # It may be empty.
        return {"contents": cell.cell_contents}
    return {}


def _of_array(array: np.ndarray[Any, Any]) -> dict[Any, Any] | None:
    if array.nbytes > _LARGE_ARRAY or array.dtype.hasobject:
        return None
    return {"shape": array.shape, "dtype": array.dtype.str, "bytes": array.tobytes()}


_PARTS: dict[type | tuple[type, ...], Callable[[Any], dict[Any, Any] | None]] = {
    dict: lambda value: dict(dict.items(value)),
    list: lambda value: dict(enumerate(list.__iter__(value))),
    tuple: lambda value: dict(enumerate(tuple.__iter__(value))),
    deque: lambda value: dict(enumerate(deque.__iter__(value))),
    set: lambda value: dict.fromkeys(set.__iter__(value)),
    frozenset: lambda value: dict.fromkeys(frozenset.__iter__(value)),
    functools.partial: lambda value: dict(enumerate((value.func, value.args, value.keywords))),
    MethodType: lambda value: {"function": value.__func__, "self": value.__self__},
    FunctionType: _of_function,
    CellType: _of_cell,
    nn.Module: lambda value: {
        name: part for name, part in attributes_of(value).items() if name not in _OF_EVERY_MODULE
    },
    np.ndarray: _of_array,
    # Whatever attributes they have, they are something else.
    (type, ModuleType, *_PLAIN): lambda _: None,
}
