"""Two units of equal blocks are traced, and a third where the second does not show what all do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from block_stacks import WIDTH, Block, SecondAsWell, Stack, stack
from cached_models import Model, example, made

pytest_plugins = ("shared_exports",)

TOO_FEW = "Two units of equal blocks are too few"


class GivesAScale(nn.Module):
    """The first computes what it does not use, and all others are given."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        if scale is None:
            return x + self.linear(x), x.mean()
        return x + self.linear(x) * scale, scale


class OfTheFirst(Stack):
    def forward(self, x: Tensor) -> Any:
        scale = None
        for block in self.blocks:
            x, scale = block(x, scale)
        return self.head(x)


class BetweenFirstAndSecond(Stack):
    """The model computes from the first block's result what all others are given."""

    def forward(self, x: Tensor) -> Any:
        scale = torch.ones(())
        for number, block in enumerate(self.blocks):
            x, _ = block(x, scale)
            if number == 0:
                scale = x.mean()
        return self.head(x)


def offset(y: Tensor) -> Tensor:
    return y + EPSILON


EPSILON = 0.5


class OtherNames(nn.Module):
    """Only blocks that are given a residual call ``offset``."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self.linear(x), 2 * x
        x = x + residual
        return offset(self.linear(x)), x


class Residuals(Stack):
    def forward(self, x: Tensor) -> Any:
        residual = None
        for block in self.blocks:
            x, residual = block(x, residual)
        return self.head(x + residual)


class Scaled(nn.Module):
    """A block that is given a second tensor, and has a weight and a buffer of that shape."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor, other: Any) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale + self.shift) + self.shared(other)

    def shared(self, other: Any) -> Tensor:
        tensor: Tensor = other
        return tensor


class ReadsAnAttribute(Scaled):
    def shared(self, other: Any) -> Tensor:
        tensor: Tensor = other.tensor
        return tensor


class ReadsItsOwn(Scaled):
    tensor: Tensor

    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        return super().forward(x, self.tensor)


class Rectified(Scaled):
    def forward(self, x: Tensor, other: Any) -> Tensor:
        return super().forward(x, other).relu()


class InputForAll(Stack):
    def forward(self, x: Tensor) -> Any:
        given = x + 1
        for block in self.blocks:
            x = block(x, given)
        return self.head(x)


class FirstResult(Stack):
    """What the second unit is given twice, the third is given once."""

    ends_unit = 0

    def forward(self, x: Tensor) -> Any:
        first = x
        for number, block in enumerate(self.blocks):
            x = block(x, first)
            if number == self.ends_unit:
                first = x
        return self.head(x)


class Holder:
    tensor: Tensor


class FirstResultHeld(Stack):
    def forward(self, x: Tensor) -> Any:
        holder = Holder()
        holder.tensor = x
        for number, block in enumerate(self.blocks):
            x = block(x, holder)
            if number == 0:
                holder.tensor = x
        return self.head(x)


class FirstResultNoted(Stack):
    """The second tensor is an attribute of one that all blocks are given."""

    def forward(self, x: Tensor) -> Any:
        noted: Any = x + 1
        noted.tensor = x
        for number, block in enumerate(self.blocks):
            x = block(x, noted)
            if number == 0:
                noted.tensor = x
        return self.head(x)


class FirstResultKept(Stack):
    """The second tensor is an attribute of every block."""

    def forward(self, x: Tensor) -> Any:
        first = x
        for number, block in enumerate(self.blocks):
            block.tensor = first
            x = block(x)
            del block.tensor
            if number == 0:
                first = x
        return self.head(x)


class WeightOfTheSecond(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x, self.blocks[1].scale)
        return self.head(x)


class BufferOfTheSecond(Stack):
    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            x = block(x, self.blocks[1].shift if number else x)
        return self.head(x)


class PartOfTheSecond(Stack):
    """A module of the second block computes, called by the model, what all others are given."""

    def forward(self, x: Tensor) -> Any:
        made = self.blocks[1].linear(x)
        for number, block in enumerate(self.blocks):
            x = block(x, made if number else x)
        return self.head(x)


class TwoResults(nn.Module):
    """The first block returns one tensor in two places."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.linear(x))
        return (y, y) if other is None else (y, other / 2 + y)


class OneResultTwice(TwoResults):
    def forward(self, x: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.linear(x))
        return (y, y) if other is None else (y + other, other)


class FirstUnitOfTwoKinds(FirstResult):
    ends_unit = 1

    def __init__(self, *_: nn.Module) -> None:
        super().__init__(*((Rectified if number % 2 else Scaled)(number) for number in range(10)))


@pytest.mark.parametrize(
    ("model", "kind", "reason"),
    [
        (Stack, Block, ""),
        (InputForAll, Scaled, ""),
        (OfTheFirst, GivesAScale, "what all are given"),
        (BetweenFirstAndSecond, GivesAScale, "is computed between blocks"),
        (SecondAsWell, Block, "a result between two of them is used elsewhere"),
        (Residuals, OtherNames, "a block uses other names"),
    ],
)
def test_a_third_unit_is_traced_where_it_is_needed(
    compared: Callable[..., int],
    caplog: pytest.LogCaptureFixture,
    model: type[Stack],
    kind: type[nn.Module],
    reason: str,
) -> None:
    with caplog.at_level(logging.INFO, logger="dynamo_moe.exporting"):
        assert compared(lambda: stack(kind, model=model).requires_grad_(False)) == 1
    assert (f"{TOO_FEW}: " in caplog.text) == bool(reason)
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("model", "kind", "reason"),
    [
        (FirstResult, Scaled, "what all are given is a unit's own"),
        (FirstUnitOfTwoKinds, Scaled, "what all are given is a unit's own"),
        (WeightOfTheSecond, Scaled, "a tensor with attributes"),
        (BufferOfTheSecond, Scaled, "what all are given is a unit's own"),
        (FirstResultHeld, ReadsAnAttribute, "objects that may hold tensors"),
        (FirstResultNoted, ReadsAnAttribute, "a tensor with attributes"),
        (FirstResultKept, ReadsItsOwn, "tensors that it is not given"),
        (PartOfTheSecond, Scaled, "is computed between blocks"),
        (OfTheFirst, TwoResults, "returns a tensor twice"),
        (OfTheFirst, OneResultTwice, "returns a tensor twice"),
    ],
)
def test_what_one_unit_has_of_its_own_and_all_have_in_common_is_told_apart(
    compared: Callable[..., int],
    caplog: pytest.LogCaptureFixture,
    model: type[Stack],
    kind: type[nn.Module],
    reason: str,
) -> None:
    with caplog.at_level(logging.INFO, logger="dynamo_moe.exporting"):
        compared(lambda: stack(kind, model=model).requires_grad_(False))
    [message] = [each for each in caplog.messages if TOO_FEW in each]
    assert reason in message


class KeysOfTheSecond(Model):
    """All blocks but the first are given what the second's layer of the cache holds."""

    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Any:
        cache = self.made(past)
        for number, block in enumerate(self.blocks):
            x = block(x, cache=cache, extra=past[1 if number else 3][0])
        return self.head(x), self.results(cache)


def test_what_a_cache_holds_is_given_to_other_blocks(
    compared: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="dynamo_moe.exporting"):
        compared(lambda: made(KeysOfTheSecond), example(), dynamic_shapes=None)
    [message] = [each for each in caplog.messages if TOO_FEW in each]
    assert "what all are given is a unit's own" in message
