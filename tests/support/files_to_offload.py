"""Files with MoE layers whose experts' weights can be offloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from safetensors.torch import save_file
from torch import nn

import dynamo_moe
from custom_ops.offload import WeightSource
from onnx_files import moe_model, save, weight
from small_models import mlp_model


def exported(folder: Path, model: nn.Module | None = None, **options: Any) -> Path:
    model = mlp_model() if model is None else model
    dynamo_moe.convert(model)
    dynamo_moe.export(model, torch.randn(3, 16), folder / "model.onnx", **options)
    return folder / "model.onnx"


def arrays(path: Path) -> dict[str, np.ndarray]:
    """A file's weights by name."""
    return {each.name: numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}


def read(source: WeightSource) -> bytes:
    return source.path.read_bytes()[source.offset :][: source.bytes]


def linked(folder: Path, pad: int = 0) -> Path:
    """A file whose weights lie in a safetensors file with its header of a multiple of 8 bytes."""
    path = exported(folder, external_data=False)
    proto = onnx.load(path)
    tensors = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}
    checkpoint = folder / "weights" / "model.safetensors"
    checkpoint.parent.mkdir()
    metadata = {"pad": " " * pad}
    save_file({name: torch.tensor(array) for name, array in tensors.items()}, checkpoint, metadata)
    lazy = dynamo_moe.open_tensors(checkpoint)
    for tensor in proto.graph.initializer:
        origin: Any = lazy[tensor.name].origin  # type: ignore[attr-defined]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, text in (
            ("location", "weights/model.safetensors"),
            ("offset", str(origin.offset)),
            ("length", str(origin.nbytes)),
        ):
            tensor.external_data.add(key=key, value=text)
    onnx.save(proto, path)
    return path


def by_hand(folder: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    proto = moe_model()
    for node in proto.graph.node:
        sizes = {"in_features": 8, "hidden_features": 16}
        for attribute in node.attribute:
            if attribute.name in sizes:
                attribute.i = sizes[attribute.name]
    shapes = {
        "norm": (8,),
        "b.0.mlp.router.weight": (3, 8),
        "b.0.mlp.w1": (3, 16, 8),
        "b.0.mlp.w2": (3, 8, 16),
        "b.0.mlp.b1": (3, 16),
        "b.1.experts.w1": (3, 32, 8),
        "b.1.experts.w2": (3, 8, 16),
    }
    for tensor in proto.graph.initializer:
        if tensor.name in shapes:
            tensor.CopyFrom(weight(tensor.name, *shapes[tensor.name]))
    for each in (*proto.graph.input, *proto.graph.output):
        each.type.tensor_type.shape.dim[2].dim_value = 8
    change(proto)
    return save(proto, folder / "model.onnx")


def unchanged(proto: onnx.ModelProto) -> None:
    pass
