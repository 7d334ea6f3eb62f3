"""A run of a model, finished or not, leaves what the model holds as it was."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dynamo_moe import restoring
from dynamo_moe.restoring import state_kept

COUNT = 0
CALLS: list[int] = []


class Holder:
    """Holds one of each."""

    def __init__(self) -> None:
        self.number = 1
        self.containers: dict[str, Any] = {"list": [1, [2]], "queue": deque([1]), "set": {1}}
        self.ordered = OrderedDict(a=1, b=2)
        self.pair = ([1], 2)
        self.namespace = SimpleNamespace(value=1)


def _counting() -> Callable[..., int]:
    calls = 0

    def count(_: Any) -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Counts(nn.Module):
    """Counts calls wherever code can."""

    calls = 0
    noted: list[int] = []  # noqa: RUF012  What is tested.
    count = _counting()
    through_property = property(_counting())

    def globally(self) -> None:
        global COUNT  # noqa: PLW0603  What is tested.
        COUNT += 1
        CALLS.append(1)

    def by_function(self) -> None:
        _count_in_default()

    def by_cache(self) -> None:
        _remembered(3).append(1)

    @staticmethod
    def in_class() -> None:
        Counts.calls += 1


def _count_in_default(calls: list[int] = []) -> int:  # noqa: B006  What is tested.
    calls.append(1)
    return len(calls)


@functools.cache
def _remembered(_: int) -> list[int]:
    return []


def _model() -> Any:
    model = nn.Sequential(Counts(), nn.Linear(1, 1))
    model[0].holder = model[1].holder = Holder()
    model[0].function = _counting()
    return model


def _show(model: Any) -> str:
    holder, first = model[0].holder, model[0]
    counts = [Counts.calls, Counts.noted, COUNT, CALLS, _count_in_default.__defaults__]
    cells = [*Counts.count.__closure__, *first.function.__closure__]  # type: ignore[misc]
    cells += Counts.through_property.fget.__closure__  # type: ignore[union-attr,operator]
    counted = [cell.cell_contents for cell in cells]
    parts = [(name, id(part)) for name, part in model.named_modules()]
    counts.append(_remembered.cache_info().currsize)
    return repr((vars(holder), model.training, [*vars(model[1])], counts, counted, parts))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda model: setattr(model[0].holder, "number", 2),
    "attribute more": lambda model: setattr(model[0].holder, "other", 2),
    "attribute fewer": lambda model: delattr(model[0].holder, "number"),
    "list": lambda model: model[0].holder.containers["list"].append(2),
    "inner list": lambda model: model[0].holder.containers["list"][1].clear(),
    "queue": lambda model: model[0].holder.containers["queue"].append(2),
    "set": lambda model: model[0].holder.containers["set"].add(2),
    "order": lambda model: model[0].holder.ordered.move_to_end("a"),
    "in a tuple": lambda model: model[0].holder.pair[0].append(2),
    "namespace": lambda model: setattr(model[0].holder.namespace, "value", 2),
    "object of a module": lambda model: setattr(model[1], "holder", None),
    "attribute of a module": lambda model: setattr(model[1], "more", 1),
    "mode": lambda model: model.train(not model.training),
    "module": lambda model: setattr(model[0], "inner", nn.Identity()),
    "class attribute": lambda model: model[0].in_class(),
    "class attribute more": lambda _: setattr(Counts, "more", 1),
    "list of a class": lambda _: Counts.noted.append(1),
    "closure of a method": lambda model: model[0].count(),
    "closure of a property": lambda model: model[0].through_property,
    "closure of an object's function": lambda model: model[0].function(None),
    "globals": lambda model: model[0].globally(),
    "default argument of a function": lambda model: model[0].by_function(),
    "results of a function": lambda model: model[0].by_cache(),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_undone(name: str, fails: bool) -> None:
    model = _model()
    before, holder, attributes = _show(model), model[0].holder, {*vars(Counts)}

    def run() -> None:
        with state_kept(model):
            CHANGES[name](model)
            has_changed = (
                model[1].holder is not holder or _show(model) != before or hasattr(Counts, "more")
            )
            assert has_changed
            if fails:
                raise ValueError

    if fails:
        with pytest.raises(ValueError, match=r"^$"):
            run()
    else:
        run()
    assert _show(model) == before
    assert model[0].holder is model[1].holder is holder
    assert {*vars(Counts)} == attributes


def test_objects_that_refer_to_each_other() -> None:
    model = _model()
    holder = model[0].holder
    holder.itself, holder.model = [holder], model
    holder.itself.append(holder.itself)
    with state_kept(model):
        holder.itself.clear()
    assert holder.itself == [holder, holder.itself]


def test_all_modules_are_restored_and_not_only_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "_MOST_OBJECTS", 10)
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(100)))
    model.calls, model.seen = 0, []  # type: ignore[assignment]
    with state_kept(model):
        model.calls, model[0].last = 1, "result"  # type: ignore[assignment]
        model.seen.append(1)  # type: ignore[operator]
        model.pop(99)
        model[5].bias = None
    assert (model.calls, model.seen, len(model)) == (0, [], 100)
    assert not hasattr(model[0], "last")
    assert model[5].bias is not None


def test_a_function_without_values_in_its_closure() -> None:
    model = _model()
    model[0].function = types.FunctionType(_counting().__code__, {}, closure=(types.CellType(),))
    with state_kept(model):
        model[0].function.__closure__[0].cell_contents = 1
    assert model[0].function.__closure__[0].cell_contents == 1


def test_hooks_that_a_run_registers_are_gone() -> None:
    """Transformers registers some when a model is first asked for hidden states."""
    model = nn.Sequential(nn.Linear(2, 2))
    with state_kept(model):
        model[0].register_forward_hook(lambda *_: None)
        model.register_forward_pre_hook(lambda *_: None)
    assert not model[0]._forward_hooks
    assert not model._forward_pre_hooks


def test_a_part_that_torchscript_has_compiled() -> None:
    """Its tables are no dictionaries."""
    part: nn.Module = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    model = nn.Sequential(part, nn.ReLU())
    with state_kept(model):
        model.calls = 1  # type: ignore[assignment]
    assert not hasattr(model, "calls")
