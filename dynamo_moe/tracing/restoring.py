"""What is undone of a trace of a model.

PyTorch gives the modules of a model that it has traced copies of their lists and dictionaries, of
what these held before: modules that have one in common would have one each.

Equal blocks are passed over, and what refuses that ends the trace in the middle of the model. A
model that counts its blocks' calls, in an object that all of them know, would start from there.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor, nn

from dynamo_moe.private import attributes_of, modules_by_path
from dynamo_moe.tracing.contents import CONTAINERS, DICTS
from dynamo_moe.tracing.library_code import is_library
from dynamo_moe.tracing.values import SIMPLE

# Objects that hold others in attributes, beside those of classes that are no library's.
_WITH_ATTRIBUTES = (nn.Module, types.SimpleNamespace)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Objects after which no more are looked for.
_MOST_OBJECTS = 50_000


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the attributes that a model's modules had, and what was in their containers."""
    held = [attributes_of(module) for _, module in modules_by_path(model)]
    own = [
        {name: value for name, value in each.items() if name not in _OF_EVERY_MODULE}
        for each in held
    ]
    values = [value for each in own for value in each.values()]
    undo = _kept(values, (), objects=False)
    try:
        yield
    finally:
        for restore in undo:
            restore()
        for each, before in zip(held, own, strict=True):
            each.update(before)


@contextlib.contextmanager
def undone_if_given_up(model: nn.Module, unseen: Collection[nn.Module]) -> Iterator[None]:
    """Restores what a model's modules and their objects held, if the context raises.

    Args:
        model: The model.
        unseen: Modules of it that do not run.
    """
    inside = {id(part) for each in unseen for _, part in modules_by_path(each)}
    undo = _kept([part for _, part in modules_by_path(model) if id(part) not in inside], inside)
    try:
        yield
    except BaseException:
        for restore in undo:
            restore()
        raise


def _kept(
    roots: Collection[Any], without: Collection[int], *, objects: bool = True
) -> list[Callable[[], None]]:
    """Returns what restores the contents of some values, and of all in them.

    Args:
        roots: The values.
        without: The ids of objects that are left out.
        objects: Whether attributes are restored, or the contents of containers alone.
    """
    seen = {*without}
    undo: list[Callable[[], None]] = []
    remaining = [*roots]
    while remaining and len(undo) < _MOST_OBJECTS:
        value = remaining.pop()
        kind = type(value)
        if kind in SIMPLE or id(value) in seen or isinstance(value, (type, Tensor)):
            continue
        seen.add(id(value))
        if kind in DICTS:
            undo.append(_restoring(value, dict(value)))
            remaining += value.values()
        elif kind in CONTAINERS:
            undo.append(_restoring(value, list(value)))
            remaining += value
        elif kind is tuple:
            remaining += value
        elif objects and (isinstance(value, _WITH_ATTRIBUTES) or not _is_of_library(kind)):
            held = attributes_of(value)
            undo.append(_restoring(held, dict(held)))
            remaining += held.values()
    return undo


def _is_of_library(kind: type) -> bool:
    return is_library(sys.modules.get(kind.__module__))


def _restoring(container: Any, before: Any) -> Callable[[], None]:
    def restore() -> None:
        now = dict(container) if isinstance(before, dict) else list(container)
        if len(now) == len(before) and all(map(operator.is_, _items(now), _items(before))):
            return
        container.clear()
        (container.update if hasattr(container, "update") else container.extend)(before)

    return restore


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return [*container]
