"""Which layers' weights leave a file for engines, and what is left in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.numpy import load_file
from torch import nn

import dynamo_moe
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.plan import plan
from custom_ops.offload import cache_bytes
from dynamo_moe.files.kernel_layers import kernel_layers
from dynamo_moe.files.offloading import offloaded_kernel_layers
from dynamo_moe.moe_nodes.nodes import EXPERT_CACHE, INPUTS, RESIDENT_EXPERTS, SOURCES
from files_to_offload import arrays, by_hand, exported, read, unchanged
from onnx_files import value
from packed_cases import PackedCase, PackedLayer, packed_case
from small_models import InOut, OpLayer, OwnRouter, op_model


def nodes(path: Path) -> list[onnx.NodeProto]:
    proto = onnx.load(path, load_external_data=False)
    return [node for node in proto.graph.node if node.op_type in INPUTS]


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def check(original: Path, report: dynamo_moe.OffloadReport) -> None:
    """Compares a copy with its original: only the offloaded layers' weights have left it."""
    onnx.checker.check_model(report.path, full_check=True)
    before, after = arrays(original), arrays(report.path)
    assert before.keys() == after.keys()
    layers = {layer.node: layer for layer in report.layers}
    gone = set()
    for old, new in zip(nodes(original), nodes(report.path), strict=True):
        assert new.domain == ("moe.offloaded" if old.name in layers else old.domain)
        assert (old.name, list(old.input), list(old.output)) == (new.name, new.input, new.output)
        layer = layers.get(old.name)
        added: dict[str, Any] = {}
        if layer is not None:
            added = {RESIDENT_EXPERTS: layer.resident_experts, EXPERT_CACHE: report.shared_cache}
            added["plugin_version"] = b"2"
            for name, source in layer.tensors.items():
                key = old.input[INPUTS[old.op_type].index(name)]
                gone.add(key)
                assert read(source) == before[key].tobytes()
                is_one = "zero_points" in name and before[key].shape[1:] == (1, 1)
                shape = (1, 1, 1) if is_one else (1,)
                assert (after[key].shape, after[key].dtype) == (shape, before[key].dtype)
                assert not after[key].any()
            for weight, attribute in SOURCES.items():
                of_weight = [str(each) for name, each in layer.tensors.items() if weight in name]
                added[attribute] = "\n".join(of_weight).encode()
        assert attributes(new) == attributes(old) | added
    for name in before.keys() - gone:
        np.testing.assert_array_equal(before[name], after[name])
    assert report.path.stat().st_size < original.stat().st_size
    for old, new in zip(kernel_layers(original), kernel_layers(report.path), strict=True):
        assert old.resident_experts is None
        assert new.resident_experts in {None, *(layer.resident_experts for layer in report.layers)}


PACKED: dict[str, dict[str, Any]] = {
    "int4": {"biases": False},
    "int4 zero points": {"weight_format": "int4", "zero_points": "groups"},
    "int4 zero point": {"weight_format": "int4", "zero_points": "experts"},
    "mxfp4": {"weight_format": "mxfp4"},
    "fp8": {"weight_format": "fp8", "biases": False},
    "fp8 whole": {"weight_format": "fp8 whole"},
    "nvfp4": {"weight_format": "nvfp4"},
    "int8": {"weight_format": "int8", "biases": False},
}


@pytest.mark.parametrize("form", PACKED)
def test_packed_experts_leave_the_file(tmp_path: Path, form: str) -> None:
    case = packed_case("experts", shape=(4,), width=64, gated=True, **PACKED[form])
    path = tmp_path / "packed.onnx"
    dynamo_moe.export(PackedLayer(case).eval(), (case.arguments["x"],), path)
    report = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=3)
    check(path, report)
    (layer,) = report.layers
    (kernels,) = kernel_layers(path)
    assert [*layer.tensors] == [*kernels.shape.stored]
    assert kernel_layers(report.path) == [replace(kernels, resident_experts=3)]
    assert layer.expert_bytes == sum(kernels.shape.expert_bytes.values())
    planned = plan(replace(kernels, resident_experts=3), architecture("sm_90"))
    assert layer.device_bytes == planned.state_size
    assert dynamo_moe.inspect(report.path).offloaded == report.layers


class Several(nn.Module):
    def __init__(self, *cases: PackedCase) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(PackedLayer, cases))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_share_what_stands_for_no_zero_points(tmp_path: Path) -> None:
    case = packed_case("experts", shape=(4,), width=64)
    weights = {name: case.arguments[name].clone() for name in ("w1", "w2")}
    scales = {name: case.arguments[name] * 1.5 for name in ("w1_scales", "w2_scales")}
    again = case.changed(**{name: weight.flip(0) for name, weight in weights.items()}, **scales)
    other = packed_case("experts", "mxfp4", shape=(4,), width=64)
    path = tmp_path / "packed.onnx"
    dynamo_moe.export(Several(case, again, other).eval(), (case.arguments["x"],), path)
    first, second, third = (node.name for node in nodes(path))
    report = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts={second: 2})
    assert [layer.node for layer in report.layers] == [second]
    before, after = kernel_layers(path), kernel_layers(report.path)
    assert after == [before[0], replace(before[1], resident_experts=2), before[2]]
    assert len({first, second, third}) == 3


def test_a_few_bytes_do_not_move_the_weights_behind_them(tmp_path: Path) -> None:
    options = {"width": 72, "hidden": 40, "experts": 7, "zero_points": "experts"}
    case = packed_case("experts", shape=(4,), **options)
    path = tmp_path / "packed.onnx"
    dynamo_moe.export(PackedLayer(case).eval(), (case.arguments["x"],), path)
    report = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=2)
    offsets = {name: source.offset % 16 for name, source in report.layers[0].tensors.items()}
    assert not any(offsets[name] for name in ("w1", "w1_scales", "w2", "w2_scales")), offsets


@pytest.mark.parametrize("external_data", [False, True], ids=["one file", "data beside it"])
def test_experts_leave_the_file(tmp_path: Path, external_data: bool) -> None:
    path = exported(tmp_path, external_data=external_data)
    content = path.read_bytes()
    calls: list[tuple[int, int]] = []
    report = dynamo_moe.offload_file(
        path,
        tmp_path / "copy.onnx",
        resident_experts=3,
        progress=lambda done, total: calls.append((done, total)),
    )
    check(path, report)
    assert path.read_bytes() == content
    assert [layer.name for layer in report.layers] == ["0.mlp", "1.mlp"]
    assert [each.resident_experts for each in kernel_layers(report.path)] == [3, 3]
    # Hidden 24, width 16, six experts of float32.
    size = 4 * 2 * 24 * 16
    memory = report.to_dict()["memory"]
    assert memory == {
        "device_bytes": 2 * cache_bytes(6, 3, (size // 2, size // 2)),
        "weight_bytes": 2 * 6 * size,
        "host_bytes": 2 * 6 * size,
    }
    assert calls[-1] == (12 * size, 12 * size)
    assert report.notes == ()
    # Bodies would compute with the placeholders.
    assert not onnx.load(report.path, load_external_data=False).functions


def layers_of(kind: str) -> nn.Module:
    layers: dict[str, Callable[[], nn.Module]] = {
        "experts": lambda: op_model(OwnRouter(activation="silu", gated=True), OpLayer()),
        "in out": lambda: op_model(InOut("w1", "w2"), InOut("w2", gated=True, activation="silu")),
        "float16": lambda: op_model(OpLayer(), OpLayer()),
        "bfloat16": lambda: op_model(OpLayer(biases=False), OwnRouter()),
    }
    torch.manual_seed(0)
    model = layers[kind]()
    dtype = getattr(torch, kind, None)
    for layer in model.children():
        for name, tensor in layer.named_parameters():
            if dtype is not None and name.rpartition(".")[2] in {"w1", "w2", "b1", "b2"}:
                tensor.data = tensor.data.to(dtype)
    return model


@pytest.mark.parametrize("kind", ["experts", "in out", "float16", "bfloat16"])
def test_operators_layouts_and_dtypes(tmp_path: Path, kind: str) -> None:
    path = exported(tmp_path, layers_of(kind))
    report = dynamo_moe.offload_file(
        path, tmp_path / "copy.onnx", resident_experts=2, shared_cache=True
    )
    check(path, report)
    assert len(report.layers) == 2
    if kind == "bfloat16":
        assert arrays(report.path)["0.mlp.w1"].dtype == ml_dtypes.bfloat16


def test_some_layers(tmp_path: Path) -> None:
    path = exported(tmp_path)
    copy = tmp_path / "copy.onnx"
    report = dynamo_moe.offload_file(path, copy, resident_experts={"1.mlp": 2})
    check(path, report)
    assert [(each.name, each.resident_experts) for each in report.layers] == [("1.mlp", 2)]
    assert [each.resident_experts for each in kernel_layers(copy)] == [None, 2]
    # Its body is also the resident layer's.
    assert onnx.load(copy).functions
    by_node = dynamo_moe.offload_file(path, copy, resident_experts={"*": 4, "0.mlp/DroplessMoE": 1})
    assert [each.resident_experts for each in by_node.layers] == [1, 4]
    assert by_node.notes == (
        "layer 0.mlp: with 1 resident experts, a token's 2 take 2 waves, whatever is resident",
    )


def test_memory_is_shared_out(tmp_path: Path) -> None:
    path = exported(tmp_path)
    copy = tmp_path / "copy.onnx"
    four = 2 * cache_bytes(6, 4, (4 * 24 * 16, 4 * 24 * 16))
    report = dynamo_moe.offload_file(path, copy, resident_memory=four - 1)
    assert [each.resident_experts for each in report.layers] == [3, 3]
    assert report.to_dict()["memory"]["device_bytes"] < four
    report = dynamo_moe.offload_file(path, copy, resident_memory=four)
    assert report.to_dict()["memory"]["device_bytes"] == four
    report = dynamo_moe.offload_file(path, copy, resident_memory=2**40)
    assert [each.resident_experts for each in report.layers] == [6, 6]
    assert report.notes == (
        "every expert has a slot: without offloading, an engine takes no more memory",
    )


class Shared(nn.Module):
    """Two layers with the same weights; the result is also computed from w1 if asked for."""

    def __init__(self, use: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.use = OpLayer(), use
        self.other = OpLayer()
        self.other.w1 = self.layer.w1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.other(self.layer(x))
        return y + self.layer.w1.sum() if self.use else y


def test_layers_may_share_weights(tmp_path: Path) -> None:
    path = exported(tmp_path, Shared().eval())
    report = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=2)
    check(path, report)
    first, second = report.layers
    assert first.tensors["w1"] == second.tensors["w1"]
    assert first.tensors["w2"] != second.tensors["w2"]
    memory = report.to_dict()["memory"]
    assert memory["device_bytes"] == first.device_bytes + second.device_bytes
    assert (
        memory["host_bytes"]
        == first.tensors["w1"].bytes + first.tensors["w2"].bytes + second.tensors["w2"].bytes
    )


def test_weights_that_are_used_elsewhere_stay(tmp_path: Path) -> None:
    (tmp_path / "sum").mkdir()
    path = exported(tmp_path / "sum", Shared("sum").eval())
    copy = tmp_path / "copy.onnx"
    with pytest.raises(ValueError, match=r"its w1, 'other.w1', is also used by node 'ReduceSum'"):
        dynamo_moe.offload_file(path, copy, resident_experts=2)
    path = exported(tmp_path, Shared().eval())
    second = nodes(path)[1].name
    with pytest.raises(ValueError, match=r"also used by .*DroplessMoE.*: offload that layer, too"):
        dynamo_moe.offload_file(path, copy, resident_experts={nodes(path)[0].name: 2})
    assert second
    assert not copy.exists()
    assert not [*tmp_path.rglob("*.safetensors")]


def computed(proto: onnx.ModelProto) -> None:
    (node,) = (node for node in proto.graph.node if node.op_type == "DroplessMoE")
    node.input[2] = "turned"
    made = helper.make_node("Neg", ["b.0.mlp.w1"], ["turned"])
    proto.graph.node.insert(0, made)


def misshapen(proto: onnx.ModelProto) -> None:
    (tensor,) = (each for each in proto.graph.initializer if each.name == "b.0.mlp.w2")
    tensor.dims[:] = [3, 16, 8]


def given(proto: onnx.ModelProto) -> None:
    proto.graph.input.append(value("b.0.mlp.w1", (3, 16, 8)))


def returned(proto: onnx.ModelProto) -> None:
    proto.graph.output.append(value("b.0.mlp.w2", (3, 8, 16)))


def without_nodes(proto: onnx.ModelProto) -> None:
    del proto.graph.node[1:]
    proto.graph.output[0].CopyFrom(value("n", ["batch", None, 8]))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (computed, {"resident_experts": 2}, "its w1, 'turned', is computed by the graph"),
        (misshapen, {"resident_experts": 2}, r"'b.0.mlp.w2', must have the shape \[3, 8, 16\], g"),
        (given, {"resident_experts": 2}, "its w1, 'b.0.mlp.w1', is also an input or output"),
        (returned, {"resident_experts": 2}, "its w2, 'b.0.mlp.w2', is also an input or output"),
        (without_nodes, {"resident_experts": 2}, "has no MoE nodes of domain 'moe'"),
        (unchanged, {"resident_experts": 4}, r"has 3 experts: resident_experts must be in 1\.\.3"),
        (unchanged, {"resident_experts": 0}, r"must be in 1\.\.3, got 0"),
        (
            unchanged,
            {"resident_experts": {"b.0": 1}},
            "there is no MoE layer 'b.0'; the layers: b.0.mlp, b.1.experts",
        ),
        (unchanged, {}, "give either resident_experts or resident_memory"),
        (unchanged, {"resident_experts": {}}, "resident_experts names no layer"),
        (
            unchanged,
            {"resident_experts": 1, "weights": "experts.bin"},
            r"a file of weights must be called \*\.safetensors, got experts\.bin",
        ),
        (unchanged, {"resident_experts": 1, "resident_memory": 1}, "give either"),
        (
            unchanged,
            {"resident_memory": 2047},
            "2047 bytes hold less than one expert of layer b.0.mlp, which has 3: with the same",
        ),
    ],
)
def test_what_cannot_be_offloaded(
    tmp_path: Path,
    change: Callable[[onnx.ModelProto], None],
    options: dict[str, Any],
    message: str,
) -> None:
    path = by_hand(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        dynamo_moe.offload_file(path, tmp_path / "copy.onnx", **options)
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]


def test_a_file_without_layers_is_said_with_a_size_of_memory(tmp_path: Path) -> None:
    path = by_hand(tmp_path, without_nodes)
    for offload in (
        offloaded_kernel_layers,
        lambda path, **options: dynamo_moe.offload_file(path, tmp_path / "copy.onnx", **options),
    ):
        with pytest.raises(ValueError, match="has no MoE nodes of domain 'moe'"):
            offload(path, resident_memory=4096)


def test_layers_that_are_not_named_may_have_any_weights(tmp_path: Path) -> None:
    path = by_hand(tmp_path, computed)
    report = dynamo_moe.offload_file(
        path, tmp_path / "copy.onnx", resident_experts={"b.1.experts": 1}
    )
    assert [each.name for each in report.layers] == ["b.1.experts"]


def in_a_branch(proto: onnx.ModelProto) -> None:
    """Moves the first layer into a branch of an If."""
    (node,) = (node for node in proto.graph.node if node.op_type == "DroplessMoE")
    shape = ["batch", None, 8]
    branches = {
        "then_branch": helper.make_graph([node], "then", [], [value("y0", shape)]),
        "else_branch": helper.make_graph(
            [helper.make_node("Identity", ["n"], ["n2"])], "else", [], [value("n2", shape)]
        ),
    }
    place = list(proto.graph.node).index(node)
    proto.graph.node.remove(node)
    proto.graph.node.insert(place, helper.make_node("If", ["true"], ["y0"], **branches))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "true"))


def in_both_branches(proto: onnx.ModelProto) -> None:
    """Moves the first layer into both branches of an If, with weights of the same names."""
    in_a_branch(proto)
    weights = {each.name: each for each in proto.graph.initializer}
    (choice,) = (node for node in proto.graph.node if node.op_type == "If")
    for factor, attribute in enumerate(choice.attribute, start=1):
        (node,) = attribute.g.node
        if node.op_type == "Identity":
            result = node.output[0]
            node.CopyFrom(
                next(each.g.node[0] for each in choice.attribute if each.g != attribute.g)
            )
            node.output[0], node.name = result, "second"
        for at, name in ((2, "b.0.mlp.w1"), (3, "b.0.mlp.w2")):
            array = np.full_like(numpy_helper.to_array(weights[name]), factor)
            node.input[at] = f"own.{name[-2:]}"
            attribute.g.initializer.append(numpy_helper.from_array(array, node.input[at]))


def test_weights_of_equal_names_in_branches(tmp_path: Path) -> None:
    path = by_hand(tmp_path, in_both_branches)
    report = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)
    assert report.weights_file
    stored = load_file(report.weights_file)
    assert {"own.w1", "own.w1.1", "own.w2", "own.w2.1"} < {*stored}
    for name in ("own.w1", "own.w2"):
        values = [np.unique(stored[each]).tolist() for each in (name, f"{name}.1")]
        assert sorted(values) == [[1], [2]]
    assert len({source for layer in report.layers for source in layer.sources}) == 6


def in_a_function(proto: onnx.ModelProto) -> None:
    """Moves the first layer into a function of the model's own."""
    (node,) = (node for node in proto.graph.node if node.op_type == "DroplessMoE")
    inputs = [name for name in node.input if name]
    function = helper.make_function(
        "own", "Block", inputs, node.output, [node], opset_imports=proto.opset_import
    )
    call = helper.make_node("Block", inputs, node.output, name="call", domain="own")
    place = list(proto.graph.node).index(node)
    proto.graph.node.remove(node)
    proto.graph.node.insert(place, call)
    proto.functions.append(function)
    proto.opset_import.append(helper.make_opsetid("own", 1))


def test_layers_in_functions(tmp_path: Path) -> None:
    path = by_hand(tmp_path, in_a_function)
    report = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)
    assert sorted(each.name for each in report.layers) == ["b.0.mlp", "b.1.experts"]
    onnx.checker.check_model(report.path)
    assert arrays(report.path)["b.0.mlp.w1"].shape == (1,)
    layers = offloaded_kernel_layers(path, resident_experts={"b.0.mlp": 1})
    assert sorted(each.resident_experts or 0 for each in layers) == [0, 1]


def test_layers_in_branches(tmp_path: Path) -> None:
    path = by_hand(tmp_path, in_a_branch)
    report = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)
    assert sorted(each.name for each in report.layers) == ["b.0.mlp", "b.1.experts"]
    onnx.checker.check_model(report.path)
    assert [each.resident_experts for each in kernel_layers(report.path)] == [1, 1]
    assert arrays(report.path)["b.0.mlp.w1"].shape == (1,)
