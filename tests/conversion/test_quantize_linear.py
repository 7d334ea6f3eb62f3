"""``quantize``: linear layers beside the experts, or of a model without any."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
from custom_ops import reference
from custom_ops.packed_weights import ENCODINGS
from dynamo_moe.weights.checkpoints import load_checkpoint
from dynamo_moe.weights.packed_linear import PackedLinear, packed_layers
from listed_experts import COUNT, WIDTH, Listed, tokens
from packed_checkpoints import FAMILIES, language_model, token_ids

LENGTHS = {"input_ids": {0: "batch", 1: "length"}}
# Each family's linear layers of a block that are rounded, beside its experts.
LAYERS = {"qwen3_moe": 4, "mixtral": 4, "gpt_oss": 4, "deepseek_v3": 5 + 3}


class Two(nn.Module):
    """Two linear layers, and experts of which the router is linear too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.moe = nn.Linear(WIDTH, WIDTH), Listed()
        self.lm_head = nn.Linear(WIDTH, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.lm_head(self.moe(self.first(x)))
        return result


def two() -> Two:
    model = Two().eval()
    dynamo_moe.convert(model)
    return model


def exact(layer: PackedLinear) -> Tensor:
    """Returns what the independent decoder makes of a layer's weight."""
    return reference.unpacked(layer.weight_format, *layer.packed())


# --- Models in memory ---


@pytest.mark.parametrize("weight_format", ENCODINGS)
@pytest.mark.parametrize("target", ["plugin", "dense", "onnxruntime"])
def test_each_format_and_target(target: Any, weight_format: str, tmp_path: Path) -> None:
    model, x = two(), tokens(3, 5)
    plain = copy.deepcopy(model)
    report = dynamo_moe.quantize(model, None, linear=weight_format)
    assert (report.layers, [layer.module for layer in report.linear]) == ((), ["first"])
    assert report.plain == {"lm_head": "it is to be ignored", "moe.gate": "it is a router"}
    assert isinstance(model.first, PackedLinear)
    torch.testing.assert_close(model.first.weight, exact(model.first).float(), rtol=2e-7, atol=0)
    error = (model.first.weight - plain.first.weight).norm() / plain.first.weight.norm()
    assert 1e-4 < error < 0.15
    plain.first.weight.data = model.first.weight
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    path = tmp_path / "m.onnx"
    exported = dynamo_moe.export(model, (x,), path, target=target)
    assert len(packed_layers(model)) == 1
    multiplied = target == "onnxruntime" and weight_format != "fp8"
    node = "com.microsoft::MatMulNBits" if multiplied else "DequantizeLinear"
    assert exported.nodes[node] >= 1
    session = ort.InferenceSession(path) if multiplied else exact_session(path)
    (result,) = session.run(None, {"x": tokens(8, 5).numpy()})
    with torch.no_grad():
        close = {"rtol": 0, "atol": 2e-3} if target == "onnxruntime" else {}  # Its GELU.
        torch.testing.assert_close(torch.from_numpy(result), model(tokens(8, 5)), **close)


@pytest.mark.parametrize("weight_format", ["int4", "int8"])
def test_a_scale_of_several_blocks_of_the_runtime(weight_format: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = nn.Sequential(nn.Linear(96, 24)).eval(), tmp_path / "m.onnx"
    with torch.no_grad():
        model[0].weight[:, 48:] *= 20  # So that a row's two scales differ.
    zero_points = weight_format == "int4"
    dynamo_moe.quantize(model, None, linear=weight_format, group=48, zero_points=zero_points)
    exported = dynamo_moe.export(model, torch.randn(2, 96), path, target="onnxruntime")
    assert exported.nodes["com.microsoft::MatMulNBits"] == 1
    assert dynamo_moe.verify(path, model).passed


def exact_session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return ort.InferenceSession(path, options)


def test_experts_and_linear_layers_in_two_formats(tmp_path: Path) -> None:
    model, x = two(), tokens(3, 5)
    report = dynamo_moe.quantize(model, "int4", linear="int8", group=16, ignore=())
    assert [layer.module for layer in report.linear] == ["first", "lm_head"]
    assert model.first.packed().scales.shape == (WIDTH, WIDTH // 16)
    assert report.linear[1].bytes_before == 4 * 40 * WIDTH
    assert report.linear[1].bytes_after == 40 * WIDTH + 4 * 40 * WIDTH // 16
    lines = str(report).splitlines()
    assert lines[0].startswith("1 layers in int4: ")
    assert lines[1].startswith("2 linear layers in int8: ")
    assert lines[2] == "moe.gate stays plain: it is a router"
    exported = dynamo_moe.export(model, (x,), tmp_path / "m.onnx")
    assert exported.operators == {"DroplessMoEPacked": 1}
    assert "2 weights of products stay packed (int8)" in " ".join(exported.notes)
    assert dynamo_moe.verify(tmp_path / "m.onnx", model).passed


def test_a_model_without_experts(tmp_path: Path) -> None:
    model = language_model("llama", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"no layers on torch\.ops\.moe; convert it first"):
        dynamo_moe.quantize(model, "int4", linear="int4")
    report = dynamo_moe.quantize(model, None, linear="int4", zero_points=True, ignore=())
    assert len(report.linear) == 2 * 7
    assert report.plain == {"lm_head": "its weight is model.embed_tokens.weight too"}
    exported = dynamo_moe.export(
        model,
        (token_ids(2, 7),),
        tmp_path / "m.onnx",
        dynamic_shapes=LENGTHS,
        target="onnxruntime",
    )
    assert exported.nodes["com.microsoft::MatMulNBits"] == 2 * 7
    assert dynamo_moe.verify(tmp_path / "m.onnx", model).passed


@pytest.mark.parametrize(("family", "layers"), [*((name, 2) for name in FAMILIES), ("gpt_oss", 5)])
@pytest.mark.first(1)
def test_models_of_transformers(family: str, layers: int, tmp_path: Path) -> None:
    """Routers stay; shared experts, the head where it is wanted, and all of attention do not."""
    model = language_model(family, num_hidden_layers=layers)
    dynamo_moe.convert(model)
    group = 8 if family == "deepseek_v3" else 16
    report = dynamo_moe.quantize(model, linear="int4", group=group, ignore=())
    assert len(report.linear) == layers * LAYERS[family] + 1
    assert set(report.plain.values()) <= {"it is a router"}
    path = tmp_path / "model.onnx"
    exported = dynamo_moe.export(model, (token_ids(2, 7),), path, dynamic_shapes=LENGTHS)
    assert exported.operators == {"DroplessMoEPacked": layers}
    assert exported.nodes["DequantizeLinear"] == layers * LAYERS[family] + 1
    assert dynamo_moe.verify(path, model).passed


# --- Models of which the weights stay in their files ---


@pytest.mark.parametrize("target", ["plugin", pytest.param("onnxruntime", marks=pytest.mark.every)])
@pytest.mark.every
def test_lazy_weights_are_rounded_as_they_are_written(target: Any, tmp_path: Path) -> None:
    """The same file, byte for byte; equal blocks with their own weights among them."""
    folder = tmp_path / "model"
    language_model("qwen3_moe", num_hidden_layers=5).save_pretrained(folder)
    files = []
    for make in (dynamo_moe.open_checkpoint, load_checkpoint):
        model = make(folder)
        dynamo_moe.convert(model)
        dynamo_moe.quantize(model, linear="int4", zero_points=True)
        path = tmp_path / f"{make.__name__}.onnx"
        report = dynamo_moe.export_language_model(
            model, path, target=target, task="text-generation"
        )
        assert report.blocks
        assert "traced one by one" not in report.blocks[0]
        files.append(path)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert dynamo_moe.verify(files[0], model).passed


def test_what_the_checkpoint_has_packed_stays(tmp_path: Path) -> None:
    from packed_checkpoints import arguments, save_packed

    folder = tmp_path / "model"
    save_packed(language_model("llama"), folder, arguments(), lambda name: "q_proj" in name)
    model = dynamo_moe.open_checkpoint(folder)
    report = dynamo_moe.quantize(model, None, linear="int8")
    assert report.plain["model.layers.0.self_attn.q_proj"] == "it is packed in the checkpoint"
    assert len(report.linear) == 2 * 6
    exported = dynamo_moe.export(
        model, (token_ids(2, 7),), tmp_path / "m.onnx", dynamic_shapes=LENGTHS
    )
    kinds = Counter(t.data_type for t in onnx.load(exported.path).graph.initializer)
    assert kinds[onnx.TensorProto.INT4] == 2
    assert kinds[onnx.TensorProto.INT8] == 12


# --- The module ---


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # noqa: S301  It was made here.


@pytest.mark.parametrize("changed", [copy.deepcopy, pickled])
def test_copies_compute(changed: Callable[[nn.Module], nn.Module]) -> None:
    model = two()
    dynamo_moe.quantize(model, linear="int4")
    assert torch.equal(changed(model)(tokens(3)), model(tokens(3)))


def test_a_state_dict_has_the_bytes() -> None:
    model, other = two(), two()
    dynamo_moe.quantize(model, linear="nvfp4")
    dynamo_moe.quantize(other, linear="nvfp4")
    other.first.packed().values.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens(3)), model(tokens(3)))
    assert model.state_dict()["first.packed_weight"].dtype == torch.int8
    assert "first.weight" not in model.state_dict()


@pytest.mark.parametrize("weight_format", ["int4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_cast_model_computes(dtype: torch.dtype, weight_format: str) -> None:
    model, x = two(), tokens(5)
    dynamo_moe.quantize(model, None, linear=weight_format)
    with torch.no_grad():
        expected = model.first(x)
        result = model.to(dtype).first(x.to(dtype))
    assert (result.dtype, model.first.weight.dtype) == (dtype, dtype)
    torch.testing.assert_close(result.float(), expected, rtol=3e-2, atol=3e-2)


def test_gradients_reach_tokens_and_biases() -> None:
    model = two()
    dynamo_moe.quantize(model, None, linear="int4")
    x = tokens(5).requires_grad_()
    model.first(x).square().sum().backward()
    assert float(x.grad.abs().sum()) > 0
    assert float(model.first.bias.grad.abs().sum()) > 0


def test_a_packed_layer_is_not_trained(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    dynamo_moe.quantize(model, None, linear="int4")
    with pytest.raises(ValueError, match="the weight of '0' is packed: quantise a model once it"):
        dynamo_moe.export_training(
            model, nn.functional.mse_loss, tokens(3), tokens(3), tmp_path / "train.onnx"
        )


def test_it_is_printed_with_its_format() -> None:
    model = two()
    dynamo_moe.quantize(model, linear="int4")
    assert "weight_format='int4'" in repr(model.first)
    assert dynamo_moe.quantize(model, None, linear="int4").plain["first"] == "it was packed already"


def test_scales_from_elsewhere() -> None:
    seen = []

    def scales(path: str, expert: int, matrix: Tensor) -> Tensor:
        seen.append((path, expert))
        return torch.full((matrix.shape[0], matrix.shape[1] // 32), 0.125)

    model = two()
    dynamo_moe.quantize(model, None, linear="int4", scales=scales)
    assert seen == [("first.weight", 0)]
    assert (model.first.packed().scales == 0.125).all()


# --- What stays ---


class Shared(nn.Module):
    """Layers that cannot be packed, each for another reason."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.other.weight = self.one.weight
        self.odd = nn.Linear(48, 64)
        self.derived = nn.modules.linear.NonDynamicallyQuantizableLinear(64, 64)
        self.kept = nn.Sequential(nn.Linear(64, 64))


def test_what_stays_says_why() -> None:
    model = Shared()
    report = dynamo_moe.quantize(model, None, linear="int4", ignore=["kept.*"])
    assert report.linear == ()
    assert report.plain == {
        "one": "its weight is other.weight too",
        "other": "its weight is one.weight too",
        "odd": "it has rows of 48 values, which group=32 must divide",
        "derived": "it is a NonDynamicallyQuantizableLinear",
        "kept.0": "it is to be ignored",
    }
    assert not packed_layers(model)


def test_a_weight_that_other_operators_use_is_decoded_in_the_file(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(x) + self.layer.weight[(x.sum() > 1e9).long()]
            return result

    model = Twice().eval()
    dynamo_moe.quantize(model, None, linear="int4")
    report = dynamo_moe.export(model, (tokens(3),), tmp_path / "m.onnx")
    assert any("other operators than products use them" in note for note in report.notes)
    assert dynamo_moe.verify(tmp_path / "m.onnx", model).passed


def test_errors_leave_the_model() -> None:
    model = two()
    expected = model(tokens(3))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"weight_format": None}, "weight_format and linear are both None"),
        ({"linear": "int3"}, "linear must be one of int4, mxfp4, fp8, nvfp4, int8; got 'int3'"),
        (
            {"weight_format": "mxfp4", "linear": "fp8", "group": 32},
            "mxfp4 and fp8 has blocks of its own, got group=32",
        ),
        ({"linear": "int4", "ignore": ["firsd"]}, "ignore has 'firsd', which is no linear layer"),
        ({"linear": "int4", "group": 24}, r"moe\.w1 has rows of 64 values, which group=24 must"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            dynamo_moe.quantize(model, **options)
    with torch.no_grad():
        model.first.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"first\.weight has weights that are not finite"):
        dynamo_moe.quantize(model, linear="int4")
    with torch.no_grad():
        model.first.weight[0, 0] = 0
    assert not packed_layers(model)
    assert not any("packed_experts" in name for name, _ in model.named_modules())
    assert expected.shape == model(tokens(3)).shape


def test_experts_alone_as_before() -> None:
    model = two()
    report = dynamo_moe.quantize(model)
    assert (report.linear_format, report.linear, dict(report.plain)) == (None, (), {})
    assert not packed_layers(model)
    assert len(report.layers) == 1
    assert report.to_dict()["linear"] == []


def test_a_router_of_as_many_rows_elsewhere_is_rounded() -> None:
    """Only the layer beside the experts gives them scores."""
    model = two()
    model.lm_head = nn.Linear(WIDTH, COUNT)
    report = dynamo_moe.quantize(model, None, linear="int4", ignore=())
    assert [layer.module for layer in report.linear] == ["first", "lm_head"]


def test_the_file_is_small(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).eval()
    dynamo_moe.quantize(model, None, linear="int4")
    for target in ("plugin", "onnxruntime"):
        report = dynamo_moe.export(
            model, (torch.randn(2, 512),), tmp_path / "m.onnx", target=target
        )
        assert report.parameters_bytes == 2 * (512 * 256 + 4 * 512 * 16 + 4 * 512)
    assert np.isfinite(exact(model[0]).numpy()).all()


# --- Checks of a trace, which need values ---


class Doubles(nn.Module):
    """Computes something else for many rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if x.shape[0] > 300 else y


def test_what_a_size_decides_is_seen(tmp_path: Path) -> None:
    """The trace is compared at other sizes with the packed weights' values."""
    model = Doubles().eval()
    dynamo_moe.quantize(model, None, linear="int4")
    with pytest.raises(dynamo_moe.ExportError, match="was decided for the example, and is wrong"):
        dynamo_moe.export(model, (tokens(3),), tmp_path / "m.onnx")


class TopP(nn.Module):
    """Experts until their probabilities are 0.6 together, by the layer's own code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(64, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 64)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(dim=-1)
        ranked, order = scores.sort(dim=-1, descending=True)
        kept = ranked.cumsum(dim=-1) - ranked < 0.6
        weights = torch.zeros_like(scores).scatter(-1, order, ranked * kept)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y = y + weights[..., number, None] * expert(x)
        return y


def test_a_layer_that_is_routed_by_its_own_code(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), TopP()).eval()
    (replaced,) = dynamo_moe.convert(model).replaced
    assert replaced.module == "1"
    dynamo_moe.quantize(model, linear="int4")
    dynamo_moe.export(model, (tokens(5),), tmp_path / "m.onnx")
    assert dynamo_moe.verify(tmp_path / "m.onnx", model).passed


@pytest.mark.parametrize("target", ["plugin", "onnxruntime"])
def test_our_sessions_round_no_tokens(target: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = nn.Sequential(nn.Linear(64, 32)).eval(), tmp_path / "m.onnx"
    dynamo_moe.quantize(model, None, linear="int4", group=32)
    x = torch.randn(7, 64)
    dynamo_moe.export(model, x, path, target=target)
    feeds = {"input": x.numpy()}
    [result] = dynamo_moe.session(path).run(None, feeds)
    torch.testing.assert_close(torch.from_numpy(result), model(x), rtol=1e-5, atol=1e-5)
    if target == "plugin":
        options = ort.SessionOptions()
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
        [rounded] = dynamo_moe.session(path, options=options).run(None, feeds)
        assert np.abs(rounded - result).max() > 1e-3  # Options of a user's stay.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("opset", [None, 18])
def test_half_precision(dtype: torch.dtype, opset: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 32)
    model, path = nn.Sequential(*layers).eval().to(dtype), tmp_path / "m.onnx"
    dynamo_moe.quantize(model, None, linear="int8")
    dynamo_moe.export(model, torch.randn(2, 64, dtype=dtype), path, opset=opset)
    assert dynamo_moe.verify(path, model).passed
    assert model(torch.randn(2, 64, dtype=dtype)).dtype == dtype
