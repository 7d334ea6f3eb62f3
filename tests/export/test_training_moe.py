"""Training graphs of models with MoE layers: one node for each layer and direction."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import custom_ops
from dynamo_moe import convert, export_training
from dynamo_moe.models import DroplessMoEMlp, swin_moe_digits
from moe_architectures import ARCHITECTURES
from training_files import Arrays, File, check, state_of

pytestmark = pytest.mark.slow

ROUTED = {"DroplessMoERouted", "DroplessMoEGrad"}
EXPERTS = {"DroplessMoEExperts", "DroplessMoEExpertsGrad"}


class LanguageModel(nn.Module):
    """A transformers model, from tokens to the logits of the next one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = ARCHITECTURES[name].build()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits[:, -1]


class Experts(nn.Module):
    """A layer with a router of its own, whose choices can be none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 5)
        self.w1 = nn.Parameter(torch.randn(5, 24, 8) / 3)
        self.w2 = nn.Parameter(torch.randn(5, 8, 12) / 3)
        self.b2 = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).sigmoid().topk(3)
        ids = ids.where(weights > 0.6, -1)
        return custom_ops.experts(
            x, ids, weights, self.w1, None, self.w2, self.b2, gated=True, activation="silu"
        )


class Small(nn.Module):
    """Embedded tokens through one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(64, 8), layer, nn.Linear(8, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens)).mean(1))


def images(batch: int) -> Tensor:
    return torch.randn(batch, 1, 8, 8)


def tokens(batch: int) -> Tensor:
    return torch.randint(3, 64, (batch, 6))


def labels(batch: int) -> Tensor:
    return torch.randint(0, 10, (batch,))


Batch = Callable[[int], Tensor]
# The model, its batches, the operators of its layers, and how many layers there are.
MODELS: dict[str, tuple[Callable[[], nn.Module], Batch, set[str], int]] = {
    "swin": (swin_moe_digits, images, ROUTED, 2),
    "experts": (lambda: Small(Experts()), tokens, EXPERTS, 1),
    "mixtral": (lambda: LanguageModel("mixtral"), tokens, ROUTED, 2),
    "qwen2_moe": (lambda: LanguageModel("qwen2_moe"), tokens, ROUTED, 2),
    "deepseek_v3": (lambda: LanguageModel("deepseek_v3"), tokens, ROUTED, 1),
}


def in_torch(model: nn.Module, x: Tensor, y: Tensor) -> Arrays:
    """The loss and the gradients, computed by the model itself."""
    model = copy.deepcopy(model)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    gradients = {f"{name}.grad": value.grad for name, value in model.named_parameters()}
    found = {"loss": loss.detach(), **gradients}
    return {name: value.numpy() for name, value in found.items() if value is not None}


def moe_operators(path: Path) -> Counter[str]:
    nodes = onnx.load(path).graph.node
    return Counter(node.op_type for node in nodes if node.domain.partition(".")[0] == "moe")


# Beside DeepSeek-V3 they add nothing but plain operators.
PARAMS = [
    pytest.param(name, marks=pytest.mark.every) if name in {"mixtral", "qwen2_moe"} else name
    for name in MODELS
]


@pytest.fixture(scope="module", params=PARAMS)
def exported(request: Any, tmp_path_factory: Any) -> tuple[str, nn.Module, nn.Module, Path]:
    """The model as it was, the converted one, and its file."""
    torch.manual_seed(0)
    make, batch, _, _ = MODELS[request.param]
    original = make().eval()
    model = copy.deepcopy(original)
    convert(model)
    path = tmp_path_factory.mktemp("training") / "model.onnx"
    export_training(model, F.cross_entropy, batch(4), labels(4), path)
    return request.param, original, model, path


@pytest.mark.first(2)
def test_a_layer_is_one_node_in_each_direction(exported):
    name, _, _, path = exported
    _, _, operators, layers = MODELS[name]
    assert moe_operators(path) == dict.fromkeys(operators, layers)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.first(3)
def test_loss_and_gradients_are_those_of_the_original(exported, size):
    name, original, _, path = exported
    torch.manual_seed(size)
    x, y = MODELS[name][1](size), labels(size)
    file = File(path)
    given = {file.inputs[0]: x.numpy(), "labels": y.numpy()}
    check(file(given, state_of(original)), in_torch(original, x, y))


def test_the_converted_model_has_the_same_gradients(exported):
    name, original, model, _ = exported
    x, y = MODELS[name][1](3), labels(3)
    check(in_torch(model, x, y), in_torch(original, x, y))


def test_steps_of_sgd_lower_the_loss(exported):
    name, original, _, path = exported
    file, state = File(path), state_of(original)
    x, y = MODELS[name][1](8), labels(8)
    given = {file.inputs[0]: x.numpy(), "labels": y.numpy()}
    losses = []
    for _ in range(5):
        found = file(given, state)
        losses.append(found.pop("loss"))
        for output, value in found.items():
            parameter = output.removesuffix(".grad")
            state[parameter] = state[parameter] - np.float32(0.02) * value
    assert losses[-1] < losses[0]


def test_frozen_experts_have_no_gradient(tmp_path):
    torch.manual_seed(0)
    model = Small(Experts())
    for parameter in (model.layer.w1, model.layer.w2, model.layer.b2):
        parameter.requires_grad_(False)
    path = tmp_path / "model.onnx"
    report = export_training(model, F.cross_entropy, tokens(4), labels(4), path)
    assert "layer.router.weight.grad" in report.gradients
    assert "layer.w1.grad" not in report.gradients
    assert moe_operators(path) == dict.fromkeys(EXPERTS, 1)
    x, y = tokens(3), labels(3)
    given = {"tokens": x.numpy(), "labels": y.numpy()}
    check(File(path)(given, state_of(model)), in_torch(model, x, y))


def test_a_converted_layer_in_training_mode_is_warned_of(tmp_path):
    model = nn.Sequential(DroplessMoEMlp(8, 16, num_experts=3, top_k=2), nn.Linear(8, 10))
    convert(model.eval())
    export = partial(export_training, model, F.cross_entropy, torch.randn(4, 8), labels(4))
    model.train()
    with pytest.warns(UserWarning, match=r"1 converted module is in training mode, .*: '0'"):
        export(tmp_path / "training.onnx")
    assert not moe_operators(tmp_path / "training.onnx")
    model.eval()
    export(tmp_path / "evaluation.onnx")
    assert moe_operators(tmp_path / "evaluation.onnx") == dict.fromkeys(ROUTED, 1)
