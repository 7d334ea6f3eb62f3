"""What the report and ``inspect`` say of offloaded layers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper
from rich.console import Console

import dynamo_moe
from dynamo_moe.files.offload_report import OffloadedLayer
from dynamo_moe.moe_nodes.nodes import RESIDENT_EXPERTS
from files_to_offload import by_hand, exported, unchanged


def shown(report: Any) -> str:
    text = io.StringIO()
    Console(width=200, file=text).print(report)
    return text.getvalue()


def test_the_report_prints_the_memory(tmp_path: Path) -> None:
    report = dynamo_moe.offload_file(exported(tmp_path), tmp_path / "copy.onnx", resident_experts=1)
    text = shown(report)
    assert "0.mlp             1 of 6   3.1 kB       4.1 kB       18.4 kB" in text
    assert "8.2 kB on the GPU instead of 36.9 kB; 36.9 kB on the host, pinned" in text
    assert report.weights_file is not None
    assert f"{report.weights_file.name}: found" in text
    assert "note: layer 0.mlp and 1 more: with 1 resident experts" in text
    layer: OffloadedLayer = report.layers[0]
    layer.tensors["w1"].path.unlink()
    assert f"{report.weights_file.name}: missing" in shown(report)


def test_inspect_states_the_memory(tmp_path: Path) -> None:
    path = exported(tmp_path)
    report = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts={"1.mlp": 2})
    assert dynamo_moe.inspect(path).offloaded == ()
    summary = dynamo_moe.inspect(report.path)
    assert summary.offloaded == report.layers
    assert [layer.expert_bytes for layer in summary.moe_layers] == [3072, None]
    assert summary.to_dict()["offloaded"] == report.to_dict()["layers"]
    assert "7.2 kB on the GPU instead of 18.4 kB" in shown(summary)
    assert report.weights_file is not None
    assert f"{report.weights_file.name}: found" in shown(summary)


@pytest.mark.parametrize(
    ("name", "attribute", "message"),
    [
        ("w1_source", None, "a weight's source must be <offset> <bytes> .*, got 'None'"),
        ("w2_source", "1 2 3", "a weight's source must be <offset> <bytes> .*, got '1 2 3'"),
        ("num_experts", None, "num_experts must be a positive integer, got None"),
        ("top_k", None, "top_k must be a positive integer, got None"),
        (RESIDENT_EXPERTS, [1, 2], r"resident_experts must be a positive integer, got \[1, 2\]"),
        (RESIDENT_EXPERTS, "x", "resident_experts must be a positive integer, got x"),
        (RESIDENT_EXPERTS, -3, "resident_experts must be a positive integer, got -3"),
    ],
)
def test_inspect_names_a_damaged_node(
    tmp_path: Path, name: str, attribute: Any, message: str
) -> None:
    path = by_hand(tmp_path, unchanged)
    copy = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1).path
    proto = onnx.load(copy)
    node = next(node for node in proto.graph.node if node.op_type == "DroplessMoE")
    (old,) = (each for each in node.attribute if each.name == name)
    node.attribute.remove(old)
    if attribute is not None:
        node.attribute.append(helper.make_attribute(name, attribute))
    onnx.save(proto, copy)
    place = rf"copy\.onnx: offloaded node '{node.name or node.output[0]}': "
    with pytest.raises(ValueError, match=place + message):
        dynamo_moe.inspect(copy)
