"""The forms of an exported file, and small models exported in each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import dynamo_moe
from small_models import OpLayer, OwnRouter, mlp_model, op_model

# The forms of a file, by name, and the options that select them.
FORMS: dict[str, dict[str, Any]] = {
    "plugin": {"target": "plugin"},
    "unrolled": {"target": "plugin", "body": "unrolled"},
    "dense": {"target": "dense"},
    "onnxruntime": {"target": "onnxruntime"},
}
BESIDE_THE_NODE = ("plugin", "unrolled")
TOKENS = {"input": {1: "tokens"}}


def mixed_model() -> nn.Module:
    """Four configurations in one file, both operators."""
    torch.manual_seed(1)
    return op_model(
        OpLayer(activation="relu"),
        OpLayer(activation="silu", gated=True, biases=False),
        OpLayer(activation="relu", biases=False),
        OwnRouter(activation="silu", gated=True, interleaved=True),
    )


@pytest.fixture(scope="session")
def exported(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], tuple[nn.Module, Path]]:
    """Exports each (model, form) once, from an example with batch 1 and 5 tokens."""
    folder = tmp_path_factory.mktemp("exported")
    done: dict[tuple[str, str], tuple[nn.Module, Path]] = {}

    def export(name: str, form: str) -> tuple[nn.Module, Path]:
        if (name, form) not in done:
            model = mixed_model() if name == "mixed" else mlp_model()
            if name == "mlp":  # The other calls the operators itself.
                dynamo_moe.convert(model)
            path = folder / f"{name}_{form}.onnx"
            dynamo_moe.export(
                model, torch.randn(1, 5, 16), path, **FORMS[form], dynamic_shapes=TOKENS
            )
            done[name, form] = model, path
        return done[name, form]

    return export


def run(path_or_proto: Path | onnx.ModelProto, x: torch.Tensor) -> torch.Tensor:
    source = (
        str(path_or_proto) if isinstance(path_or_proto, Path) else path_or_proto.SerializeToString()
    )
    session = onnxruntime.InferenceSession(source)
    return torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
