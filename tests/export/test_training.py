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
from torch.utils.checkpoint import checkpoint

from dynamo_moe import ExportError, export, export_training
from dynamo_moe.private import gradients
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


class UNet(nn.Module):
    """One level of a U-Net, with both ways back up."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.below = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Mish()
        )
        self.resized = nn.Upsample(scale_factor=2, mode="bilinear")
        self.transposed = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(32, 10, 1)

    def forward(self, image: Tensor) -> Tensor:
        above = self.first(image)
        below = self.below(above)
        joined = torch.cat([above, self.resized(below), self.transposed(below)], 1)
        return self.last(joined).mean((2, 3))


class ConvNeXtBlock(nn.Module):
    """The block of "A ConvNet for the 2020s" (arXiv 2201.03545)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + (self.scale * y).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Two stages of one block each."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            nn.Conv2d(3, 8, 4, 4), ConvNeXtBlock(8), nn.Conv2d(8, 16, 2, 2), ConvNeXtBlock(16)
        )
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 10))

    def forward(self, image: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.stages(image), 1).flatten(1))


class Recurrent(nn.Module):
    """An LSTM and a GRU, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.gru = nn.GRU(12, 10, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gru(self.lstm(self.embedding(tokens))[0])[0][:, -1]


def images(*sizes: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *sizes)


def tokens(count: int, below: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(0, below, (batch, count))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mnist": (MnistCnn, images(1, 28, 28)),
    "resnet18": (lambda: ResNet18(8), images(3, 64, 64)),
    "encoder": (Encoder, tokens(7, 20)),
    "tied": (Tied, tokens(5, 10)),
    "unet": (UNet, images(1, 16, 16)),
    "convnext": (ConvNeXt, images(3, 32, 32)),
    "recurrent": (Recurrent, tokens(3, 20)),
}


def labels(batch: int) -> Tensor:
    return torch.randint(0, 10, (batch,))


def in_torch(model: nn.Module, x: Tensor, y: Tensor) -> Arrays:
    """Runs a step on a copy of the model."""
    model = copy.deepcopy(model)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    found: dict[str, Tensor | None] = {"loss": loss.detach()}
    found |= {f"{name}.grad": value.grad for name, value in model.named_parameters()}
    found |= {f"{name}.new": value for name, value in model.named_buffers()}
    return {name: value.numpy() for name, value in found.items() if value is not None}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.every) if name == "resnet18" else name
        for name in MODELS
    ],
)
def exported(request, tmp_path_factory) -> tuple[nn.Module, Callable[[int], Tensor], File]:
    torch.manual_seed(0)
    make, batch = MODELS[request.param]
    model = make().train()
    path = tmp_path_factory.mktemp("training") / "model.onnx"
    export_training(model, F.cross_entropy, batch(4), labels(4), path)
    return model, batch, File(path)


@pytest.mark.parametrize("size", [2, 7])
@pytest.mark.first(5)
def test_loss_and_gradients_are_those_of_pytorch(exported, size):
    model, batch, file = exported
    x, y = batch(size), labels(size)
    (name,) = {"image", "tokens"} & {*file.inputs}
    given = {name: x.numpy(), "labels": y.numpy()}
    check(file(given, state_of(model)), in_torch(model, x, y))


def test_steps_of_sgd_follow_pytorch(exported):
    # Larger steps carry rounding into the sign of some ReLU, and from there on PyTorch's own
    # float32 and float64 differ by more than the tolerance.
    rate = 0.01
    torch.manual_seed(1)
    model, batch, file = exported
    model = copy.deepcopy(model)
    state = state_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
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
                state[own] = state[own] - np.float32(rate) * value
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
    assert report.outputs == tuple(outputs) == ("loss", *report.gradients, *report.buffers)
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


def test_a_loss_comes_with_other_results(tmp_path):
    def loss(logits: Tensor, target: Tensor) -> dict[str, Tensor]:
        right = (logits.argmax(-1) == target).sum()
        return {"right": right, "loss": F.cross_entropy(logits, target), "logits": logits}

    torch.manual_seed(0)
    model = small()
    report = export_small(tmp_path, model, loss)
    assert report.outputs == ("loss", "right", "logits", "0.weight.grad", "0.bias.grad")
    x, y = torch.randn(5, 4), labels(5)
    found = File(report.path)({"input": x.numpy(), "labels": y.numpy()}, state_of(model))
    right, logits = found.pop("right"), found.pop("logits")
    check(found, in_torch(model, x, y))
    np.testing.assert_allclose(logits, model(x).detach().numpy(), rtol=1e-5, atol=1e-6)
    assert right == (logits.argmax(-1) == y.numpy()).sum()


class Counting(nn.Module):
    """Buffers that a forward changes: one counts, one is no part of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 10)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(10), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x)
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean


def test_buffers_are_changed_in_place(tmp_path):
    torch.manual_seed(0)
    model = Counting()
    report = export_small(tmp_path, model)
    assert report.buffers == ("calls.new", "mean.new")
    x, y = torch.randn(5, 4), labels(5)
    found = File(report.path)({"x": x.numpy(), "labels": y.numpy()}, state_of(model))
    check(found, in_torch(model, x, y))


def test_a_buffer_that_is_assigned_is_refused(tmp_path):
    class Assigning(Counting):
        def forward(self, x: Tensor) -> Tensor:
            self.mean: Tensor = 0.9 * self.mean
            return self.linear(x) - self.mean

    model = Assigning()
    before = model.mean
    with pytest.raises(ValueError, match="assigns its buffer 'mean' anew"):
        export_small(tmp_path, model)
    assert model.mean is before


class Tripled(torch.autograd.Function):
    """A backward that is not the forward's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 3 * dy


class Calling(nn.Module):
    """A layer, and a function of its result."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 10), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Tripled.apply, "Function Tripled, whose backward .* dynamo_moe.op_from_function"),
        (
            lambda y: checkpoint(torch.tanh, y, use_reentrant=True),
            "Function CheckpointFunction, .* use_reentrant=False",
        ),
    ],
)
def test_gradients_that_a_trace_does_not_see_are_refused(tmp_path, function, message):
    with pytest.raises(ValueError, match=message):
        export_small(tmp_path, Calling(function))


def test_backward_hooks_of_modules_are_refused(tmp_path):
    model = small()
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="remove the backward hooks"):
        export_small(tmp_path, model)


def test_checkpointed_layers(tmp_path):
    torch.manual_seed(0)
    model = Calling(lambda y: checkpoint(torch.tanh, y, use_reentrant=False))
    report = export_small(tmp_path, model)
    x, y = torch.randn(5, 4), labels(5)
    found = File(report.path)({"x": x.numpy(), "labels": y.numpy()}, state_of(model))
    check(found, in_torch(model, x, y))


def test_a_parameter_without_a_gradient_has_no_output(tmp_path):
    model = Pair()
    for unused in (lambda one, _: model.first(one), lambda one, other: model.first(one) * 2):
        model.forward = unused
        report = export_small(
            tmp_path, model, F.mse_loss, args=(torch.randn(3, 4), torch.randn(3, 5)),
            labels=torch.randn(3, 2),
        )  # fmt: skip
        assert report.gradients == ("first.weight.grad", "first.bias.grad")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes(tmp_path, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(),
        nn.LayerNorm(16), nn.Linear(16, 10),
    )  # fmt: skip
    if dtype == torch.float64:  # ONNX Runtime convolves in float32 alone.
        model = nn.Sequential(nn.Linear(16, 16), *list(model)[4:])
    model = model.to(dtype).train()
    x, y = torch.randn(5, 16, dtype=dtype), labels(5)
    report = export_training(model, F.cross_entropy, x[:3], y[:3], tmp_path / "model.onnx")
    found = File(report.path)({"input": x.numpy(), "labels": y.numpy()}, state_of(model))
    expected = in_torch(copy.deepcopy(model).double(), x.double(), y)
    for name, value in expected.items():
        assert found[name].dtype == str(dtype).removeprefix("torch.")
        scale = 3e-3 if dtype == torch.float16 else 1e-12
        np.testing.assert_allclose(found[name], value, rtol=0, atol=scale * np.abs(value).max())


@pytest.mark.every
def test_sequences_of_any_length(tmp_path):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            x = self.layer(self.embedding(tokens), src_mask=mask, is_causal=True)
            return self.head(x).mT

    torch.manual_seed(0)
    model = Model().train()
    example = torch.randint(0, 20, (2, 5))
    sizes = {"tokens": {1: "length"}, "labels": {1: "length"}}
    path = tmp_path / "model.onnx"
    export_training(model, F.cross_entropy, example, example, path, dynamic_shapes=sizes)
    x, y = torch.randint(0, 20, (3, 9)), torch.randint(0, 20, (3, 9))
    found = File(path)({"tokens": x.numpy(), "labels": y.numpy()}, state_of(model))
    check(found, in_torch(model, x, y))


@pytest.mark.every
def test_recurrent_layers_have_the_length_of_the_example(tmp_path):
    example, sizes = torch.randint(0, 20, (2, 5)), {"tokens": {1: "length"}}
    # Inference may come first: PyTorch keeps which kernel an LSTM has called.
    export(Recurrent().eval(), example, tmp_path / "inference.onnx", dynamic_shapes=sizes)
    path = tmp_path / "model.onnx"
    export_training(Recurrent(), F.cross_entropy, example, labels(2), path)
    with pytest.raises(ExportError, match=r"static shape of 5 for dimension .*\['tokens'\]"):
        export_training(
            Recurrent(), F.cross_entropy, example, labels(2), path, dynamic_shapes=sizes
        )


@pytest.mark.parametrize("moved", [None, lambda program: program])
def test_a_pytorch_with_other_names_is_refused(tmp_path, monkeypatch, moved):
    monkeypatch.setattr(gradients, "_export_forward_backward", moved)
    with pytest.raises(ExportError, match=r"cannot export gradients: .*_export_forward_backward"):
        export_small(tmp_path, small())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, _: y, r"floating scalar, got float32 of shape \[.*, 10\]"),
        (lambda y, _: (y > 0).sum(), r"floating scalar, got int64 of shape \[\]"),
        (lambda y, _: (y.mean(), y.sum()), "one tensor, got 2 values"),
        (lambda y, _: {"total": y.sum()}, "a tensor of the name 'loss', got total"),
        (lambda y, _: {"loss": y.sum(), "n": 1}, "one tensor for each name, got 2 values"),
        (lambda y, _: y.detach().sum(), "depends on no parameter"),
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
