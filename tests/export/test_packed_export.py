"""Files whose experts are packed: one node a layer, and its bodies in ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor

import dynamo_moe
from custom_ops.weight_formats import WHOLE_MATRIX
from dynamo_moe.files.kernel_layers import kernel_layers
from kernel_runs import layer_of
from moe_cases import OPS
from packed_cases import PackedLayer, packed_case

GATED: dict[str, Any] = {"activation": "silu", "gated": True}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gated": GATED | {"biases": False},
    "interleaved": GATED | {"interleaved": True, "zero_points": "groups"},
    "zero points alone": GATED | {"biases": False, "zero_points": "groups"},
    "biases alone": GATED | {"scales_dtype": torch.bfloat16},
    "half scales": {"scales_dtype": torch.float16, "group": 16, "biases": False},
    "on input": GATED | {"weight_on_input": True},
    "mxfp4": {"weight_format": "mxfp4", "biases": False},
    "mxfp4 with biases": GATED | {"weight_format": "mxfp4", "interleaved": True},
}
FORMS |= {
    form: GATED | {"weight_format": form, "biases": form == "fp8"}
    for form in ("fp8", "fp8 rows", "fp8 whole", "fp8 groups")
}
FORMS |= {
    "nvfp4": GATED | {"weight_format": "nvfp4", "biases": False},
    "nvfp4 with biases": {"weight_format": "nvfp4"},
    "int8": GATED | {"weight_format": "int8", "group": 16, "biases": False},
    "int8 rows": GATED | {"weight_format": "int8 rows", "biases": False},
    "int4 rows": GATED | {"weight_format": "int4 rows", "biases": False},
    "int4 rows, zero points": GATED | {"weight_format": "int4 rows", "zero_points": "groups"},
    "int8 with biases": {"weight_format": "int8", "scales_dtype": torch.float16},
}
_OF_QMOE = [
    name
    for name, form in FORMS.items()
    if form.get("weight_format") in (None, "int4 rows", "int8 rows") and name != "on input"
]


def layer(op: str, **options: Any) -> PackedLayer:
    return PackedLayer(packed_case(op, shape=(64 * 20,), **options)).eval()


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, 32, generator=generator).to(dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("body", ["loop", "unrolled"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPS)
def test_one_node_that_runs(op: str, form: str, body: Any, tmp_path: Path) -> None:
    model, path = layer(op, **FORMS[form]), tmp_path / "layer.onnx"
    report = dynamo_moe.export(model, (tokens(2, 5),), path, body=body)
    name = {"dropless": "DroplessMoEPacked", "experts": "DroplessMoEExpertsPacked"}[op]
    assert report.operators == {name: 1}
    session = ort.InferenceSession(path)
    for batch in (0, 1, 2, 70, 256):
        x = tokens(batch, 5)
        (result,) = session.run(None, {"x": x.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(result), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["fp8", "fp8 rows", "fp8 whole", "fp8 groups"])
@pytest.mark.parametrize("body", ["loop", "unrolled"])
def test_blocks_that_are_cut_off(body: Any, form: str, tmp_path: Path) -> None:
    case = packed_case("dropless", form, width=224, hidden=160, biases=False, shape=(5,), **GATED)
    model, path = PackedLayer(case).eval(), tmp_path / "layer.onnx"
    dynamo_moe.export(model, (torch.zeros(2, 224),), path, body=body)
    session = ort.InferenceSession(path)
    for batch in (0, 1, 3, 900):
        x = torch.randn(batch, 224, generator=torch.Generator().manual_seed(batch))
        (result,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(result), model(x), rtol=1e-4, atol=1e-5)


def test_half_precision_tokens(tmp_path: Path) -> None:
    model = layer("dropless", dtype=torch.float16, biases=False, **GATED)
    dynamo_moe.export(model, (tokens(2, 5, dtype=torch.float16),), tmp_path / "layer.onnx")
    session = ort.InferenceSession(tmp_path / "layer.onnx")
    for batch in (1, 200):
        x = tokens(batch, 5, dtype=torch.float16)
        (result,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(result), model(x), rtol=2e-3, atol=2e-3)


def test_the_file_has_the_bytes(tmp_path: Path) -> None:
    model = layer("dropless", zero_points="groups", biases=False)
    dynamo_moe.export(model, (tokens(2, 5),), tmp_path / "layer.onnx")
    file = onnx.load(tmp_path / "layer.onnx")
    (node,) = (node for node in file.graph.node if node.op_type == "DroplessMoEPacked")
    values = {each.name: onnx.numpy_helper.to_array(each) for each in file.graph.initializer}
    for position, name in enumerate(("w1", "w2", "w1_scales", "w2_scales"), start=2):
        stored = torch.from_numpy(values[node.input[position]].copy())
        assert torch.equal(stored, getattr(model, name))
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert attributes["weight_format"] == b"int4"
    assert attributes["block_size"] == 8
    assert attributes["hidden_features"] == 16
    onnx.checker.check_model(file, full_check=True)


@pytest.mark.parametrize("op", OPS)
def test_verified(op: str, tmp_path: Path) -> None:
    model, path = layer(op, biases=False, **GATED), tmp_path / "layer.onnx"
    dynamo_moe.export(model, (tokens(2, 5),), path)
    assert dynamo_moe.verify(path, model, [(tokens(2, 5),), (tokens(9, 5),)]).passed


@pytest.mark.each_value
@pytest.mark.parametrize("form", _OF_QMOE)
@pytest.mark.parametrize("op", OPS)
def test_onnx_runtime_s_own_operator(op: str, form: str, tmp_path: Path) -> None:
    model, path = layer(op, **FORMS[form] | {"group": 16}), tmp_path / "layer.onnx"
    report = dynamo_moe.export(model, (tokens(2, 5),), path, target="onnxruntime")
    assert report.nodes["com.microsoft::QMoE"] == 1
    session = ort.InferenceSession(path)
    for batch in (1, 256):
        x = tokens(batch, 5)
        (result,) = session.run(None, {"x": x.numpy()})
        approximately = {"rtol": 0, "atol": 3e-3} if "silu" not in FORMS[form].values() else {}
        torch.testing.assert_close(torch.from_numpy(result), model(x), **approximately)


@pytest.mark.parametrize("weight_format", ["int4", "int8 rows"])
def test_bytes_are_written_as_onnx_runtime_s_operator_takes_them(
    weight_format: str, tmp_path: Path
) -> None:
    """It would fold nodes that reorder them while it loads the file, and hold both for a time."""
    options = GATED | {"weight_format": weight_format, "biases": False, "group": 16}
    model, path = layer("dropless", **options), tmp_path / "layer.onnx"
    report = dynamo_moe.export(model, (tokens(2, 5),), path, target="onnxruntime")
    assert not report.nodes.keys() & {"Cast", "BitwiseXor", "Split", "Concat"}
    [summary] = dynamo_moe.inspect(path).moe_layers
    assert (summary.in_features, summary.hidden_features) == (32, 16)
    assert summary.parameters == 5 * (2 * 16 * 32 + 32 * 16)
    kinds = [each.data_type for each in onnx.load(path).graph.initializer]
    assert kinds.count(onnx.TensorProto.UINT8) == 2
    assert onnx.TensorProto.INT8 not in kinds


@pytest.mark.parametrize("form", FORMS)
def test_dense(form: str, tmp_path: Path) -> None:
    """Bytes are read by DequantizeLinear alone, as TensorRT needs of constants."""
    model, path = layer("dropless", **FORMS[form]), tmp_path / "layer.onnx"
    dynamo_moe.export(model, (tokens(2, 5),), path, target="dense")
    graph = onnx.load(path).graph
    packed = {each.name for each in graph.initializer if each.data_type == onnx.TensorProto.INT8}
    readers = {node.op_type for node in graph.node if packed & {*node.input}}
    assert readers == {"DequantizeLinear"}
    session = ort.InferenceSession(path)
    for batch in (0, 1, 64):
        x = tokens(batch, 5)
        (result,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(result), model(x), rtol=1e-4, atol=1e-5)


def test_tokens_are_not_rounded(tmp_path: Path) -> None:
    """Of int8 in groups, ONNX Runtime 1.31 rounds them, and is 1e-2 off."""
    model = layer("dropless", weight_format="int8", group=16, biases=False)
    with pytest.raises(ValueError, match="rounds tokens to 8 bits where int8 weights have groups"):
        dynamo_moe.export(model, (tokens(2, 5),), tmp_path / "x.onnx", target="onnxruntime")
    square = packed_case("dropless", "int8 rows", width=64, hidden=64, biases=False, **GATED)
    path = tmp_path / "rows.onnx"
    x = square.arguments["x"]
    dynamo_moe.export(PackedLayer(square).eval(), (x,), path, target="onnxruntime")
    (result,) = ort.InferenceSession(path).run(None, {"x": x.numpy()})
    error = (torch.from_numpy(result) - square()).norm() / square().norm()
    assert error < 5e-4


@pytest.mark.parametrize("form", [{}, {"biases": False}, {"interleaved": True}], ids=str)
@pytest.mark.parametrize("zero_points", ["groups", "experts"])
def test_zero_points_of_whole_rows(zero_points: Any, form: dict[str, Any], tmp_path: Path) -> None:
    """Of rows of two lengths, which share a byte by neighbours."""
    options = GATED | {"width": 48, "hidden": 24, **form}
    case = packed_case("dropless", "int4 rows", zero_points=zero_points, **options)
    model, path = PackedLayer(case).eval(), tmp_path / "x.onnx"
    x = case.arguments["x"]
    report = dynamo_moe.export(model, (x,), path, target="onnxruntime")
    assert report.nodes["com.microsoft::QMoE"] == 1
    (result,) = ort.InferenceSession(path).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), model(x), rtol=1e-4, atol=1e-5)


def test_a_target_that_has_no_form_of_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no form of packed weights \(int4\): .* decodes"):
        dynamo_moe.export(
            layer("dropless"), (tokens(2, 5),), tmp_path / "x.onnx", target="tensorrt_moe"
        )


@pytest.mark.parametrize("scoring", ["softmax", "topk_softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True], ids=["as scored", "divided"])
def test_onnx_runtime_s_own_operator_with_each_router(
    renormalize: bool, scoring: str, tmp_path: Path
) -> None:
    router = {"scoring": scoring, "renormalize": renormalize, "biases": False}
    model = layer("dropless", group=16, **GATED, **router)
    dynamo_moe.export(model, (tokens(2, 5),), tmp_path / "x.onnx", target="onnxruntime")
    x = tokens(7, 5)
    (result,) = ort.InferenceSession(tmp_path / "x.onnx").run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", [8, 24])
def test_groups_that_onnx_runtime_s_operator_does_not_take(group: int, tmp_path: Path) -> None:
    case = packed_case("dropless", group=group, width=48, hidden=48)
    message = rf"QMoE takes groups of 16, 32, 64, \.\.\. values, got {group}"
    with pytest.raises(ValueError, match=message):
        dynamo_moe.export(
            PackedLayer(case).eval(),
            (torch.zeros(2, 48),),
            tmp_path / "x.onnx",
            target="onnxruntime",
        )


def test_zero_points_whose_shape_is_not_known_are_not_guessed(tmp_path: Path) -> None:
    model = layer("dropless", zero_points="groups", biases=False)
    path = tmp_path / "model.onnx"
    dynamo_moe.export(model, (model.case.arguments["x"][:64],), path)
    proto = onnx.load(path)
    (node,) = (each for each in proto.graph.node if each.op_type == "DroplessMoEPacked")
    for position, name in ((6, "unknown"), (7, "other")):
        given = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT8, None)
        proto.graph.input.append(given)
        node.input[position] = name
    onnx.save(proto, path)
    with pytest.raises(ValueError, match="the shape of its input w1_zero_points, 'unknown',"):
        kernel_layers(path)


def test_formats_that_onnx_runtime_s_operator_does_not_run(tmp_path: Path) -> None:
    model = layer("dropless", **FORMS["mxfp4"])
    with pytest.raises(ValueError, match=r"QMoE of ONNX Runtime 1\.31 does not run mxfp4"):
        dynamo_moe.export(model, (tokens(2, 5),), tmp_path / "x.onnx", target="onnxruntime")


@pytest.mark.parametrize("form", FORMS)
def test_a_file_has_the_layer_of_its_kernels(form: str, tmp_path: Path) -> None:
    model = layer("dropless", **FORMS[form])
    path = tmp_path / "model.onnx"
    dynamo_moe.export(model, (model.case.arguments["x"][:64],), path)
    (stored,) = kernel_layers(path)
    weight_format = layer_of(model.case).canonical().shape.weight_format
    if form in ("plain", "on input", "biases alone"):
        # Where biases come behind them, there are zero points, and one for each expert.
        assert stored.shape.weight_format.zero_points_block == WHOLE_MATRIX
        weight_format = replace(weight_format, stored=stored.shape.weight_format.stored)
    assert stored.shape.weight_format == weight_format
