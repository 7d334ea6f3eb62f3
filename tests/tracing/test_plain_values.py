"""What objects hold, read without running their code: equal for equal ones, and for them alone."""

from __future__ import annotations

import functools
import threading
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

from dynamo_moe.tracing.plain_values import PlainValues


@dataclass
class Window:
    size: int


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


class Module(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def fits(self, size: int) -> bool:
        return size < self.size


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
    "slice in a tuple": lambda n: (slice(n).stop,),
    "list": lambda n: [n],
    "list of a class": lambda n: Sizes([n]),
    "dictionary": lambda n: {"size": n},
    "ordered": lambda n: OrderedDict(size=n),
    "with a default": lambda n: defaultdict(list, size=n),
    "queue": lambda n: deque([n]),
    "set": lambda n: {n},
    "frozen set": lambda n: frozenset([n]),
    "array": lambda n: np.array([n]),
    "shape": lambda n: torch.Size([n]),
    "object": Window,
    "slots": Slots,
    "inherited slots": Older,
    "asks nobody": AsksNobody,
    "namespace": lambda n: SimpleNamespace(size=n),
    "nested": lambda n: {"a": [{n}]},
    "module": Module,
    "method": lambda n: Module(n).fits,
    "partial": lambda n: functools.partial(fits, limit=n),
    "argument of a partial": lambda n: functools.partial(fits, n),
    "closure": enclosed,
    "default": by_default,
    "keyword's default": by_keyword,
    "partial of a method": lambda n: functools.partial(Module(n).fits, 1),
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
    "large array": lambda: np.zeros(2**16),
    "array of objects": lambda: np.array([Window(1)]),
    "too deep": lambda: [[[[[1]]]]],
}


@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_itself_alone(make: Callable[[], Any]) -> None:
    values = PlainValues()
    value = make()
    assert values.of(value) == values.of(value)
    assert values.of(value) != values.of(make())


def test_objects_may_refer_to_themselves() -> None:
    values = PlainValues()
    held: list[Any] = [1]
    held.append(held)
    assert values.of(held) == values.of(held)
