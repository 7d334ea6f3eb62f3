"""What a model does between its blocks, and with them, keeps them from being shared or does not."""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from block_stacks import Block, SecondAsWell, Stack, stack
from dynamo_moe import process_state

pytest_plugins = ("shared_exports",)


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


class Beside(Stack):
    """Computes something in turns with its blocks, from a block on."""

    begins = 0

    def forward(self, x: Tensor) -> Any:
        e = x
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number >= self.begins:
                e = e.sin()
        return self.head(x + e)


class BesideLater(Beside):
    begins = 3


class BesideTheLast(Beside):
    """The head's own work begins there."""

    begins = 5


class BesideTheFirst(Stack):
    def forward(self, x: Tensor) -> Any:
        e = x
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number < 1:
                e = e.sin()
        return self.head(x + e)


class Unused(Stack):
    """What nobody uses is no node of the graph."""

    def forward(self, x: Tensor) -> Any:
        e = x
        for block in self.blocks:
            x = block(x)
            e = e.sin()
        return self.head(x)


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


class ReplacesForward(Stack):
    def forward(self, x: Tensor) -> Any:
        own = nn.Linear.forward
        try:
            for number, block in enumerate(self.blocks):
                nn.Linear.forward = negated if number == 4 else own  # type: ignore[method-assign]
                x = block(x)
        finally:
            nn.Linear.forward = own  # type: ignore[method-assign]
        return self.head(x)


def negated(linear: nn.Linear, x: Tensor) -> Tensor:
    return -F.linear(x, linear.weight, linear.bias)


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
        (FunctionMode, 0), (Replaces, 0), (Beside, 0), (BesideLater, 0), (BesideTheLast, 1),
        (BesideTheFirst, 1), (Unused, 1), (InTurns, 0), (ReplacesForward, 0),
    ],
)  # fmt: skip
def test_what_is_done_between_blocks(
    compared: Callable[..., int], kind: type[Stack], count: int
) -> None:
    assert compared(lambda: stack(model=kind)) == count


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
    assert compared(lambda: stack(WithMask, model=kind)) == count


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


def test_garbage_collector_is_not_called_by_blocks(
    monkeypatch: pytest.MonkeyPatch, compared: Callable[..., int]
) -> None:
    """It runs anybody's callbacks at any time, as hypothesis has one."""
    calls = []
    monkeypatch.setattr(process_state, "_YOUNG_OBJECTS", 10)

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


class Fills(Block):
    """Leaves something in a container that it is given."""

    def forward(self, x: Tensor, found: Any = None) -> Tensor:
        y = super().forward(x)
        if isinstance(found, dict):
            found["scale"] = 2.0
        else:
            found.append(y.mean())
        return y


class TakesWhatIsFilled(Stack):
    def __init__(self, *blocks: nn.Module, container: Any) -> None:
        super().__init__(*blocks)
        self.container = container

    def forward(self, x: Tensor) -> Any:
        every: list[Any] = []
        for block in self.blocks:
            found = self.container()
            x = block(x, found)
            every += found.values() if isinstance(found, dict) else found
        return self.head(x) * sum(every)


class ReturnsTwice(Block):
    def forward(self, pair: Any) -> Any:
        x, again = pair if isinstance(pair, tuple) else (pair, pair)
        y = super().forward(x) * (2 if x is again else 3)
        return y, y


class TakesPair(Stack):
    def forward(self, x: Tensor) -> Any:
        pair: Any = x
        for block in self.blocks:
            pair = block(pair)
        return self.head(pair[0] if pair[0] is pair[1] else 2 * pair[1])


class ReturnsPart(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x, super().forward(x)], dim=1) * (2 if x.storage_offset() else 1)
        return y[:, x.shape[1] :]


@pytest.mark.parametrize("container", [dict, list])
def test_a_container_that_blocks_fill(shared: Callable[..., int], container: type[Any]) -> None:
    blocks: Any = stack(Fills).blocks
    assert shared(TakesWhatIsFilled(*blocks, container=container).eval()) == 0


def test_a_tensor_that_is_two_results(shared: Callable[..., int]) -> None:
    assert shared(stack(ReturnsTwice, model=TakesPair)) == 0


def test_a_result_that_is_part_of_another_tensor(shared: Callable[..., int]) -> None:
    assert shared(stack(ReturnsPart)) == 0


class PassesTwice(Block):
    def forward(self, x: Tensor, shift: Tensor) -> Any:
        return super().forward(x) + shift, shift, shift


class TakesFirst(Stack):
    def forward(self, x: Tensor) -> Any:
        shift = x.mean()
        for block in self.blocks:
            x, shift, _ = block(x, shift)
        return self.head(x)


def test_what_blocks_are_given_they_may_return_twice(shared: Callable[..., int]) -> None:
    assert shared(stack(PassesTwice, model=TakesFirst)) == 1
