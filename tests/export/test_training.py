"""Training graphs: loss, gradients and new buffers in ONNX Runtime against PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_moe import ExportError, export_training
from training_files import Arrays, File, check, state_of

pytestmark = pytest.mark.slow


class MnistCnn(nn.Module):
    """Two convolutions, pooling, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, stride=2, groups=2), nn.GELU(), nn.AvgPool2d(2, padding=1),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 10))

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.features(image))


class Block(nn.Module):
    """The basic block of "Deep Residual Learning for Image Recognition" (arXiv 1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)), inplace=True)
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18, with ``width`` channels in its first stage; the paper has 64."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    Block(before, after, 1 if before == after else 2), Block(after, after, 1)
                )
                for before, after in pairwise(widths)
            )
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(image))), 3, 2, 1)
        return self.head(F.adaptive_avg_pool2d(self.stages(x), 1).flatten(1))


class Encoder(nn.Module):
    """An embedding, ``nn.TransformerEncoder`` and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32, padding_idx=0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)))[:, -1]


def images(*sizes: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *sizes)


def tokens(count: int, below: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(0, below, (batch, count))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mnist": (MnistCnn, images(1, 28, 28)),
    "resnet18": (lambda: ResNet18(8), images(3, 64, 64)),
    "encoder": (Encoder, tokens(7, 20)),
    "tied": (Tied, tokens(5, 10)),
}


def labels(batch: int) -> Tensor:
    return torch.randint(0, 10, (batch,))


def in_torch(model: nn.Module, x: Tensor, y: Tensor) -> Arrays:
    """Runs a step on a copy of the model."""
    model = copy.deepcopy(model)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {f"{name}.grad": value.grad for name, value in model.named_parameters()}
    found |= {f"{name}.new": value for name, value in model.named_buffers()}
    return {name: value.numpy() for name, value in found.items() if value is not None}


@pytest.fixture(scope="module", params=MODELS)
def exported(request, tmp_path_factory) -> tuple[nn.Module, Callable[[int], Tensor], File]:
    torch.manual_seed(0)
    make, batch = MODELS[request.param]
    model = make().train()
    path = tmp_path_factory.mktemp("training") / "model.onnx"
    export_training(model, F.cross_entropy, batch(4), labels(4), path)
    return model, batch, File(path)


@pytest.mark.parametrize("size", [2, 7])
def test_loss_and_gradients_are_those_of_pytorch(exported, size):
    model, batch, file = exported
    x, y = batch(size), labels(size)
    (name,) = {"image", "tokens"} & {*file.inputs}
    given = {name: x.numpy(), "labels": y.numpy()}
    check(file(given, state_of(model)), in_torch(model, x, y))


def test_steps_of_sgd_follow_pytorch(exported):
    model, batch, file = exported
    model = copy.deepcopy(model)
    state = state_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    names = {*file.inputs}
    for _ in range(5):
        x, y = batch(6), labels(6)
        given = {"labels": y.numpy(), **dict.fromkeys({"image", "tokens"} & names, x.numpy())}
        found = file(given, state)
        loss = F.cross_entropy(model(x), y)
        np.testing.assert_allclose(found["loss"], loss.item(), rtol=2e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for output, value in found.items():
            own, _, kind = output.rpartition(".")
            if kind == "grad":
                state[own] = state[own] - np.float32(0.05) * value
            elif kind == "new":
                state[own] = value


def test_exporting_leaves_the_model_as_it_was(tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    before = state_of(model.train())
    x = torch.randn(4, 1, 8, 8)
    export_training(model, F.cross_entropy, x, labels(4), tmp_path / "model.onnx")
    after = state_of(model)
    assert all(np.array_equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


def small(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 10), *modules).train()


def export_small(path: Path, model: nn.Module, loss: Any = F.cross_entropy, **options: Any) -> Any:
    x, y = options.pop("args", torch.randn(4, 4)), options.pop("labels", labels(4))
    return export_training(model, loss, x, y, path / "model.onnx", **options)


def test_what_the_file_is(tmp_path):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 10)).train()
    model[0].bias.requires_grad_(False)
    report = export_small(tmp_path, model)
    trained = ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]
    held = ["0.weight", "0.bias", *trained[1:]]
    buffers = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert sorted(report.inputs) == sorted(["input", "labels", *held, *buffers[:2], buffers[2]])
    assert report.inputs[:2] == ("input", "labels")
    assert report.gradients == tuple(f"{name}.grad" for name in trained)
    assert report.buffers == tuple(f"{name}.new" for name in buffers)
    outputs = [value.name for value in onnx.load(report.path).graph.output]
    assert set(outputs) == {"loss", *report.gradients, *report.buffers}
    assert report.to_dict()["path"] == str(tmp_path / "model.onnx")


def test_parameters_can_be_initializers(tmp_path):
    torch.manual_seed(0)
    model = small()
    report = export_small(tmp_path, model, parameters="initializers")
    assert report.inputs == ("input", "labels")
    x, y = torch.randn(5, 4), labels(5)
    found = File(report.path)({"input": x.numpy(), "labels": y.numpy()}, {})
    check(found, in_torch(model, x, y))


class Pair(nn.Module):
    """A model of two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(5, 2)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.first(one) * self.second(other)


def test_several_arguments_and_labels_have_names(tmp_path):
    def loss(result: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return ((result - target).square() * weight).mean()

    args = (torch.randn(3, 4), torch.randn(3, 5))
    report = export_small(
        tmp_path,
        Pair(),
        loss,
        args=args,
        labels=(torch.randn(3, 2), torch.rand(3, 1)),
    )
    assert report.inputs[:4] == ("one", "other", "labels_0", "labels_1")


def test_parameters_of_the_loss_are_trained_too(tmp_path):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, logits: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.scale * logits, target)

    report = export_small(tmp_path, small(), Scaled())
    assert report.gradients == ("0.weight.grad", "0.bias.grad", "loss.scale.grad")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, _: y, r"floating scalar, got float32 of shape \[.*, 10\]"),
        (lambda y, _: (y > 0).sum(), r"floating scalar, got int64 of shape \[\]"),
        (lambda y, _: (y.mean(), y.sum()), "one tensor, got 2 values"),
    ],
)
def test_a_loss_is_one_floating_scalar(tmp_path, loss, message):
    with pytest.raises(ValueError, match=message):
        export_small(tmp_path, small(), loss)
    assert not list(tmp_path.iterdir())


def test_a_model_without_trained_parameters_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        export_small(tmp_path, small().requires_grad_(False))


@pytest.mark.parametrize(
    "module", [nn.Dropout(0.1), nn.AlphaDropout(0.1), nn.RReLU(), nn.FeatureAlphaDropout(0.1)]
)
def test_random_numbers_are_refused(tmp_path, module):
    with pytest.raises(ValueError, match=r"^1 draws random numbers .* dropout to 0"):
        export_small(tmp_path, small(module))


@pytest.mark.parametrize(
    "module", [nn.Dropout(0.0), nn.Dropout(0.1).eval(), nn.AlphaDropout(0.1).eval()]
)
def test_what_draws_no_numbers_is_exported(tmp_path, module):
    model = small()
    model.append(module)
    assert export_small(tmp_path, model).gradients == ("0.weight.grad", "0.bias.grad")


def test_other_values_of_options_are_refused(tmp_path):
    with pytest.raises(ValueError, match="inputs or initializers; got 'outputs'"):
        export_small(tmp_path, small(), parameters="outputs")
    with pytest.raises(TypeError, match=r"the example does not fit Sequential\.forward"):
        export_small(tmp_path, small(), args=(torch.randn(4, 4), torch.randn(4, 4)))
    with pytest.raises(ExportError, match="the model itself fails on the example"):
        export_small(tmp_path, small(), args=torch.randn(4, 5))
