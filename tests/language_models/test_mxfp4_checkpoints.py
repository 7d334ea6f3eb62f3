"""gpt-oss's own checkpoints: MXFP4 experts, whose bytes a file may even link."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import dynamo_moe
from dynamo_moe.weights.checkpoints import load_checkpoint
from packed_checkpoints import check_file, language_model, set_quantization, token_ids

SHAPES = {"input_ids": {0: "batch", 1: "length"}}
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def unchanged(stored: dict[str, Tensor]) -> None:
    pass


def checkpoint(folder: Path, change: Callable[[dict[str, Tensor]], None] = unchanged) -> Path:
    """Saves a small gpt-oss whose experts have any bytes, and scales around 2**-6."""
    language_model("gpt_oss").save_pretrained(folder)
    generator, stored = torch.Generator().manual_seed(0), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj") and ".experts." in name:
            experts, columns, rows = tensor.shape
            sizes = (experts, rows, columns // 32)
            stored[f"{name}_blocks"] = torch.randint(
                0, 256, (*sizes, 16), dtype=torch.uint8, generator=generator
            )
            stored[f"{name}_scales"] = torch.randint(
                118, 124, sizes, dtype=torch.uint8, generator=generator
            )
        else:
            stored[name] = tensor
    change(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, CONFIG)
    return folder


def opened(folder: Path, dtype: torch.dtype | None = torch.float32) -> nn.Module:
    model = dynamo_moe.open_checkpoint(folder, dtype=dtype)
    report = dynamo_moe.convert(model)
    assert len(report.replaced) == 2
    assert all(r.notes == ("its experts stay packed (mxfp4)",) for r in report.replaced)
    return model


def test_the_decoded_weights_are_transformers(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    for dtype in (torch.float32, None):
        whole = load_checkpoint(folder, dtype=dtype)
        for layer, block in enumerate(whole.model.layers):
            for name in ("gate_up_proj", "down_proj"):
                prefix = f"model.layers.{layer}.mlp.experts.{name}"
                weight = getattr(block.mlp.experts, name)
                judged = convert_moe_packed_tensors(
                    stored[f"{prefix}_blocks"], stored[f"{prefix}_scales"], dtype=weight.dtype
                )
                assert torch.equal(weight, judged)


@pytest.mark.parametrize("form", ["loop", "unrolled", "linked"])
@pytest.mark.first(2)
def test_the_file_computes_what_the_decoded_model_does(form: Any, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    path = folder / "model.onnx"
    options = {"link_weights": True} if form == "linked" else {"body": form}
    report = dynamo_moe.export(
        opened(folder), (token_ids(2, 7),), path, dynamic_shapes=SHAPES, **options
    )
    assert report.operators == {"DroplessMoEPacked": 2}
    check_file(path, folder)
    file = onnx.load(path, load_external_data=False)
    linked = {
        tensor.name
        for tensor in file.graph.initializer
        if any(e.value == "model.safetensors" for e in tensor.external_data)
    }
    names = {
        name
        for node in file.graph.node
        if node.op_type == "DroplessMoEPacked"
        for name in node.input[2:6]
    }
    assert len(names) == 2 * 4
    assert names <= linked if form == "linked" else not linked


def test_in_the_checkpoint_s_own_dtype(tmp_path: Path) -> None:
    """bfloat16: the router is in the node, and rounds as the checkpoint's does."""
    folder = checkpoint(tmp_path / "model")
    model = opened(folder, torch.bfloat16)
    report = dynamo_moe.export(
        model, (token_ids(2, 7),), tmp_path / "model.onnx", dynamic_shapes=SHAPES
    )
    assert report.operators == {"DroplessMoEPacked": 2}
    assert "TopK" not in report.nodes


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("down_proj_scales", r"down_proj_blocks has no .*down_proj_scales"),
        ("down_proj_blocks", r"down_proj_scales has no .*down_proj_blocks"),
    ],
)
def test_files_that_do_not_fit(missing: str, message: str, tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        del stored[f"model.layers.1.mlp.experts.{missing}"]

    with pytest.raises(ValueError, match=message):
        dynamo_moe.open_checkpoint(checkpoint(tmp_path / "model", change))


def test_blocks_of_another_shape(tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        name = "model.layers.1.mlp.experts.down_proj_blocks"
        stored[name] = stored[name][..., :8].contiguous()

    with pytest.raises(ValueError, match=r"\[4, 64, 2, 8\], with scales \[4, 64, 2\] is not mxfp4"):
        dynamo_moe.open_checkpoint(checkpoint(tmp_path / "model", change))
