"""Blocks that look equal and are not, or not in every way: files are right all the same.

Whether blocks are shared is not asserted here: the files of both ways are equal, or, where a
model's state makes a plain trace another one than the model, the file computes what the model does.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dynamo_moe
from block_stacks import (
    BLOCKS,
    LAST,
    WIDTH,
    Block,
    KeepsResult,
    Negated,
    ReadsNumber,
    ReadsPrecision,
    doubled,
    factor,
    stack,
)
from shared_exports import Checked

pytest_plugins = ("shared_exports",)

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


class CountsInClass(Block):
    calls = 0

    def compute(self, y: Tensor) -> Tensor:
        CountsInClass.calls += 1
        return y * factor(CountsInClass.calls - 1)


class CountsGlobally(Block):
    def compute(self, y: Tensor) -> Tensor:
        global COUNT  # noqa: PLW0603  What is tested.
        COUNT += 1
        return y * factor(COUNT - 1)


class AppendsToGlobal(Block):
    def compute(self, y: Tensor) -> Tensor:
        CALLS.append(1)
        return y * factor(len(CALLS) - 1)


class CountsInObject(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.state = STATE

    def compute(self, y: Tensor) -> Tensor:
        self.state.count += 1
        return y * factor(self.state.count - 1)


class CountsInDefault(Block):
    def compute(self, y: Tensor, calls: list[int] = CALLS) -> Tensor:
        calls.append(1)
        return y * factor(len(calls) - 1)


class CountsWithIterator(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * factor(next(NUMBERS[0]))


class CountsInThread(Block):
    def compute(self, y: Tensor) -> Tensor:
        THREAD.count = getattr(THREAD, "count", 0) + 1
        return y * factor(THREAD.count - 1)


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
        return y * factor(calls - 1)

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


class ReadsDictionary(ReadsNumber):
    def compute(self, y: Tensor) -> Tensor:
        return y * factor(vars(self)["number"])


class Dumps(Block):
    def compute(self, y: Tensor) -> Tensor:
        shown = json.dumps(vars(self), default=lambda value: type(value).__name__)
        return y * factor(json.loads(shown)["number"])


class Copies(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * factor(copy.copy(self).number)


class HasSlots(Block):
    __slots__ = ("place",)

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.place = number

    def compute(self, y: Tensor) -> Tensor:
        return y * factor(self.place)


class OverDictionary(Block):
    factor = property(lambda self: factor(self.__dict__["number"]))

    def compute(self, y: Tensor) -> Tensor:
        return y * self.factor


class DecidesWhatIsRead(Block):
    def __getattribute__(self, name: str) -> Any:
        if name == "factor":
            return factor(object.__getattribute__(self, "__dict__")["number"])
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


class ChangesInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


class ChangesCopy(Block):
    """All but one change a copy of what they have computed."""

    def compute(self, y: Tensor) -> Tensor:
        z = y.detach() if self.number == LAST else y.clone()
        z.add_(1)
        return y * z


class CopiesChanged(Block):
    """All but one copy what they have computed before they change it."""

    def compute(self, y: Tensor) -> Tensor:
        if self.number == LAST:
            y[:, :4].zero_()
            return y.clone()
        z = y.clone()
        y[:, :4].zero_()
        return z


class ReadsChanged(Block):
    """All but one read a copy of what they change, one the changed tensor itself."""

    def compute(self, y: Tensor) -> Tensor:
        z = y.detach() if self.number == LAST else y.clone()
        y.add_(1)
        return y * z


class ChangesConstant(Block):
    def compute(self, y: Tensor) -> Tensor:
        scale = torch.tensor([1.0] * WIDTH)
        before = scale.clone()
        scale.mul_(self.linear.bias)
        return y * (scale if self.number == LAST else before)


class RoundsSizes(Block):
    """One rounds half of a size up."""

    def compute(self, y: Tensor) -> Tensor:
        half = (y.shape[0] + self.number // LAST) // 2
        return y + y[half:].sum(0)


class ChangesOwnTensor(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y.clone().mul_(2).add_(y)


class Logs(Block):
    def compute(self, y: Tensor) -> Tensor:
        LOG.debug("%s of %s", y.shape, self.number)
        return y * factor(self.number)


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
        self.scale = [torch.tensor(float(factor(number)))]

    def compute(self, y: Tensor) -> Tensor:
        return y * self.scale[0]


class MakesConstants(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * torch.tensor([1.0] * (WIDTH - 1) + [float(factor(self.number))])


@pytest.mark.parametrize(
    "kind",
    [
        ReadsNumber, ReadsDictionary, Dumps, Copies, HasSlots, OverDictionary, DecidesWhatIsRead,
        WritesAttribute, WritesBuffer, KeepsResult, ChangesInput, ChangesCopy, CopiesChanged,
        ReadsChanged, ChangesConstant, RoundsSizes, ChangesOwnTensor, Logs, ReadsPrecision,
        ReadsItem, ReadsSize, Selects, Checkpoints, ByTable, OfConstants, MakesConstants,
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


@pytest.mark.each_value
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


class HoldsFunction(Block):
    function: Callable[[Tensor], Tensor]

    def compute(self, y: Tensor) -> Tensor:
        return self.function(y)


def _doubled_at(sizes: Collection[int], y: Tensor) -> Tensor:
    return y * 2 if any(y.shape[0] == size for size in sizes) else y


@pytest.mark.parametrize("kind", [frozenset, set, tuple])
def test_functions_that_decide_by_what_they_hold(checked: Checked, kind: Any) -> None:
    def make() -> nn.Module:
        model: Any = stack(HoldsFunction, BLOCKS)
        for number, block in enumerate(model.blocks):
            block.function = functools.partial(_doubled_at, kind([6] if number == LAST else []))
        return model

    checked(make)


class Configured(Block):
    config: Any = None

    def compute(self, y: Tensor) -> Tensor:
        return y * 2 if y.shape[0] > self.config.options["window"] else y


def test_objects_that_refer_to_themselves(checked: Checked) -> None:
    def make() -> nn.Module:
        model: Any = stack(Configured, BLOCKS)
        for block in model.blocks:
            block.config = SimpleNamespace(options={"window": 3000})
            block.config.options["config"] = block.config
        return model

    checked(make)


def test_objects_that_decide_at_larger_sizes(checked: Checked) -> None:
    def make() -> nn.Module:
        model: Any = stack(Configured, BLOCKS)
        for number, block in enumerate(model.blocks):
            options = {"window": 3000 if number == LAST else 1_000_000}
            block.config = SimpleNamespace(options=options)
        return model

    checked(make)


# --- What is different about one block ---


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
    "hook": lambda block: block.register_forward_hook(doubled),
    "earlier hook": lambda block: block.register_forward_pre_hook(lambda _, given: 2 * given[0]),
    "hook of a submodule": lambda block: block.linear.register_forward_hook(doubled),
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
        scaled = {"compute": lambda _, y, number=number: y * factor(number)}
        block.__class__ = type("Made", (Block,), scaled)


def _functions_of_their_own(model: Any) -> None:
    for number, block in enumerate(model.blocks):
        block.compute = lambda y, number=number: y * factor(number)


def _forwards_of_their_own(model: Any) -> None:
    for number, block in enumerate(model.blocks):
        block.forward = lambda x, block=block, number=number: Block.forward(
            block, x * factor(number)
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
        block.register_buffer("offset", torch.full((), float(factor(number))), persistent=False)
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


@pytest.mark.each_value
@pytest.mark.parametrize("changed", range(6))
@pytest.mark.parametrize(
    "other",
    [lambda w: w.t(), lambda w: w.repeat(1, 2)[:, ::2], lambda w: w[:, :1].expand(16, 16)],
    ids=["transposed", "strided", "expanded"],
)
def test_weights_that_lie_otherwise(tmp_path: Path, other: Any, changed: int) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(x).tanh()

    model = nn.Sequential(*(Block() for _ in range(6))).eval()
    weight = model[changed].linear.weight
    weight.data = other(weight.data)
    dynamo_moe.export(model, torch.randn(3, 16), tmp_path / "m.onnx")
    assert dynamo_moe.verify(tmp_path / "m.onnx", model).passed
