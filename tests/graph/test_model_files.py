"""Files are written of what is in memory and of what is in other files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from dynamo_moe.files import model_files
from dynamo_moe.graph import checking


def a_model(folder: Path, **described: str) -> ir.Model:
    """A sum of the input, a weight in a file of its own, a large one and a small one."""
    (folder / "weights.bin").write_bytes(np.arange(128, dtype=np.float32).tobytes())
    outside = ir.ExternalTensor(
        "weights.bin", 0, 512, ir.DataType.FLOAT, shape=ir.Shape([128]), name="outside",
        base_dir=folder, metadata_props=described, doc_string=described.get("doc"),
    )  # fmt: skip
    tensors = [
        outside,
        ir.tensor(np.ones(128, np.float32), name="large"),
        ir.tensor(np.ones(1, np.float32), name="small"),
    ]
    float32 = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", shape=ir.Shape([128]), type=float32)
    weights = [
        ir.Value(name=each.name, shape=each.shape, type=float32, const_value=each)
        for each in tensors
    ]
    total = ir.node("Sum", [x, *weights])
    total.outputs[0].name, total.outputs[0].type = "y", float32
    total.outputs[0].shape = ir.Shape([128])
    graph = ir.Graph(
        [x], total.outputs, nodes=[total], initializers=weights, name="g", opset_imports={"": 18}
    )
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("external_data", [False, True])
def test_weights_are_where_they_were_or_where_they_are_asked_for(
    tmp_path: Path, checked: bool, external_data: bool
) -> None:
    model = a_model(tmp_path)
    proto = checking.check(model) if checked else None
    files = model_files.save_model(model, tmp_path / "m.onnx", external_data, proto)
    assert len(files) == 1 + external_data
    onnx.checker.check_model(files[0], full_check=True)
    written = onnx.load(files[0], load_external_data=False)
    places = {
        each.name: {entry.key: entry.value for entry in each.external_data}.get("location")
        for each in written.graph.initializer
    }
    inside = "m.onnx.data" if external_data else None
    assert places == {"small": None, "outside": "weights.bin", "large": inside}
    assert [value.name for value in written.graph.input] == ["x"]
    [outside] = [
        onnx.numpy_helper.to_array(each)
        for each in onnx.load(files[0]).graph.initializer
        if each.name == "outside"
    ]
    assert outside.tolist() == list(range(128))


def test_descriptions_of_weights_in_other_files_stay(tmp_path: Path) -> None:
    [path] = model_files.save_model(
        a_model(tmp_path, doc="from elsewhere", by="another"), tmp_path / "m.onnx", False
    )
    [outside] = [
        each
        for each in onnx.load(path, load_external_data=False).graph.initializer
        if each.name == "outside"
    ]
    assert outside.doc_string == "from elsewhere"
    assert {each.key: each.value for each in outside.metadata_props}["by"] == "another"


def test_values_are_described_as_onnx_ir_describes_them(tmp_path: Path) -> None:
    """Values share their type and shape, and one has more to it than these."""
    model = a_model(tmp_path)
    [y] = model.graph.outputs
    for name in ("first", "second", "described"):
        node = ir.node("Neg", [y])
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, y.type, y.shape
        model.graph.append(node)
    node.outputs[0].metadata_props["by"] = "another"
    expected = ir.to_proto(model)
    without = model_files.without_weights(model)
    assert [each.name for each in without.graph.initializer] == ["small"]
    weights = {"outside", "large"}
    infos = sorted(
        (each for each in expected.graph.value_info if each.name not in weights), key=str
    )
    assert sorted(without.graph.value_info, key=str) == infos
    assert list(without.graph.node) == list(expected.graph.node)
    assert ir.to_proto(model) == expected
