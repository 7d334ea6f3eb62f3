"""``dynamo_moe.export``: the contents of the file, and what is left on the disk."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.files import model_files
from export_forms import FORMS, TOKENS, mixed_model
from small_models import OpLayer, mlp_model, op_model

pytest_plugins = ("export_forms",)


def test_plugin_node(exported) -> None:
    _, path = exported("mlp", "plugin")
    proto = onnx.load(path)
    nodes = [node for node in proto.graph.node if node.op_type == "DroplessMoE"]
    assert [node.domain for node in nodes] == ["moe", "moe"]
    assert [node.name for node in nodes] == ["0.mlp/DroplessMoE", "1.mlp/DroplessMoE"]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in nodes[0].attribute}
    assert attributes == {
        "top_k": 2, "num_experts": 6, "in_features": 16, "hidden_features": 24,
        "activation": b"gelu", "gated": 0, "interleaved": 0, "weight_on_input": 0,
        "activation_alpha": pytest.approx(1.702), "activation_limit": 7.0,
        "pre_norm": b"none", "norm_eps": pytest.approx(1e-6), "residual": 0,
        "scoring": b"softmax", "renormalize": 1, "routed_scaling": 1.0,
        "group_scoring": b"none", "n_group": 1, "topk_group": 1,
        "w1_transposed": 0, "w2_transposed": 0,
        "plugin_version": b"1", "plugin_namespace": b"", "kernels": b"",
    }  # fmt: skip
    assert list(nodes[1].input[1:4]) == ["1.mlp.router.weight", "1.mlp.w1", "1.mlp.w2"]
    assert list(nodes[1].input[5:]) == ["1.mlp.b1", "1.mlp.b2"]


@pytest.mark.parametrize("name", ["mlp", "mixed"])
def test_nodes_obey_the_rules_of_tensorrts_parser(exported, name: str) -> None:
    """One function per (domain, name), with all inputs, none omitted, and all attributes."""
    _, path = exported(name, "plugin")
    proto = onnx.load(path)
    functions = {(function.domain, function.name): function for function in proto.functions}
    assert len(functions) == len(proto.functions)
    nodes = [node for node in proto.graph.node if node.domain.startswith("moe")]
    assert nodes
    for node in nodes:
        function = functions[node.domain, node.op_type]
        assert len(node.input) == len(function.input)
        assert all(node.input)
        assert {a.name for a in node.attribute} == set(function.attribute)
        assert not node.overload
        assert {"plugin_version", "plugin_namespace", "kernels"} <= set(function.attribute)


def test_one_configuration_keeps_the_plain_domain(exported) -> None:
    _, path = exported("mixed", "plugin")
    domains = [n.domain for n in onnx.load(path).graph.node if n.domain.startswith("moe")]
    assert domains[0] == domains[3] == "moe"  # The first configuration of each operator.
    assert len(set(domains[:3])) == 3


@pytest.mark.parametrize("form", FORMS)
def test_weights_keep_their_names_and_are_stored_once(exported, form: str) -> None:
    model, path = exported("mlp", form)
    proto = onnx.load(path)
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    for name, parameter in model.named_parameters():
        array = stored[name]
        expected = parameter.detach().numpy()
        if array.shape != expected.shape:
            expected = np.swapaxes(expected, 1, 2)
        np.testing.assert_array_equal(array, expected)
    parameters = sum(p.numel() for p in model.parameters())
    assert sum(array.size for array in stored.values()) < parameters + 600


def test_file_is_the_parameters_and_less_than_5_percent(tmp_path: Path) -> None:
    model = mlp_model(width=64, hidden=256, experts=8)
    dynamo_moe.convert(model)
    report = dynamo_moe.export(model, torch.randn(2, 64), tmp_path / "model.onnx")
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert parameters < report.file_bytes < 1.05 * parameters


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mlp", "mixed"])
def test_checker_and_shape_inference(exported, name: str, form: str) -> None:
    _, path = exported(name, form)
    onnx.checker.check_model(path, full_check=True)
    proto = onnx.load(path)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    typed = {info.name for info in (*proto.graph.value_info, *proto.graph.output)}
    assert {name for node in proto.graph.node for name in node.output} <= typed
    for info in proto.graph.value_info:
        assert info.type.tensor_type.HasField("shape"), info.name


@pytest.mark.parametrize("name", ["mlp", "mixed"])
def test_shape_inference_restores_what_a_tool_stripped(exported, name: str) -> None:
    _, path = exported(name, "plugin")
    proto = onnx.load(path)
    before = {info.name: info.type for info in proto.graph.value_info}
    del proto.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(
        proto, check_type=True, strict_mode=True, data_prop=True
    )
    after = {info.name: info.type for info in inferred.graph.value_info}
    moe = [o for n in proto.graph.node if n.domain == "moe" for o in n.output if o in before]
    assert moe
    for value in moe:
        assert after[value] == before[value]


def test_no_local_paths_or_stack_traces(exported) -> None:
    for form in FORMS:
        _, path = exported("mlp", form)
        content = path.read_bytes()
        for trace in (str(Path(__file__).parents[1]), 'File "', "stack_trace", "site-packages"):
            assert trace.encode() not in content


def test_nodes_are_named_after_their_modules(tmp_path: Path) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[:, : x.shape[1] // 2]

    sizes = ({0: "batch", 1: "length"},)
    dynamo_moe.export(Half(), torch.randn(2, 6, 4), tmp_path / "m.onnx", dynamic_shapes=sizes)
    names = {node.name for node in onnx.load(tmp_path / "m.onnx").graph.node}
    assert {"Shape", "inner/MatMul", "Slice"} <= names
    assert {name.rpartition("/")[0] for name in names} == {"", "inner"}


def test_exporting_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    model = mixed_model()
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    for path in (first, second):
        dynamo_moe.export(model, torch.randn(2, 3, 16), path)
    assert first.read_bytes() == second.read_bytes()


def test_the_example_does_not_change_the_file(tmp_path: Path) -> None:
    model = mlp_model()
    dynamo_moe.convert(model)
    files, seconds = [], []
    for index, shape in enumerate([(1, 5), (4, 700), (0, 2), (2, 1)]):
        path = tmp_path / f"{index}.onnx"
        started = time.process_time()
        dynamo_moe.export(model, torch.randn(*shape, 16), path, dynamic_shapes=TOKENS)
        seconds.append(time.process_time() - started)
        files.append(path.read_bytes())
    assert len(set(files)) == 1
    # 560 times the tokens. Twice the processor time allows for other work on it, not for growth.
    assert seconds[1] < 2 * max(seconds[0], *seconds[2:])


def test_external_data(tmp_path: Path) -> None:
    model = mlp_model()
    dynamo_moe.convert(model)
    report = dynamo_moe.export(model, torch.randn(2, 16), tmp_path / "m.onnx", external_data=True)
    assert [file.name for file in report.files] == ["m.onnx", "m.onnx.data"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert dynamo_moe.verify(tmp_path / "m.onnx", model).passed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]


def test_too_large_for_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp_model()
    dynamo_moe.convert(model)
    monkeypatch.setattr(model_files, "EXTERNAL_DATA_LIMIT", 1000)
    with pytest.raises(
        ValueError, match=r"the weights have \d+ bytes; one ONNX file holds at most"
    ):
        dynamo_moe.export(model, torch.randn(2, 16), tmp_path / "m.onnx", external_data=False)
    report = dynamo_moe.export(model, torch.randn(2, 16), tmp_path / "m.onnx")
    assert len(report.files) == 2


def test_the_file_is_what_protobuf_itself_would_write(tmp_path: Path) -> None:
    """Except for the order of the weights."""
    model = mlp_model()
    dynamo_moe.convert(model)
    dynamo_moe.export(model, torch.randn(2, 16), tmp_path / "m.onnx")
    written = onnx.load(tmp_path / "m.onnx")
    assert written.ByteSize() == (tmp_path / "m.onnx").stat().st_size
    weights = {tensor.name: tensor for tensor in written.graph.initializer}
    assert len(weights) == len(written.graph.initializer)
    for name, tensor in weights.items():
        again = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), name)
        assert again == tensor
    onnx.checker.check_model(written, full_check=True)
    state = model.state_dict()
    for name in weights.keys() & state.keys():
        values = onnx.numpy_helper.to_array(weights[name])
        assert np.array_equal(np.sort(values, axis=None), np.sort(state[name].numpy(), axis=None))


def test_a_failed_export_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"earlier")
    model = mlp_model()
    dynamo_moe.convert(model)

    def full_disk(model: object, beside: Path, weights: object) -> None:
        Path(beside).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_files.protobuf, "write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        dynamo_moe.export(model, torch.randn(2, 16), path)
    assert path.read_bytes() == b"earlier"
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_a_model_and_its_weights_take_their_places_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, x = tmp_path / "model.onnx", np.ones((2, 16), np.float32)
    models = [nn.Linear(16, 16), nn.Linear(16, 16)]
    example = torch.from_numpy(x)
    dynamo_moe.export(models[0], example, path, external_data=True)
    expected = onnxruntime.InferenceSession(path).run(None, {"input": x})[0]
    replace = Path.replace

    def full_disk(source: Path, place: Path) -> Path:
        if place == path and source.parent != tmp_path and "old" not in source.parts:
            raise OSError(28, "No space left on device")
        return replace(source, place)

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        dynamo_moe.export(models[1], example, path, external_data=True)
    result = onnxruntime.InferenceSession(path).run(None, {"input": x})[0]
    np.testing.assert_array_equal(result, expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]


@pytest.mark.parametrize("name", ["old", "new"])
def test_names_of_files_are_free(name: str, tmp_path: Path) -> None:
    path, example = tmp_path / name, torch.randn(2, 16)
    for _ in range(2):
        report = dynamo_moe.export(nn.Linear(16, 16), example, path, external_data=True)
        assert report.files == (path, tmp_path / f"{name}.data")


def test_a_model_that_cannot_be_renamed_stays_whole(tmp_path: Path) -> None:
    model = op_model(OpLayer())
    report = dynamo_moe.export(model, torch.randn(3, 16), tmp_path / "a", external_data=True)
    taken = tmp_path / "b"
    (taken / "folder").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        model_files.rename_model(report.files, taken)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a.data", "b"]
    onnxruntime.InferenceSession(str(report.path))
