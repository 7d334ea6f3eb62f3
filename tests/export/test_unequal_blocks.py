"""Blocks that look equal and are not, or not in every way: files are right all the same.

Whether blocks are shared is not asserted here: the files of both ways are equal, or, where a
model's state makes a plain trace another one than the model, the file computes what the model does.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import cached_models
import dynamo_moe
from block_stacks import WIDTH, Block, SecondAsWell, Stack, stack
from shared_exports import Checked

pytest_plugins = ("shared_exports",)

BLOCKS = 7
LAST = 5
"""The block that does something else, which a shared trace passes over."""
LOG = logging.getLogger(__name__)

# --- What blocks can find, and count with ---

COUNT = 0
CALLS: list[int] = []
STATE = SimpleNamespace(count=0)
NUMBERS: list[Any] = [itertools.count()]
THREAD = threading.local()


@pytest.fixture(autouse=True)
def from_zero() -> Callable[[], None]:
    """Returns what begins all counters anew."""

    def begin() -> None:
        global COUNT  # noqa: PLW0603  What is tested.
        COUNT = STATE.count = 0
        CountsInClass.calls = 0
        CALLS.clear()
        NUMBERS[0] = itertools.count()
        THREAD.count = 0

    begin()
    return begin


def _factor(count: int) -> int:
    """Returns what the last block but one multiplies by, and others."""
    return 2 if count % BLOCKS == LAST else 1


class CountsInClass(Block):
    calls = 0

    def compute(self, y: Tensor) -> Tensor:
        CountsInClass.calls += 1
        return y * _factor(CountsInClass.calls - 1)


class CountsGlobally(Block):
    def compute(self, y: Tensor) -> Tensor:
        global COUNT  # noqa: PLW0603  What is tested.
        COUNT += 1
        return y * _factor(COUNT - 1)


class AppendsToGlobal(Block):
    def compute(self, y: Tensor) -> Tensor:
        CALLS.append(1)
        return y * _factor(len(CALLS) - 1)


class CountsInObject(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.state = STATE

    def compute(self, y: Tensor) -> Tensor:
        self.state.count += 1
        return y * _factor(self.state.count - 1)


class CountsInDefault(Block):
    def compute(self, y: Tensor, calls: list[int] = CALLS) -> Tensor:
        calls.append(1)
        return y * _factor(len(calls) - 1)


class CountsWithIterator(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * _factor(next(NUMBERS[0]))


class CountsInThread(Block):
    def compute(self, y: Tensor) -> Tensor:
        THREAD.count = getattr(THREAD, "count", 0) + 1
        return y * _factor(THREAD.count - 1)


class DrawsFromIterator(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * (1 + next(NUMBERS[0]) % BLOCKS)


class CountsAndRepeats(Block):
    """Each of them computes something else."""

    def compute(self, y: Tensor) -> Tensor:
        STATE.count += 1
        return y * (STATE.count % BLOCKS)


def _counting() -> Callable[[Block, Tensor], Tensor]:
    calls = 0

    def compute(_: Block, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return y * _factor(calls - 1)

    return compute


def _counts_in_closure() -> nn.Module:
    kind = type("CountsInClosure", (Block,), {"compute": _counting()})
    return stack(kind, BLOCKS)


def _counts_in_property() -> nn.Module:
    class Counts(Block):
        factor = property(_counting())

        def compute(self, y: Tensor) -> Tensor:
            return Counts.factor.fget(self, y)  # type: ignore[misc, no-any-return, call-arg]

    return stack(Counts, BLOCKS)


COUNTERS = [
    CountsInClass, CountsGlobally, AppendsToGlobal, CountsInObject, CountsInDefault,
    CountsAndRepeats, DrawsFromIterator,
]  # fmt: skip


@pytest.mark.parametrize("kind", COUNTERS)
def test_blocks_that_count_calls(
    checked: Checked, from_zero: Callable[[], None], kind: type[Block]
) -> None:
    checked(lambda: stack(kind, BLOCKS), before=from_zero)


@pytest.mark.parametrize("make", [_counts_in_closure, _counts_in_property])
def test_blocks_that_count_in_their_class(checked: Checked, make: Callable[[], nn.Module]) -> None:
    checked(make)


@pytest.mark.parametrize("kind", [CountsWithIterator, CountsInThread])
def test_counters_that_cannot_be_set_back_are_refused(
    tmp_path: Path, from_zero: Callable[[], None], kind: type[Block]
) -> None:
    path, example = tmp_path / "model.onnx", torch.zeros(2, WIDTH)
    with pytest.raises(dynamo_moe.ExportError, match="export it with repeated_blocks='off'"):
        dynamo_moe.export(stack(kind, BLOCKS), example, path)
    assert not path.exists()
    from_zero()
    dynamo_moe.export(stack(kind, BLOCKS), example, path, repeated_blocks="off")
    from_zero()
    expected = stack(kind, BLOCKS)(example)
    result = onnxruntime.InferenceSession(path).run(None, {"x": example.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(result), expected, rtol=1e-5, atol=1e-5)


# --- What a block knows of itself ---


class ReadsNumber(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * _factor(self.number)


class ReadsDictionary(ReadsNumber):
    def compute(self, y: Tensor) -> Tensor:
        return y * _factor(vars(self)["number"])


class Dumps(Block):
    def compute(self, y: Tensor) -> Tensor:
        shown = json.dumps(vars(self), default=lambda value: type(value).__name__)
        return y * _factor(json.loads(shown)["number"])


class Copies(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * _factor(copy.copy(self).number)


class HasSlots(Block):
    __slots__ = ("place",)

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.place = number

    def compute(self, y: Tensor) -> Tensor:
        return y * _factor(self.place)


class OverDictionary(Block):
    factor = property(lambda self: _factor(self.__dict__["number"]))

    def compute(self, y: Tensor) -> Tensor:
        return y * self.factor


class DecidesWhatIsRead(Block):
    def __getattribute__(self, name: str) -> Any:
        if name == "factor":
            return _factor(object.__getattribute__(self, "__dict__")["number"])
        return super().__getattribute__(name)

    def compute(self, y: Tensor) -> Tensor:
        return y * self.factor


class WritesAttribute(Block):
    def compute(self, y: Tensor) -> Tensor:
        self.epsilon = self.epsilon * 2
        return y + self.epsilon


class WritesBuffer(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("calls", torch.zeros(()))

    def compute(self, y: Tensor) -> Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        return y * self.calls  # type: ignore[operator]


class KeepsResult(Block):
    def compute(self, y: Tensor) -> Tensor:
        self.kept = super().compute(y)
        return self.kept


class ChangesInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


class ChangesOwnTensor(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y.clone().mul_(2).add_(y)


class Logs(Block):
    def compute(self, y: Tensor) -> Tensor:
        LOG.debug("%s of %s", y.shape, self.number)
        return y * _factor(self.number)


class ReadsPrecision(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * 2 if torch.get_float32_matmul_precision() == "high" else y


class ReadsItem(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * 2 if y.sum().item() > 0 else y


class ReadsSize(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y + (y > 0).nonzero().shape[0]


class Selects(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y + y[y > 0].sum()


class Checkpoints(Block):
    def compute(self, y: Tensor) -> Tensor:
        return checkpoint(super().compute, y, use_reentrant=False)  # type: ignore[no-any-return]


class ByTable(Block):
    """Its table holds no more rows than the example has."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.table = nn.Parameter(torch.randn(2, WIDTH))

    def compute(self, y: Tensor) -> Tensor:
        return y + self.table[: y.shape[0]]


class OfConstants(Block):
    """Each has another tensor that is no parameter."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scale = [torch.tensor(float(_factor(number)))]

    def compute(self, y: Tensor) -> Tensor:
        return y * self.scale[0]


class MakesConstants(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * torch.tensor([1.0] * (WIDTH - 1) + [float(_factor(self.number))])


@pytest.mark.parametrize(
    "kind",
    [
        ReadsNumber, ReadsDictionary, Dumps, Copies, HasSlots, OverDictionary, DecidesWhatIsRead,
        WritesAttribute, WritesBuffer, KeepsResult, ChangesInput, ChangesOwnTensor, Logs,
        ReadsPrecision, ReadsItem, ReadsSize, Selects, Checkpoints, ByTable, OfConstants,
        MakesConstants,
    ],
)  # fmt: skip
def test_kinds_of_blocks(checked: Checked, kind: type[Block]) -> None:
    checked(lambda: stack(kind, BLOCKS))


class Window(Block):
    """Decides something where inputs are larger than the example's."""

    window: Any = None

    def compute(self, y: Tensor) -> Tensor:
        if self.window is None:
            return y
        if isinstance(self.window, str):
            return y * 2 if self.window == "wide" and y.shape[0] > 5 else y
        return y * 2 if y.shape[0] > (5 if self.window is True else self.window) else y


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "windows", [(None, 3000), (None, 3), (1, 3000), (10, 20), ("none", "wide"), (False, True)]
)
def test_attributes_that_decide_at_larger_sizes(
    checked: Checked, windows: tuple[Any, Any], static: bool
) -> None:
    def make() -> nn.Module:
        model: Any = stack(Window, BLOCKS)
        for number, block in enumerate(model.blocks):
            block.window = windows[number == LAST]
        return model

    checked(make, **({"dynamic_shapes": None} if static else {}))


# --- What is different about one block ---


class Negated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


class Holds(Block):
    """A block with attributes of several kinds."""

    gain = 1.0

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.numbers = [1.5]
        self.options = {"scales": [1.5]}
        self.scale = torch.ones(())
        self.register_buffer("offset", torch.ones(()))

    def compute(self, y: Tensor) -> Tensor:
        y = y * self.numbers[0] * self.options["scales"][0] * self.gain
        return super().compute(y) * self.scale + self.offset


def _makes_another_class(block: Any) -> None:
    class Other(type(block)):  # type: ignore[misc]
        def compute(self, y: Tensor) -> Tensor:
            return torch.relu(y)

    block.__class__ = Other


def _doubled(*arguments: Any) -> Any:
    return 2 * arguments[-1]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda block: setattr(block, "epsilon", 0.5),
    "number of a submodule": lambda block: setattr(block.norm, "eps", 0.5),
    "class attribute": lambda block: setattr(block, "gain", 2.0),
    "item of a list": lambda block: block.numbers.__setitem__(0, 3.0),
    "nested item": lambda block: block.options["scales"].__setitem__(0, 3.0),
    "constant": lambda block: setattr(block, "scale", torch.full((), 2.0)),
    "dtype of a buffer": lambda block: setattr(block, "offset", torch.ones((), dtype=torch.int64)),
    "no bias": lambda block: setattr(block, "linear", nn.Linear(WIDTH, WIDTH, bias=False)),
    "more parts": lambda block: setattr(block, "linear", nn.Sequential(block.linear, nn.Tanh())),
    "no norm": lambda block: setattr(block, "norm", nn.Identity()),
    "class": _makes_another_class,
    "class of a submodule": lambda block: setattr(block.linear, "__class__", Negated),
    "method": lambda block: setattr(block, "compute", torch.relu),
    "random numbers": lambda block: setattr(block, "compute", lambda y: F.dropout(y, 0.5)),
    "forward": lambda block: setattr(block, "forward", lambda x: x * 2),
    "hook": lambda block: block.register_forward_hook(_doubled),
    "earlier hook": lambda block: block.register_forward_pre_hook(lambda _, given: 2 * given[0]),
    "hook of a submodule": lambda block: block.linear.register_forward_hook(_doubled),
    "trained": lambda block: block.requires_grad_(False),
    "zeros": lambda block: nn.init.zeros_(block.linear.bias),
    "note": lambda block: setattr(block, "note", "not read"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_block_is_another(checked: Checked, name: str) -> None:
    def make() -> nn.Module:
        model: Any = stack(Holds, BLOCKS)
        CHANGES[name](model.blocks[LAST])
        return model

    checked(make)


def _changed_stack(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: Any = stack(blocks=BLOCKS)
        changed = change(model)
        return model if changed is None else changed  # type: ignore[no-any-return]

    return make


def _shallow_copy(model: Any) -> None:
    model.blocks[LAST] = copy.copy(model.blocks[1])


def _shallow_copies(model: Any) -> None:
    for number in range(1, BLOCKS):
        model.blocks[number] = copy.copy(model.blocks[0])
        model.blocks[number].norm = copy.deepcopy(model.blocks[0].norm)


def _one_block(model: Any) -> None:
    for number in range(BLOCKS):
        model.blocks[number] = model.blocks[0]


def _tied_weights(model: Any) -> None:
    model.blocks[LAST].linear.weight = model.blocks[2].linear.weight


def _all_tied(model: Any) -> None:
    for block in model.blocks:
        block.linear.weight = model.blocks[0].linear.weight


def _tied_to_the_head(model: Any) -> None:
    model.head = model.blocks[LAST].linear


def _one_part_for_all(model: Any) -> None:
    for block in model.blocks:
        block.norm = model.blocks[0].norm


def _one_part_for_some(model: Any) -> None:
    for block in model.blocks[2:]:
        block.norm = model.blocks[2].norm


def _views_of_one_tensor(model: Any) -> None:
    whole = torch.randn(BLOCKS, WIDTH, WIDTH)
    for number, block in enumerate(model.blocks):
        block.linear.weight = nn.Parameter(whole[number])


def _overlapping_views(model: Any) -> None:
    whole = torch.randn(WIDTH + BLOCKS, WIDTH)
    for number, block in enumerate(model.blocks):
        block.linear.weight = nn.Parameter(whole[number : number + WIDTH])


def _classes_of_their_own(model: Any) -> None:
    for number, block in enumerate(model.blocks):
        scaled = {"compute": lambda _, y, number=number: y * _factor(number)}
        block.__class__ = type("Made", (Block,), scaled)


def _functions_of_their_own(model: Any) -> None:
    for number, block in enumerate(model.blocks):
        block.compute = lambda y, number=number: y * _factor(number)


def _forwards_of_their_own(model: Any) -> None:
    for number, block in enumerate(model.blocks):
        block.forward = lambda x, block=block, number=number: Block.forward(
            block, x * _factor(number)
        )


def _another_in_two_places(model: Any) -> None:
    model.second = model.blocks[LAST]


def _list_in_two_places(model: Any) -> None:
    model.second = model.blocks


def _compiled(model: Any) -> Any:
    return torch.compile(model)


def _hook_counts_modules(model: Any) -> None:
    model.register_forward_hook(lambda own, _, result: result * len([*own.modules()]))


def _cycle(model: Any) -> None:
    for block, other in zip(model.blocks, [*model.blocks[1:], model.blocks[0]], strict=True):
        block.others = [other]
        block.compute = lambda y, block=block: y + block.others[0].linear.bias


def _double_precision_buffers(model: Any) -> None:
    for number, block in enumerate(model.blocks):
        block.register_buffer("offset", torch.full((), float(_factor(number))), persistent=False)
        block.compute = lambda y, block=block: y * block.offset


@pytest.mark.parametrize(
    "change",
    [
        _shallow_copy, _shallow_copies, _one_block, _tied_weights, _all_tied, _tied_to_the_head,
        _one_part_for_all, _one_part_for_some, _views_of_one_tensor, _overlapping_views,
        _classes_of_their_own, _functions_of_their_own, _forwards_of_their_own,
        _another_in_two_places, _list_in_two_places, _compiled, _hook_counts_modules, _cycle,
        _double_precision_buffers,
    ],
)  # fmt: skip
def test_what_blocks_have_in_common(checked: Checked, change: Callable[[Any], Any]) -> None:
    checked(_changed_stack(change))


# --- What a model does with its blocks ---


class Collects(Stack):
    """Has what each block returns."""

    def forward(self, x: Tensor) -> Any:
        states = [x]
        for number, block in enumerate(self.blocks):
            states.append(self.call(block, self.given(number, states), number))
        return self.result(states)

    def call(self, block: nn.Module, x: Tensor, number: int) -> Tensor:
        return block(x)  # type: ignore[no-any-return]

    def given(self, number: int, states: list[Tensor]) -> Tensor:
        return states[-1]

    def result(self, states: list[Tensor]) -> Any:
        return self.head(states[-1])


def _results(of: Callable[[Any, list[Tensor]], Any]) -> type[Stack]:
    return type("Results", (Collects,), {"result": of})


def _gives(of: Callable[[Any, int, list[Tensor]], Tensor]) -> type[Stack]:
    return type("Gives", (Collects,), {"given": of})


def _large(x: Tensor) -> bool:
    return x.shape[0] > 5


class InContext(Collects):
    """One block is called in a context."""

    context: Callable[[], Any]

    def call(self, block: nn.Module, x: Tensor, number: int) -> Tensor:
        with self.context() if number == LAST else contextlib.nullcontext():
            return super().call(block, x, number)


def _in_context(context: Callable[[], Any]) -> type[Stack]:
    return type("In", (InContext,), {"context": staticmethod(context)})


class Relu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
        return F.relu(*args) if function is F.gelu else function(*args, **(kw or {}))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _high_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _hooked() -> Iterator[None]:
    handle = modules.register_module_forward_hook(_doubled)
    try:
        yield
    finally:
        handle.remove()


_LINEAR = F.linear
CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "function mode": Relu,
    "F.gelu": lambda: _replaced(F, "gelu", F.relu),
    "F.linear": lambda: _replaced(F, "linear", lambda *given: -_LINEAR(*given)),
    "forward of a class": lambda: _replaced(nn.Linear, "forward", Negated.forward),
    "code of a function": lambda: _replaced(
        Block.compute, "__code__", ReadsNumber.compute.__code__
    ),
    "precision": _high_precision,
    "hook of all modules": _hooked,
    "no gradients": torch.no_grad,
    "default dtype": lambda: _replaced(torch, "float32", torch.float64),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_one_block_runs_in_another_context(checked: Checked, name: str) -> None:
    kind = ReadsPrecision if name == "precision" else Block
    checked(lambda: stack(kind, BLOCKS, _in_context(CONTEXTS[name])))


MODELS: dict[str, type[Stack]] = {
    "all states": _results(lambda self, states: (self.head(states[-1]), *states)),
    "all states as one": _results(lambda _, states: torch.stack(states)),
    "states from the last": _results(lambda _, states: tuple(states[::-1])),
    "a state": _results(lambda self, states: (self.head(states[-1]), states[LAST])),
    "an early state": _results(lambda self, states: (self.head(states[-1]), states[2])),
    "last state": _results(lambda _, states: states[-1]),
    "last state twice": _results(lambda _, states: (states[-1], states[-1])),
    "last but one": _results(lambda self, states: self.head(states[-2])),
    "last and a late one": _results(lambda self, states: self.head(states[-1] + states[LAST])),
    "last and an early one": _results(lambda self, states: self.head(states[-1] + states[2])),
    "last and the third": _results(lambda self, states: self.head(states[-1] + states[3])),
    "sum": _results(lambda self, states: self.head(sum(states))),
    "losses": _results(
        lambda self, states: (self.head(states[-1]), sum(state.pow(2).mean() for state in states))
    ),
    "another is changed": _results(
        lambda self, states: self.head(states[-1]) + states[LAST].mul_(2).sum()
    ),
    "last is changed": _results(lambda self, states: self.head(states[-1].clamp_(min=0))),
    "first is changed": _results(lambda self, states: (states[1].mul_(2), self.head(states[-1]))),
    "view is changed": _results(
        lambda self, states: (states[-1].view(-1).add_(1), self.head(states[-1]))[1]
    ),
    "number is added": _gives(lambda _, number, states: states[-1] + number),
    "one is shifted": _gives(lambda _, number, states: states[-1] + (number == LAST)),
    "one is shifted in place": _gives(
        lambda _, number, states: states[-1].add_(1) if number == LAST else states[-1]
    ),
    "one takes the one before": _gives(lambda _, number, states: states[-1 - (number == LAST)]),
    "one takes the third": _gives(lambda _, number, states: states[3 if number == LAST else -1]),
    "sums of two": _gives(lambda _, number, states: sum(states[-2:])),  # type: ignore[return-value]
    "sums of all": _gives(lambda _, number, states: sum(states)),  # type: ignore[return-value]
    "input is added": _gives(lambda _, number, states: states[-1] + states[0]),
    "U-Net": _gives(lambda _, number, states: states[-1] + states[BLOCKS - 1 - number] if number > 3
                    else states[-1]),
    "copies": _gives(lambda _, number, states: states[-1].clone()),
    "one takes the one before if large": _gives(
        lambda _, number, states: states[-1 - (number == LAST and _large(states[0]))]
    ),
    "one is shifted in place if large": _gives(
        lambda _, number, states: (
            states[-1].add_(1) if number == LAST and _large(states[0]) else states[-1]
        )
    ),
    "early result if large": _results(
        lambda self, states: self.head(states[LAST if _large(states[0]) else -1])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_what_is_done_with_results(checked: Checked, name: str) -> None:
    checked(lambda: stack(blocks=BLOCKS, model=MODELS[name]))


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


class EachTwice(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(block(x))
        return self.head(x)


class OneTwice(Stack):
    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            x = block(block(x)) if number == LAST else block(x)
        return self.head(x)


class Skips(Stack):
    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            x = x if number == LAST else block(x)
        return self.head(x)


class LastIsUnused(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks[:-1]:
            x = block(x)
        self.blocks[-1](x)
        return self.head(x)


class InSlices(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in (*self.blocks[:3], *self.blocks[3:]):
            x = block(x)
        return self.head(x)


class Parallel(Stack):
    def forward(self, x: Tensor) -> Any:
        return self.head(sum(block(x) for block in self.blocks))


class Beside(Stack):
    """Computes something in turns with its blocks."""

    begins = 0

    def forward(self, x: Tensor) -> Any:
        y = x
        for number, block in enumerate(self.blocks):
            x = block(x)
            y = y.sin() if number >= self.begins else y
        return self.head(x + y)


class BesideLater(Beside):
    begins = 3


class InTurns(Stack):
    """Two runs, of which each block is followed by one of the other's."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.others = nn.ModuleList([Block(number) for number in range(len(blocks))])

    def forward(self, x: Tensor) -> Any:
        y = x.sin()
        for block, other in zip(self.blocks, self.others, strict=True):
            x, y = block(x), other(y)
        return self.head(x + y)


class CallsParts(Stack):
    """Calls what is in its blocks."""

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block.compute(block.linear(block.norm(x)))  # type: ignore[operator,union-attr]
        return self.head(x)


class CallsForward(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block.forward(x)
        return self.head(x)


class PartOfTheSecond(Stack):
    def forward(self, x: Tensor) -> Any:
        y = self.blocks[1].linear(x)  # type: ignore[operator,union-attr]
        return super().forward(x + y)


class ReadsWeights(Stack):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * sum(weight.pow(2).sum() for weight in self.parameters())


class ReadsAWeight(Stack):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.blocks[LAST].linear.bias)  # type: ignore[operator,union-attr]


class CountsWeights(Stack):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * len(self.state_dict())


class CatchesErrors(Stack):
    def forward(self, x: Tensor) -> Any:
        try:
            return super().forward(x) * self.blocks[LAST].linear.bias.sum()  # type: ignore[operator,union-attr]
        except Exception:
            return super().forward(x)


class CallCountsModules(Stack):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * len([*self.modules()])


class AsksForClass(Stack):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (2 if type(self.blocks[LAST]) is Block else 3)


class EndsIfLarge(Stack):
    def forward(self, x: Tensor) -> Any:
        large = _large(x)
        for number, block in enumerate(self.blocks):
            if number < LAST or not large:
                x = block(x)
        return self.head(x)


class SetsNumbers(Stack):
    """Writes into its blocks while it runs."""

    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            block.epsilon = _factor(number)  # type: ignore[assignment]
            x = block(x)
        return self.head(x)


class PassesInputOn(Stack):
    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            x.scale = float(number)  # type: ignore[attr-defined]
            x = block(x)
        return self.head(x)


class Appends(Stack):
    def forward(self, x: Tensor) -> Any:
        states: list[Tensor] = []
        for block in self.blocks:
            x = block(x, states)
        return self.head(x) + sum(state.mean() for state in states)


class InAppending(Block):
    def forward(self, x: Tensor, states: list[Tensor]) -> Tensor:  # type: ignore[override]
        states.append(x)
        return super().forward(x) * len(states)


class Keeps(Stack):
    """Reads afterwards what its blocks have kept."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y + sum(block.kept.mean() for block in self.blocks)  # type: ignore[operator,union-attr,misc]


class KeepsOne(Stack):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y + self.blocks[LAST].kept.mean()  # type: ignore[operator,union-attr]


class NotedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(x, "scale", 3.0)  # type: ignore[no-any-return]


class Refers(Block):
    def forward(self, x: Tensor, reference: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x) * (1 if reference() is None else 2)


class Forgets(Stack):
    def forward(self, x: Tensor) -> Any:
        held: Any = Relu()
        reference = weakref.ref(held)
        for number, block in enumerate(self.blocks):
            if number == LAST:
                held = None
            x = block(x, reference)
        return self.head(x)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *((model, Block) for model in (
            SecondAsWell, Reversed, Twice, EachTwice, OneTwice, Skips, LastIsUnused, InSlices,
            Parallel, Beside, BesideLater, InTurns, CallsParts, CallsForward, PartOfTheSecond,
            ReadsWeights, ReadsAWeight, CountsWeights, CatchesErrors, CallCountsModules,
            AsksForClass, EndsIfLarge, SetsNumbers,
        )),
        (PassesInputOn, NotedBlock), (Appends, InAppending), (Keeps, KeepsResult),
        (KeepsOne, KeepsResult), (Forgets, Refers),
    ],
)  # fmt: skip
def test_how_blocks_are_called(checked: Checked, model: type[Stack], kind: type[Block]) -> None:
    checked(lambda: stack(kind, BLOCKS, model))


# --- What blocks are given and return beside it ---


class Pair(nn.Module):
    """Takes and returns two tensors."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, y: Any) -> Any:
        return torch.tanh(self.linear(x) * self.scale) + y, y


class GivesItsOwn(Pair):
    def forward(self, x: Tensor, y: Any) -> Any:
        z = torch.tanh(self.linear(x))
        return z, z.cos() + (0 if y is None else y)


class GivesTwice(Pair):
    def forward(self, x: Tensor, y: Any) -> Any:
        z = torch.tanh(self.linear(x)) * (2 if x is y else 3)
        return z, z


class GivesPart(Pair):
    def forward(self, x: Tensor, y: Any) -> Any:
        z = torch.cat([x, torch.tanh(self.linear(x))], 1) * (2 if x.storage_offset() else 1)
        return z[:, WIDTH:], y


class ChangesBoth(Pair):
    def forward(self, x: Tensor, y: Any) -> Any:
        return super().forward(x, y.mul_(0.5))


class FirstGivesAScale(Pair):
    def forward(self, x: Tensor, y: Any) -> Any:
        return (x + self.linear(x), x.mean()) if y is None else (x + self.linear(x) * y, y)


class GivesNumber(Pair):
    def forward(self, x: Tensor, y: Any) -> Any:
        return torch.tanh(self.linear(x)) * (y or 1), (y or 0) + 1


class Pairs(Stack):
    first: Callable[[Tensor], Any] = torch.sin

    def forward(self, x: Tensor) -> Any:
        y: Any = type(self).first(x)
        for number, block in enumerate(self.blocks):
            x, y = self.call(number, block, x, y)
        return self.head(x) if y is None else self.head(x) + y

    def call(self, number: int, block: nn.Module, x: Tensor, y: Any) -> Any:
        return block(x, y)

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.head = nn.Linear(WIDTH, WIDTH)


class OfNone(Pairs):
    first = staticmethod(lambda _: None)  # type: ignore[assignment]


class OfFirstResult(Pairs):
    def call(self, number: int, block: nn.Module, x: Tensor, y: Any) -> Any:
        x, y = block(x, y)
        return x, x if number == 0 else y


class OfSecondWeight(Pairs):
    def call(self, number: int, block: nn.Module, x: Tensor, y: Any) -> Any:
        return block(x, self.blocks[1].scale if number else x)  # type: ignore[union-attr]


class ChangedForOne(Pairs):
    def call(self, number: int, block: nn.Module, x: Tensor, y: Any) -> Any:
        return block(x, y.mul_(2) if number == LAST else y)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (Pairs, Pair), (Pairs, GivesItsOwn), (Pairs, GivesTwice), (Pairs, GivesPart),
        (Pairs, ChangesBoth), (OfNone, FirstGivesAScale), (OfNone, GivesItsOwn),
        (OfNone, GivesNumber), (OfFirstResult, Pair), (OfSecondWeight, Pair), (ChangedForOne, Pair),
    ],
)  # fmt: skip
def test_pairs(checked: Checked, model: type[Stack], kind: type[nn.Module]) -> None:
    checked(lambda: stack(kind, BLOCKS, model))


class Scaled(Block):
    """A block that is given a factor."""

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:  # type: ignore[override]
        return x + self.compute(self.linear(self.norm(x))) * factor


class TwoFactors(Stack):
    """The first five blocks are given one of the model's inputs, the others another."""

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Any:  # type: ignore[override]
        for number, block in enumerate(self.blocks):
            x = block(x, first if number < 5 else second)
        return self.head(x)


class FactorsInTurns(TwoFactors):
    """Blocks are given two of the model's inputs in turns, and once the same twice."""

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            x = block(x, first if number % 2 == 0 or number == LAST else second)
        return self.head(x)


@pytest.mark.parametrize("model", [TwoFactors, FactorsInTurns])
@pytest.mark.parametrize("blocks", [7, 9, 12])
def test_inputs_of_some_blocks(checked: Checked, model: type[Stack], blocks: int) -> None:
    checked(lambda: stack(Scaled, blocks, model), tuple(torch.randn(3, 2, 8)))


# --- Caches ---

Update = Callable[[Any, Tensor, Tensor, Any], Any]


def _updates(keys: Tensor, values: Tensor, cache: Any, number: int) -> Any:
    return cache.update(keys, values, number)


class AddsToCache(cached_models.Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        cache.count = getattr(cache, "count", 0) + 1
        return super().update(keys * _factor(cache.count), values, cache)


class CatchesUpdate(cached_models.Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        try:
            cache.update(keys, values, self.layer_idx + 1)
        except Exception:
            keys = keys * 3
        return super().update(keys, values, cache)


class TwoLayers(cached_models.Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        cache.update(keys, values, self.layer_idx)
        return cache.update(keys, values, cached_models.LAYERS - 1 - self.layer_idx)


class ChangesKeys(cached_models.Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys, values = super().update(keys, values, cache)
        return keys.mul_(2), values


UPDATES: dict[str, Update] = {
    "as it is": lambda own, keys, values, cache: _updates(keys, values, cache, own.layer_idx),
    "by number": lambda own, keys, values, cache: _updates(
        keys * (1 + (own.layer_idx == 3)), values, cache, own.layer_idx
    ),
    "one layer for all": lambda own, keys, values, cache: _updates(keys, values, cache, 2),
    "reversed": lambda own, keys, values, cache: _updates(
        keys, values, cache, cached_models.LAYERS - 1 - own.layer_idx
    ),
    "one without": lambda own, keys, values, cache: (
        (keys, values) if own.layer_idx == 3 else _updates(keys, values, cache, own.layer_idx)
    ),
    "first layer is read": lambda own, keys, values, cache: _updates(
        keys + cache.layers[0].keys.sum(), values, cache, own.layer_idx
    ),
    "last layer is read": lambda own, keys, values, cache: _updates(
        keys + cache.layers[4].keys.sum(), values, cache, own.layer_idx
    ),
}


def _with_update(update: Update) -> type[cached_models.Attention]:
    return type("Updates", (cached_models.Attention,), {"update": update})


@pytest.mark.parametrize(
    "kind",
    [*map(_with_update, UPDATES.values()), AddsToCache, CatchesUpdate, TwoLayers, ChangesKeys],
    ids=[*UPDATES, "count", "error", "two layers", "keys in place"],
)
def test_blocks_with_a_cache(checked: Checked, kind: type[cached_models.Attention]) -> None:
    checked(
        lambda: cached_models.made(cached_models.Model, kind),
        cached_models.example(),
        dynamic_shapes=None,
    )


def _model(**methods: Callable[..., Any]) -> type[cached_models.Model]:
    return type("Model", (cached_models.Model,), methods)


def _filled(change: Callable[[list[Any]], Any]) -> type[cached_models.Model]:
    """Returns a model whose cache is made of what becomes of the past."""
    return _model(made=lambda own, past: cached_models.Model.made(own, change(past)))


def _given_back(change: Callable[[list[Any]], Any]) -> type[cached_models.Model]:
    return _model(results=lambda own, cache: change(cached_models.Model.results(own, cache)))


def _scaled(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys * 2, values


def _writes_between(own: Any, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
    if number == 3:
        cache.layers[4].keys = cache.layers[4].keys * 2
    return block(x, cache=cache)


def _writes_in_place(own: Any, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
    if number == 4:
        cache.layers[3].keys.mul_(2)
    return block(x, cache=cache)


def _gives_the_second(own: Any, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
    return block(x, cache=cache, extra=cache.layers[1].keys)


def _gives_the_fourth(own: Any, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
    return block(x, cache=cache, extra=cache.layers[3].keys)


CACHES: dict[str, type[cached_models.Model]] = {
    "one for two": _filled(lambda past: [*past[:4], past[3]]),
    "one is computed": _filled(lambda past: [*past[:4], _scaled(*past[4])]),
    "new": _model(made=lambda own, past: cached_models.DynamicCache()),
    "layer is read": _model(after=lambda own, x, cache: x + cache.layers[3].keys.sum()),
    "layer is changed": _model(call=_writes_between),
    "layer is changed in place": _model(call=_writes_in_place),
    "second layer for all": _model(call=_gives_the_second),
    "fourth layer for all": _model(call=_gives_the_fourth),
    "some results": _given_back(lambda results: results[:3]),
    "result twice": _given_back(lambda results: [*results, results[3]]),
    "one result is scaled": _given_back(lambda results: [*results[:4], _scaled(*results[4])]),
    "all results are scaled": _given_back(lambda results: [_scaled(*layer) for layer in results]),
}


@pytest.mark.parametrize("name", CACHES)
def test_models_with_a_cache(checked: Checked, name: str) -> None:
    checked(lambda: cached_models.made(CACHES[name]), cached_models.example(), dynamic_shapes=None)


@pytest.mark.parametrize(
    "layer",
    [
        (torch.rand(2, 6, WIDTH), torch.rand(2, 6, WIDTH)),
        (torch.rand(2, 4, WIDTH).double(), torch.rand(2, 4, WIDTH)),
        (torch.rand(2, 0, WIDTH), torch.rand(2, 0, WIDTH)),
    ],
)
def test_layers_of_a_cache_that_differ(checked: Checked, layer: Any) -> None:
    x, past = cached_models.example()
    checked(cached_models.made, (x, [*past[:4], layer]), dynamic_shapes=None)


# --- What is left of it ---


def _state(model: nn.Module) -> Any:
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {
        path: {name: repr(value) for name, value in vars(module).items() if name[0] != "_"}
        for path, module in model.named_modules()
    }
    return tensors, attributes


@pytest.mark.parametrize(
    "kind",
    [
        Block, CountsInClass, CountsGlobally, CountsInObject, CountsInDefault, WritesAttribute,
        WritesBuffer, KeepsResult, ReadsNumber, ReadsItem, Holds,
    ],
)  # fmt: skip
def test_models_are_left_as_they_were(tmp_path: Path, kind: type[Block]) -> None:
    model = stack(kind, BLOCKS)
    tensors, attributes = _state(model)
    parts = {path: id(part) for path, part in model.named_modules()}
    counts = CountsInClass.calls, COUNT, STATE.count, [*CALLS]
    with contextlib.suppress(dynamo_moe.ExportError):
        dynamo_moe.export(model, torch.zeros(2, WIDTH), tmp_path / "model.onnx")
    after, attributes_after = _state(model)
    assert all(torch.equal(tensor, after[name]) for name, tensor in tensors.items())
    assert {**attributes} == attributes_after
    assert {path: id(part) for path, part in model.named_modules()} == parts
    assert (CountsInClass.calls, COUNT, STATE.count, [*CALLS]) == counts


def test_lists_that_modules_have_in_common_they_have_afterwards(tmp_path: Path) -> None:
    notes, nested = [0], ({"inner": [1]}, [2])
    model: Any = stack(blocks=BLOCKS)
    for block in model.blocks:
        block.notes, block.nested = notes, nested
        block.compute = lambda y, notes=notes: (notes.append(1), y)[1]
    dynamo_moe.export(model, torch.zeros(2, WIDTH), tmp_path / "model.onnx")
    assert notes == [0]
    assert all(block.notes is notes and block.nested is nested for block in model.blocks)
    assert nested == ({"inner": [1]}, [2])
