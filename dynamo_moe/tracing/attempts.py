"""What is undone of an attempt to trace a model that is given up.

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
# Objects after which no more are looked for.
_MOST_OBJECTS = 50_000


@contextlib.contextmanager
def undone_if_given_up(model: nn.Module, unseen: Collection[nn.Module]) -> Iterator[None]:
    """Restores what a model's modules and their objects held, if the context raises.

    PyTorch gives modules other lists and dictionaries of the same contents as well.

    Args:
        model: The model.
        unseen: Modules of it that do not run: their attributes are restored alone.
    """
    inside = [part for each in unseen for _, part in modules_by_path(each)]
    ids = {*map(id, inside)}
    undo = _kept([part for _, part in modules_by_path(model) if id(part) not in ids], ids)
    undo += [_restoring(held, dict(held)) for held in map(attributes_of, inside)]
    try:
        yield
    except BaseException:
        for restore in undo:
            restore()
        raise


def _kept(roots: Collection[Any], without: Collection[int]) -> list[Callable[[], None]]:
    """Returns what restores the contents of some objects, and of all that they hold."""
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
        elif isinstance(value, _WITH_ATTRIBUTES) or not _is_of_library(kind):
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
