"""What objects hold, read without running their code: equal for equal ones, and for them alone."""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dynamo_moe.private.pytorch import modules_by_path
from dynamo_moe.tracing.plain_values import PlainValues


@dataclass
class Window:
    size: int

    def fits(self, size: int) -> bool:
        return size < self.size


@dataclass(slots=True)
class Slots:
    size: int


class Older(Slots):
    """Its slot is its base's; beside it, it has attributes."""


class Nothing:
    pass


class Size(int):
    pass


class Sizes(list):  # type: ignore[type-arg]
    pass


class AsksNobody:
    """Fails where it is asked anything."""

    def __init__(self, size: int) -> None:
        object.__setattr__(self, "size", size)

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)

    def __eq__(self, other: object) -> bool:
        raise AssertionError(other)

    __hash__ = None  # type: ignore[assignment]


def with_size(value: Any, size: int) -> Any:
    value.size = size
    return value


def fits(size: int, limit: int = 0, *, least: int = 0) -> bool:
    return least < size < limit


def enclosed(limit: int) -> Callable[[int], bool]:
    return lambda size: size < limit


def by_default(limit: int) -> Callable[[int], bool]:
    def fits(size: int, limit: int = limit) -> bool:
        return size < limit

    return fits


def by_keyword(limit: int) -> Callable[[int], bool]:
    def fits(size: int, *, limit: int = limit) -> bool:
        return size < limit

    return fits


HOLDING: dict[str, Callable[[int], Any]] = {
    "number": lambda n: n,
    "NumPy's number": np.int64,
    "range": lambda n: range(2, n),
    "slice": slice,
    "getter": operator.itemgetter,
    "list": lambda n: [n],
    "list of a class": lambda n: Sizes([n]),
    "dictionary": lambda n: {"size": n},
    "ordered": lambda n: OrderedDict(size=n),
    "with a default": lambda n: defaultdict(list, size=n),
    "queue": lambda n: deque([n]),
    "set": lambda n: {n},
    "frozen set": lambda n: frozenset([n]),
    "array": lambda n: np.array([n]),
    "deep": lambda n: [[[[[[n]]]]]],
    "shape": lambda n: torch.Size([n]),
    "object": Window,
    "slots": Slots,
    "inherited slots": Older,
    "asks nobody": AsksNobody,
    "namespace": lambda n: SimpleNamespace(size=n),
    "nested": lambda n: {"a": [{n}]},
    "method": lambda n: Window(n).fits,
    "partial": lambda n: functools.partial(fits, limit=n),
    "argument of a partial": lambda n: functools.partial(fits, n),
    "closure": enclosed,
    "default": by_default,
    "keyword's default": by_keyword,
    "partial of a method": lambda n: functools.partial(Window(n).fits, 1),
    "attribute of a list": lambda n: with_size(Sizes(), n),
    "attribute of a function": lambda n: with_size(by_default(1), n),
    "key that is no text": lambda n: {n: 1},
    "large array": lambda n: np.full(2**16, n),
}


@pytest.mark.parametrize("make", HOLDING.values(), ids=HOLDING)
def test_equal_where_they_hold_the_same(make: Callable[[int], Any]) -> None:
    values = PlainValues()
    first, same, other = (values.of(make(size)) for size in (8, 8, 15))
    assert first == same
    assert first != other


SAME: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "dtype": lambda: torch.float16,
    "device": lambda: torch.device("cpu"),
    "without attributes": Nothing,
    "function": lambda: fits,
    "function of a library": lambda: F.silu,
    "builtin": lambda: torch.relu,
    "class": lambda: Window,
    "order of a set": lambda: {"a", "b", 1, 2},
    "tensor": lambda: torch.rand(3),
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_equal_ones(make: Callable[[], Any]) -> None:
    values = PlainValues()
    assert values.of(make()) == values.of(make())


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "types of numbers": ([1], (1,)),
    "functions": (F.silu, F.gelu),
    "builtins": (torch.relu, torch.sigmoid),
    "classes": (Window, Slots),
    "classes of equal objects": (Window(1), Slots(1)),
    "dtypes": (torch.float16, torch.bfloat16),
    "devices": (torch.device("cpu"), torch.device("meta")),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_different_ones(one: Any, other: Any) -> None:
    values = PlainValues()
    assert values.of(one) != values.of(other)


UNREADABLE: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "iterator": lambda: iter([1]),
    "generator": torch.Generator,
    "number of a class": lambda: Size(8),
    "array of objects": lambda: np.array([Window(1)]),
    "too deep": lambda: [[[[[[[[[1]]]]]]]]],
    "another module": lambda: nn.Linear(1, 1),
    "objects in a set": lambda: {Nothing()},
}


@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_itself_alone(make: Callable[[], Any]) -> None:
    values = PlainValues()
    value = make()
    assert values.of(value) == values.of(value)
    assert values.of(value) != values.of(make())


class Block(nn.Module):
    """Refers to itself and to its parts, as modules do that choose a method when they are made."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.size = size
        self.chosen = self.of_size
        self.parts = [self, self.inner]
        self.by_type = {nn.Linear: {self.inner}}
        self.later = lambda: self.size
        self.known = functools.cache(functools.partial(self.of_size))
        self.weak = weakref.ref(self)

    def of_size(self) -> int:
        return self.size


def test_modules_may_refer_to_themselves() -> None:
    values = PlainValues()
    first, same, other = (values.of_modules(modules_by_path(Block(n))) for n in (8, 8, 15))
    assert first == same
    assert {name for name in first if first[name] != other[name]} == {("", "size")}


def test_objects_may_refer_to_themselves() -> None:
    held: list[Any] = [1]
    held.append(held)
    assert PlainValues().of(held)[0] == 1


def test_no_method_of_a_class_runs() -> None:
    class Asked:
        calls = 0

        def __hash__(self) -> int:
            Asked.calls += 1
            return 1

        def __eq__(self, other: object) -> bool:
            Asked.calls += 1
            return True

    held = [{Asked()}, {Asked(): 1}, frozenset({Asked()})]
    Asked.calls = 0
    values = PlainValues()
    assert values.of(held) != values.of([{Asked()}])
    assert Asked.calls == 1  # As the second set was made.
