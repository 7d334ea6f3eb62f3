"""Exports over a dozen models in every form and computes the digests of their files.

Changes inside the exporter should not change the files, unless that is their purpose.
``python tests/support/exported_files.py`` rewrites the digests; the diff shows what changed.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.models import swin_moe_digits
from infmoe_reference import random_weights
from moe_architectures import ARCHITECTURES, example_inputs
from public_moe import CASES
from small_models import OpLayer, OwnRouter, mlp_model, op_model

DIGESTS = Path(__file__).with_name("exported_files.json")
VERSIONS = {
    name: version(name) for name in ("torch", "onnx", "onnx-ir", "onnxscript", "transformers")
}
"""Packages whose releases change the files."""

Export = Callable[[Path], dynamo_moe.ExportReport]

_PUBLIC = {case.name: case for case in CASES}


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Fills all weights with values that are the same on every processor, unlike random ones."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and type(tensor) in {Tensor, nn.Parameter}:
            numbers = torch.arange(tensor.numel()) * 7919 % 1009
            tensor.copy_(((numbers - 504) / 1024).reshape(tensor.shape))


def _export(make: Callable[[], tuple[nn.Module, Any]], path: Path, **options: Any) -> Any:
    model, example = make()
    experts_dtype = options.pop("experts_dtype", None)
    if options.pop("converted", True):
        dynamo_moe.convert(model, experts_dtype=experts_dtype)
    _fill(model)
    if isinstance(example, dict):
        return dynamo_moe.export(model, (), path, kwargs=example, **options)
    return dynamo_moe.export(model, example, path, **options)


def _digits() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return swin_moe_digits().eval(), torch.rand(2, 1, 8, 8)


def _mlp() -> tuple[nn.Module, Any]:
    return mlp_model(), torch.randn(3, 16)


def _operators() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layers = (
        OpLayer(activation="clamped_swiglu", gated=True, interleaved=True, biases=False),
        OpLayer(pre_norm="rms", residual=True, scoring="sigmoid", renormalize=False),
        OwnRouter(activation="silu", gated=True, weight_on_input=True),
    )
    return op_model(*layers), torch.randn(3, 16)


def _architecture(name: str) -> tuple[nn.Module, Any]:
    architecture = ARCHITECTURES[name]
    return architecture.build(), example_inputs(architecture, 2, 5)


def _public(name: str) -> tuple[nn.Module, Any]:
    return _PUBLIC[name].build(), _PUBLIC[name].args(2, 5, 0)


def _infmoe(path: Path) -> dynamo_moe.ExportReport:
    weights, centroids = random_weights()
    arrays = path.with_suffix(".npz")
    np.savez(arrays, **weights)
    layer = dynamo_moe.load_infmoe(arrays, centroids)
    arrays.unlink()
    return _export(lambda: (layer, torch.randn(2, 3, 16)), path, converted=False)


def _language_model(path: Path) -> dynamo_moe.ExportReport:
    model = ARCHITECTURES["qwen3_moe"].build()
    dynamo_moe.convert(model)
    _fill(model)
    return dynamo_moe.export_language_model(model, path)


def _linked(path: Path) -> dynamo_moe.ExportReport:
    model = ARCHITECTURES["gpt_oss"].build()
    _fill(model)
    model.save_pretrained(path.parent / "checkpoint")
    streamed = dynamo_moe.open_checkpoint(path.parent / "checkpoint")
    dynamo_moe.convert(streamed)
    return dynamo_moe.export_language_model(
        streamed, path, task="text-generation", link_weights=True
    )


FILES: dict[str, Export] = {
    "swin-moe-digits": partial(_export, _digits),
    "swin-moe-digits-unrolled": partial(_export, _digits, body="unrolled"),
    "swin-moe-digits-dense": partial(_export, _digits, target="dense"),
    "swin-moe-digits-unconverted": partial(_export, _digits, converted=False),
    "mlp-onnxruntime": partial(_export, _mlp, target="onnxruntime"),
    "mlp-float16-experts": partial(_export, _mlp, experts_dtype=torch.float16),
    "mlp-static-opset-18": partial(_export, _mlp, dynamic_shapes=None, opset=18),
    "mlp-external": partial(_export, _mlp, external_data=True),
    "operators": partial(_export, _operators, converted=False),
    "operators-unrolled": partial(_export, _operators, converted=False, body="unrolled"),
    "operators-dense": partial(_export, _operators, converted=False, target="dense"),
    **{
        name.replace("_", "-"): partial(_export, partial(_architecture, name))
        for name in ("mixtral", "deepseek_v3", "llama4", "granitemoe", "qwen3_omni_moe")
    },
    **{
        name: partial(_export, partial(_public, name))
        for name in ("mistral-inference", "torchtitan-score-before", "swin-moe-dropless")
    },
    "infmoe": _infmoe,
    "qwen3-moe-with-past": _language_model,
    "gpt-oss-linked": _linked,
}
"""How to write each file."""


def digests(name: str, folder: Path) -> dict[str, str]:
    """Exports a model and returns the SHA-256 of each file written."""
    report = FILES[name](folder / "model.onnx")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in report.files}


def main() -> None:
    """Writes the digests of all files."""
    found = {}
    for name in FILES:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = digests(name, Path(folder))
    DIGESTS.write_text(json.dumps({"versions": VERSIONS, "files": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
