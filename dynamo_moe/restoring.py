"""Undoes the changes that a run of a model makes in it: attributes, containers, counters.

A model may count calls, fill a cache, or keep its last result; an export leaves it as it was.
``torch.export``, too, gives modules copies of their lists and dictionaries.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from dynamo_moe.library_code import is_installed, is_library
from dynamo_moe.private.pytorch import (
    CHILDREN_TABLE,
    TENSOR_TABLES,
    attributes_of,
    modules_by_path,
)

_DICTS = frozenset({dict, OrderedDict, defaultdict})
_LISTS = frozenset({list, set, deque})
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
# Objects that hold others in attributes, beside those of classes that are no library's.
_WITH_ATTRIBUTES = (nn.Module, types.SimpleNamespace)
# Tables of hooks, mostly, a dozen for each module; those that are empty are left out.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PARTS = frozenset({*TENSOR_TABLES, CHILDREN_TABLE})
_CACHING = type(functools.cache(lambda: None))
_WRAPPERS = (staticmethod, classmethod, property, types.MethodType, _CACHING)
_CODE = (type, types.FunctionType, *_WRAPPERS)
# Objects, beside modules, after which no more are looked for.
_MOST_OBJECTS = 50_000


@contextlib.contextmanager
def state_kept(model: nn.Module, *, attributes: bool = True) -> Iterator[None]:
    """Restores, as the context ends, what :func:`state_of` a model says."""
    restore = state_of(model, attributes=attributes)
    try:
        yield
    finally:
        restore()


def state_of(model: nn.Module, *, attributes: bool = True) -> Callable[[], None]:
    """Returns a function that restores a model's modules and up to 50,000 objects that they reach.

    That includes what code that is no package's has in its classes, closures, default arguments and
    global variables; not what is in iterators, arrays, tensors or context variables. Results that
    ``functools.cache`` keeps are forgotten if there are new ones.

    Args:
        model: The model.
        attributes: Whether the modules' own attributes are restored, and not only what is in them.
    """
    undo = _undoing(model, attributes=attributes)

    def restore() -> None:
        for undone in undo:
            undone()

    return restore


def _undoing(model: nn.Module, *, attributes: bool) -> list[Callable[[], None]]:
    modules = [module for _, module in modules_by_path(model)]
    undo: list[Callable[[], None]] = []
    remaining: list[Any] = [*{kind for module in modules for kind in type(module).__mro__}]
    # All modules, however many there are.
    seen = {*map(id, modules)}
    for module in modules:
        remaining += _contents_of_object(module, undo, attributes=attributes)
    most = len(undo) + _MOST_OBJECTS
    while remaining and len(undo) < most:
        value = remaining.pop()
        kind = type(value)
        if kind in _PLAIN or id(value) in seen or isinstance(value, Tensor):
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
        elif isinstance(value, _CODE):
            if _is_code_of_model(value):
                remaining += _contents_of_code(value, undo)
        elif isinstance(value, _WITH_ATTRIBUTES) or not is_library(
            sys.modules.get(kind.__module__)
        ):
            own = attributes or not isinstance(value, nn.Module)
            remaining += _contents_of_object(value, undo, attributes=own)
    return undo


def _contents_of_object(
    value: Any, undo: list[Callable[[], None]], *, attributes: bool
) -> list[Any]:
    """Returns the objects in an object's attributes; adds functions that restore these.

    A module's tensors and submodules are not among them.
    """
    held = attributes_of(value)
    if attributes:
        undo.append(_restoring(held, dict(held)))
        undo.append(_emptying(held))
        if isinstance(value, nn.Module):
            tables = [held[name] for name in _PARTS & held.keys()]
            # TorchScript's are something else.
            undo += [_restoring(each, dict(each)) for each in tables if type(each) in _DICTS]
    return [
        part
        for name, part in held.items()
        if name not in _OF_EVERY_MODULE
        or (attributes and name not in _PARTS and type(part) in _DICTS and part)
    ]


def _is_code_of_model(value: Any) -> bool:
    """Whether a class, a function or what is around one is no installed package's."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return isinstance(value, _WRAPPERS) or not (is_installed(module) or is_library(module))


def _contents_of_code(value: Any, undo: list[Callable[[], None]]) -> list[Any]:
    """Returns the objects in a class or a function; adds functions that restore it."""
    if isinstance(value, type):
        before = {name: part for name, part in vars(value).items() if not _is_of_python(name)}
        undo.append(functools.partial(_restore_class, value, before))
        return [*before.values()]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, _CACHING):
        undo.append(_forgetting(value))
        return [value.__wrapped__]
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        return [value.__func__, getattr(value, "__self__", None)]
    variables = value.__globals__
    names = {name for name in _names(value.__code__) if name in variables}
    before = {name: variables[name] for name in names}
    undo.append(functools.partial(variables.update, before))
    contents = [*before.values(), value.__defaults__, value.__kwdefaults__]
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # An empty one.
            undo.append(_restoring_cell(cell, cell.cell_contents))
            contents.append(cell.cell_contents)
    return contents


def _names(code: types.CodeType) -> set[str]:
    """Returns the names in a function's code and in the functions inside of it."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return {*code.co_names}.union(*map(_names, inner))


def _is_of_python(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _restore_class(kind: type, before: Mapping[str, Any]) -> None:
    now = dict(vars(kind))
    for name in {*now, *before}:
        if _is_of_python(name) or now.get(name, kind) is before.get(name, kind):
            continue
        if name in before:
            setattr(kind, name, before[name])
        else:
            delattr(kind, name)


def _restoring_cell(cell: types.CellType, before: Any) -> Callable[[], None]:
    def restore() -> None:
        cell.cell_contents = before

    return restore


def _forgetting(function: Any) -> Callable[[], None]:
    before = function.cache_info().misses

    def restore() -> None:
        if function.cache_info().misses != before:
            function.cache_clear()

    return restore


def _emptying(held: Mapping[str, Any]) -> Callable[[], None]:
    """Returns a function that removes the hooks that a module gets in tables without any."""
    tables = [held[name] for name in _OF_EVERY_MODULE & held.keys()]
    empty = [table for table in tables if type(table) in _DICTS and not table]

    def restore() -> None:
        for table in filter(None, empty):
            table.clear()

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
