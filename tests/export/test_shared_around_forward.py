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


def _call_of_instance_counts_modules(model: Any) -> None:
    original = model._call_impl
    model._call_impl = lambda *args: original(*args) * _number_of_modules(model)


def _forward_of_instance_counts_modules(model: nn.Module) -> None:
    original = model.forward
    model.forward = lambda x: original(x) * _number_of_modules(model)  # type: ignore[method-assign]


class ListsCountModules(Stack):
    """PyTorch asks it for its parameters."""

    count = 0

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        self.count = _number_of_modules(self)
        return super().named_parameters(*args, **kwargs)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.count


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (ListsCountModules, 0),
        (CallAddsWeights, 0),
        (CallCountsModules, 0),
        (ForwardCountsModules, 1),
    ],
)
def test_classes(compared: Callable[..., int], model: type[nn.Module], count: int) -> None:
    assert compared(lambda: stack(blocks=BLOCKS, model=model)) == count


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (_hook_adds_weights, 0),
        (_hook_counts_modules, 0),
        (_earlier_hook_counts_modules, 0),
        (_call_of_instance_counts_modules, 0),
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


class HeadInSlices(Stack):
    """Its head is part of a list."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.rest = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.rest[1:](x)


class AsksForItsHead(Stack):
    """It computes something else where PyTorch's tracer wraps modules, as it may."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 if type(self.head) is nn.Linear else 2)


@pytest.mark.parametrize("model", [ActivatedLast, HeadInSlices, AsksForItsHead])
@pytest.mark.parametrize("first", [0, 1, 2, 5])
def test_module_of_some_blocks(
    compared: Callable[..., int], model: type[nn.Module], first: int
) -> None:
    def make() -> nn.Module:
        made = stack(WithActivation, blocks=BLOCKS, model=model)
        activation = nn.GELU()
        for block in made.blocks[first:]:  # type: ignore[index,union-attr]
            block.activation = activation
        return made

    assert compared(make) == 1


class InSlices(Stack):
    """Its blocks are called as parts of their list."""

    def forward(self, x: Tensor) -> Any:
        for block in (*self.blocks[:3], *self.blocks[3:]):
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("head", [False, True])
def test_slices(compared: Callable[..., int], head: bool) -> None:
    """PyTorch names modules otherwise where it sees one of them twice."""

    def make() -> nn.Module:
        model = stack(blocks=BLOCKS, model=InSlices)
        if head:
            model.second = model.head
        return model

    assert compared(make) == 1


def _last_but_one(model: Any) -> None:
    model.second = model.blocks[-2]


def _second_list(model: Any) -> None:
    model.second = nn.ModuleList(model.blocks)


def _list_as_well(model: Any) -> None:
    model.second = model.blocks


@pytest.mark.parametrize(
    ("alias", "count"), [(_last_but_one, 1), (_second_list, 0), (_list_as_well, 0)]
)
def test_blocks_in_several_places(
    compared: Callable[..., int], alias: Callable[[Any], None], count: int
) -> None:
    def make() -> nn.Module:
        model = stack(blocks=BLOCKS)
        alias(model)
        return model

    assert compared(make) == count


@pytest.mark.parametrize("counts", [False, True])
def test_compiled_models(compared: Callable[..., int], counts: bool) -> None:
    """What ``torch.compile`` returns is called otherwise, by PyTorch alone."""
    model = CallCountsModules if counts else Stack

    def make() -> Any:
        return torch.compile(stack(blocks=BLOCKS, model=model))

    assert compared(make) == (not counts)


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
