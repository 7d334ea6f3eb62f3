"""ONNX Runtime's MoE takes tokens of three axes as they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
import transformer_models as models
from small_models import OpLayer, op_model

PLAIN: dict[str, Any] = {"activation": "silu", "gated": True}


def exported(model: nn.Module, x: Tensor, path: Path, **options: Any) -> onnx.ModelProto:
    torch.manual_seed(0)
    dynamo_moe.export(model, (x,), path, target="onnxruntime", **{"opset": 23} | options)
    assert dynamo_moe.verify(path, model, inputs=[(x,)]).passed
    return onnx.load(path)


def reshapes(file: onnx.ModelProto) -> int:
    return Counter(node.op_type for node in file.graph.node)["Reshape"]


def test_no_reshape_behind(tmp_path: Path) -> None:
    """One before the router stays. A use behind the node keeps it from overwriting its tokens."""
    file = exported(op_model(OpLayer(**PLAIN)), torch.randn(2, 3, 16), tmp_path / "m.onnx")
    assert reshapes(file) == 1
    [moe] = [node for node in file.graph.node if node.op_type == "MoE"]
    guard = next(node for node in file.graph.node if moe.output[0] in node.input)
    assert guard.op_type == "Where"
    assert guard.input[1] == moe.input[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{"scoring": "sigmoid"}, {"routed_scaling": 2.5}, {"pre_norm": "rms", "residual": True}, {}],
)
def test_what_stands_between(options: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """A factor, a cast or a norm: it may keep its Reshapes, and the numbers are right."""
    model = op_model(OpLayer(**PLAIN, **options)).to(dtype)
    exported(model, torch.randn(2, 3, 16).to(dtype), tmp_path / "m.onnx")


@pytest.mark.parametrize("sizes", [(0, 3, 16), (2, 0, 16), (1, 1, 16), (3, 70, 16)])
def test_any_number_of_tokens(sizes: tuple[int, ...], tmp_path: Path) -> None:
    model = op_model(OpLayer(**PLAIN))
    shapes = {"args": ({0: "batch", 1: "length"},)}
    exported(model, torch.randn(2, 3, 16), tmp_path / "m.onnx", dynamic_shapes=shapes["args"])
    x = torch.randn(sizes)
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(found, model(x).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"opset": 20}, {"fuse": False}])
def test_reshapes_stay_where_nothing_is_fused(options: Any, tmp_path: Path) -> None:
    file = exported(
        op_model(OpLayer(**PLAIN)), torch.randn(2, 3, 16), tmp_path / "m.onnx", **options
    )
    assert reshapes(file) == 2


@pytest.mark.parametrize(("sizes", "count"), [((5, 16), 1), ((2, 3, 2, 16), 2)])
def test_other_numbers_of_axes(sizes: tuple[int, ...], count: int, tmp_path: Path) -> None:
    file = exported(op_model(OpLayer(**PLAIN)), torch.randn(sizes), tmp_path / "m.onnx")
    assert reshapes(file) == count


@pytest.mark.every
def test_packed_experts_of_a_language_model(tmp_path: Path) -> None:
    model: Any = models.gpt_oss()[0]
    dynamo_moe.convert(model)
    dynamo_moe.quantize(model, "int4", group=16)
    path = tmp_path / "m.onnx"
    dynamo_moe.export_language_model(model, path, target="onnxruntime")
    assert dynamo_moe.verify(path, model).passed
    nodes = onnx.load(path).graph.node
    behind = {node.output[0]: node.op_type for node in nodes}
    packed = [node for node in nodes if node.op_type == "QMoE"]
    assert {behind[node.input[0]] for node in packed} == {"SkipSimplifiedLayerNormalization"}
