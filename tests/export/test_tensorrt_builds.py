"""Exported files in TensorRT for RTX's parser and builder, for GPUs that are not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.models import swin_moe_digits
from small_models import OpLayer, OwnRouter, mlp_model, op_model
from tensorrt_builds import build, parse

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("form", [{"target": "dense"}, {"body": "unrolled"}], ids=str)
def test_a_file_without_the_plugin_builds(form: dict[str, str], tmp_path: Path) -> None:
    """Also for more slots, T*K, than TensorRT's TopK takes."""
    model = swin_moe_digits().eval()
    dynamo_moe.convert(model)
    path = tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.rand(2, 1, 8, 8), path, **form)
    # 16 tokens of 2 slots each for each image
    built = build(path, "SM89", "SM120", sizes=(1, 64, 512))
    assert built.built, built.reason()
    assert "PLUGIN_V3" not in {kind for _, kind in built.layers}


def test_a_file_of_a_rank_builds(tmp_path: Path) -> None:
    model = mlp_model()
    dynamo_moe.convert(model)
    dynamo_moe.export(model, torch.randn(3, 16), tmp_path / "m.onnx", target="dense", ranks=2)
    for rank in range(2):
        built = build(tmp_path / f"m.rank{rank}.onnx", "SM89")
        assert built.built, built.reason()
        assert [kind for _, kind in built.layers].count("DIST_COLLECTIVE") == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dense_builds_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    layers = (
        OpLayer(activation="silu", gated=True, biases=False),
        OpLayer(pre_norm="rms", residual=True, scoring="sigmoid"),
    )
    model = op_model(*layers).to(dtype)
    dynamo_moe.export(model, torch.randn(3, 16, dtype=dtype), tmp_path / "m.onnx", target="dense")
    built = build(tmp_path / "m.onnx", "SM89")
    assert built.built, built.reason()


def test_a_file_without_its_plugin_is_refused_at_the_body(tmp_path: Path) -> None:
    model = op_model(OpLayer())
    dynamo_moe.export(model, torch.randn(3, 16), tmp_path / "m.onnx")
    refused = parse(tmp_path / "m.onnx")
    assert not refused.parsed
    assert "y_EPD" in refused.reason(), refused.reason()
    assert "DroplessMoE" in refused.reason()


class _Norm(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.moe.rms_norm(x, self.weight, 1e-6)


@pytest.mark.parametrize("target", ["plugin", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_normalisation_builds(target: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """It has no plugin: TensorRT's parser expands the body of its node."""
    example = torch.zeros(2, 3, 16, dtype=dtype)
    dynamo_moe.export(_Norm(dtype), example, tmp_path / "m.onnx", target=target, opset=23)
    built = build(tmp_path / "m.onnx", "SM89")
    assert built.built, built.reason()


class _Sinkhorn(nn.Module):
    """As in DeepSeek-V4."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.softmax(-1) + 1e-6
        x = x / (x.sum(-2, keepdim=True) + 1e-6)
        for _ in range(19):
            x = x / (x.sum(-1, keepdim=True) + 1e-6)
            x = x / (x.sum(-2, keepdim=True) + 1e-6)
        return x


def test_repeated_normalisations_are_a_loop_that_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rolled, plain = tmp_path / "rolled.onnx", tmp_path / "plain.onnx"
    example = torch.randn(2, 5, 4, 4)
    report = dynamo_moe.export(_Sinkhorn(), example, rolled)
    assert report.nodes["Loop"] == 1
    assert report.nodes["ReduceSum"] == 1
    monkeypatch.setattr("dynamo_moe.graph.pipeline.roll_repeats", lambda model: None)
    assert dynamo_moe.export(_Sinkhorn(), example, plain).nodes["ReduceSum"] == 39
    x = np.random.default_rng(0).standard_normal((3, 5, 4, 4), np.float32)
    results = []
    for path in (rolled, plain):
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        results += session.run(None, {session.get_inputs()[0].name: x})
    np.testing.assert_array_equal(*results)
    built = build(rolled, "SM89")
    assert built.built, built.reason()


def test_few_steps_or_different_ones_are_no_loop(tmp_path: Path) -> None:
    class Few(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for epsilon in (1e-6, 1e-5, 1e-4, 1e-3):
                x = x / (x.sum(-1, keepdim=True) + epsilon)
            return x

    report = dynamo_moe.export(Few(), torch.rand(2, 4), tmp_path / "m.onnx")
    assert "Loop" not in report.nodes


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [(OpLayer, torch.float16), (OpLayer, torch.bfloat16), (OwnRouter, torch.float16)],
)
def test_tensorrts_own_operator_is_parsed(
    layer: type[OpLayer], dtype: torch.dtype, tmp_path: Path
) -> None:
    """RTX's builder refuses the architectures that have it."""
    model = op_model(layer(activation="silu", gated=True)).to(dtype)
    example = torch.randn(3, 16, dtype=dtype)
    report = dynamo_moe.export(model, example, tmp_path / "m.onnx", target="tensorrt_moe")
    assert report.nodes["trt::TRT_MoE"] == 1
    assert any("experimental" in note for note in report.notes)
    parsed = parse(tmp_path / "m.onnx")
    assert parsed.parsed, parsed.reason()
    assert any("MOE" in kind for _, kind in parsed.layers), parsed.layers
    with pytest.raises(ValueError, match="only TensorRT has TRT_MoE"):
        dynamo_moe.verify(tmp_path / "m.onnx", model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation": "gelu"}, "not gated, with activation 'gelu'"),
        ({"activation": "gelu", "gated": True}, "gated, with activation 'gelu'"),
        ({"activation": "silu", "gated": True, "interleaved": True}, "interleaved"),
        ({"activation": "silu", "gated": True, "weight_on_input": True}, "experts' inputs"),
        ({"activation": "silu", "gated": True, "pre_norm": "rms"}, "pre_norm 'rms'"),
    ],
    ids=str,
)
def test_layers_that_tensorrts_own_operator_has_not(
    options: dict[str, str | bool], reason: str, tmp_path: Path
) -> None:
    model = op_model(OpLayer(**options))
    with pytest.raises(ValueError, match=f"TRT_MoE has no form of .*{reason}"):
        dynamo_moe.export(model, torch.randn(3, 16), tmp_path / "m.onnx", target="tensorrt_moe")
