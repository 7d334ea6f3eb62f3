"""What objects hold: the same as before, or not, by a look at each of them that C takes."""

from __future__ import annotations

import itertools
import operator
import types
from abc import ABCMeta
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from dynamo_moe.private import attributes_of

DICTS = (dict, OrderedDict)
_ROWS = (list, deque, set)
CONTAINERS = frozenset({*DICTS, *_ROWS})
"""Types of which :class:`Contents` sees all that an object holds."""
_CLASSES = (type, ABCMeta)
# Ordered dictionaries can have attributes, too.
_PLAIN = frozenset({types.FunctionType, dict, *_ROWS, *_CLASSES})
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__", "__dict__")


def is_plain(value: Any) -> bool:
    """Whether :class:`Contents` sees all that an object holds: a function, class or container."""
    return type(value) in _PLAIN


def content_of(cell: types.CellType) -> Any:
    """Returns what a function holds in one place of its closure."""
    try:
        return cell.cell_contents
    except ValueError:  # Empty so far.
        return content_of


class Contents:
    """The objects that others hold."""

    def __init__(
        self,
        plain: Iterable[Any] = (),
        *,
        empty: Iterable[Any] = (),
        typed: Iterable[Any] = (),
        owners: Iterable[tuple[Any, Collection[str]]] = (),
        others: Iterable[Contents] = (),
    ) -> None:
        """Takes what they are now.

        Args:
            plain: Functions, classes and containers, that are looked at whole.
            empty: Containers that hold nothing, of which the size says all.
            typed: Objects of which the class alone is looked at.
            owners: Objects, each with the attributes of its own that are looked at.
            others: What is looked at as well, and may be part of several.
        """
        self._empty, self._others = [*empty], [*others]
        self._functions: list[types.FunctionType] = []
        self._classes: list[type] = []
        self._owners = list(owners)
        self._typed = [*typed, *(owner for owner, _ in self._owners)]
        dicts: list[Mapping[Any, Any]] = []
        rows: list[Collection[Any]] = []
        for value in plain:
            kind = type(value)
            if kind in CONTAINERS and not value:
                self._empty.append(value)
            elif kind in _ROWS:
                rows.append(value)
            elif kind in DICTS:
                dicts.append(value)
            elif kind in _CLASSES:
                self._classes.append(value)
                dicts.append(vars(value))
            else:
                self._functions.append(value)
                held = vars(value)  # Looked at itself as well: another may take its place.
                (dicts if held else self._empty).append(held)
        cells = [cell for each in self._functions for cell in each.__closure__ or ()]
        self._empty_cells = [cell for cell in cells if content_of(cell) is content_of]
        self._cells = [cell for cell in cells if content_of(cell) is not content_of]
        self._sized = [*dicts, *rows, *(attributes_of(owner) for owner, _ in self._owners)]
        self._sizes = [*map(len, self._sized)]
        self._dicts, self._rows = dicts, rows
        self._objects = [*self._look()]

    def _look(self) -> Iterator[Any]:
        """Yields what they hold."""
        held = [attributes_of(owner) for owner, _ in self._owners]
        return itertools.chain(
            *(map(operator.attrgetter(name), self._functions) for name in _OF_FUNCTIONS),
            map(operator.attrgetter("cell_contents"), self._cells),
            map(content_of, self._empty_cells),
            map(operator.attrgetter("__mro__"), self._classes),
            map(type, self._typed),
            *self._dicts,
            *map(operator.methodcaller("values"), self._dicts),
            *self._rows,
            held,
            *(
                map(each.__getitem__, names)
                for each, (_, names) in zip(held, self._owners, strict=True)
            ),
        )

    def is_unchanged(self) -> bool:
        """Whether each of them holds the very objects that it held."""
        try:
            same = not any(self._empty) and [*map(len, self._sized)] == self._sizes
            same = same and all(map(operator.is_, self._look(), self._objects))
            return same and all(each.is_unchanged() for each in self._others)
        except (KeyError, ValueError):  # An attribute is gone, or what a cell held.
            return False
