"""``dynamo_moe.export``: the contents of the file, and that it computes the same everywhere."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxsim
import onnxslim
import pytest
import torch
from torch import nn

import dynamo_moe
from dynamo_moe.files import model_files
from dynamo_moe.weights import placeholders
from small_models import OpLayer, OwnRouter, mlp_model, op_model

# The forms of a file, by name, and the options that select them.
FORMS: dict[str, dict[str, Any]] = {
    "plugin": {"target": "plugin"},
    "unrolled": {"target": "plugin", "body": "unrolled"},
    "dense": {"target": "dense"},
    "onnxruntime": {"target": "onnxruntime"},
}
BESIDE_THE_NODE = ("plugin", "unrolled")
TOKENS = {"input": {1: "tokens"}}


def mixed_model() -> nn.Module:
    """Four configurations in one file, both operators."""
    torch.manual_seed(1)
    return op_model(
        OpLayer(activation="relu"),
        OpLayer(activation="silu", gated=True, biases=False),
        OpLayer(activation="relu", biases=False),
        OwnRouter(activation="silu", gated=True, interleaved=True),
    )


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], tuple[nn.Module, Path]]:
    """Exports each (model, form) once, from an example with batch 1 and 5 tokens."""
    folder = tmp_path_factory.mktemp("exported")
    done: dict[tuple[str, str], tuple[nn.Module, Path]] = {}

    def export(name: str, form: str) -> tuple[nn.Module, Path]:
        if (name, form) not in done:
            model = mixed_model() if name == "mixed" else mlp_model()
            dynamo_moe.convert(model)
            path = folder / f"{name}_{form}.onnx"
            dynamo_moe.export(
                model, torch.randn(1, 5, 16), path, **FORMS[form], dynamic_shapes=TOKENS
            )
            done[name, form] = model, path
        return done[name, form]

    return export


def run(path_or_proto: Path | onnx.ModelProto, x: torch.Tensor) -> torch.Tensor:
    source = (
        str(path_or_proto) if isinstance(path_or_proto, Path) else path_or_proto.SerializeToString()
    )
    session = onnxruntime.InferenceSession(source)
    return torch.from_numpy(session.run(None, {"input": x.numpy()})[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mlp", "mixed"])
def test_runs_at_other_shapes_than_the_example(exported, name: str, form: str) -> None:
    model, path = exported(name, form)
    cases = [(torch.randn(*shape, 16),) for shape in ((1, 1), (3, 7), (2, 64), (7, 2))]
    report = dynamo_moe.verify(path, model, cases)
    assert [case.shapes["input"][:2] for case in report.cases] == [(1, 1), (3, 7), (2, 64), (7, 2)]
    assert all(case.routing_agreement == 1.0 for case in report.cases)


@pytest.mark.parametrize("form", ["plugin", "unrolled", "dense"])
@pytest.mark.parametrize("name", ["mlp", "mixed"])
def test_empty_batch(exported, name: str, form: str) -> None:
    _, path = exported(name, form)
    assert run(path, torch.randn(0, 5, 16)).shape == (0, 5, 16)


@pytest.mark.parametrize("form", FORMS)
def test_experts_that_the_example_did_not_hit(tmp_path: Path, form: str) -> None:
    """The example only reaches experts 0 and 1; then tokens choose every other pair."""
    torch.manual_seed(2)
    layer = OpLayer(experts=6, activation="relu")
    with torch.no_grad():
        layer.router_weight.zero_()
        layer.router_weight[:, :6] = torch.eye(6) * 20
    model = nn.Sequential(layer).eval()

    def tokens(first: int, second: int) -> torch.Tensor:
        x = torch.randn(2, 16) * 0.01
        x[:, first], x[:, second] = 1.0, 0.9
        return x

    path = tmp_path / "model.onnx"
    dynamo_moe.export(model, tokens(0, 1), path, **FORMS[form])
    for first in range(6):
        for second in set(range(6)) - {first}:
            x = tokens(first, second)
            torch.testing.assert_close(run(path, x), model(x).detach(), rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mlp", "mixed"])
@pytest.mark.parametrize("tool", ["onnxslim", "onnxsim"])
def test_simplifiers_leave_a_good_file(exported, name: str, form: str, tool: str) -> None:
    _, path = exported(name, form)
    proto = onnx.load(path)
    simplified = onnxslim.slim(proto) if tool == "onnxslim" else onnxsim.simplify(proto)[0]
    onnx.checker.check_model(simplified, full_check=True)
    onnx.shape_inference.infer_shapes(simplified, check_type=True, strict_mode=True)
    x = torch.randn(3, 4, 16)
    assert torch.equal(run(simplified, x), run(path, x))
    count = sum(node.domain.startswith("moe") for node in simplified.graph.node)
    layers = {"mlp": 2, "mixed": 4}[name]
    assert count == (layers if form in BESIDE_THE_NODE else 0)


def test_no_local_paths_or_stack_traces(exported) -> None:
    for form in FORMS:
        _, path = exported("mlp", form)
        content = path.read_bytes()
        for trace in (str(Path(__file__).parent), 'File "', "stack_trace", "site-packages"):
            assert trace.encode() not in content


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
        report = dynamo_moe.export(model, torch.randn(*shape, 16), path, dynamic_shapes=TOKENS)
        files.append(path.read_bytes())
        seconds.append(report.seconds)
    assert len(set(files)) == 1
    # 560 times the tokens. Twice the time allows for another test on the same core, not for growth.
    assert seconds[1] < 2 * max(seconds[0], *seconds[2:])


@pytest.mark.parametrize("opset", [18, 20, 23, 24])
@pytest.mark.parametrize("body", ["loop", "unrolled"])
def test_opsets(tmp_path: Path, opset: int, body: str) -> None:
    model = mixed_model()
    path = tmp_path / "model.onnx"
    report = dynamo_moe.export(model, torch.randn(2, 3, 16), path, opset=opset, body=body)
    assert report.body == body
    assert {o.domain: o.version for o in onnx.load(path).opset_import}[""] == opset
    assert dynamo_moe.verify(path, model, [(torch.randn(3, 3, 16),)]).passed


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_experts(tmp_path: Path, form: str) -> None:
    model = mlp_model()
    dynamo_moe.convert(model, experts_dtype=torch.float16)
    path = tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(2, 5, 16), path, **FORMS[form])
    types = {t.name: t.data_type for t in onnx.load(path).graph.initializer}
    assert types["0.mlp.w1"] == types["0.mlp.b2"] == onnx.TensorProto.FLOAT16
    assert types["0.mlp.router.weight"] == onnx.TensorProto.FLOAT
    report = dynamo_moe.verify(path, model, [(torch.randn(3, 5, 16),), (torch.randn(1, 5, 16),)])
    assert report.tolerance.max == 1e-2


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


def test_unconverted_model(tmp_path: Path) -> None:
    message = r"^2 MoE modules are not converted.*'0\.mlp' \(DroplessMoEMlp\), '1\.mlp' .*convert\("
    with pytest.warns(UserWarning, match=message) as warned:
        report = dynamo_moe.export(mlp_model(), torch.randn(2, 16), tmp_path / "m.onnx")
    assert report.notes == (str(warned[0].message),)
    assert not report.layers
    assert sum(report.nodes.values()) > 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"target": "tflite"},
            "target must be one of plugin, dense, onnxruntime, tensorrt_moe; got 'tflite'",
        ),
        ({"body": "scan"}, "body must be one of loop, unrolled; got 'scan'"),
        (
            {"body": "unrolled", "target": "dense"},
            "body 'unrolled' needs target 'plugin': with 'dense' nodes have no body",
        ),
        ({"opset": 17}, r"opset must be in 18\.\..*, got 17"),
        ({"opset": 99}, r"opset must be in 18\.\..*, got 99"),
        ({"dynamic_shapes": "tokens"}, "dynamic_shapes must be 'batch', a mapping or None"),
        ({"dynamic_shapes": {"y": {0: "n"}}}, "dynamic_shapes names 'y'; the example's arguments"),
        ({"dynamic_shapes": {"input": {2: "n"}}}, "names dimension 2 of 'input', whose example"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    model = mlp_model()
    dynamo_moe.convert(model)
    with pytest.raises(ValueError, match=message):
        dynamo_moe.export(model, torch.randn(2, 16), tmp_path / "m.onnx", **arguments)
    assert not list(tmp_path.iterdir())


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere to write m\.onnx into"):
        dynamo_moe.export(mlp_model(), torch.randn(2, 16), tmp_path / "nowhere" / "m.onnx")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "relu2"}, "no form of an expert with activation 'relu2'"),
        ({"activation": "gelu", "gated": True}, "no form of a gated expert with activation 'gelu'"),
        ({"weight_on_input": True}, "cannot weight the experts' inputs"),
    ],
)
def test_onnxruntime_target_refuses_what_it_cannot_express(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dynamo_moe.export(
            op_model(OpLayer(**options)), torch.randn(2, 16), tmp_path / "m.onnx",
            target="onnxruntime",
        )  # fmt: skip


def test_static_shapes(tmp_path: Path) -> None:
    model = mlp_model()
    dynamo_moe.convert(model)
    path = tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(1, 16), path, dynamic_shapes=None)
    shape = onnx.load(path).graph.input[0].type.tensor_type.shape
    assert [dim.dim_value for dim in shape.dim] == [1, 16]


def test_modes_are_restored(tmp_path: Path) -> None:
    model = mlp_model().train()
    dynamo_moe.convert(model)
    model[1].norm.eval()
    modes = [module.training for module in model.modules()]
    dynamo_moe.export(model, torch.randn(2, 16), tmp_path / "m.onnx")
    dynamo_moe.verify(tmp_path / "m.onnx", model)
    assert [module.training for module in model.modules()] == modes


class ManyArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = OpLayer()

    def forward(self, x, mask=None, flag=False, scale=1.0, extra=None, *rest, key=None, **more):
        y = self.layer(x) * scale
        terms = [*rest, *more.values(), *(value for value in (mask, key) if value is not None)]
        if isinstance(extra, dict):
            terms += [extra["a"], *extra["b"]]
        for term in terms:
            y = y + term
        return {"y": -y if flag else y, "first": y[:, 0]}


TERM = torch.randn(1, 3, 16)


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        ((None,), {}),
        ((), {"flag": True, "scale": 0.5}),
        ((TERM,), {"key": TERM.clone()}),
        ((), {"extra": {"a": TERM, "b": [TERM.clone(), TERM.clone()]}}),
        ((None, False, 1.0, None, TERM, TERM.clone()), {}),
        ((), {"more": TERM}),
    ],
)
def test_any_arguments(
    tmp_path: Path, arguments: tuple[object, ...], keywords: dict[str, object]
) -> None:
    model, path = ManyArguments().eval(), tmp_path / "m.onnx"
    dynamo_moe.export(model, (torch.randn(1, 3, 16), *arguments), path, kwargs=keywords)
    proto = onnx.load(path)
    for value in (*proto.graph.input, *proto.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert [len(v.type.tensor_type.shape.dim) for v in proto.graph.output] == [3, 2]


def test_a_dimension_that_the_model_fixes(tmp_path: Path) -> None:
    class Positions(nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return x + positions[:, None]

    example = (torch.randn(2, 5, 16), torch.randn(5))
    message = r"fixed by the model: static shape of 5 for dimension inputs\['positions'\]"
    with pytest.raises(dynamo_moe.ExportError, match=message):
        dynamo_moe.export(Positions(), example, tmp_path / "m.onnx")
    dynamo_moe.export(
        Positions(), example, tmp_path / "m.onnx", dynamic_shapes={"positions": {0: None}}
    )


def test_an_operator_without_a_translation(tmp_path: Path) -> None:
    class Eigenvalues(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvals(x @ x.mT).real

    message = "^operator aten.linalg_eig has no translation to ONNX, nor a decomposition"
    with pytest.raises(dynamo_moe.ExportError, match=message):
        dynamo_moe.export(Eigenvalues(), torch.randn(3, 4, 4), tmp_path / "m.onnx")


@pytest.mark.parametrize("frozen", [False, True])
def test_the_garbage_collector_is_left_as_it_was(tmp_path: Path, frozen: bool) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert gc.get_freeze_count()
            assert frozen or gc.get_threshold()[0] > usual[0]
            raise ValueError("not today")

    usual = gc.get_threshold()
    if frozen:
        gc.freeze()
    try:
        dynamo_moe.export(nn.Linear(4, 4), torch.randn(2, 4), tmp_path / "m.onnx")
        with pytest.raises(dynamo_moe.ExportError, match="not today"):
            dynamo_moe.export(Fails(), torch.randn(2, 4), tmp_path / "m.onnx")
        assert bool(gc.get_freeze_count()) == frozen
        assert gc.get_threshold() == usual
    finally:
        gc.unfreeze()


def test_an_operator_on_complex_tensors(tmp_path: Path) -> None:
    class Phases(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvals(torch.complex(x, x)).real

    with pytest.raises(dynamo_moe.ExportError, match="for complex tensors: ONNX has none"):
        dynamo_moe.export(Phases(), torch.randn(3, 4, 4), tmp_path / "m.onnx")


@pytest.mark.parametrize("external", [True, False])
def test_a_view_is_written_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, external: bool
) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(24, 70, bias=False)
            self.scales = nn.Parameter(torch.randn(5, 3, 70).permute(2, 0, 1))
            self.none = nn.Parameter(torch.randn(3, 0, 70).permute(2, 0, 1))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            scaled = self.head(input)[..., None, None] * self.scales
            return scaled.sum() + self.none.sum() + self.scales

    model, path = Views().eval(), tmp_path / "m.onnx"
    monkeypatch.setattr(placeholders, "_CHUNK", 1000)
    dynamo_moe.export(model, torch.randn(2, 6, 24), path, external_data=external)
    x = torch.randn(3, 6, 24)
    torch.testing.assert_close(run(path, x), model(x).detach(), rtol=1e-4, atol=1e-4)
    held = {w.name: onnx.numpy_helper.to_array(w) for w in onnx.load(path).graph.initializer}
    assert np.array_equal(held["scales"], model.scales.detach().numpy())
    assert np.array_equal(held["head.weight"], model.head.weight.detach().numpy().T)


@pytest.mark.parametrize("args", [[torch.randn(2, 16)], None])
def test_args_that_are_no_tuple(tmp_path: Path, args: object) -> None:
    with pytest.raises(TypeError, match="args must be a tuple or one tensor, got"):
        dynamo_moe.export(nn.Identity(), args, tmp_path / "m.onnx")


def test_destination_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        dynamo_moe.export(nn.Identity(), torch.randn(2, 16), tmp_path)


def test_names_follow_the_arguments_whatever_their_order(tmp_path: Path) -> None:
    class Lookup(nn.Module):
        def forward(self, rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return table[rows]

    example = {"table": torch.randn(7, 4), "rows": torch.tensor([0, 3, 2])}
    shapes = {"rows": {0: "queries"}, "table": {0: "entries"}}
    path = tmp_path / "m.onnx"
    dynamo_moe.export(Lookup(), (), path, kwargs=example, dynamic_shapes=shapes)
    inputs = {
        i.name: i.type.tensor_type.shape.dim[0].dim_param for i in onnx.load(path).graph.input
    }
    assert inputs == {"rows": "queries", "table": "entries"}


def test_layers_in_the_branches_of_control_flow(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = OpLayer(), OpLayer(activation="relu")
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(
                x.sum() > 0,
                lambda x: self.first(self.linear(x)),
                lambda x: self.second(x) + 1,
                (x,),
            )

    model, path = Branches().eval(), tmp_path / "m.onnx"
    report = dynamo_moe.export(model, torch.randn(2, 16), path)
    assert len(report.layers) == 2
    positive = torch.rand(3, 16)
    dynamo_moe.verify(path, model, [(positive,), (-positive,)])


def test_a_module_that_runs_twice(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = OpLayer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    model, path = Twice().eval(), tmp_path / "m.onnx"
    report = dynamo_moe.export(model, torch.randn(2, 16), path)
    assert report.layers == ("layer", "layer")
    names = [node.name for node in onnx.load(path).graph.node if node.domain == "moe"]
    assert names == ["layer/DroplessMoE", "layer/DroplessMoE_2"]
    assert len(onnx.load(path).functions) == 1
    dynamo_moe.verify(path, model)


def test_notes(exported, tmp_path: Path) -> None:
    model, path = mlp_model(), tmp_path / "m.onnx"
    dynamo_moe.convert(model)
    assert not dynamo_moe.export(model, torch.randn(2, 16), path).notes
    (gelu,) = dynamo_moe.export(model, torch.randn(2, 16), path, target="onnxruntime").notes
    assert "computes GELU in its tanh form" in gelu
    (by_name,) = dynamo_moe.export(mixed_model(), torch.randn(2, 16), path).notes
    assert "TensorRT's parser finds functions by name alone" in by_name


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "topk_softmax", "sigmoid"])
def test_onnxruntime_target_takes_any_router(tmp_path: Path, scoring: str, gated: bool) -> None:
    torch.manual_seed(3)
    activation = "clamped_swiglu" if gated else "silu"
    layer = OpLayer(
        activation=activation, gated=gated, scoring=scoring, renormalize=False, routed_scaling=2.5
    )
    model, path = op_model(layer), tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(2, 16), path, target="onnxruntime")
    dynamo_moe.verify(path, model, [(torch.randn(40, 16),)])


def test_an_unrolled_body_serves_one_number_of_experts(tmp_path: Path) -> None:
    """A file with layers of 6 and of 4 experts has two functions, each with its own products."""
    torch.manual_seed(3)
    layers = [OpLayer(experts=count, activation="relu") for count in (6, 4, 6)]
    model = nn.Sequential(*layers).eval()
    path = tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(2, 16), path, body="unrolled")
    proto = onnx.load(path)
    products = [
        sum(node.op_type == "Gemm" for node in function.node) for function in proto.functions
    ]
    assert products == [2 * 6 + 1, 2 * 4 + 1]  # Including the router's.
    assert len({node.domain for node in proto.graph.node}) == 2
    assert dynamo_moe.verify(path, model, [(torch.randn(9, 16),)]).passed


@pytest.mark.parametrize("form", FORMS)
def test_norm_and_residual_in_the_layer(tmp_path: Path, form: str) -> None:
    torch.manual_seed(3)
    options = {"activation": "silu", "pre_norm": "rms", "residual": True}
    model = nn.Sequential(
        OpLayer(scoring="sigmoid", renormalize=False, norm_eps=0.25, gated=True, **options),
        OwnRouter(norm_eps=0.5, **options),
    ).eval()
    path = tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(1, 5, 16), path, **FORMS[form], dynamic_shapes=TOKENS)
    cases = [(torch.randn(*shape, 16),) for shape in ((1, 1), (3, 7), (2, 64))]
    dynamo_moe.verify(path, model, cases)
    if form in BESIDE_THE_NODE:
        layers = dynamo_moe.inspect(path).moe_layers
        keys = ("pre_norm", "norm_eps", "residual")
        assert [[layer.attributes[key] for key in keys] for layer in layers] == [
            ["rms", 0.25, 1],
            ["rms", 0.5, 1],
        ]


def test_a_model_that_cannot_be_renamed_stays_whole(tmp_path: Path) -> None:
    model = op_model(OpLayer())
    report = dynamo_moe.export(model, torch.randn(3, 16), tmp_path / "a", external_data=True)
    taken = tmp_path / "b"
    (taken / "folder").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        model_files.rename_model(report.files, taken)
    onnxruntime.InferenceSession(str(report.path))
