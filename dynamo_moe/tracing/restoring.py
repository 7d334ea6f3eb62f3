"""What a run of a model changes in the model, undone: attributes, containers, counters.

A model may count calls, fill a cache, or keep its last result; an export leaves it as it was.
``torch.export``, too, gives modules copies of their lists and dictionaries.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from dynamo_moe.private import attributes_of, modules_by_path
from dynamo_moe.tracing.library_code import is_library

_DICTS = frozenset({dict, OrderedDict, defaultdict})
_LISTS = frozenset({list, set, deque})
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
# Objects that hold others in attributes, beside those of classes that are no library's.
_WITH_ATTRIBUTES = (nn.Module, types.SimpleNamespace)
# Tables of hooks, mostly, a dozen for each module; those that are empty are left out.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Objects after which no more are looked for.
_MOST_OBJECTS = 50_000


@contextlib.contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restores, as the context ends, what :func:`state_of` a model says."""
    restore = state_of(model)
    try:
        yield
    finally:
        restore()


def state_of(model: nn.Module) -> Callable[[], None]:
    """Returns what restores all that a model's modules reach, up to 50,000 objects.

    That includes what the functions of its classes close over, and no global variables.
    """
    undo = _undoing(model)

    def restore() -> None:
        for undone in undo:
            undone()

    return restore


def _undoing(model: nn.Module) -> list[Callable[[], None]]:
    modules = [module for _, module in modules_by_path(model)]
    undo: list[Callable[[], None]] = []
    remaining: list[Any] = [*modules]
    for cell in _cells({type(module) for module in modules}):
        undo.append(_restoring_cell(cell, cell.cell_contents))
        remaining.append(cell.cell_contents)
    seen: set[int] = set()
    while remaining and len(undo) < _MOST_OBJECTS:
        value = remaining.pop()
        kind = type(value)
        if kind in _PLAIN or id(value) in seen or isinstance(value, (type, Tensor)):
            continue
        seen.add(id(value))
        if kind in _DICTS:
            undo.append(_restoring(value, dict(value)))
            remaining += value.values()
        elif kind in _LISTS:
            undo.append(_restoring(value, list(value)))
            remaining += value
        elif kind is tuple:
            remaining += value
        elif isinstance(value, _WITH_ATTRIBUTES) or not is_library(
            sys.modules.get(kind.__module__)
        ):
            attributes = attributes_of(value)
            undo.append(_restoring(attributes, dict(attributes)))
            remaining += [
                attribute
                for name, attribute in attributes.items()
                if name not in _OF_EVERY_MODULE or (type(attribute) in _DICTS and attribute)
            ]
    return undo


def _cells(classes: set[type]) -> Iterator[types.CellType]:
    """Yields what the functions of classes close over, libraries' excepted."""
    for kind in classes:
        if _is_of_library(kind):
            continue
        for function in vars(kind).values():
            for cell in getattr(function, "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # An empty one.
                    cell.cell_contents  # noqa: B018
                    yield cell


def _is_of_library(kind: type) -> bool:
    return is_library(sys.modules.get(kind.__module__))


def _restoring_cell(cell: types.CellType, before: Any) -> Callable[[], None]:
    def restore() -> None:
        cell.cell_contents = before

    return restore


def _restoring(container: Any, before: Any) -> Callable[[], None]:
    def restore() -> None:
        if len(container) == len(before) and all(map(operator.is_, container, before)):
            if not isinstance(before, dict):
                return
            if all(map(operator.is_, container.values(), before.values())):
                return
        container.clear()
        (container.update if hasattr(container, "update") else container.extend)(before)

    return restore
