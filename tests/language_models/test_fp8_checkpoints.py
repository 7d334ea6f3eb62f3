"""Checkpoints in FP8: DeepSeek-V3's and Qwen3's blocks, Mistral's matrices, and rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dynamo_moe
from dynamo_moe.weights.checkpoints import load_checkpoint
from moe_architectures import ARCHITECTURES
from packed_checkpoints import check_file, language_model, set_quantization, token_ids

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
ROWS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
SIZES = {"hidden_size": 256, "moe_intermediate_size": 128}


def quantized(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Returns a matrix in E4M3, and its scales."""
    if form == "blocks":
        blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    elif form == "rows":
        scales = weight.abs().amax(dim=1, keepdim=True) / 448
        spread = scales
    else:
        scales = (weight.abs().max() / 448).reshape(1)
        spread = scales
    return (weight / spread).to(torch.float8_e4m3fn), scales


def checkpoint(folder: Path, form: str, **changes: Tensor | None) -> Path:
    language_model("qwen3_moe", **SIZES).save_pretrained(folder)
    name_of_scales = "weight_scale_inv" if form == "blocks" else "weight_scale"
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".experts." in name or (name.endswith("o_proj.weight") and form != "blocks"):
            prefix = name.removesuffix("weight")
            stored[name], stored[prefix + name_of_scales] = quantized(tensor, form)
        else:
            stored[name] = tensor
    for name, change in changes.items():
        first = next(key for key in stored if key.endswith(name))
        if change is None:
            del stored[first]
        else:
            stored[first] = change
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, BLOCKS if form == "blocks" else ROWS)
    return folder


@pytest.mark.parametrize("form", ["blocks", "rows", "one scale"])
@pytest.mark.first(2)
def test_the_file_computes_what_the_decoded_model_does(form: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", form)
    model = dynamo_moe.open_checkpoint(folder, dtype=torch.float32)
    report = dynamo_moe.convert(model)
    assert [r.notes for r in report.replaced] == [("its experts stay packed (fp8)",)] * 2
    path = tmp_path / "model.onnx"
    exported = dynamo_moe.export(
        model,
        (token_ids(2, 7),),
        path,
        dynamic_shapes={"input_ids": {0: "batch", 1: "length"}},
    )
    assert exported.operators == {"DroplessMoEPacked": 2}
    whole = load_checkpoint(folder, dtype=torch.float32)
    stored = load_file(folder / "model.safetensors")
    prefix = "model.layers.1.mlp.experts.3.down_proj.weight"
    weight = whole.model.layers[1].mlp.experts.down_proj[3]
    scales = stored[f"{prefix}_scale_inv" if form == "blocks" else f"{prefix}_scale"]
    if form == "blocks":
        scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(weight, stored[prefix].float() * scales)
    check_file(path, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale_inv": None}, r"weight has no .*\.weight_scale_inv"),
        ({"weight_scale_inv": torch.ones(3, 3)}, r"has scales \[3, 3\]; they must be \[2, 1\] or"),
    ],
)
def test_files_that_do_not_fit(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "blocks", **change)
    with pytest.raises(ValueError, match=message):
        dynamo_moe.open_checkpoint(folder)


def test_stacked_weights_are_refused(tmp_path: Path) -> None:
    stacked = torch.zeros(4, 128, 256, dtype=torch.float8_e4m3fn)
    folder = checkpoint(tmp_path / "model", "blocks", **{"down_proj.weight": stacked})
    with pytest.raises(ValueError, match=r"with scales \[2, 1\] must be float8_e4m3fn of all expe"):
        dynamo_moe.open_checkpoint(folder)


@pytest.mark.parametrize("of_experts", [(8,), pytest.param((8, 1, 1), marks=pytest.mark.every)])
def test_one_scale_of_each_matrix(of_experts: tuple[int, ...], tmp_path: Path) -> None:
    """As Mistral Small 4 has it: all experts in one tensor, scales of activations beside all."""
    folder, path = tmp_path / "model", tmp_path / "model.onnx"
    ARCHITECTURES["mistral4"].build().save_pretrained(folder)
    stored: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = decoded[name] = tensor
        if tensor.ndim == 3:
            scales = tensor.abs().amax((1, 2)) / 448
            of_activations, sizes = f"{name}_activation_scale", of_experts
        elif "_proj.weight" in name:
            scales = tensor.abs().max() / 448
            of_activations, sizes = f"{name.removesuffix('weight')}activation_scale", ()
        else:
            continue
        spread = scales.reshape(*scales.shape, *[1] * (tensor.ndim - scales.ndim))
        stored[name] = (tensor / spread).to(torch.float8_e4m3fn)
        decoded[name] = stored[name].float() * spread
        stored[f"{name}_scale_inv"] = scales.reshape(sizes)
        stored[of_activations] = torch.ones_like(scales)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, BLOCKS | {"weight_block_size": None, "activation_scheme": "static"})
    whole = load_checkpoint(folder, dtype=torch.float32)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, decoded[name]), name
    model = dynamo_moe.open_checkpoint(folder, dtype=torch.float32)
    report = dynamo_moe.convert(model)
    assert {r.notes for r in report.replaced} == {("its experts stay packed (fp8)",)}
    shapes = {"input_ids": {0: "batch", 1: "length"}}
    dynamo_moe.export(model, (token_ids(2, 7),), path, dynamic_shapes=shapes)
    check_file(path, folder)


def test_other_blocks_are_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "blocks")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"fp8 with weight_block_size=\[64, 64\] is not taken"):
        dynamo_moe.open_checkpoint(folder)
