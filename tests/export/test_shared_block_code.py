"""Blocks whose code reads or changes what others do not are traced whole."""

from __future__ import annotations

import contextvars
import copy
import itertools
import os
import queue
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
from block_stacks import WIDTH, Block, stack

pytest_plugins = ("shared_exports",)

CALLS: list[int] = []
COUNT = 0
SCALE = SimpleNamespace(value=1.0)
MODE: contextvars.ContextVar[int] = contextvars.ContextVar("mode", default=0)
NUMBERS = itertools.count()
ARRAY = np.zeros(1)
THREAD = threading.local()
QUEUE: queue.SimpleQueue[int] = queue.SimpleQueue()


class ReadsNumber(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * 2 if self.number == 4 else y


class ReadsDictionary(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * (1 + vars(self)["number"])


class CatchesErrors(Block):
    def compute(self, y: Tensor) -> Tensor:
        try:
            return y * self.number
        except Exception:
            return y


class CountsCalls(Block):
    calls = 0

    def compute(self, y: Tensor) -> Tensor:
        CountsCalls.calls += 1
        return y * 2 if CountsCalls.calls == 5 else y


class CountsGlobally(Block):
    def compute(self, y: Tensor) -> Tensor:
        global COUNT  # noqa: PLW0603  What is tested.
        COUNT += 1
        return y * 2 if COUNT % 6 == 5 else y


class AppendsToGlobal(Block):
    def compute(self, y: Tensor) -> Tensor:
        CALLS.append(1)
        return y * len(CALLS) if len(CALLS) % 6 == 5 else y


class ChangesSharedObject(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scale = SCALE

    def compute(self, y: Tensor) -> Tensor:
        self.scale.value += 1.0
        return y


class CountsInDefault(Block):
    def compute(self, y: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006
        calls.append(1)
        return y * (1 + (len(calls) % 6 == 5))


class SetsContext(Block):
    def compute(self, y: Tensor) -> Tensor:
        MODE.set((MODE.get() + 1) % 6)
        return y * (1 + (MODE.get() == 5))


class CountsWithIterator(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * (1 + (next(NUMBERS) % 6 == 5))


class CountsInArray(Block):
    def compute(self, y: Tensor) -> Tensor:
        ARRAY[0] += 1
        return y * (1 + (int(ARRAY[0]) % 6 == 5))


class CountsInQueue(Block):
    def compute(self, y: Tensor) -> Tensor:
        QUEUE.put(1)
        return y * (1 + (QUEUE.qsize() % 6 == 5))


class ReadsSize(Block):
    """The number of positive elements is a size that has a name in the file."""

    def compute(self, y: Tensor) -> Tensor:
        return super().compute(y) + (y > 0).nonzero().shape[0]


class DrawsNumber(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * random.random()  # noqa: S311


class ChangesInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


class WritesAttribute(Block):
    def compute(self, y: Tensor) -> Tensor:
        self.epsilon = self.epsilon * 2
        return y + self.epsilon


class ReadsAnother(Block):
    """Each finds the one after it, and adds its weight."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.others: list[Any] = []

    def compute(self, y: Tensor) -> Tensor:
        return y + self.others[0].linear.bias


class CallsInBase(Block):
    calls: list[int] = []  # noqa: RUF012  What is tested.


class CountsInBase(CallsInBase):
    def compute(self, y: Tensor) -> Tensor:
        self.calls.append(1)
        return y * len(self.calls)


class CountsInEnvironment(Block):
    def compute(self, y: Tensor) -> Tensor:
        os.environ["COUNT"] = f"{os.environ.get('COUNT', '')}1"
        return y * len(os.environ["COUNT"])


class CountsInThread(Block):
    def compute(self, y: Tensor) -> Tensor:
        THREAD.count = getattr(THREAD, "count", 0) + 1
        return y * THREAD.count


class HasSlots(Block):
    __slots__ = ("place",)

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.place = number

    def compute(self, y: Tensor) -> Tensor:
        return y * self.place


class DecidesWhatIsRead(Block):
    def __getattribute__(self, name: str) -> Any:
        if name == "factor":
            return object.__getattribute__(self, "__dict__")["number"]
        return super().__getattribute__(name)

    def compute(self, y: Tensor) -> Tensor:
        return y * self.factor


class ReadsPastItsClass(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * object.__getattribute__(self, "number")


class ReadsItsCopy(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * copy.copy(self).number


class LooksGlobalsUp(Block):
    def compute(self, y: Tensor) -> Tensor:
        globals()["COUNT"] += 1
        return y * globals()["COUNT"]


class Imports(Block):
    def compute(self, y: Tensor) -> Tensor:
        import os as system

        return y * system.getpid()


def _counted(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    calls = [0]

    def counted(self: Block, y: Tensor) -> Tensor:
        calls[0] += 1
        return compute(self, y) * calls[0]

    return counted


class CountsInClosure(Block):
    compute = _counted(Block.compute)


class CountsInProperty(Block):
    factor: Any = property(_counted(lambda self, y: y))

    def compute(self, y: Tensor) -> Tensor:
        return CountsInProperty.factor.fget(self, y)


@pytest.mark.parametrize(
    "kind",
    [
        CountsInBase, CountsInEnvironment, CountsInThread, HasSlots, DecidesWhatIsRead,
        ReadsPastItsClass, ReadsItsCopy, LooksGlobalsUp, Imports, CountsInClosure,
        CountsInProperty,
    ],
)  # fmt: skip
def test_blocks_whose_code_is_not_plain(
    shared: Callable[..., int], monkeypatch: pytest.MonkeyPatch, kind: type[Block]
) -> None:
    monkeypatch.setenv("COUNT", "")
    assert shared(stack(kind)) == 0


def test_code_without_a_file(shared: Callable[..., int]) -> None:
    names: dict[str, Any] = {"Block": Block, "COUNT": 0, "__name__": "nowhere"}
    exec(  # noqa: S102  As in a shell or a notebook.
        "class Counts(Block):\n"
        "    def compute(self, y):\n"
        "        global COUNT\n"
        "        COUNT += 1\n"
        "        return y * COUNT\n",
        names,
    )
    assert shared(stack(names["Counts"])) == 0


@pytest.mark.parametrize(
    "kind",
    [
        ReadsNumber, ReadsDictionary, CatchesErrors, CountsCalls, CountsGlobally, AppendsToGlobal,
        CountsInArray, CountsInQueue, DrawsNumber, ChangesSharedObject, CountsInDefault,
        SetsContext, CountsWithIterator, ChangesInput,
        WritesAttribute,
    ],
)  # fmt: skip
def test_blocks_that_depend_on_their_turn(shared: Callable[..., int], kind: type[Block]) -> None:
    assert shared(stack(kind)) == 0


def test_blocks_that_read_sizes_from_data(
    compared: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "dynamo_moe.exporting"):
        assert compared(lambda: stack(ReadsSize)) == 0
    assert "a block reads a size from data" in caplog.text


def test_two_runs_of_one_class(compared: Callable[..., int]) -> None:
    def make(kind: type[Block]) -> nn.Module:
        torch.manual_seed(0)
        others = [kind(number) for number in range(5)]
        for block in others:
            block.norm = nn.Identity()  # type: ignore[assignment]
        return nn.Sequential(*(kind(number) for number in range(5)), *others).eval()

    assert compared(lambda: make(Block)) == 2
    assert compared(lambda: make(ReadsDictionary)) == 0


def test_block_that_reaches_another(compared: Callable[..., int]) -> None:
    def make() -> nn.Module:
        model: Any = stack(ReadsAnother)
        for block, other in zip(model.blocks, [*model.blocks[1:], model.blocks[0]], strict=True):
            block.others.append(other)
        return model

    assert compared(make) == 0


def test_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = stack(CountsInDefault)
    before = dict(model.state_dict(keep_vars=True))
    forward = CountsInDefault.forward
    twin = copy.deepcopy(model)
    for kind in (model, stack()):
        dynamo_moe.export(kind, torch.zeros(2, WIDTH), tmp_path / "model.onnx")
    after = model.state_dict(keep_vars=True)
    assert before.keys() == after.keys()
    assert all(after[name] is tensor for name, tensor in before.items())
    assert CountsInDefault.forward is forward
    assert "forward" not in vars(CountsInDefault)
    assert "__getattribute__" not in vars(Block)
    x = torch.randn(2, WIDTH)
    assert torch.equal(model.head(x), twin.head(x))
