"""Blocks whose MoE layers are converted are traced once for all of them, as other blocks are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import dynamo_moe
from dynamo_moe.files import metadata
from dynamo_moe.tracing.equal_blocks import runs_of

pytest_plugins = ("shared_exports",)

WIDTH, HIDDEN, EXPERTS, CHOICES = 8, 12, 5, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MoE(nn.Module):
    """Experts in a list, each called with its tokens."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.scale = scale
        self.add_experts()

    def add_experts(self) -> None:
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def expert(self, number: int, x: Tensor) -> Tensor:
        return self.experts[number](x)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(CHOICES, -1)
        weights = weights / weights.sum(-1, keepdim=True) * self.scale
        y = torch.zeros_like(x)
        for number in range(EXPERTS):
            token, choice = torch.where(ids == number)
            if token.numel():
                y[token] += self.expert(number, x[token]) * weights[token, choice, None]
        return y


class StackedMoE(MoE):
    """Weights ``[E, in, out]``, those of gate and up apart."""

    def add_experts(self) -> None:
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)

    def expert(self, number: int, x: Tensor) -> Tensor:
        return (F.silu(x @ self.gate[number]) * (x @ self.up[number])) @ self.down[number]


class SharedExpertMoE(MoE):
    """With an expert that every token visits, scaled by a gate."""

    def add_experts(self) -> None:
        super().add_experts()
        self.shared = Expert()
        self.shared_gate = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shared(x) * self.shared_gate(x).sigmoid()


class Layer(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Wide(Layer):
    """The second kind of layer of a model that has two in turn."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


def converted(*layers: nn.Module) -> nn.Module:
    model = nn.Sequential(*layers).eval()
    report = dynamo_moe.convert(model)
    assert len(report.replaced) == sum(isinstance(each, Layer) for each in layers)
    return model


def made(kind: Callable[[], nn.Module], count: int = 5) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return converted(*(Layer(kind()) for _ in range(count)))

    return make


EXAMPLE = torch.linspace(-1, 1, 4 * WIDTH).sin().reshape(4, WIDTH)


@pytest.mark.parametrize(
    ("kind", "called"),
    [(MoE, False), (MoE, True), (StackedMoE, True), (SharedExpertMoE, False)],
)
def test_converted_layers_are_shared(
    compared: Callable[..., int], tmp_path: Path, kind: type[MoE], called: bool
) -> None:
    def make() -> nn.Module:
        model = made(kind)()
        if called:  # Each layer now keeps its experts' weights in one stack.
            with torch.no_grad():
                model(EXAMPLE)
        return model

    assert compared(make, EXAMPLE) == 1
    dynamo_moe.verify(tmp_path / "True" / "model.onnx", make())


@pytest.mark.parametrize("places", [slice(3), slice(3, 6)])
def test_some_layers_keep_stacked_weights(
    compared: Callable[..., int], tmp_path: Path, places: slice
) -> None:
    def make() -> nn.Module:
        model: Any = made(MoE, 6)()
        with torch.no_grad():
            for layer in model[places]:
                layer(EXAMPLE)
        return model

    assert compared(make, EXAMPLE) == 1
    dynamo_moe.verify(tmp_path / "True" / "model.onnx", make())


@pytest.mark.parametrize("kind", [MoE, StackedMoE])
def test_dynamic_sizes(compared: Callable[..., int], tmp_path: Path, kind: type[MoE]) -> None:
    assert compared(made(kind), EXAMPLE, dynamic_shapes="batch") == 1
    dynamo_moe.verify(tmp_path / "True" / "model.onnx", made(kind)())


@pytest.mark.parametrize("target", ["dense", "onnxruntime"])
def test_record_of_layers(compared: Callable[..., int], tmp_path: Path, target: str) -> None:
    """Where a Reshape in front of a layer is removed, the record names what the file lacks."""

    def make() -> nn.Module:
        config = MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=5,
            num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        model = MixtralForCausalLM(config).eval()
        dynamo_moe.convert(model)
        return model

    example = torch.ones(2, 4, dtype=torch.int64)
    assert compared(make, example, target=target, dynamic_shapes="batch") == 1
    proto = onnx.load(tmp_path / "True" / "model.onnx")
    layers = metadata.layers_of(proto)
    results = {name for node in proto.graph.node for name in node.output}
    known = results | {weight.name for weight in proto.graph.initializer}
    assert len(layers) == 5
    for layer in layers:
        for place, name in enumerate(layer.inputs):
            assert not name or name in known or name == f"{layer.name}/{place}"


def test_two_kinds_in_turn(compared: Callable[..., int], tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        kinds = [lambda: Layer(MoE()), lambda: Wide(MoE(2.0))]
        return converted(*(kinds[number % 2]() for number in range(8)))

    assert compared(make, EXAMPLE) == 1
    dynamo_moe.verify(tmp_path / "True" / "model.onnx", make())


def test_layer_of_another_scale_is_traced(compared: Callable[..., int], tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        scales = (1.0, 1.0, 1.0, 1.0, 2.5, 1.0)
        return converted(*(Layer(MoE(scale)) for scale in scales))

    compared(make, EXAMPLE)
    dynamo_moe.verify(tmp_path / "True" / "model.onnx", make())


def test_experts_of_a_converted_layer_are_no_run() -> None:
    model: Any = made(MoE, 1)()
    assert not runs_of(model)
    assert not runs_of(model[0].moe)


class ReadsWeights(nn.Module):
    """Computes with the weights of modules, and calls none of them."""

    catches = False

    def __init__(self) -> None:
        super().__init__()
        self.parts: Any = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        try:
            weights = torch.stack([part.weight for part in self.parts])
        except Exception:
            if not self.catches:
                raise
            return x * 2
        return x @ weights.mean(0)


class CatchesErrors(ReadsWeights):
    catches = True


@pytest.mark.parametrize("kind", [ReadsWeights, CatchesErrors])
def test_run_that_is_not_called_alone_is_refused(
    compared: Callable[..., int], caplog: pytest.LogCaptureFixture, kind: type[nn.Module]
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(5)]
        return nn.Sequential(nn.Sequential(*blocks), kind()).eval()

    caplog.set_level(logging.INFO, "dynamo_moe")
    assert compared(make, EXAMPLE) == 1
    assert "weight of one that is passed over is read" in caplog.text
    assert not any(record.exc_info for record in caplog.records)
