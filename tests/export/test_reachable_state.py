"""What is said of the state that blocks reach: a change is found wherever it is."""

from __future__ import annotations

import functools
import os
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynamo_moe.tracing.reachable_state import state_of


class _Base:
    pass


class _Other(_Base):
    pass


def _function() -> Any:
    held = [1]

    def function(x: int = 1, *, y: int = 2) -> Any:
        return x, y, held

    return function


def _unfilled() -> Any:
    return types.FunctionType(_function().__code__, {}, closure=(types.CellType(),))


def _class(*bases: type, **attributes: Any) -> Any:
    return type("Made", bases, attributes)


def _object() -> Any:
    made = _class()()
    made.flag, made.held = 1, [1]
    return made


def _fill(cell: Any) -> None:
    cell.cell_contents = [1]


# A value that is reached, and what changes it.
_CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "item of a list": (lambda: [1, 2], lambda x: x.__setitem__(0, 3)),
    "equal item of another type": (lambda: [1, 2], lambda x: x.__setitem__(0, True)),
    "item more": (lambda: [1], lambda x: x.append(2)),
    "order": (lambda: [_Base, _Other], list.reverse),
    "item of a deque": (lambda: deque([1]), lambda x: x.append(2)),
    "item of a set": (lambda: {1}, lambda x: x.add(2)),
    "value of a dictionary": (lambda: {"a": 1}, lambda x: x.update(a=2)),
    "key of a dictionary": (lambda: {"a": 1}, lambda x: (x.pop("a"), x.update(b=1))),
    "order of a dictionary": (lambda: {"a": 1, "b": 1}, lambda x: x.update(a=x.pop("a"))),
    "ordered dictionary": (lambda: OrderedDict(a=1), lambda x: x.update(a=2)),
    "order of an ordered dictionary": (
        lambda: OrderedDict(a=1, b=1),
        lambda x: x.move_to_end("a"),
    ),
    "attribute of an ordered dictionary": (OrderedDict, lambda x: setattr(x, "flag", True)),
    "attributes of an ordered dictionary": (
        OrderedDict,
        lambda x: setattr(x, "__dict__", {"flag": True}),
    ),
    "in a list in a tuple": (lambda: ([1],), lambda x: x[0].append(2)),
    "from one list to the next": (lambda: [[1, 2], [3]], lambda x: x[1].insert(0, x[0].pop())),
    "code": (
        _function,
        lambda x: setattr(x, "__code__", _function().__code__.replace(co_name="z")),
    ),
    "default": (_function, lambda x: setattr(x, "__defaults__", (2,))),
    "default by name": (_function, lambda x: x.__kwdefaults__.update(y=3)),
    "defaults by name": (_function, lambda x: setattr(x, "__kwdefaults__", {"y": 3})),
    "closure": (_function, lambda x: setattr(x.__closure__[0], "cell_contents", [2])),
    "in a closure": (_function, lambda x: x.__closure__[0].cell_contents.append(2)),
    "empty closure": (_unfilled, lambda x: _fill(x.__closure__[0])),
    "emptied closure": (_function, lambda x: delattr(x.__closure__[0], "cell_contents")),
    "attribute of a function": (_function, lambda x: setattr(x, "flag", True)),
    "attributes of a function": (_function, lambda x: setattr(x, "__dict__", {"flag": True})),
    "attribute of a class": (lambda: _class(flag=1), lambda x: setattr(x, "flag", 2)),
    "new attribute of a class": (_class, lambda x: setattr(x, "flag", 2)),
    "method": (lambda: _class(run=_function()), lambda x: setattr(x.run, "__defaults__", (2,))),
    "bases": (lambda: _class(_Base), lambda x: setattr(x, "__bases__", (_Other,))),
    "namespace": (lambda: types.SimpleNamespace(a=1), lambda x: setattr(x, "a", 2)),
    "thread": (threading.local, lambda x: setattr(x, "a", 2)),
    "object": (_class(), lambda x: setattr(x, "flag", 2)),
    "value of an object": (_object, lambda x: setattr(x, "flag", 2)),
    "in an object": (_object, lambda x: x.held.append(2)),
    "attribute fewer": (_object, lambda x: delattr(x, "flag")),
    "another attribute": (_object, lambda x: (delattr(x, "flag"), setattr(x, "other", 1))),
    "attributes of an object": (_object, lambda x: setattr(x, "__dict__", {**vars(x), "flag": 2})),
    "class of an object": (_Base, lambda x: setattr(x, "__class__", _Other)),
    "partial": (lambda: functools.partial(dict, [(1, 2)]), lambda x: x.args[0].append(2)),
    "tensor": (lambda: torch.zeros(2), lambda x: x.add_(1)),
}


@pytest.mark.parametrize("what", _CHANGES)
def test_a_change_is_found(what: str) -> None:
    make, change = _CHANGES[what]
    value = make()
    roots = {"value": value, "beside": {"one": [1]}}
    before = state_of(roots, ())
    assert before.is_unchanged(roots)
    change(value)
    assert not before.is_unchanged(roots)
    assert state_of(roots, ()).facts != before.facts


def test_other_values_are_found() -> None:
    value = [1]
    before = state_of({"value": value}, ())
    assert not before.is_unchanged({"value": [1]})
    assert not before.is_unchanged({"other": value})


def test_equal_numbers_are_the_same_wherever_they_are() -> None:
    value = {"number": 10**6}
    before = state_of({"value": value}, ())
    value["number"] = int("1000000")
    assert before.is_unchanged({"value": value})


def test_the_environment_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    roots = {"environment": os.environ}
    before = state_of(roots, ())
    assert before.is_unchanged(roots)
    monkeypatch.setenv("DYNAMO_MOE_TEST", "1")
    assert not before.is_unchanged(roots)
    assert state_of(roots, ()).facts != before.facts
