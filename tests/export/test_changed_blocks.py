"""A block that the model changes before it calls it is not what its description says."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from block_stacks import Block, Stack
from dynamo_moe.tracing import run_trace

pytest_plugins = ("shared_exports",)


class Plain:
    common = 1.5

    def __init__(self) -> None:
        self.scale = 1.5

    def scaled(self, y: Tensor) -> Tensor:
        return y * self.scale * self.common


class Doubled(Plain):
    def scaled(self, y: Tensor) -> Tensor:
        return y * 2


class Negated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def scaled(y: Tensor, factor: float = 1.5) -> Tensor:
    return y * factor


def otherwise_scaled(y: Tensor, factor: float = 1.5) -> Tensor:
    return y + factor


def function() -> Any:
    """Returns a function of its own for each block."""

    def made(y: Tensor, factor: float = 1.5) -> Tensor:
        return y * factor

    return made


class Holding(Block):
    """A block with attributes of all kinds."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.held = [1.5]
        self.options = {"scale": 1.5}
        self.nested = ({"scales": [1.5]},)
        self.plain = Plain()
        self.activation = nn.Tanh()
        self.table = self.activation._parameters
        self.function = function()
        self.method = self.plain.scaled

    def compute(self, y: Tensor) -> Tensor:
        y = y * self.held[0] * self.options["scale"] * self.nested[0]["scales"][0]
        y = self.function(self.method(self.plain.scaled(y)))
        more = len(self.table) + len(self.activation._buffers)
        return super().compute(self.activation(y) * (1 + more))


class HoldingMore(Holding):
    """A block with an attribute that is described anew each time."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.partial = functools.partial(scaled, factor=1.5)

    def compute(self, y: Tensor) -> Tensor:
        return super().compute(self.partial(y))


class Changes(Stack):
    """Changes its fifth block while it computes."""

    change: Any = None

    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            with contextlib.ExitStack() as undone:
                if number == 4 and self.change is not None:
                    undone.callback(self.change(block))
                x = block(x)
        return self.head(x)


def _sets(owner: Callable[[Any], Any], name: str, value: Any) -> Any:
    def change(block: Any) -> Any:
        before = getattr(owner(block), name)
        setattr(owner(block), name, value)
        return functools.partial(setattr, owner(block), name, before)

    return change


def _puts(owner: Callable[[Any], Any], key: Any) -> Any:
    def change(block: Any) -> Any:
        owner(block)[key] = 3.0
        return functools.partial(owner(block).__setitem__, key, 1.5)

    return change


def _hooks(block: Holding) -> Any:
    return block.linear.register_forward_hook(lambda module, args, y: 2 * y).remove


def _replaces_dict(owner: Callable[[Any], Any], name: str, value: Any) -> Any:
    def change(block: Any) -> Any:
        before = vars(owner(block))
        owner(block).__dict__ = {**before, name: value}
        return functools.partial(setattr, owner(block), "__dict__", before)

    return change


def _registers(block: Any) -> Any:
    block.activation.register_buffer("more", torch.ones(()))
    return functools.partial(delattr, block.activation, "more")


def _adds(block: Any) -> Any:
    block.linear.more = 1
    return functools.partial(delattr, block.linear, "more")


_CHANGES: dict[str, Any] = {
    "attribute": _sets(lambda block: block, "epsilon", 0.5),
    "of a submodule": _sets(lambda block: block.norm, "eps", 0.5),
    "new attribute": _adds,
    "submodule": _sets(lambda block: block, "norm", nn.Identity()),
    "class of a submodule": _sets(lambda block: block.linear, "__class__", Negated),
    "hook": _hooks,
    "item of a list": _puts(lambda block: block.held, 0),
    "item of a dictionary": _puts(lambda block: block.options, "scale"),
    "nested item": _puts(lambda block: block.nested[0]["scales"], 0),
    "attribute of an object": _sets(lambda block: block.plain, "scale", 3.0),
    "class of an object": _sets(lambda block: block.plain, "__class__", Doubled),
    "dictionary of a submodule": _replaces_dict(lambda block: block.norm, "eps", 0.5),
    "dictionary of an object": _replaces_dict(lambda block: block.plain, "scale", 3.0),
    "table that is an attribute, too": _sets(lambda block: block, "table", {"more": None}),
    "buffer": _registers,
    "default of a function": _sets(lambda block: block.function, "__defaults__", (3.0,)),
    "code of a function": _sets(
        lambda block: block.function, "__code__", otherwise_scaled.__code__
    ),
}
_OTHER_CHANGES: dict[str, Any] = {
    "attribute": _CHANGES["attribute"],
    "keyword of a partial function": _puts(lambda block: block.partial.keywords, "factor"),
    "partial function": _sets(lambda block: block, "partial", functools.partial(otherwise_scaled)),
}


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "dynamo_moe.exporting"):
        yield


@pytest.fixture
def descriptions(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The blocks that were described in the trace."""
    found: list[nn.Module] = []

    def described(block: nn.Module) -> Any:
        found.append(block)
        return describe(block)

    describe = run_trace.describe
    monkeypatch.setattr(run_trace, "describe", described)
    return found


def _made(change: Any, kind: type[Block] = Holding) -> nn.Module:
    torch.manual_seed(0)
    model = Changes(*(kind(number) for number in range(7))).eval()
    model.change = change
    return model


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES.keys())
def test_changed_before_its_call(
    compared: Callable[..., int], caplog: pytest.LogCaptureFixture, change: Any
) -> None:
    assert compared(lambda: _made(change)) == 0
    assert "a block has changed since the trace began" in caplog.text


@pytest.mark.parametrize("change", _OTHER_CHANGES.values(), ids=_OTHER_CHANGES.keys())
def test_changed_in_what_is_described_anew(
    compared: Callable[..., int], caplog: pytest.LogCaptureFixture, change: Any
) -> None:
    assert compared(lambda: _made(change, HoldingMore)) == 0
    assert "a block has changed since the trace began" in caplog.text


def test_class_of_an_object_changes(
    compared: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    assert compared(lambda: _made(_sets(lambda block: Plain, "common", 3.0))) == 0
    assert "what blocks read changes" in caplog.text


def test_left_as_it_was(compared: Callable[..., int], descriptions: list[nn.Module]) -> None:
    assert compared(lambda: _made(None)) == 1
    assert len(descriptions) == 1  # The last that is traced.
    assert compared(lambda: _made(None, HoldingMore)) == 1
    assert len(descriptions) == 8


def test_attributes_that_are_equal_again(
    compared: Callable[..., int], descriptions: list[nn.Module]
) -> None:
    """Equal ones may be other objects."""
    assert compared(lambda: _made(_sets(lambda block: block, "held", [1.5]))) == 1
    assert len(descriptions) == 2
