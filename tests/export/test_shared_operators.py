"""Code that PyTorch's own functions call for a block is seen as the block's own is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    handle_torch_function,
    has_torch_function,
    wrap_torch_function,
)

from dynamo_moe.private import FakeTensorMode
from dynamo_moe.tracing.read_names import ReadNames

pytest_plugins = ("shared_exports",)

WIDTH = 8
TURN = 0


class Size:
    """A size that PyTorch asks for by ``__index__``."""

    def __index__(self) -> int:
        return WIDTH - (TURN == 4)


def overridable(x: Tensor) -> Tensor:
    if has_torch_function((x,)):
        taken: Tensor = handle_torch_function(overridable, (x,), x)
        return taken
    return x * TURN


class Scaling(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * TURN if func is torch.tanh else result


@wrap_torch_function(lambda x: (x,))
def wrapped(x: Tensor) -> Tensor:
    return x * TURN


def attended(x: Tensor) -> Tensor:
    ones = torch.ones(3 * WIDTH, WIDTH), torch.ones(WIDTH, WIDTH), torch.ones(WIDTH)
    result, _ = torch.nn.functional.multi_head_attention_forward(
        *(x, x, x, WIDTH, 1, ones[0], None, None, None, False, 0.0, ones[1], ones[2]),
        training=False,
    )
    return result


def in_slice(x: Tensor) -> Tensor:
    return x[..., : Size()].sum(-1, keepdim=True)


def in_mode(x: Tensor) -> Tensor:
    with Scaling():
        return torch.tanh(x)


def registered(x: Tensor) -> Tensor:
    result: Tensor = torch.ops.dynamo_moe_tests.scaled(x)
    return result


@pytest.fixture(autouse=True)
def operator() -> Iterator[None]:
    """Registers an operator that PyTorch computes by Python code."""
    library = torch.library.Library("dynamo_moe_tests", "FRAGMENT")
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", lambda x: x * TURN, "CompositeImplicitAutograd")
    yield
    library._destroy()


@pytest.fixture
def replaced_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces a function that others of PyTorch call."""
    original = torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda x, **options: original(x, **options) * TURN
    )


class Block(nn.Module):
    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return x + self.compute(self.linear(x))


class Stack(nn.Module):
    """Blocks that find another global each time, if they look for it."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(compute) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        global TURN  # noqa: PLW0603  What is tested.
        for turn, block in enumerate(self.blocks):
            TURN = turn
            x = block(x)
        return x


@pytest.mark.parametrize("compute", [overridable, wrapped, in_slice, in_mode, registered])
def test_globals_that_are_read_inside(
    shared: Callable[..., int], compute: Callable[[Tensor], Tensor]
) -> None:
    assert shared(Stack(compute).eval(), torch.randn(2, WIDTH)) == 0


@pytest.mark.usefixtures("replaced_softmax")
def test_functions_of_others_in_place_of_pytorchs(shared: Callable[..., int]) -> None:
    assert shared(Stack(attended).eval(), torch.randn(2, WIDTH)) == 0


class UnderMode(nn.Module):
    """A model that runs under a mode, which finds another global for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(torch.tanh)

    def forward(self, x: Tensor) -> Tensor:
        with Scaling():
            result: Tensor = self.stack(x)
        return result


def test_modes_of_others_around_all_blocks(shared: Callable[..., int]) -> None:
    assert shared(UnderMode().eval(), torch.randn(2, WIDTH)) == 0


def plain(x: Tensor) -> Tensor:
    return torch.tanh(x[..., :WIDTH]).softmax(-1)


def test_blocks_that_read_none_are_shared(compared: Callable[..., int]) -> None:
    assert compared(lambda: Stack(plain).eval(), torch.randn(2, WIDTH)) == 1


def test_code_of_operators_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    note = ReadNames._note

    def noting(self: ReadNames, frame: Any, event: str, argument: Any) -> None:
        seen.append(frame.f_code.co_name)
        note(self, frame, event, argument)

    monkeypatch.setattr(ReadNames, "_note", noting)
    names = ReadNames()
    with FakeTensorMode() as mode:
        given = mode.from_tensor(torch.randn(2, WIDTH))
        with names.watched():
            result = plain(given)
    assert result.shape == (2, WIDTH)
    assert "plain" in seen
    assert len(seen) < 50  # Of some 1500 in all.
