"""Which products get their packed matrices, and which matrices are decoded, with the reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
from custom_ops.packed_weights import ENCODINGS, WHOLE
from dynamo_moe.weights.packed_tensors import decoded
from dynamo_moe.weights.rounding import rounded
from listed_experts import Listed, tokens
from packed_checkpoints import session_of


def packed_linear(
    encoding: str = "int4", block: tuple[int, int] = (1, 32), rows: int = 48, columns: int = 64
) -> nn.Linear:
    """Returns a layer whose weight decodes when it is read, as a checkpoint's does."""
    torch.manual_seed(0)
    layer = nn.Linear(columns, rows)
    packed = rounded(layer.weight.detach(), ENCODINGS[encoding], block)
    weight = decoded(encoding, packed, (rows, columns), torch.float32)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def exported(model: nn.Module, path: Path, x: Tensor, **options: Any) -> Any:
    """Exports, compares with the decoded model, and returns the report."""
    report = dynamo_moe.export(model, x, path, **options)
    (result,) = session_of(path).run(None, {"input": x.numpy()})
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight: Any = module.weight.detach()
            module.weight = nn.Parameter(weight.read())
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(result), model(x), rtol=1e-5, atol=1e-5)
    return report


@pytest.mark.each_value
@pytest.mark.parametrize("shape", [(5, 64), (2, 5, 64)], ids=["Gemm", "MatMul"])
@pytest.mark.parametrize(
    ("encoding", "block"),
    [
        *(("int4", (1, 32)), ("int8", (1, WHOLE)), ("fp8", (128, 128)), ("fp8", (WHOLE, WHOLE))),
        *(("mxfp4", (1, 32)), ("nvfp4", (1, 16))),
    ],
    ids=str,
)
def test_products_of_both_kinds(
    encoding: str, block: tuple[int, int], shape: tuple[int, ...], tmp_path: Path
) -> None:
    report = exported(packed_linear(encoding, block), tmp_path / "m.onnx", torch.randn(shape))
    assert report.nodes["DequantizeLinear"] == 1
    assert report.nodes[{2: "Gemm", 3: "MatMul"}[len(shape)]] == 1


def test_blocks_that_are_cut_off_have_one_size_in_the_file(tmp_path: Path) -> None:
    """TensorRT divides the columns by the scales."""
    layer = packed_linear("fp8", (128, 128), rows=200, columns=320)
    exported(layer, tmp_path / "m.onnx", torch.randn(3, 320))
    (node,) = (
        node
        for node in onnx.load(tmp_path / "m.onnx").graph.node
        if node.op_type == "DequantizeLinear"
    )
    assert {a.name: a.i for a in node.attribute} == {"axis": 0, "block_size": 64}


class Twice(nn.Module):
    """One matrix in two products."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = packed_linear(rows=64)

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self.layer(self.layer(input))
        return result


def test_a_matrix_of_two_products(tmp_path: Path) -> None:
    report = exported(Twice(), tmp_path / "m.onnx", torch.randn(2, 3, 64))
    file = onnx.load(tmp_path / "m.onnx")
    assert report.nodes["DequantizeLinear"] == 2
    assert [t.data_type for t in file.graph.initializer].count(onnx.TensorProto.INT4) == 1


class BothWays(nn.Module):
    """A matrix in two products, transposed in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = packed_linear(rows=64)

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self.layer(input) @ self.layer.weight
        return result


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (lambda: packed_linear(rows=47), {}, "a byte has two rows' numbers, and their number is"),
        (lambda: packed_linear(block=(1, 4)), {}, "fewer than 8 columns would share a scale"),
        (packed_linear, {"opset": 20}, "opset 20 has no DequantizeLinear of int4, but 21 has"),
        (BothWays, {}, "other operators than products use them"),
    ],
    ids=["odd", "small groups", "opset", "other operators"],
)
def test_what_is_decoded_says_why(
    model: Any, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    made = model()
    report = exported(made, tmp_path / "m.onnx", torch.randn(64, 64), **options)
    assert "DequantizeLinear" not in report.nodes
    (note,) = (note for note in report.notes if "are decoded" in note)
    assert reason in note


def test_a_matrix_is_turned_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dynamo_moe.graph.dequantized_weights._PANEL_ROWS", 10)
    report = exported(packed_linear(), tmp_path / "m.onnx", torch.randn(2, 64))
    assert Counter(report.nodes)["DequantizeLinear"] == 1


# --- MatMulNBits ---


def multiplied(model: nn.Module, path: Path, x: Tensor) -> Counter[str]:
    """Exports for ONNX Runtime, compares there by its own options, and returns the nodes."""
    report = exported(model, path, x, target="onnxruntime", dynamic_shapes=None)
    (result,) = ort.InferenceSession(path).run(None, {"input": x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(result), model(x), rtol=1e-5, atol=1e-5)
    return Counter(report.nodes)


@pytest.mark.pairwise
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 64), (2, 5, 64), (2, 3, 5, 64)], ids=str)
@pytest.mark.parametrize(
    ("encoding", "block"),
    [
        *(("int4", (1, 16)), ("int4", (1, 64)), ("int8", (1, 32)), ("int8", (1, WHOLE))),
        *(("mxfp4", (1, 32)), ("nvfp4", (1, 16))),
    ],
    ids=str,
)
def test_one_node_multiplies(
    encoding: str, block: tuple[int, int], shape: tuple[int, ...], bias: bool, tmp_path: Path
) -> None:
    layer = packed_linear(encoding, block, rows=47)
    layer.bias = layer.bias if bias else None
    nodes = multiplied(layer, tmp_path / "m.onnx", torch.randn(shape))
    assert nodes["com.microsoft::MatMulNBits"] == 1
    assert not nodes.keys() & {"MatMul", "Gemm", "DequantizeLinear"}


def test_zero_points_of_an_odd_number_of_groups(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 10)
    packed = rounded(layer.weight.detach() + 0.1, ENCODINGS["int4"], (1, 16), zero_points=True)
    weight = decoded("int4", packed, (10, 48), torch.float32)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    nodes = multiplied(layer, tmp_path / "m.onnx", torch.randn(3, 48))
    assert nodes["com.microsoft::MatMulNBits"] == 1


def test_two_products_share_their_codes(tmp_path: Path) -> None:
    nodes = multiplied(Twice(), tmp_path / "m.onnx", torch.randn(2, 3, 64))
    assert nodes["com.microsoft::MatMulNBits"] == 2
    file = onnx.load(tmp_path / "m.onnx")
    assert [t.data_type for t in file.graph.initializer].count(onnx.TensorProto.UINT8) == 1


class Scaled(nn.Module):
    """A Gemm with a factor, or with a bias of more than one row."""

    def __init__(self, *, factor: float = 1.0, rows: int = 1) -> None:
        super().__init__()
        self.layer, self.factor = packed_linear(), factor
        self.rows = nn.Parameter(torch.randn(rows, 48))

    def forward(self, input: Tensor) -> Tensor:
        return torch.addmm(self.rows, input, self.layer.weight.t(), alpha=self.factor)


@pytest.mark.parametrize("model", [Scaled(factor=2.0), Scaled(rows=5)], ids=["factor", "rows"])
def test_other_products_are_dequantized(model: nn.Module, tmp_path: Path) -> None:
    """The operator has no factor, and adds a row."""
    nodes = multiplied(model, tmp_path / "m.onnx", torch.randn(5, 64))
    assert nodes["DequantizeLinear"] == 1
    assert "com.microsoft::MatMulNBits" not in nodes


def test_an_opset_without_integers_of_4_bits_is_enough(tmp_path: Path) -> None:
    x = torch.randn(5, 64)
    report = exported(packed_linear(), tmp_path / "m.onnx", x, target="onnxruntime", opset=20)
    assert report.nodes["com.microsoft::MatMulNBits"] == 1


def test_experts_are_no_weights_of_products(tmp_path: Path) -> None:
    model = nn.Sequential(Listed()).eval()
    dynamo_moe.convert(model)
    dynamo_moe.quantize(model)
    report = dynamo_moe.export(model, (tokens(3, 5),), tmp_path / "m.onnx")
    assert not any("stay packed" in note for note in report.notes)
