"""Equal blocks are traced once for all of them; files are those of a model traced whole.

But for what the optimiser would make of the values of weights, which it is not shown.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import itertools
import json
import os
import queue
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import dynamo_moe
from dynamo_moe import exporting
from dynamo_moe.models import DroplessMoEMlp

pytest_plugins = ("shared_exports",)

WIDTH = 8
CALLS: list[int] = []
COUNT = 0
SCALE = SimpleNamespace(value=1.0)
MODE: contextvars.ContextVar[int] = contextvars.ContextVar("mode", default=0)
NUMBERS = itertools.count()
ARRAY = np.zeros(1)
THREAD = threading.local()
QUEUE: queue.SimpleQueue[int] = queue.SimpleQueue()


class Block(nn.Module):
    """A residual block that does not read its number."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.epsilon = 1e-5
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.compute(self.linear(self.norm(x)))

    def compute(self, y: Tensor) -> Tensor:
        return F.gelu(y) + self.epsilon


class Stack(nn.Module):
    """Blocks one after the other, and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(kind: type[nn.Module] = Block, blocks: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return Stack(*(kind(number) for number in range(blocks))).eval()


@pytest.mark.parametrize("blocks", [4, 7])
def test_equal_blocks_are_shared(compared: Callable[..., int], blocks: int) -> None:
    assert compared(lambda: stack(blocks=blocks)) == 1


def test_nothing_is_shared_of_three_blocks(compared: Callable[..., int]) -> None:
    assert compared(lambda: stack(blocks=3)) == 0


def test_file_computes_what_the_model_does(tmp_path: Path) -> None:
    model = stack(blocks=7)
    dynamo_moe.export(model, torch.zeros(2, WIDTH), tmp_path / "model.onnx")
    dynamo_moe.verify(tmp_path / "model.onnx", model)


def test_sequential_and_half_precision(compared: Callable[..., int]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Block() for _ in range(5))).half().eval()

    assert compared(make, torch.zeros(2, WIDTH).half()) == 1


@pytest.mark.parametrize("target", ["plugin", "dense"])
def test_moe_layers(compared: Callable[..., int], target: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = (DroplessMoEMlp(WIDTH, 16, num_experts=4, top_k=2) for _ in range(5))
        model = nn.Sequential(*layers).eval()
        dynamo_moe.convert(model)
        return model

    assert compared(make, target=target) == 1


def test_alternating_kinds(compared: Callable[..., int]) -> None:
    class Alternating(Block):
        def compute(self, y: Tensor) -> Tensor:
            return F.relu(y) if self.is_odd else F.gelu(y)

    def make() -> nn.Module:
        model: Any = stack(Alternating, 9)
        for number, block in enumerate(model.blocks):
            block.is_odd = bool(number % 2)
        return model

    assert compared(make) == 1


def test_first_block_is_another(compared: Callable[..., int]) -> None:
    def make() -> nn.Module:
        model: Any = stack(blocks=6)
        model.blocks[0].linear = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH))
        return model

    assert compared(make) == 1


def test_attribute_that_is_not_read_may_differ(compared: Callable[..., int]) -> None:
    def make() -> nn.Module:
        model: Any = stack()
        model.blocks[4].note = "not read"
        return model

    assert compared(make) == 1


def test_stochastic_depth(compared: Callable[..., int]) -> None:
    class DropPath(nn.Module):
        def __init__(self, probability: float) -> None:
            super().__init__()
            self.probability = probability

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, self.probability) if self.probability and self.training else x

    class Dropping(Block):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.drop = DropPath(number / 10)

        def compute(self, y: Tensor) -> Tensor:
            return self.drop(F.gelu(y))

    assert compared(lambda: stack(Dropping)) == 1

    class ReadsProbability(Dropping):
        def compute(self, y: Tensor) -> Tensor:
            return super().compute(y) * (1 - self.drop.probability)

    assert compared(lambda: stack(ReadsProbability)) == 0


# --- What differs ---


def _constant(block: Any) -> None:
    block.epsilon = 2e-5


def _norm_epsilon(block: Any) -> None:
    block.norm.eps = 1e-6


def _dropout(block: Any) -> None:
    block.compute = lambda y: F.dropout(y, 0.5, training=True)


def _hook(block: Any) -> None:
    block.register_forward_hook(lambda module, given, result: result * 2)


def _inner_hook(block: Any) -> None:
    block.linear.register_forward_hook(lambda module, given, result: result * 2)


def _own_method(block: Any) -> None:
    block.compute = torch.relu


def _own_forward(block: Any) -> None:
    block.forward = lambda x: x * 2


def _class_attribute(block: Any) -> None:
    block.gain = 2.0


def _buffer_dtype(block: Any) -> None:
    block.offset = torch.ones(WIDTH, dtype=torch.float64).sum().to(torch.int64)


def _other_class(block: Any) -> None:
    class Other(type(block)):  # type: ignore[misc]
        def compute(self, y: Tensor) -> Tensor:
            return torch.relu(y)

    block.__class__ = Other


def _no_bias(block: Any) -> None:
    block.linear = nn.Linear(WIDTH, WIDTH, bias=False)


def _constant_tensor(block: Any) -> None:
    block.scale = [torch.full((), 2.0)]


class Gained(Block):
    gain = 1.0

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scale = [SHARED]
        self.register_buffer("offset", torch.ones(()))

    def compute(self, y: Tensor) -> Tensor:
        return super().compute(y) * self.gain * self.scale[0] + self.offset


SHARED = torch.ones(())


@pytest.mark.parametrize(
    "change",
    [
        _constant, _norm_epsilon, _dropout, _hook, _inner_hook, _own_method, _own_forward,
        _class_attribute, _buffer_dtype, _other_class, _no_bias, _constant_tensor,
    ],
)  # fmt: skip
def test_block_that_differs_is_traced(
    compared: Callable[..., int], change: Callable[[Any], None]
) -> None:
    def make() -> nn.Module:
        model: Any = stack(Gained)
        change(model.blocks[2])
        return model

    assert compared(make) == 0


def test_closures_and_default_arguments(compared: Callable[..., int]) -> None:
    def closure(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda y: y * factor

    def default(factor: float) -> Callable[[Tensor], Tensor]:
        def scaled(y: Tensor, by: float = factor) -> Tensor:
            return y * by

        return scaled

    def made(function: Any, factor: Callable[[int], float]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            model: Any = stack()
            for number, block in enumerate(model.blocks):
                block.compute = function(factor(number))
            return model

        return make

    for function in (closure, default):
        assert compared(made(function, lambda number: 2.0)) == 1
        assert compared(made(function, lambda number: 2.0 + (number == 4))) == 0


def test_tied_weights(compared: Callable[..., int]) -> None:
    def make() -> nn.Module:
        model: Any = stack()
        model.blocks[3].linear.weight = model.blocks[2].linear.weight
        return model

    assert compared(make) == 0


def test_one_module_in_every_place(compared: Callable[..., int]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[Block()] * 6).eval()

    assert compared(make) == 0


# --- Values of weights ---


class Scaled(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def compute(self, y: Tensor) -> Tensor:
        return y * (1.0 + self.weight.float()) * self.scale


@pytest.mark.parametrize("name", ["weight", "scale", "linear.bias", "norm.weight", "norm.bias"])
def test_special_values_in_traced_blocks(
    shared: Callable[..., int], tmp_path: Path, name: str
) -> None:
    model: Any = stack(Scaled)
    with torch.no_grad():
        for number, block in enumerate(model.blocks):
            for tensor in block.parameters():
                tensor.add_(torch.randn_like(tensor))
            if number < 3:
                block.get_parameter(name).fill_(float(name == "scale"))
    assert shared(model) == 1
    dynamo_moe.verify(tmp_path / "model.onnx", model)


# --- What blocks do ---


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


# --- What is between the blocks ---


class AllStates(Stack):
    def forward(self, x: Tensor) -> Any:
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return self.head(x), torch.stack(states)


class LastButOne(Stack):
    def forward(self, x: Tensor) -> Any:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.head(states[-2])


class EndOfThird(Stack):
    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 2:
                third = x
        return self.head(x), third


class SecondAsWell(Stack):
    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                second = x
        return self.head(x) + self.head(second)


class Reversed(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class Twice(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


class Between(Stack):
    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            x = block(x + number)
        return self.head(x)


class Parallel(Stack):
    def forward(self, x: Tensor) -> Any:
        return self.head(sum(block(x) for block in self.blocks))


class Skips(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks[:-1]:
            x = block(x)
        return self.head(x)


class Ends(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Relu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
        return F.relu(*args) if function is F.gelu else function(*args, **(kw or {}))


class FunctionMode(Stack):
    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            with Relu() if number == 4 else contextlib.nullcontext():
                x = block(x)
        return self.head(x)


class Replaces(Stack):
    def forward(self, x: Tensor) -> Any:
        gelu = F.gelu
        try:
            for number, block in enumerate(self.blocks):
                F.gelu = F.relu if number == 4 else gelu  # type: ignore[assignment]
                x = block(x)
        finally:
            F.gelu = gelu
        return self.head(x)


class Mode(Stack):
    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            with torch.autocast("cpu", torch.bfloat16, enabled=number == 4):
                x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (AllStates, 0), (LastButOne, 0), (EndOfThird, 0), (SecondAsWell, 1), (Reversed, 0),
        (Twice, 0), (Between, 0), (Parallel, 0), (Skips, 0), (Ends, 1), (Mode, 0),
        (FunctionMode, 0), (Replaces, 0),
    ],
)  # fmt: skip
def test_what_is_done_between_blocks(
    compared: Callable[..., int], kind: type[Stack], count: int
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind(*(Block(number) for number in range(6))).eval()

    assert compared(make) == count


def activated(y: Tensor) -> Tensor:
    return F.gelu(y)


def otherwise_activated(y: Tensor) -> Tensor:
    return F.silu(y)


class Activates(Block):
    def compute(self, y: Tensor) -> Tensor:
        return activated(y)


class ReplacesCode(Stack):
    def forward(self, x: Tensor) -> Any:
        codes = activated.__code__, otherwise_activated.__code__
        try:
            for number, block in enumerate(self.blocks):
                activated.__code__ = codes[number == 4]
                x = block(x)
        finally:
            activated.__code__ = codes[0]
        return self.head(x)


def test_code_of_a_function_that_blocks_call(compared: Callable[..., int]) -> None:
    def make(kind: type[Stack]) -> nn.Module:
        torch.manual_seed(0)
        return kind(*(Activates() for _ in range(6))).eval()

    assert compared(lambda: make(ReplacesCode)) == 0
    assert compared(lambda: make(Stack)) == 1


class Held:
    """What a weak reference is to."""


class Refers(Block):
    def forward(self, x: Tensor, reference: weakref.ref[Held]) -> Tensor:
        return super().forward(x) * (1 if reference() is None else 2)


class Forgets(Stack):
    def forward(self, x: Tensor) -> Any:
        held: Held | None = Held()
        reference = weakref.ref(held)
        for number, block in enumerate(self.blocks):
            if number == len(self.blocks) - 2:
                held = None
            x = block(x, reference)
        return self.head(x)


def test_what_blocks_refer_to_weakly_is_not_kept_alive(compared: Callable[..., int]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Forgets(*(Refers(number) for number in range(6))).eval()

    assert compared(make) == 0


class SumsParameters(Stack):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y * sum(parameter.pow(2).sum() for parameter in self.parameters())


class CountsParameters(Stack):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * sum(each.numel() for each in self.blocks[-1].parameters())


class CountsState(Stack):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * len(self.state_dict())


class ReadsLast(Stack):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y if self.blocks[-1].linear.bias is None else y + 1


class CatchesRefusal(Stack):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        try:
            return y * len(dict(self.blocks[-1].linear.named_parameters()))
        except Exception:
            return y


class LooksUp(Stack):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * len({**self.blocks[-1].linear._parameters})


@pytest.mark.parametrize(
    "kind",
    [SumsParameters, CountsParameters, CountsState, ReadsLast, CatchesRefusal, LooksUp],
)
def test_weights_of_other_blocks_are_read(compared: Callable[..., int], kind: type[Stack]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind(*(Block(number) for number in range(6))).eval()

    assert compared(make) == 0


class WithMask(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None, **kw: Any) -> Any:
        y = super().forward(x)
        return (y if mask is None else y * mask, mask)


class Masked(Stack):
    changes = False

    def forward(self, x: Tensor) -> Any:
        mask = (x > 0).to(x.dtype)
        for number, block in enumerate(self.blocks):
            if self.changes and number == 4:
                mask.mul_(2)
            x, mask = block(x, mask, scale=1.5)
        return self.head(x)


class MaskChanged(Masked):
    changes = True


@pytest.mark.parametrize(("kind", "count"), [(Masked, 1), (MaskChanged, 0)])
def test_what_all_blocks_are_given(
    compared: Callable[..., int], kind: type[Stack], count: int
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind(*(WithMask(number) for number in range(6))).eval()

    assert compared(make) == count


def test_list_that_blocks_append_to(compared: Callable[..., int]) -> None:
    class Appending(Block):
        def forward(self, x: Tensor, states: list[Tensor]) -> Tensor:
            states.append(x)
            return super().forward(x) + len(states)

    class Collecting(Stack):
        def forward(self, x: Tensor) -> Any:
            states: list[Tensor] = []
            for block in self.blocks:
                x = block(x, states)
            return self.head(x)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Collecting(*(Appending() for _ in range(6))).eval()

    assert compared(make) == 0


def test_lists_in_lists(compared: Callable[..., int]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Sequential(*(Block() for _ in range(5))),
            nn.Linear(WIDTH, WIDTH),
            nn.Sequential(*(nn.Sequential(*(Block() for _ in range(4))) for _ in range(5))),
        ).eval()

    assert compared(make) == 2


def test_garbage_collector_is_not_called_by_blocks(
    monkeypatch: pytest.MonkeyPatch, compared: Callable[..., int]
) -> None:
    """It runs anybody's callbacks at any time, as hypothesis has one."""
    calls = []
    monkeypatch.setattr(exporting, "_YOUNG_OBJECTS", 10)

    def callback(phase: str, info: dict[str, int]) -> None:
        calls.append((phase, info["generation"], json.dumps(phase)))

    thresholds = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(10, 10, 10)
    try:
        assert compared(lambda: stack(blocks=6)) == 1
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(callback)
    assert calls


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


# --- Random programs ---


class Drawn(Block):
    """A block whose code depends on attributes that may differ, and that may do more than that."""

    kind = 0
    counts = False
    calls: list[int] = []  # noqa: RUF012  What is tested.

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        y = self.linear(self.norm(x))
        y = (F.gelu(y), F.relu(y), y * self.epsilon)[self.kind]
        if self.counts:
            self.calls.append(self.kind)
        return x + (y if mask is None else y * mask)


class DrawnStack(Stack):
    """What is done with blocks, by an index for each of the ways in which it may be unusual."""

    masked = False
    taken = -1
    shifted = -1

    def forward(self, x: Tensor) -> Any:
        mask = torch.sigmoid(x) if self.masked else None
        taken = []
        for number, block in enumerate(self.blocks):
            x = block(x + 1 if number == self.shifted else x, mask)
            taken += [x] if number == self.taken else []
        return self.head(x), *taken


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_programs(compared: Callable[..., int], data: st.DataObject) -> None:
    pattern = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    blocks = data.draw(st.integers(4, 10))
    place = st.integers(-1, blocks - 1)
    other, counting = data.draw(place), data.draw(st.sampled_from([-1, -1, 3]))
    usage = {
        "masked": data.draw(st.booleans()),
        "taken": data.draw(place),
        "shifted": data.draw(st.one_of(st.just(-1), place)),
    }

    def make() -> nn.Module:
        torch.manual_seed(0)
        model: Any = DrawnStack(*(Drawn(number) for number in range(blocks))).eval()
        for number, block in enumerate(model.blocks):
            block.kind = pattern[number % len(pattern)]
            block.epsilon = 0.5 if number == other else 1e-5
            block.counts = number == counting
        for name, value in usage.items():
            setattr(model, name, value)
        return model

    compared(make)
