"""Two units of equal blocks are traced, and a third where the second does not show what all do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
from block_stacks import WIDTH, Block, Stack, stack
from cached_models import Model, example, made

pytest_plugins = ("shared_exports",)


class GivesAScale(nn.Module):
    """The first computes what it does not use, and all others are given."""

    def __init__(self) -> None:
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


class AfterTheSecond(Stack):
    """What the second block returns has another use, too."""

    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                second = x
        return self.head(x) + self.head(second)


def offset(y: Tensor) -> Tensor:
    return y + EPSILON


EPSILON = 0.5


class OtherNames(nn.Module):
    """Only blocks that are given a residual call ``offset``."""

    def __init__(self) -> None:
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

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor, other: Any) -> Tensor:
        shared: Tensor = getattr(other, "tensor", other)
        return torch.tanh(self.linear(x) * self.scale + self.shift) + shared / 2


class FirstResult(Stack):
    """What the second block is given twice, the third is given once."""

    def forward(self, x: Tensor) -> Any:
        first = x
        for number, block in enumerate(self.blocks):
            x = block(x, first)
            if number == 0:
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


class FirstResultOfTwoKinds(Stack):
    def forward(self, x: Tensor) -> Any:
        first = x
        for number, block in enumerate(self.blocks):
            x = block(x, first)
            if number == 1:
                first = x
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


class ReadsItsOwn(Scaled):
    tensor: Tensor

    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        return super().forward(x, self.tensor)


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

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.linear(x))
        return (y, y) if other is None else (y, other / 2 + y)


class OneResultTwice(TwoResults):
    def forward(self, x: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.linear(x))
        return (y, y) if other is None else (y + other, other)


@pytest.mark.parametrize(
    ("make", "third"),
    [
        (stack, False),
        (lambda: Stack(*(Block(n) for n in range(4))), False),
        (lambda: OfTheFirst(*(GivesAScale() for _ in range(6))), True),
        (lambda: BetweenFirstAndSecond(*(GivesAScale() for _ in range(6))), True),
        (lambda: AfterTheSecond(*(Block() for _ in range(6))), True),
        (lambda: Residuals(*(OtherNames() for _ in range(6))), True),
    ],
    ids=["plain", "four", "of-the-first", "between", "after-the-second", "other-names"],
)
def test_a_third_unit_is_traced_where_it_is_needed(
    compared: Callable[..., int],
    caplog: pytest.LogCaptureFixture,
    make: Callable[[], nn.Module],
    third: bool,
) -> None:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)

    with caplog.at_level(logging.INFO, logger="dynamo_moe.exporting"):
        assert compared(seeded) == 1
    assert ("Two units of equal blocks are too few" in caplog.text) == third


def _alternating() -> nn.Module:
    class Other(Scaled):
        def forward(self, x: Tensor, other: Any) -> Tensor:
            return super().forward(x, other).relu()

    return FirstResultOfTwoKinds(*((Other if number % 2 else Scaled)() for number in range(10)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: FirstResult(*(Scaled() for _ in range(6))),
        lambda: FirstResultHeld(*(Scaled() for _ in range(6))),
        lambda: FirstResultNoted(*(Scaled() for _ in range(6))),
        lambda: FirstResultKept(*(ReadsItsOwn() for _ in range(6))),
        _alternating,
        lambda: BufferOfTheSecond(*(Scaled() for _ in range(6))),
        lambda: PartOfTheSecond(*(Scaled() for _ in range(6))),
        lambda: OfTheFirst(*(TwoResults() for _ in range(6))),
        lambda: OfTheFirst(*(OneResultTwice() for _ in range(6))),
    ],
    ids=[
        *("first-result", "held", "noted", "kept", "two-kinds", "buffer-of-the-second"),
        *("part-of-the-second", "two-results", "one-result-twice"),
    ],
)
def test_what_one_unit_has_of_its_own_and_all_have_in_common_is_told_apart(
    compared: Callable[..., int], caplog: pytest.LogCaptureFixture, make: Callable[[], nn.Module]
) -> None:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)

    with caplog.at_level(logging.INFO, logger="dynamo_moe.exporting"):
        compared(seeded)
    assert "Two units of equal blocks are too few" in caplog.text


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
    assert "Two units of equal blocks are too few" in caplog.text


def test_a_weight_of_the_second_block_that_all_are_given(
    shared: Callable[..., int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = WeightOfTheSecond(*(Scaled() for _ in range(6))).eval()
    shared(model, path=tmp_path / "model.onnx")
    dynamo_moe.verify(tmp_path / "model.onnx", model)
