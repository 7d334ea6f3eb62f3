"""Models that do more with their blocks' results than pass them on: files are right all the same.

Whether blocks are shared is not asserted: see test_unequal_blocks.py.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode

from block_stacks import (
    BLOCKS,
    LAST,
    WIDTH,
    Block,
    KeepsResult,
    Negated,
    ReadsNumber,
    ReadsPrecision,
    SecondAsWell,
    Stack,
    doubled,
    factor,
    stack,
)
from shared_exports import Checked

pytest_plugins = ("shared_exports",)


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
    handle = modules.register_module_forward_hook(doubled)
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
    "early states and numbers": _results(
        lambda self, states: (
            self.head(states[-1]) + states[0].new_tensor([1.5]),
            states[2] * torch.tensor([2.0], device=states[0].device),
        )
    ),
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
            block.epsilon = factor(number)  # type: ignore[assignment]
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


class PassesOn(Pair):
    """Returns what it is given beside its tensor; one a copy of it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def forward(self, x: Tensor, y: Any) -> Any:
        z = x + torch.tanh(self.linear(x))
        return z, y.clone() if self.number == LAST else y


class ChangesWhatIsPassedOn(Stack):
    def forward(self, x: Tensor) -> Any:
        first = y = x.sin()
        for block in self.blocks:
            x, y = block(x, y)
        y[:, :2].zero_()
        return self.head(x + first)


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
        (ChangesWhatIsPassedOn, PassesOn),
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
