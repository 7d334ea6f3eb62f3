"""What becomes of the results of blocks in the middle of a run, which have one node in common."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import dynamo_moe
from block_stacks import WIDTH, Block, Stack, stack
from cached_models import Attention, Compared, Model, example, made
from dynamo_moe.tracing import private
from dynamo_moe.tracing.shared_blocks import SharedTrace

pytest_plugins = ("shared_exports",)

BLOCKS = 9
ALONE = "Equal blocks are traced one by one"
USED = "a result between two of them is used elsewhere"
ANOTHER = "a tensor that a block is given is not the one's before"
IN_PLACE = "a block's result is changed in place"
ATTRIBUTES = "a tensor that a block is given has other attributes"
READS = "what blocks read changes"


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "dynamo_moe.exporting"):
        yield


class Collects(Stack):
    """Has what each block returns."""

    def forward(self, x: Tensor) -> Any:
        states = [x]
        for number, block in enumerate(self.blocks):
            states.append(block(self.given(number, states)))
        return self.result(states)

    def given(self, number: int, states: list[Tensor]) -> Tensor:
        return states[-1]

    def result(self, states: list[Tensor]) -> Any:
        return self.head(states[-1])


class AllStates(Collects):
    def result(self, states: list[Tensor]) -> Any:
        return self.head(states[-1]), tuple(states)


class OneState(Collects):
    def result(self, states: list[Tensor]) -> Any:
        return self.head(states[-1]), states[6]


class UsedAfter(Collects):
    def result(self, states: list[Tensor]) -> Any:
        return self.head(states[-1] + states[5])


class LastButOne(Collects):
    def result(self, states: list[Tensor]) -> Any:
        return self.head(states[-2])


class ChangedAfter(Collects):
    def result(self, states: list[Tensor]) -> Any:
        return self.head(states[-1]) + states[5].mul_(2).sum()


class TwoBefore(Collects):
    def given(self, number: int, states: list[Tensor]) -> Tensor:
        return states[-2] if number == 6 else states[-1]


class OfTheFirstPassedOver(Collects):
    def given(self, number: int, states: list[Tensor]) -> Tensor:
        return states[3] if number == 6 else states[-1]


class InPlace(Collects):
    def given(self, number: int, states: list[Tensor]) -> Tensor:
        return states[-1].add_(1) if number == 6 else states[-1]


class EarlierInPlace(Collects):
    """Nothing comes of it, which nobody has to see."""

    def given(self, number: int, states: list[Tensor]) -> Tensor:
        if number == 6:
            states[4].add_(1)
        return states[-1]


class LastInPlace(Collects):
    def result(self, states: list[Tensor]) -> Any:
        return self.head(states[-1].clamp_(min=0))


class LastReturnedInPlace(Collects):
    def result(self, states: list[Tensor]) -> Any:
        return states[-1].mul_(2)


class ByView(Collects):
    def result(self, states: list[Tensor]) -> Any:
        states[-1].view(-1).add_(1)
        return self.head(states[-1])


class FirstInPlace(Collects):
    def result(self, states: list[Tensor]) -> Any:
        states[1].mul_(2)
        return self.head(states[-1])


class Noted(Collects):
    def given(self, number: int, states: list[Tensor]) -> Tensor:
        if number == 6:
            states[-1].scale = 2.0  # type: ignore[attr-defined]
        return states[-1]


class NotedOnAll(Collects):
    def given(self, number: int, states: list[Tensor]) -> Tensor:
        states[-1].scale = 2.0 + number  # type: ignore[attr-defined]
        return states[-1]


class ReadsScale(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        try:
            return y * x.scale  # type: ignore[attr-defined, no-any-return]
        except AttributeError:
            return y * 3


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (AllStates, USED), (OneState, USED), (UsedAfter, USED), (LastButOne, USED),
        (ChangedAfter, IN_PLACE), (TwoBefore, ANOTHER), (OfTheFirstPassedOver, ANOTHER),
        (InPlace, IN_PLACE), (EarlierInPlace, IN_PLACE), (LastInPlace, IN_PLACE),
        (LastReturnedInPlace, IN_PLACE), (ByView, IN_PLACE), (FirstInPlace, IN_PLACE),
    ],
)  # fmt: skip
def test_results_go_to_the_next_block_alone_as_they_are(
    compared: Callable[..., int],
    caplog: pytest.LogCaptureFixture,
    model: type[Stack],
    reason: str,
    trained: bool,
) -> None:
    assert compared(lambda: stack(blocks=BLOCKS, model=model).requires_grad_(trained)) == 0
    assert f"{ALONE}: blocks.0 and those after it: {reason}" in caplog.text


@pytest.mark.parametrize("model", [Noted, NotedOnAll])
def test_what_is_noted_on_a_result_is_of_that_one_alone(
    compared: Callable[..., int], caplog: pytest.LogCaptureFixture, model: type[Stack]
) -> None:
    assert compared(lambda: stack(ReadsScale, blocks=BLOCKS, model=model)) == 0
    assert f"{ALONE}: blocks.0 and those after it: {ATTRIBUTES}" in caplog.text


class Mask(nn.Module):
    def __init__(self, _: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + mask
        try:
            return y * mask.scale  # type: ignore[attr-defined, no-any-return]
        except AttributeError:
            return y * 3


class NotedOnAMask(Stack):
    changes = True

    def forward(self, x: Tensor) -> Any:
        mask = x.sin()
        for number, block in enumerate(self.blocks):
            if self.changes or not number:
                mask.scale = 2.0 + number  # type: ignore[attr-defined]
            x = block(x, mask)
        return self.head(x)


class NotedOnce(NotedOnAMask):
    changes = False


class MadeInPlace(Stack):
    """PyTorch notes on the mask what it is now."""

    def forward(self, x: Tensor) -> Any:
        mask = x.sin().mul_(2).add_(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


@pytest.mark.parametrize(("model", "count"), [(NotedOnAMask, 0), (NotedOnce, 1), (MadeInPlace, 1)])
def test_what_is_noted_on_what_all_are_given(
    compared: Callable[..., int], caplog: pytest.LogCaptureFixture, model: type[Stack], count: int
) -> None:
    assert compared(lambda: stack(Mask, blocks=BLOCKS, model=model)) == count
    assert (f"{ALONE}: blocks.0 and those after it: {ATTRIBUTES}" in caplog.text) == (not count)


# --- Runs that are shared ---


class Doubled(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y.sin() * 1.5


class TwoKinds(Stack):
    def __init__(self, *_: nn.Module) -> None:
        super().__init__(*((Block, Doubled)[number % 2](number) for number in range(2 * BLOCKS)))


class Several(nn.Module):
    """Returns two tensors of its own, what it was given, a number and nothing."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Any:
        z = torch.tanh(self.linear(x) * mask)
        return {"x": z + y, "y": (z.cos(), mask, 3, None)}


class OfSeveral(Stack):
    def forward(self, x: Tensor) -> Any:
        y, mask = x.sin(), x.cos()
        for block in self.blocks:
            found = block(x, y, mask)
            x, (y, mask, number, _) = found["x"], found["y"]
        return self.head(x * number) + y.sum()


class OneOfSeveral(OfSeveral):
    """What one block alone gives besides is used."""

    def forward(self, x: Tensor) -> Any:
        mask = x.cos()
        others = []
        for block in self.blocks:
            found = block(x, x, mask)
            x = found["x"]
            others.append(found["y"][0])
        return self.head(x) + others[5].sum()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    ("kind", "model", "count"),
    [(Block, Stack, 1), (Block, Collects, 1), (Block, TwoKinds, 1), (Several, OfSeveral, 1),
     (Several, OneOfSeveral, 0)],
)  # fmt: skip
def test_long_runs(
    compared: Callable[..., int],
    caplog: pytest.LogCaptureFixture,
    kind: type[nn.Module],
    model: type[Stack],
    count: int,
    trained: bool,
) -> None:
    def make() -> nn.Module:
        return stack(kind, blocks=BLOCKS, model=model).requires_grad_(trained)

    assert compared(make) == count
    assert (f"{ALONE}: blocks.0 and those after it: {USED}" in caplog.text) == (not count)


def test_long_runs_with_a_cache(compared: Compared) -> None:
    assert compared(lambda: made(Model, Attention, BLOCKS), example(BLOCKS), dynamic_shapes=None)


def test_further_blocks_need_no_operator(
    shared: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    def finish(self: SharedTrace, program: ExportedProgram) -> None:
        counts.append(len(program.graph.nodes))
        finished(self, program)

    finished = SharedTrace.finish
    monkeypatch.setattr(SharedTrace, "finish", finish)
    for blocks in (BLOCKS, 2 * BLOCKS):
        assert shared(stack(blocks=blocks)) == 1
    assert counts[1] == counts[0]


def test_without_twins(compared: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As for tensors that are no fake ones."""
    monkeypatch.setattr(private, "twin_of", lambda _: None)
    assert compared(lambda: stack(blocks=BLOCKS)) == 1


# --- Other sizes than the example's ---


class SkipsWhereLarge(Collects):
    def given(self, number: int, states: list[Tensor]) -> Tensor:
        return states[-2 if number == 6 and states[0].shape[0] > 5 else -1]


class EndsWhereLarge(Stack):
    def forward(self, x: Tensor) -> Any:
        large = x.shape[0] > 5
        for number, block in enumerate(self.blocks):
            if number == 6 and large:
                break
            x = block(x)
        return self.head(x)


class InPlaceWhereLarge(Collects):
    def given(self, number: int, states: list[Tensor]) -> Tensor:
        return states[-1].add_(1) if number == 6 and states[0].shape[0] > 5 else states[-1]


class OfTheSixthWhereLarge(Collects):
    place = 6

    def result(self, states: list[Tensor]) -> Any:
        return self.head(states[self.place if states[0].shape[0] > 5 else -1])


class OfTheTracedWhereLarge(OfTheSixthWhereLarge):
    place = 2


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (SkipsWhereLarge, f": blocks.0 and those after it: {ANOTHER}"),
        (EndsWhereLarge, ": blocks.0 and those after it: not all of them are called"),
        (InPlaceWhereLarge, f": blocks.0 and those after it: {IN_PLACE}"),
        (OfTheSixthWhereLarge, ""),
        (OfTheTracedWhereLarge, ""),
    ],
)
def test_what_large_inputs_do_otherwise_is_found(
    shared: Callable[..., int], caplog: pytest.LogCaptureFixture, model: type[Stack], reason: str
) -> None:
    with pytest.raises(dynamo_moe.ExportError, match=r"was decided for the example, and is wrong"):
        shared(stack(blocks=BLOCKS, model=model))
    assert f"{ALONE}{reason}" in caplog.text


# --- Random numbers ---


class Draws(Stack):
    """Draws numbers between the blocks, which those neither draw nor know of."""

    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number > 3:
                random.random()  # noqa: S311
        return self.head(x)


class KnowsState(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.state = random.getstate

    def compute(self, y: Tensor) -> Tensor:
        return y * (3 + self.state()[1][-1] % 5)


class KnowsGenerator(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.draw = random.random

    def compute(self, y: Tensor) -> Tensor:
        return y * self.draw()


@pytest.mark.parametrize(
    ("kind", "count", "reason"),
    [(Block, 1, ""), (KnowsState, 0, READS), (KnowsGenerator, 0, READS)],
)
def test_numbers_are_drawn_between_blocks(
    shared: Callable[..., int],
    caplog: pytest.LogCaptureFixture,
    kind: type[nn.Module],
    count: int,
    reason: str,
) -> None:
    assert shared(stack(kind, blocks=BLOCKS, model=Draws)) == count
    assert reason in caplog.text
