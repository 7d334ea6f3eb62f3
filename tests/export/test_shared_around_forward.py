"""Code around a model's forward, and submodules of blocks that PyTorch does not see there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from block_stacks import Block, Stack, stack

pytest_plugins = ("shared_exports",)

BLOCKS = 8


def _number_of_modules(model: nn.Module) -> int:
    return len(list(model.modules()))


def _sum_of_weights(model: nn.Module) -> Any:
    return sum(each.sum() for each in model.parameters())


class CallAddsWeights(Stack):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) + _sum_of_weights(self)


class CallCountsModules(Stack):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * _number_of_modules(self)


class ForwardCountsModules(Stack):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * _number_of_modules(self)


def _hook_adds_weights(model: nn.Module) -> None:
    model.register_forward_hook(lambda own, given, result: result + _sum_of_weights(own))


def _hook_counts_modules(model: nn.Module) -> None:
    model.register_forward_hook(lambda own, given, result: result * _number_of_modules(own))


def _earlier_hook_counts_modules(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda own, given: (given[0] * _number_of_modules(own),))


def _forward_of_instance_counts_modules(model: nn.Module) -> None:
    original = model.forward
    model.forward = lambda x: original(x) * _number_of_modules(model)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("model", "count"), [(CallAddsWeights, 0), (CallCountsModules, 0), (ForwardCountsModules, 1)]
)
def test_classes(compared: Callable[..., int], model: type[nn.Module], count: int) -> None:
    assert compared(lambda: stack(blocks=BLOCKS, model=model)) == count


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (_hook_adds_weights, 0),
        (_hook_counts_modules, 0),
        (_earlier_hook_counts_modules, 0),
        (_forward_of_instance_counts_modules, 1),
    ],
)
def test_instances(
    compared: Callable[..., int], change: Callable[[nn.Module], None], count: int
) -> None:
    def make() -> nn.Module:
        model = stack(blocks=BLOCKS)
        change(model)
        return model

    assert compared(make) == count


@pytest.fixture
def hook_of_all_modules() -> Iterator[None]:
    """One that changes what the last block returns."""

    def changed(module: nn.Module, given: Any, result: Any) -> Any:
        return 2 * result if getattr(module, "number", 0) == BLOCKS - 1 else result

    handle = modules.register_module_forward_hook(changed)
    yield
    handle.remove()


@pytest.mark.usefixtures("hook_of_all_modules")
def test_hooks_of_all_modules(compared: Callable[..., int]) -> None:
    assert compared(lambda: stack(blocks=BLOCKS)) == 0


class HookAmongBlocks(Stack):
    """From its fourth block on, whatever a module returns is doubled."""

    def forward(self, x: Tensor) -> Any:
        with contextlib.ExitStack() as hooks:
            for number, block in enumerate(self.blocks):
                if number == 3:
                    handle = modules.register_module_forward_hook(
                        lambda own, given, result: 2 * result
                    )
                    hooks.callback(handle.remove)
                x = block(x)
        return self.head(x)


def test_hooks_of_all_modules_among_blocks(compared: Callable[..., int]) -> None:
    assert compared(lambda: stack(blocks=BLOCKS, model=HookAmongBlocks)) == 0


class WithActivation(Block):
    """A block whose activation is a module."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.activation = nn.GELU()

    def compute(self, y: Tensor) -> Tensor:
        return self.activation(y) + self.epsilon


class ActivatedLast(Stack):
    """The activation of the last block but one has another use, too."""

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(self.blocks[-2].activation(x))  # type: ignore[operator]


class ActivatedByName(ActivatedLast):
    """It is known by another path as well."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.last = blocks[-2].activation


@pytest.mark.parametrize("model", [ActivatedLast, ActivatedByName])
def test_modules_of_blocks_used_elsewhere(
    compared: Callable[..., int], model: type[nn.Module]
) -> None:
    assert compared(lambda: stack(WithActivation, blocks=BLOCKS, model=model)) == 1


@pytest.mark.parametrize("everywhere", [False, True])
def test_module_of_all_blocks(compared: Callable[..., int], everywhere: bool) -> None:
    def make() -> nn.Module:
        model = stack(WithActivation, blocks=BLOCKS)
        shared = nn.GELU()
        for block in model.blocks[0 if everywhere else 2 :]:  # type: ignore[index,union-attr]
            block.activation = shared
        return model

    assert compared(make) == 1


class KeepsInBlock(Stack):
    """A module of a block holds something new once the block has been called."""

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        self.blocks[-2].linear.kept = x.shape[1]  # type: ignore[union-attr]
        return self.head(x) * self.blocks[-2].linear.kept  # type: ignore[union-attr]


def test_blocks_changed_after_their_call(compared: Callable[..., int]) -> None:
    assert compared(lambda: stack(blocks=BLOCKS, model=KeepsInBlock)) == 1


def test_model_is_whole_afterwards(shared: Callable[..., int]) -> None:
    model = stack(blocks=BLOCKS)
    paths = [path for path, _ in model.named_modules()]
    x = torch.rand(2, 8)
    before = model(x)
    assert shared(model) == 1
    assert [path for path, _ in model.named_modules()] == paths
    assert torch.equal(model(x), before)
