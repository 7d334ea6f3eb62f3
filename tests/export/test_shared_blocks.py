"""Equal blocks are traced once for all of them; files are those of a model traced whole.

But for what the optimiser would make of the values of weights, which it is not shown.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dynamo_moe
from block_stacks import WIDTH, Block, Stack, stack
from dynamo_moe.models import DroplessMoEMlp

pytest_plugins = ("shared_exports",)


@pytest.mark.parametrize("blocks", [4, 7])
def test_equal_blocks_are_shared(compared: Callable[..., int], blocks: int) -> None:
    assert compared(lambda: stack(blocks=blocks)) == 1


def test_nothing_is_shared_of_three_blocks(compared: Callable[..., int]) -> None:
    assert compared(lambda: stack(blocks=3)) == 0


def test_file_computes_what_the_model_does(tmp_path: Path) -> None:
    model = stack(blocks=7)
    dynamo_moe.export(model, torch.zeros(2, WIDTH), tmp_path / "model.onnx")
    dynamo_moe.verify(tmp_path / "model.onnx", model)


def test_sequential_and_half_precision(compared: Callable[..., int]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Block() for _ in range(5))).half().eval()

    assert compared(make, torch.zeros(2, WIDTH).half()) == 1


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return x + self.inner(x)


@pytest.mark.parametrize("target", ["plugin", "dense"])
def test_moe_layers(compared: Callable[..., int], target: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = (Residual(DroplessMoEMlp(WIDTH, 16, num_experts=4, top_k=2)) for _ in range(5))
        model = nn.Sequential(*layers).eval()
        dynamo_moe.convert(model)
        return model

    assert compared(make, target=target) == 1


def test_alternating_kinds(compared: Callable[..., int]) -> None:
    class Alternating(Block):
        def compute(self, y: Tensor) -> Tensor:
            return F.relu(y) if self.is_odd else F.gelu(y)

    def make() -> nn.Module:
        model: Any = stack(Alternating, 9)
        for number, block in enumerate(model.blocks):
            block.is_odd = bool(number % 2)
        return model

    assert compared(make) == 1


def test_first_block_is_another(compared: Callable[..., int]) -> None:
    def make() -> nn.Module:
        model: Any = stack(blocks=6)
        model.blocks[0].linear = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH))
        return model

    assert compared(make) == 1


def test_attribute_that_is_not_read_may_differ(compared: Callable[..., int]) -> None:
    def make() -> nn.Module:
        model: Any = stack()
        model.blocks[4].note = "not read"
        return model

    assert compared(make) == 1


def test_stochastic_depth(compared: Callable[..., int]) -> None:
    class DropPath(nn.Module):
        def __init__(self, probability: float) -> None:
            super().__init__()
            self.probability = probability

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, self.probability) if self.probability and self.training else x

    class Dropping(Block):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.drop = DropPath(number / 10)

        def compute(self, y: Tensor) -> Tensor:
            return self.drop(F.gelu(y))

    assert compared(lambda: stack(Dropping)) == 1

    class ReadsProbability(Dropping):
        def compute(self, y: Tensor) -> Tensor:
            return super().compute(y) * (1 - self.drop.probability)

    assert compared(lambda: stack(ReadsProbability)) == 0


def _constant(block: Any) -> None:
    block.epsilon = 2e-5


def _norm_epsilon(block: Any) -> None:
    block.norm.eps = 1e-6


def _dropout(block: Any) -> None:
    block.compute = lambda y: F.dropout(y, 0.5, training=True)


def _hook(block: Any) -> None:
    block.register_forward_hook(lambda module, given, result: result * 2)


def _inner_hook(block: Any) -> None:
    block.linear.register_forward_hook(lambda module, given, result: result * 2)


def _own_method(block: Any) -> None:
    block.compute = torch.relu


def _own_forward(block: Any) -> None:
    block.forward = lambda x: x * 2


def _class_attribute(block: Any) -> None:
    block.gain = 2.0


def _buffer_dtype(block: Any) -> None:
    block.offset = torch.ones(WIDTH, dtype=torch.float64).sum().to(torch.int64)


def _other_class(block: Any) -> None:
    class Other(type(block)):  # type: ignore[misc]
        def compute(self, y: Tensor) -> Tensor:
            return torch.relu(y)

    block.__class__ = Other


def _no_bias(block: Any) -> None:
    block.linear = nn.Linear(WIDTH, WIDTH, bias=False)


def _constant_tensor(block: Any) -> None:
    block.scale = [torch.full((), 2.0)]


class Gained(Block):
    gain = 1.0

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scale = [SHARED]
        self.register_buffer("offset", torch.ones(()))

    def compute(self, y: Tensor) -> Tensor:
        return super().compute(y) * self.gain * self.scale[0] + self.offset


SHARED = torch.ones(())


@pytest.mark.parametrize(
    "change",
    [
        _constant, _norm_epsilon, _dropout, _hook, _inner_hook, _own_method, _own_forward,
        _class_attribute, _buffer_dtype, _other_class, _no_bias, _constant_tensor,
    ],
)  # fmt: skip
def test_block_that_differs_is_traced(
    compared: Callable[..., int], change: Callable[[Any], None]
) -> None:
    def make() -> nn.Module:
        model: Any = stack(Gained)
        change(model.blocks[2])
        return model

    assert compared(make) == 0


def test_closures_and_default_arguments(compared: Callable[..., int]) -> None:
    def closure(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda y: y * factor

    def default(factor: float) -> Callable[[Tensor], Tensor]:
        def scaled(y: Tensor, by: float = factor) -> Tensor:
            return y * by

        return scaled

    def made(function: Any, factor: Callable[[int], float]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            model: Any = stack()
            for number, block in enumerate(model.blocks):
                block.compute = function(factor(number))
            return model

        return make

    for function in (closure, default):
        assert compared(made(function, lambda number: 2.0)) == 1
        assert compared(made(function, lambda number: 2.0 + (number == 4))) == 0


def test_tied_weights(compared: Callable[..., int]) -> None:
    def make() -> nn.Module:
        model: Any = stack()
        model.blocks[3].linear.weight = model.blocks[2].linear.weight
        return model

    assert compared(make) == 0


def test_one_module_in_every_place(compared: Callable[..., int]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[Block()] * 6).eval()

    assert compared(make) == 0


class Scaled(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def compute(self, y: Tensor) -> Tensor:
        return y * (1.0 + self.weight.float()) * self.scale


@pytest.mark.parametrize("name", ["weight", "scale", "linear.bias", "norm.weight", "norm.bias"])
def test_special_values_in_traced_blocks(
    shared: Callable[..., int], tmp_path: Path, name: str
) -> None:
    model: Any = stack(Scaled)
    with torch.no_grad():
        for number, block in enumerate(model.blocks):
            for tensor in block.parameters():
                tensor.add_(torch.randn_like(tensor))
            if number < 3:
                block.get_parameter(name).fill_(float(name == "scale"))
    assert shared(model) == 1
    dynamo_moe.verify(tmp_path / "model.onnx", model)


def test_lists_in_lists(compared: Callable[..., int]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Sequential(*(Block() for _ in range(5))),
            nn.Linear(WIDTH, WIDTH),
            nn.Sequential(*(nn.Sequential(*(Block() for _ in range(4))) for _ in range(5))),
        ).eval()

    assert compared(make) == 2


class Drawn(Block):
    """A block whose code depends on attributes that may differ, and that may do more than that."""

    kind = 0
    counts = False
    calls: list[int] = []  # noqa: RUF012  What is tested.

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        y = self.linear(self.norm(x))
        y = (F.gelu(y), F.relu(y), y * self.epsilon)[self.kind]
        if self.counts:
            self.calls.append(self.kind)
        return x + (y if mask is None else y * mask)


class DrawnStack(Stack):
    """What is done with blocks, by an index for each of the ways in which it may be unusual."""

    masked = False
    taken = -1
    shifted = -1

    def forward(self, x: Tensor) -> Any:
        mask = torch.sigmoid(x) if self.masked else None
        taken = []
        for number, block in enumerate(self.blocks):
            x = block(x + 1 if number == self.shifted else x, mask)
            taken += [x] if number == self.taken else []
        return self.head(x), *taken


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_programs(compared: Callable[..., int], data: st.DataObject) -> None:
    pattern = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    blocks = data.draw(st.integers(4, 10))
    place = st.integers(-1, blocks - 1)
    other, counting = data.draw(place), data.draw(st.sampled_from([-1, -1, 3]))
    usage = {
        "masked": data.draw(st.booleans()),
        "taken": data.draw(place),
        "shifted": data.draw(st.one_of(st.just(-1), place)),
    }

    def make() -> nn.Module:
        torch.manual_seed(0)
        model: Any = DrawnStack(*(Drawn(number) for number in range(blocks))).eval()
        for number, block in enumerate(model.blocks):
            block.kind = pattern[number % len(pattern)]
            block.epsilon = 0.5 if number == other else 1e-5
            block.counts = number == counting
        for name, value in usage.items():
            setattr(model, name, value)
        return model

    compared(make)
