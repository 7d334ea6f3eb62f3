"""Files for engines whose experts' weights stay in safetensors files."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from rich.console import Console
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import nn

import dynamo_moe
from custom_ops.residency import cache_bytes
from custom_ops.weight_source import WeightSource
from dynamo_moe.files.kernel_layers import kernel_layers
from dynamo_moe.files.offloading import OffloadedLayer, offloaded_kernel_layers
from dynamo_moe.moe_nodes.nodes import EXPERT_CACHE, INPUTS, RESIDENT_EXPERTS, SOURCES
from onnx_files import moe_model, save, value, weight
from small_models import InOut, OpLayer, OwnRouter, mlp_model, op_model


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
            for name, source in (("w1", layer.w1), ("w2", layer.w2)):
                key = old.input[INPUTS[old.op_type].index(name)]
                gone.add(key)
                assert read(source) == before[key].tobytes()
                added[SOURCES[name]] = str(source).encode()
                assert (after[key].shape, after[key].dtype) == ((1,), before[key].dtype)
                assert not after[key].any()
        assert attributes(new) == attributes(old) | added
    for name in before.keys() - gone:
        np.testing.assert_array_equal(before[name], after[name])
    assert report.path.stat().st_size < original.stat().st_size
    for old, new in zip(kernel_layers(original), kernel_layers(report.path), strict=True):
        assert old.resident_experts is None
        assert new.resident_experts in {None, *(layer.resident_experts for layer in report.layers)}


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
        "device_bytes": 2 * cache_bytes(6, 3, size // 2, size // 2),
        "weight_bytes": 2 * 6 * size,
        "host_bytes": 2 * 6 * size,
    }
    assert calls[-1] == (12 * size, 12 * size)
    assert report.notes == ()
    # Bodies would compute with the placeholders.
    assert not onnx.load(report.path, load_external_data=False).functions


def test_the_weights_file_is_a_safetensors_file(tmp_path: Path) -> None:
    path = exported(tmp_path)
    report = dynamo_moe.offload_file(
        path, tmp_path / "copy.onnx", resident_experts=1, weights=tmp_path / "e.safetensors"
    )
    (written,) = tmp_path.glob("e.*.safetensors")
    assert report.weights_file == written
    checksum = report.layers[0].w1.file.header_crc32
    assert written.name == f"e.{checksum:08x}.safetensors"
    stored = load_file(report.weights_file)
    assert {*stored} == {f"{layer}.mlp.{name}" for layer in (0, 1) for name in ("w1", "w2")}
    for name, array in arrays(path).items():
        if name in stored:
            np.testing.assert_array_equal(stored[name], array)
    content = report.weights_file.read_bytes()
    for source in (each for layer in report.layers for each in layer.sources):
        assert source.state() == "found"
        assert source.offset % 128 == 0
        assert source.file.header_bytes % 256 == 0
        header = content[: source.file.header_bytes]
        assert source.file.header_crc32 == zlib.crc32(header)
        assert source.file.file_bytes == len(content)


def test_a_file_of_other_values_is_written_beside_the_first(tmp_path: Path) -> None:
    path = exported(tmp_path)
    first = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)
    source = first.layers[0].w1
    written = source.path.stat()
    same = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=2)
    assert (first.is_weights_file_new, same.is_weights_file_new) == (True, False)
    assert (same.weights_file, source.path.stat()) == (first.weights_file, written)
    model = mlp_model()
    model[0].mlp.w1.data.view(-1)[0] += 1
    other = dynamo_moe.offload_file(
        exported(tmp_path, model), tmp_path / "copy.onnx", resident_experts=1
    )
    assert other.is_weights_file_new
    assert {source.state(), other.layers[0].w1.state()} == {"found"}
    changed = other.layers[0].w1
    assert changed.path.stat().st_size == source.file.file_bytes
    assert changed.path != source.path
    # By their headers, either is told from the other one.
    changed.path.replace(source.path)
    assert source.state() == "changed"


def test_a_damaged_file_of_that_name_is_replaced(tmp_path: Path) -> None:
    path = exported(tmp_path)
    first = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)
    source = first.layers[0].w1
    source.path.write_bytes(source.path.read_bytes()[:-1])
    assert source.state() == "changed"
    dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)
    assert source.state() == "found"


def test_weights_are_removed_if_the_copy_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exported(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr("dynamo_moe.files.offloading.save_model", fail)
    with pytest.raises(OSError, match="no room"):
        dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]


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


def test_linked_weights_stay_in_their_file(tmp_path: Path) -> None:
    path = linked(tmp_path)
    report = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=2)
    before, after = arrays(path), arrays(report.path)
    for layer in report.layers:
        for name, source in (("w1", layer.w1), ("w2", layer.w2)):
            assert source.path == tmp_path / "weights" / "model.safetensors"
            assert read(source) == before[f"{layer.name}.{name}"].tobytes()
            assert after[f"{layer.name}.{name}"].shape == (1,)
    assert report.weights_file is None
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "copy.onnx",
        "model.onnx",
        "weights",
    ]


def test_weights_that_cannot_be_mapped_are_named(tmp_path: Path) -> None:
    reports = []
    for pad in (0, 8):
        (tmp_path / str(pad)).mkdir()
        path = linked(tmp_path / str(pad), pad)
        reports.append(
            dynamo_moe.offload_file(path, path.with_name("copy.onnx"), resident_experts=2)
        )
    (note,) = [note for report in reports for note in report.notes]
    assert "model.safetensors: weights that do not begin at a multiple of 16 bytes are" in note


def test_a_copy_in_another_folder_finds_the_other_weights(tmp_path: Path) -> None:
    path = linked(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "model.onnx"
    for _ in range(2):
        dynamo_moe.offload_file(path, copy, resident_experts=2)
    link = tmp_path / "elsewhere" / "weights" / "model.safetensors"
    assert link.readlink() == tmp_path / "weights" / "model.safetensors"
    link.unlink()
    link.write_bytes(b"another")
    with pytest.raises(FileExistsError, match=r"model\.safetensors"):
        dynamo_moe.offload_file(path, copy, resident_experts=2)


def test_links_that_cannot_be_made_are_said_before_weights_are_copied(tmp_path: Path) -> None:
    path = exported(tmp_path, external_data=True)
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = str(tmp_path / entry.value)
    path.write_bytes(proto.SerializeToString())
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    with pytest.raises(ValueError, match="not a file in the ONNX file's folder: no link is made"):
        dynamo_moe.offload_file(path, folder / "copy.onnx", resident_experts=2)
    assert not [*folder.iterdir()]


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
    four = 2 * cache_bytes(6, 4, 4 * 24 * 16, 4 * 24 * 16)
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
    assert first.w1 == second.w1
    assert first.w2 != second.w2
    memory = report.to_dict()["memory"]
    assert memory["device_bytes"] == first.device_bytes + second.device_bytes
    assert memory["host_bytes"] == first.w1.bytes + first.w2.bytes + second.w2.bytes


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


def unchanged(proto: onnx.ModelProto) -> None:
    pass


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


@pytest.mark.parametrize("name", [b"a\nb", b"a\x01", b"\xe9", b"a\xffb"])
def test_paths_that_an_engine_cannot_hold(tmp_path: Path, name: bytes) -> None:
    path = by_hand(tmp_path, unchanged)
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    message = "a path of weights must be UTF-8 without control characters"
    with pytest.raises(ValueError, match=message):
        dynamo_moe.offload_file(path, folder / "copy.onnx", resident_experts=1)
    assert not [*folder.iterdir()]
    linked(folder)
    with pytest.raises(ValueError, match=message):
        dynamo_moe.offload_file(
            folder / "model.onnx",
            folder / "copy.onnx",
            resident_experts=1,
            weights=tmp_path / "e.safetensors",
        )
    assert not [*tmp_path.glob("e.*")]


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


def test_nothing_that_is_read_is_overwritten(tmp_path: Path) -> None:
    path = linked(tmp_path)
    checkpoint = tmp_path / "weights" / "model.safetensors"
    content = path.read_bytes(), checkpoint.read_bytes()
    for output in (path, checkpoint):
        with pytest.raises(ValueError, match="is read to write it: name another file"):
            dynamo_moe.offload_file(path, output, resident_experts=1)
    dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1, weights=checkpoint)
    assert content == (path.read_bytes(), checkpoint.read_bytes())


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


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exported(tmp_path)
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("dynamo_moe.files.experts_file.shutil.disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"\.experts\.safetensors needs 36864 bytes, .* 100 left"):
        dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)


def test_a_file_that_is_cut_off_leaves_nothing(tmp_path: Path) -> None:
    path = exported(tmp_path, external_data=True)
    data = tmp_path / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:5000])
    with pytest.raises(OSError, match="bytes before the end of"):
        dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]


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
    layer.w1.path.unlink()
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
