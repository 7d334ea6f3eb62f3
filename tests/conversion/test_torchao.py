"""Modules whose weights torchao has quantised keep them, packed, when they are converted."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    quantize_,
)
from torchao.quantization.granularity import PerGroup

import dynamo_moe
from dynamo_moe.packed_experts import PackedExperts
from listed_experts import WIDTH, Listed, tokens
from packed_checkpoints import language_model, token_ids

INT4: Any = getattr(torch, "int4")  # noqa: B009  # PyTorch's annotations lack it.
ASYMMETRIC = IntxWeightOnlyConfig(
    weight_dtype=INT4, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC
)
CONFIGS: dict[str, tuple[Any, str]] = {
    "int8": (Int8WeightOnlyConfig(), "int8"),
    "int8 groups": (
        IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerGroup(16)),
        "int8",
    ),
    "int4": (IntxWeightOnlyConfig(weight_dtype=INT4, granularity=PerGroup(32)), "int4"),
    "int4 zero points": (ASYMMETRIC, "int4"),
    "fp8": (Float8WeightOnlyConfig(), "fp8"),
}


def quantized(config: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Listed(**options), nn.Linear(WIDTH, WIDTH)).eval()
    quantize_(model[0].experts, config)
    return model


def weights_of(model: Any) -> list[Any]:
    return [expert[place].weight for expert in model[0].experts for place in (0, 2)]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_bytes_stay(name: str, tmp_path: Path) -> None:
    config, encoding = CONFIGS[name]
    model, x, path = quantized(config), tokens(3, 5), tmp_path / "model.onnx"
    with torch.no_grad():
        expected = model(x)
    matrices = [weight.dequantize() for weight in weights_of(model)]
    codes = [weight.qdata for weight in weights_of(model)]
    report = dynamo_moe.convert(model)
    (replacement,) = report.replaced
    assert f"its experts stay packed ({encoding})" in replacement.notes
    packed = model[0].packed_experts
    assert isinstance(packed, PackedExperts)
    for place, name_of in ((0, "w1"), (1, "w2")):
        stored = getattr(packed, name_of)
        if encoding != "int4":
            assert torch.equal(stored, torch.stack(codes[place::2]).view(torch.int8))
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert len(matrices) == 8
    exported = dynamo_moe.export(model, (x,), path)
    assert exported.operators == {"DroplessMoEPacked": 1}
    assert dynamo_moe.verify(path, model).passed


@pytest.mark.parametrize("config", [Int8WeightOnlyConfig(), Float8WeightOnlyConfig()])
def test_stacked_experts_of_transformers(config: Any, tmp_path: Path) -> None:
    model, ids, path = language_model("qwen3_moe"), token_ids(2, 7), tmp_path / "model.onnx"
    plain = language_model("qwen3_moe")
    names = FqnToConfig({r"re:.*experts\.(gate_up|down)_proj": config})
    quantize_(model, names, filter_fn=None)
    for ours, theirs in zip(plain.model.layers, model.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            dequantized = getattr(theirs.mlp.experts, name).dequantize()
            getattr(ours.mlp.experts, name).data = dequantized
    assert len(dynamo_moe.convert(model).replaced) == 2
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    shapes = {"input_ids": {0: "batch", 1: "length"}}
    exported = dynamo_moe.export(model, (ids,), path, dynamic_shapes=shapes)
    assert exported.operators == {"DroplessMoEPacked": 2}


def test_what_the_operators_do_not_have_stays_and_says_so() -> None:
    model = quantized(Int8DynamicActivationInt8WeightConfig())
    weights = weights_of(model)
    report = dynamo_moe.convert(model)
    assert report.replaced == ()
    (left,) = report.unrecognised
    assert left.reason.startswith("torchao's Int8Tensor quantises activations too")
    assert all(now is before for now, before in zip(weights_of(model), weights, strict=True))


def test_zero_points_of_eight_bits() -> None:
    config = IntxWeightOnlyConfig(
        weight_dtype=torch.int8, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC
    )
    model = quantized(config)
    report = dynamo_moe.convert(model)
    (left,) = report.unrecognised
    assert left.reason == (
        "torchao's IntxUnpackedToInt8Tensor has zero points, which int8 has not: "
        "dequantise it, then convert"
    )


def test_other_layers_and_failed_conversions_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized(Int8WeightOnlyConfig())
    quantize_(model[1], Int8WeightOnlyConfig())
    other, experts = model[1].weight, weights_of(model)

    def failing(*_: Any) -> None:
        raise KeyError("of a test")

    with monkeypatch.context() as patch:
        patch.setattr("dynamo_moe.conversion.convert_model.convert_layers", failing)
        with pytest.raises(KeyError, match="of a test"):
            dynamo_moe.convert(model)
    assert model[1].weight is other
    assert all(now is before for now, before in zip(weights_of(model), experts, strict=True))
    dynamo_moe.convert(model)
    assert model[1].weight is other


def test_a_cast_decodes(tmp_path: Path) -> None:
    model, x = quantized(Int8WeightOnlyConfig()), tokens(4)
    with torch.no_grad():
        expected = model(x)
    dynamo_moe.convert(model, experts_dtype=torch.bfloat16)
    assert all(type(weight.data) is Tensor for weight in weights_of(model))
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=0, atol=2e-2)
    exported = dynamo_moe.export(model, (x,), tmp_path / "model.onnx")
    assert exported.operators == {"DroplessMoE": 1}


def test_copies_compute() -> None:
    model, x = quantized(Int8WeightOnlyConfig()), tokens(4)
    dynamo_moe.convert(model)
    again = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_experts_that_another_module_has_too() -> None:
    """They stay as they were computed with, since nobody else could do with packed ones."""
    model = quantized(Int8WeightOnlyConfig(), bias=False)
    other = Listed(bias=False)
    other.experts = model[0].experts
    model.append(other)
    x = tokens(4)
    with torch.no_grad():
        expected = model(x)
    report = dynamo_moe.convert(model)
    assert any("is also" in note for each in report.replaced for note in each.notes)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


def test_another_reason_stays_the_reason() -> None:
    class Scaled(Listed):
        def __init__(self) -> None:
            super().__init__(bias=False)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(super().forward(x)).square()

    model = nn.Sequential(Scaled()).eval()
    quantize_(model[0].out, Int8DynamicActivationInt8WeightConfig())
    report = dynamo_moe.convert(model)
    assert report.unrecognised
    assert not any("torchao" in left.reason for left in report.unrecognised)
