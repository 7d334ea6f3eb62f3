"""Checkpoints whose experts are packed: their bytes go to the file as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file, save_file
from torch import Tensor

import dynamo_moe
from dynamo_moe.weights.checkpoints import load_checkpoint
from dynamo_moe.weights.lazy_tensors import LazyTensor
from packed_checkpoints import (
    FAMILIES,
    add_packed,
    arguments,
    check_file,
    compressed,
    decompressed,
    language_model,
    save_packed,
    token_ids,
)

SHAPES = {"input_ids": {0: "batch", 1: "length"}}
# transformers keeps gpt-oss's experts as they come in MXFP4, not each in a linear layer.
LINEAR = [family for family in FAMILIES if family != "gpt_oss"]


def of_experts(name: str) -> bool:
    return ".experts." in name


def everywhere(name: str) -> bool:
    return of_experts(name) or name.endswith(("q_proj.weight", "o_proj.weight"))


def opened(folder: Path, dtype: torch.dtype | None = torch.float32) -> Any:
    model = dynamo_moe.open_checkpoint(folder, dtype=dtype)
    report = dynamo_moe.convert(model)
    assert len(report.replaced) == 2
    assert all(r.notes == ("its experts stay packed (int4)",) for r in report.replaced)
    return model


@pytest.mark.each_value
@pytest.mark.parametrize("target", ["plugin", "onnxruntime"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("family", LINEAR)
@pytest.mark.first(2)
def test_the_file_computes_what_the_decoded_model_does(
    family: str, symmetric: bool, target: Any, tmp_path: Path
) -> None:
    args = arguments(symmetric=symmetric)
    folder = save_packed(language_model(family), tmp_path / "model", args, everywhere)
    path = tmp_path / "model.onnx"
    model = opened(folder)
    report = dynamo_moe.export(
        model, (token_ids(2, 7),), path, dynamic_shapes=SHAPES, target=target
    )
    assert report.operators == {"DroplessMoEPacked": 2}
    check_file(path, folder)


def test_the_file_has_the_checkpoint_s_bytes(tmp_path: Path) -> None:
    folder = save_packed(
        language_model("qwen3_moe"), tmp_path / "model", arguments(symmetric=False), of_experts
    )
    stored, path = load_file(folder / "model.safetensors"), tmp_path / "model.onnx"
    dynamo_moe.export(opened(folder), (token_ids(2, 7),), path, dynamic_shapes=SHAPES)
    file = onnx.load(path)
    values = {t.name: onnx.numpy_helper.to_array(t) for t in file.graph.initializer}
    nodes = [node for node in file.graph.node if node.op_type == "DroplessMoEPacked"]
    for layer, node in enumerate(nodes):
        w1, w2 = (torch.from_numpy(values[node.input[place]].copy()) for place in (2, 3))
        for expert in range(4):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            gate, up, down = (
                stored[f"{prefix}.{name}_proj.weight_packed"].view(torch.int8)
                for name in ("gate", "up", "down")
            )
            assert torch.equal(w1[expert], torch.cat([gate, up]))
            assert torch.equal(w2[expert], down)


def test_the_checkpoint_s_own_dtype(tmp_path: Path) -> None:
    """Its decoded weights are transformers' to the bit."""
    model = language_model("qwen3_moe").to(torch.bfloat16)
    folder = save_packed(model, tmp_path / "model", arguments(symmetric=False), of_experts)
    whole = load_checkpoint(folder)
    stored = load_file(folder / "model.safetensors")
    for layer, block in enumerate(whole.model.layers):
        for expert in range(4):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            judged = [
                decompressed(
                    {
                        kind: stored[f"{prefix}.{name}.{kind}"]
                        for kind in (
                            *("weight_packed", "weight_scale", "weight_shape"),
                            "weight_zero_point",
                        )
                    },
                    arguments(symmetric=False),
                )
                for name in ("gate_proj", "up_proj", "down_proj")
            ]
            experts = block.mlp.experts
            assert torch.equal(experts.gate_up_proj[expert], torch.cat(judged[:2]))
            assert torch.equal(experts.down_proj[expert], judged[2])
    report = dynamo_moe.export(
        opened(folder, None), (token_ids(2, 7),), tmp_path / "x.onnx", dynamic_shapes=SHAPES
    )
    assert report.operators == {"DroplessMoEPacked": 2}


def test_nothing_is_decoded_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_packed(language_model("qwen3_moe"), tmp_path / "model", arguments(), of_experts)
    model = opened(folder)
    buffers = dict(model.named_buffers())
    packed = {name: tensor for name, tensor in buffers.items() if "packed_experts" in name}
    assert len(packed) == 2 * 4
    assert all(isinstance(tensor, LazyTensor) for tensor in packed.values())
    assert not any("experts" in name for name, _ in model.named_parameters())

    def decoded(*_: Any) -> Tensor:
        raise AssertionError("a weight is decoded")

    monkeypatch.setattr("dynamo_moe.weights.packed_tensors._Unpacking.__call__", decoded)
    dynamo_moe.export(model, (token_ids(2, 7),), tmp_path / "model.onnx", dynamic_shapes=SHAPES)


def test_experts_in_another_dtype_are_decoded(tmp_path: Path) -> None:
    folder = save_packed(language_model("mixtral"), tmp_path / "model", arguments(), of_experts)
    model = dynamo_moe.open_checkpoint(folder, dtype=torch.float32)
    dynamo_moe.convert(model, experts_dtype=torch.float16)
    report = dynamo_moe.export(
        model, (token_ids(2, 7),), tmp_path / "model.onnx", dynamic_shapes=SHAPES
    )
    assert report.operators == {"DroplessMoE": 2}


def of_w2(name: str) -> bool:
    return of_experts(name) and name.endswith("down_proj.weight")


def test_a_scale_for_a_whole_row(tmp_path: Path) -> None:
    """D and H differ: the larger group's scale is repeated, which changes no number."""
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=64)
    folder = save_packed(language_model("qwen3_moe"), tmp_path / "model", args, of_w1)
    add_packed(folder, arguments(symmetric=False, group=32), of_w2)
    model, path = opened(folder), tmp_path / "model.onnx"
    experts = model.model.layers[0].mlp.experts.packed_experts
    assert experts.w1_scales.shape == (4, 64, 2)
    assert experts.w1_zero_points.shape == (4, 64, 2)
    dynamo_moe.export(model, (token_ids(2, 7),), path, dynamic_shapes=SHAPES)
    whole, ids = load_checkpoint(folder, dtype=torch.float32), token_ids(3, 9)
    (result,) = ort.InferenceSession(path).run(None, {"input_ids": ids.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(result), whole(ids).logits, rtol=1e-4, atol=1e-5
        )


def of_w1(name: str) -> bool:
    return of_experts(name) and not of_w2(name)


@pytest.mark.parametrize("kind", ["w1 alone", "gate in other groups than up"])
def test_what_is_not_packed_alike_is_decoded_and_says_so(kind: str, tmp_path: Path) -> None:
    folder = save_packed(language_model("qwen3_moe"), tmp_path / "model", arguments(), of_w1)
    if kind != "w1 alone":
        stored = load_file(folder / "model.safetensors")
        for name in [name for name in stored if name.endswith("gate_proj.weight_scale")]:
            stored[name] = stored[name].repeat_interleave(2, 1)
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        add_packed(folder, arguments(), of_w2)
    model = dynamo_moe.open_checkpoint(folder, dtype=torch.float32)
    report = dynamo_moe.convert(model)
    notes = {note for replacement in report.replaced for note in replacement.notes}
    assert notes == {"its experts are decoded: not all of them are packed, or not alike"}
    path = tmp_path / "model.onnx"
    exported = dynamo_moe.export(model, (token_ids(2, 7),), path, dynamic_shapes=SHAPES)
    assert exported.operators == {"DroplessMoE": 2}


# --- What is refused ---


def _without(kind: str) -> Callable[[dict[str, Tensor]], None]:
    def change(stored: dict[str, Tensor]) -> None:
        del stored[next(name for name in stored if name.endswith(kind))]

    return change


def _halved(kind: str) -> Callable[[dict[str, Tensor]], None]:
    def change(stored: dict[str, Tensor]) -> None:
        name = next(name for name in stored if name.endswith(kind))
        stored[name] = stored[name][: len(stored[name]) // 2].clone()

    return change


def _reordered(stored: dict[str, Tensor]) -> None:
    name = next(name for name in stored if name.endswith("weight_packed"))
    stored[name.replace("packed", "g_idx")] = torch.zeros(63, dtype=torch.int32)


def _unpacked(stored: dict[str, Tensor]) -> None:
    name = next(name for name in stored if name.endswith("weight_packed"))
    rows = stored[name].shape[0]
    stored[name.replace("packed", "zero_point")] = torch.zeros(rows, 1, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("weight_scale"), r"experts\.\d\.\w+\.weight_packed has no .*weight_scale"),
        (_halved("weight_scale"), r"weight_packed, \[64, 4\] .* is not packed in 4 bits"),
        (_reordered, r"weight_g_idx, \[63\], must be \[\d+\]"),
        (_unpacked, r"weight_zero_point, \[64, 1\] of torch.int8, must be \[8, 1\] of torch.int32"),
        (_without("weight_packed"), r"\.weight_\w+ has no .*\.weight_packed"),
    ],
)
def test_files_that_do_not_fit(
    change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    folder = save_packed(language_model("qwen3_moe"), tmp_path / "model", arguments(), of_experts)
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        dynamo_moe.open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "aqlm"}, "quantization method 'aqlm' is not taken"),
        ({"format": "marlin-24"}, "compressed-tensors format 'marlin-24' is not taken"),
        ({"transform_config": {"config_groups": {}}}, "compressed-tensors. transform_config, of"),
        (
            {"config_groups": {"g": {"weights": {"num_bits": 3, "type": "int"}}}},
            r"weights of 3 bits of 'int' \(g\) are not taken",
        ),
    ],
)
def test_methods_that_are_not_taken(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_packed(language_model("qwen3_moe"), tmp_path / "model", arguments(), of_experts)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"is quantised: {message}"):
        dynamo_moe.open_checkpoint(folder)


def test_the_judge_packs_as_described() -> None:
    """Code 0 of the first column is in the lowest bits of a row's first word."""
    weight = torch.zeros(1, 64)
    weight[0, 0] = 1
    words = compressed(weight, arguments())["weight_packed"]
    assert words.view(torch.uint8)[0].tolist() == [0x8F, *[0x88] * 31]
