"""``dynamo_moe.export`` of models without MoE layers: numbers, shapes, nothing left to simplify."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.graph import passes
from engine_checks import checked_engine

LENGTH = {"x": {1: "length"}}


class Case(NamedTuple):
    """A model, its example inputs, and the inputs that it then runs on."""

    model: nn.Module
    example: dict[str, Tensor]
    shapes: dict[str, Any]
    other: dict[str, Tensor]


class Encoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 2, 256, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(
            layer, 2, enable_nested_tensor=not options.get("norm_first"), mask_check=False
        )

    def forward(self, x: Tensor, mask: Tensor | None = None, padding: Tensor | None = None) -> Any:
        return self.encoder(x, mask=mask, src_key_padding_mask=padding)


class Residual(nn.Module):
    """ResNet's basic block, with both sums in place."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and channels == width
            else nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class Digits(nn.Module):
    """The network of PyTorch's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1, self.fc2 = nn.Linear(16 * 144, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout(x), 1)))
        return F.log_softmax(self.fc2(self.dropout(x)), dim=1)


class Logits(nn.Module):
    """A transformers model that returns only its logits."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options


class Seq2Seq(Logits):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Any:
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            use_cache=False,
        ).logits


class Images(Logits):
    def forward(self, pixel_values: Tensor) -> Any:
        return self.model(pixel_values).logits


def encoder(form: str, *, norm_first: bool) -> Case:
    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        x = {"x": torch.randn(batch, length, 128)}
        if form == "mask":
            return {**x, "mask": nn.Transformer.generate_square_subsequent_mask(length)}
        if form == "padding":
            padding = torch.zeros(batch, length, dtype=torch.bool)
            padding[0, length // 2 :] = True
            return {**x, "padding": padding}
        return x

    shapes = {
        "none": LENGTH,
        "mask": {**LENGTH, "mask": {0: "length", 1: "length"}},
        "padding": {**LENGTH, "padding": {1: "length"}},
    }
    return Case(Encoder(norm_first=norm_first), inputs(2, 5), shapes[form], inputs(3, 7))


def resnet() -> Case:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 8, 7, 2, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 8
    for width, stride in ((8, 1), (16, 2), (32, 2), (64, 2)):
        layers += [Residual(channels, width, stride), Residual(width, width, 1)]
        channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return Case(
        model, {"input": torch.randn(2, 3, 64, 64)}, {}, {"input": torch.randn(5, 3, 64, 64)}
    )


def digits() -> Case:
    return Case(Digits(), {"x": torch.randn(2, 1, 28, 28)}, {}, {"x": torch.randn(5, 1, 28, 28)})


def t5() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip

    def inputs(batch: int, source: int, target: int) -> dict[str, Tensor]:
        mask = torch.ones(batch, source, dtype=torch.long)
        mask[0, source // 2 :] = 0
        return {
            "input_ids": torch.randint(64, (batch, source)),
            "attention_mask": mask,
            "decoder_input_ids": torch.randint(64, (batch, target)),
        }

    shapes = {
        "input_ids": {1: "source"},
        "attention_mask": {1: "source"},
        "decoder_input_ids": {1: "target"},
    }
    model = Seq2Seq(transformers.T5ForConditionalGeneration(config))
    return Case(model, inputs(2, 6, 5), shapes, inputs(3, 9, 4))


def swin() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    model = Images(transformers.SwinForImageClassification(config))
    example, other = ({"pixel_values": torch.randn(batch, 3, 32, 32)} for batch in (2, 3))
    return Case(model, example, {}, other)


MODELS: dict[str, Callable[[], Case]] = {
    **{
        f"encoder-{form}-{'pre' if norm_first else 'post'}": (
            lambda form=form, norm_first=norm_first: encoder(form, norm_first=norm_first)
        )
        for form in ("none", "mask", "padding")
        for norm_first in (False, True)
    },
    "resnet": resnet,
    "digits": digits,
    "t5": t5,
    "swin": swin,
}

# Constant factors that onnxsim multiplies with one another. In T5, which scales the weighted result
# of its last norm, one factor is a weight, and weights keep their values.
MERGED_FACTORS = {"t5": 1}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Case, Path]]:
    """Exports each model once."""
    folder = tmp_path_factory.mktemp("models")
    done: dict[str, tuple[Case, Path]] = {}

    def export(name: str) -> tuple[Case, Path]:
        if name not in done:
            torch.manual_seed(0)
            case = MODELS[name]()
            case.model.eval()
            with torch.no_grad():  # Zero biases would have no effect.
                for parameter in case.model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            path = folder / f"{name}.onnx"
            dynamo_moe.export(case.model, (), path, kwargs=case.example, dynamic_shapes=case.shapes)
            done[name] = case, path
        return done[name]

    return export


def run(path: Path, inputs: dict[str, Tensor]) -> Tensor:
    session = onnxruntime.InferenceSession(str(path))
    feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
    return torch.from_numpy(session.run(None, feeds)[0])


def largest_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.first(6)
def test_numbers_at_other_sizes_than_the_example(exported, name: str) -> None:
    case, path = exported(name)
    for inputs in (case.other, case.example):
        # With gradients, so that an encoder does not use its fused path, which returns zeros for
        # padding tokens.
        expected = case.model(**inputs).detach()
        assert largest_error(run(path, inputs), expected) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_every_value_has_a_type_and_a_shape_of_sizes_and_names(exported, name: str) -> None:
    _, path = exported(name)
    model = ir.load(path)
    assert passes._shapes_are_complete(model)
    for value in (output for node in model.graph for output in node.outputs):
        assert all(isinstance(size, int) or size.value for size in value.shape), value
    onnx.checker.check_model(path, full_check=True)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in {"resnet", "swin", "t5"} else pytest.mark.every)
        for name in MODELS
    ],
)
def test_tensorrt_builds_them(exported, name: str) -> None:
    engine = checked_engine(exported(name)[1])
    assert engine.built, engine.reason()


def operators(proto: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in proto.graph.node)


@pytest.mark.parametrize("name", MODELS)
def test_onnxslim_finds_nothing_to_simplify(exported, name: str) -> None:
    onnxslim = pytest.importorskip("onnxslim")
    _, path = exported(name)
    ours = operators(onnx.load(path))
    assert not ours - operators(onnxslim.slim(onnx.load(path)))


@pytest.mark.parametrize("name", MODELS)
def test_onnxsim_only_merges_products(exported, name: str) -> None:
    """Several products with the same tensor become one product, followed by a ``Split``."""
    onnxsim = pytest.importorskip("onnxsim")
    _, path = exported(name)
    ours = operators(onnx.load(path))
    theirs = operators(onnxsim.simplify(onnx.load(path))[0])
    merged = theirs["Split"] - ours["Split"] + MERGED_FACTORS.get(name, 0)
    assert ours.total() <= theirs.total() + merged
    assert set(ours - theirs) <= {"MatMul", "Add", "Mul"}


@pytest.mark.parametrize("name", [pytest.param("t5", marks=pytest.mark.slow), "resnet"])
def test_rules_that_look_at_every_node_find_no_more(
    exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case, path = exported(name)
    monkeypatch.setattr(passes, "_RULES", list(passes._WANTED))
    again = tmp_path / "m.onnx"
    dynamo_moe.export(case.model, (), again, kwargs=case.example, dynamic_shapes=case.shapes)
    assert again.read_bytes() == path.read_bytes()


def test_an_empty_batch(exported) -> None:
    _, path = exported("encoder-none-post")
    assert run(path, {"x": torch.randn(0, 5, 128)}).shape == (0, 5, 128)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("form", ["none", "mask", "padding"])
def test_encoders_are_not_fused_where_gradients_are_off(
    tmp_path: Path, form: str, frozen: bool
) -> None:
    case, path = encoder(form, norm_first=False), tmp_path / "m.onnx"
    case.model.eval().requires_grad_(not frozen)
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.set_grad_enabled(frozen):
        dynamo_moe.export(case.model, (), path, kwargs=case.example, dynamic_shapes=case.shapes)
    assert torch.backends.mha.get_fastpath_enabled()
    case.model.requires_grad_(True)
    expected = case.model(**case.other).detach()
    assert largest_error(run(path, case.other), expected) < 1e-5


def test_attention_is_as_it_was_after_a_failed_export(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not torch.backends.mha.get_fastpath_enabled()
            raise ValueError("not today")

    before = nn.modules.transformer._detect_is_causal_mask
    with pytest.raises(dynamo_moe.ExportError, match="not today"):
        dynamo_moe.export(Fails(), torch.randn(2, 3), tmp_path / "m.onnx")
    assert torch.backends.mha.get_fastpath_enabled()
    assert nn.modules.transformer._detect_is_causal_mask is before
