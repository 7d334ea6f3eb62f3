"""The opset of a file is one whose operators take the graph's types."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.moe_nodes.targets.names import TargetName
from traced_programs import Call, run


class Inner(nn.Module):
    """One whose translation gives the operand of Softplus no type."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x, beta=2.0)


class Multiplied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.to(self.conv.weight.dtype))
        return torch.einsum("bij,bkj->bik", y, y).float()


MODELS = {
    "convolution": nn.Conv1d(4, 4, 3, padding=1),
    "activation": nn.Sequential(nn.Linear(6, 6), nn.Hardswish()),
    "inside a translation": Inner(),
}


def opset_of(path: Path) -> int:
    return {o.domain: o.version for o in onnx.load(path).opset_import}[""]


@pytest.mark.parametrize("name", MODELS)
def test_later_opset_for_bfloat16(name: str, tmp_path: Path) -> None:
    model, x = MODELS[name].eval(), torch.randn(2, 4, 6)
    path = tmp_path / "model.onnx"
    dynamo_moe.export(model, x, path)
    assert opset_of(path) == 20
    dynamo_moe.export(model.bfloat16(), x.bfloat16(), path)
    assert opset_of(path) == 22
    model.float()


def test_opset_that_is_enough(tmp_path: Path) -> None:
    dynamo_moe.export(nn.Linear(4, 4).bfloat16(), torch.randn(2, 4).bfloat16(), tmp_path / "m.onnx")
    assert opset_of(tmp_path / "m.onnx") == 20


@pytest.mark.parametrize("target", ["plugin", "onnxruntime"])
def test_in_float32_where_no_opset_is_read(target: TargetName, tmp_path: Path) -> None:
    """Einsum takes bfloat16 from opset 28 on, and Conv not at the opset that is asked for."""
    model = Multiplied().bfloat16().eval()
    x, path = torch.randn(2, 4, 6), tmp_path / "model.onnx"
    for opset in (None, 20):
        dynamo_moe.export(model, x, path, target=target, opset=opset)
        graph = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True).graph
        dtypes = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
        dtypes |= {value.name: value.type.tensor_type.elem_type for value in graph.output}
        [conv] = [node for node in graph.node if node.op_type == "Conv"]
        [einsum] = [node for node in graph.node if node.op_type == "Einsum"]
        wide, narrow = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16
        assert dtypes[conv.output[0]] == (wide if opset else narrow)
        assert dtypes[einsum.output[0]] == wide


def test_numbers_in_float32(tmp_path: Path) -> None:
    """A result in bfloat16 is rounded to it."""

    def function(x: Tensor) -> Tensor:
        return torch.einsum("bij,bkj->bik", x.bfloat16(), (x * 2).bfloat16()).float()

    model, x = Call(function), torch.randn(3, 4, 6)
    dynamo_moe.export(model, x[:2], tmp_path / "model.onnx")
    [result] = run(tmp_path / "model.onnx", x)
    torch.testing.assert_close(result, function(x), rtol=2**-7, atol=1e-5)
    assert torch.equal(result.bfloat16().float(), result)
    assert not torch.equal(result, torch.einsum("bij,bkj->bik", x, x * 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_stays_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    """``var + eps`` is 0 in float16, and the weights would be infinite."""
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4, eps=1e-8)).to(dtype).eval()
    model[1].running_var.fill_(0)
    dynamo_moe.export(model, torch.randn(2, 4, 6, dtype=dtype), tmp_path / "model.onnx")
    nodes = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert nodes == ["Conv", "BatchNormalization"]
