"""A trace of a model, finished or given up, leaves the model as it was."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.tracing.restoring import undone_if_given_up


class Holder:
    """Holds one of each."""

    def __init__(self) -> None:
        self.number = 1
        self.held: dict[str, Any] = {"list": [1, [2]], "queue": deque([1]), "set": {1}}
        self.ordered = OrderedDict(a=1, b=2)
        self.pair = ([1], 2)


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].holder = model[1].holder = Holder()
    return model


def _show(model: nn.Module) -> str:
    holder = model[0].holder
    return repr((vars(holder), model.training, [*vars(model[1])]))


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda model: setattr(model[0].holder, "number", 2),
    "attribute more": lambda model: setattr(model[0].holder, "other", 2),
    "attribute fewer": lambda model: delattr(model[0].holder, "number"),
    "list": lambda model: model[0].holder.held["list"].append(2),
    "inner list": lambda model: model[0].holder.held["list"][1].clear(),
    "queue": lambda model: model[0].holder.held["queue"].append(2),
    "set": lambda model: model[0].holder.held["set"].add(2),
    "order": lambda model: model[0].holder.ordered.move_to_end("a"),
    "in a tuple": lambda model: model[0].holder.pair[0].append(2),
    "object of a module": lambda model: setattr(model[1], "holder", None),
    "attribute of a module": lambda model: setattr(model[1], "found", 1),
}


@pytest.mark.parametrize("what", _CHANGES)
def test_a_change_is_undone(what: str) -> None:
    model = _model()
    before, holder = _show(model), model[0].holder

    def change() -> None:
        with undone_if_given_up(model, ()):
            _CHANGES[what](model)
            assert model[1].holder is not holder or _show(model) != before
            raise ValueError("given up")

    with pytest.raises(ValueError, match="given up"):
        change()
    assert _show(model) == before
    assert model[0].holder is model[1].holder is holder


def test_what_is_finished_stays() -> None:
    model = _model()
    with undone_if_given_up(model, ()):
        model[0].holder.number = 2
    assert model[0].holder.number == 2


class Notes(nn.Module):
    """Notes something in a list that all of them have."""

    def __init__(self, notes: list[int], found: Any) -> None:
        super().__init__()
        self.linear, self.notes, self.found = nn.Linear(4, 4), notes, found

    def forward(self, x: Tensor) -> Tensor:
        """Adds to the list."""
        self.notes.append(1)
        return self.linear(x)


@pytest.mark.parametrize("blocks", [2, 6])
def test_what_modules_have_in_common_they_have_after_an_export(tmp_path: Path, blocks: int) -> None:
    notes, found = [0], ({"inner": [1]}, [2])
    model = nn.Sequential(*(Notes(notes, found) for _ in range(blocks))).eval()
    dynamo_moe.export(model, torch.randn(2, 4), tmp_path / "model.onnx")
    assert notes == [0]
    assert all(block.notes is notes and block.found is found for block in model)
    assert found == ({"inner": [1]}, [2])


class Counting(nn.Module):
    """Counts the calls of all blocks, as controllers of attention do, from 0 to 0 in each pass."""

    def __init__(self, controller: Any) -> None:
        super().__init__()
        self.linear, self.controller = nn.Linear(4, 4), controller

    def forward(self, x: Tensor) -> Tensor:
        """Computes another factor in each block."""
        y = x + self.linear(x) * (1 + self.controller.place)
        self.controller.place = (self.controller.place + 1) % 7
        return y


def test_a_counter_of_all_blocks_begins_where_it_was(tmp_path: Path) -> None:
    controller = SimpleNamespace(place=0)
    torch.manual_seed(0)
    model = nn.Sequential(*(Counting(controller) for _ in range(7))).eval()
    example = torch.randn(2, 4)
    dynamo_moe.export(model, example, tmp_path / "model.onnx")
    assert controller.place == 0
    dynamo_moe.verify(tmp_path / "model.onnx", model)
