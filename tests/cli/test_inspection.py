"""What `dynamo_moe.inspect` reports about a file, and which files it refuses."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from rich.console import Console

import dynamo_moe
from dynamo_moe.inspection.summary import WeightsSummary
from onnx_files import dense_model, model, moe_model, save, sizes, value, weight


def test_interface_and_format(tmp_path: Path) -> None:
    path = save(moe_model(), tmp_path / "m.onnx")
    summary = dynamo_moe.inspect(path)
    assert summary.path == path
    assert summary.file_bytes == path.stat().st_size
    assert summary.producer == "by hand"
    assert summary.ir_version == 10
    assert summary.opsets == {"ai.onnx": 20, "moe": 1, "moe.silu_gated": 1}
    [given] = summary.inputs
    assert (given.name, given.dtype, given.shape) == ("x", "float32", ("batch", None, 4))
    assert [output.name for output in summary.outputs] == ["y"]


def test_values_without_rank_or_tensor(tmp_path: Path) -> None:
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    proto = model(
        [helper.make_node("Abs", ["x"], ["y"])],
        inputs=[value("x", None, TensorProto.FLOAT16), sequence],
        outputs=[value("y", [])],
    )
    summary = dynamo_moe.inspect(save(proto, tmp_path / "m.onnx"))
    kinds = [(given.dtype, given.shape) for given in (*summary.inputs, *summary.outputs)]
    assert kinds == [("float16", None), ("", None), ("float32", ())]


def test_an_initializer_that_is_also_an_input_is_no_input(tmp_path: Path) -> None:
    proto = model(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [weight("w", 2)],
        inputs=[value("x", [2]), value("w", [2])],
        outputs=[value("y", [2])],
    )
    summary = dynamo_moe.inspect(save(proto, tmp_path / "m.onnx"))
    assert [given.name for given in summary.inputs] == ["x"]


def test_operators_of_the_graph_and_of_functions(tmp_path: Path) -> None:
    summary = dynamo_moe.inspect(save(moe_model(), tmp_path / "m.onnx"))
    assert next(iter(summary.operators.items())) == ("Add", 2)
    assert summary.operators["moe::DroplessMoE"] == 1
    assert summary.operators["moe.silu_gated::DroplessMoEExperts"] == 1
    assert "Identity" not in summary.operators
    assert summary.nodes == 7
    names = [(f.domain, f.name, f.overload, f.nodes, f.operators) for f in summary.functions]
    assert names == [
        ("moe", "DroplessMoE", "", 1, {"Identity": 1}),
        ("moe.silu_gated", "DroplessMoEExperts", "", 1, {"Abs": 1}),
    ]


def test_branches_count_as_the_graph(tmp_path: Path) -> None:
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("Mul", ["x", f"{name}_w"], [name])],
            name,
            [],
            [value(name, [2])],
            [weight(f"{name}_w", 2)],
        )
        for name in ("then", "else")
    }
    proto = model(
        [helper.make_node("If", ["c"], ["y"], **branches)],
        inputs=[value("x", [2]), value("c", [], TensorProto.BOOL)],
        outputs=[value("y", [2])],
    )
    summary = dynamo_moe.inspect(save(proto, tmp_path / "m.onnx"))
    assert (summary.nodes, summary.operators) == (3, {"Mul": 2, "If": 1})
    assert summary.parameters == 4


@pytest.mark.parametrize(
    ("dtype", "name", "size"), [(np.float32, "float32", 4), (np.float16, "float16", 2)]
)
def test_moe_layers(tmp_path: Path, dtype: type, name: str, size: int) -> None:
    summary = dynamo_moe.inspect(save(moe_model(dtype), tmp_path / "m.onnx"))
    plain, gated = summary.moe_layers
    assert (plain.name, plain.node) == ("b.0.mlp", "b.0.mlp/DroplessMoE")
    assert (plain.domain, plain.op_type) == ("moe", "DroplessMoE")
    assert (plain.num_experts, plain.top_k) == (3, 2)
    assert plain.expert_bytes == 2 * 4 * 6 * np.dtype(dtype).itemsize
    assert (plain.in_features, plain.hidden_features) == (4, 6)
    assert (plain.activation, plain.precision) == ("gelu", name)
    assert plain.weights == {
        "router_weight": "b.0.mlp.router.weight",
        "w1": "b.0.mlp.w1",
        "w2": "b.0.mlp.w2",
        "b1": "b.0.mlp.b1",
    }
    assert plain.parameters == 12 + 72 + 72 + 18
    assert plain.bytes == 12 * 4 + (72 + 72 + 18) * size
    assert plain.attributes["scoring"] == "softmax"
    assert plain.attributes["plugin_namespace"] == ""
    assert plain.attributes["activation_alpha"] == pytest.approx(1.702)
    # An unnamed node is identified by its output; the ids and weights of a token are computed.
    assert (gated.name, gated.node) == ("b.1.experts", "y1")
    assert gated.weights == {"w1": "b.1.experts.w1", "w2": "b.1.experts.w2"}
    assert gated.attributes["gated"] == 1


def test_onnxruntimes_moe(tmp_path: Path) -> None:
    node = helper.make_node(
        "MoE", ["x", "logits", "mlp.w1", "", "mlp.w2"], ["y"], domain="com.microsoft",
        k=2, activation_type="silu",
    )  # fmt: skip
    proto = model(
        [node],
        [weight("mlp.w1", 3, 6, 4), weight("mlp.w2", 3, 4, 6)],
        inputs=[value("x", ["T", 4]), value("logits", ["T", 3])],
        outputs=[value("y", ["T", 4])],
        opsets={"com.microsoft": 1},
    )
    [layer] = dynamo_moe.inspect(save(proto, tmp_path / "m.onnx")).moe_layers
    assert (layer.name, layer.num_experts, layer.top_k) == ("mlp", 3, 2)
    assert (layer.in_features, layer.hidden_features, layer.activation) == (4, 6, "silu")
    assert layer.parameters == 144


def test_weights_that_are_computed(tmp_path: Path) -> None:
    proto = model(
        [
            helper.make_node("Cast", ["half"], ["w1"], to=TensorProto.FLOAT),
            helper.make_node("DroplessMoE", ["x", "r", "w1", "w2"], ["y"], domain="moe"),
        ],
        [weight("half", 3, 6, 4, dtype=np.float16), weight("r", 3, 4), weight("w2", 3, 4, 6)],
        inputs=[value("x", ["T", 4])],
        outputs=[value("y", ["T", 4])],
    )
    summary = dynamo_moe.inspect(save(proto, tmp_path / "m.onnx"))
    [layer] = summary.moe_layers
    assert (layer.name, layer.precision, layer.num_experts, layer.top_k) == ("y", None, None, None)
    assert layer.weights == {"router_weight": "r", "w2": "w2"}
    assert "computed" in _printed(summary)


def test_weights_by_dtype(tmp_path: Path) -> None:
    summary = dynamo_moe.inspect(save(moe_model(np.float16), tmp_path / "m.onnx"))
    assert summary.weights == {
        "float16": WeightsSummary(5, 378, 756),
        "float32": WeightsSummary(2, 16, 64),
        "int64": WeightsSummary(1, 1, 8),
    }
    assert list(summary.weights) == ["float16", "float32", "int64"]
    assert (summary.parameters, summary.weight_bytes) == (395, 828)


def test_four_bit_weights_share_bytes(tmp_path: Path) -> None:
    tensor = helper.make_tensor("w", TensorProto.INT4, [3], [1, 2, 3])
    proto = model([], [tensor])
    assert dynamo_moe.inspect(save(proto, tmp_path / "m.onnx")).weights == {
        "int4": WeightsSummary(1, 3, 2)
    }


def test_external_data_is_not_opened(tmp_path: Path) -> None:
    path = save(moe_model(), tmp_path / "m.onnx", external=True)
    data = tmp_path / "m.onnx.data"
    inline = dynamo_moe.inspect(save(moe_model(), tmp_path / "inline.onnx"))
    before = dynamo_moe.inspect(path)
    assert before.weights == inline.weights
    assert before.external_bytes == before.weight_bytes
    assert (inline.external_bytes, before.missing_files) == (0, ())
    data.unlink()
    after = dynamo_moe.inspect(path)
    assert after.weights == before.weights
    assert after.missing_files == ("m.onnx.data",)
    assert "m.onnx.data" in _printed(after)


def test_a_file_of_many_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 20, 1 << 10])
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("location", "w.data"), ("length", str(1 << 32))):
        tensor.external_data.add(key=key, value=text)
    path = tmp_path / "m.onnx"
    path.write_bytes(model([], [tensor]).SerializeToString())
    with (tmp_path / "w.data").open("wb") as data:
        data.truncate(1 << 32)
    summary = dynamo_moe.inspect(path)
    assert summary.external_bytes == 1 << 32
    assert "4.3 GB" in _printed(summary)


def test_a_summary_is_json(tmp_path: Path) -> None:
    summary = dynamo_moe.inspect(save(moe_model(), tmp_path / "m.onnx"))
    plain = summary.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["path"] == str(tmp_path / "m.onnx")
    assert plain["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", None, 4]}]
    assert plain["moe_layers"][0]["name"] == "b.0.mlp"
    assert plain["moe_layers"][0]["attributes"]["top_k"] == 2
    assert plain["weights"]["float32"]["elements"] == summary.weights["float32"].elements
    with pytest.raises(TypeError, match="complex"):
        replace(summary, parameters=1j).to_dict()


def _printed(summary: dynamo_moe.ModelSummary, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(summary)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_tables_say_it(tmp_path: Path) -> None:
    text = _printed(dynamo_moe.inspect(save(moe_model(), tmp_path / "m.onnx")))
    for part in (
        "2 MoE layers",
        "b.0.mlp",
        "2 of 3",
        "gated silu",
        "float32",
        "[batch, ?, 4]",
        "moe.silu_gated 1",
        "LayerNormalization",
    ):
        assert part in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_names_are_not_markup(tmp_path: Path) -> None:
    proto = model(
        [helper.make_node("Abs", ["[red]x"], ["[/]"])],
        inputs=[value("[red]x", [1])],
        outputs=[value("[/]", [1])],
    )
    text = _printed(dynamo_moe.inspect(save(proto, tmp_path / "[bold]m.onnx")))
    assert "[red]x" in text
    assert "[bold]m.onnx" in text


def test_a_model_without_moe_nodes(tmp_path: Path) -> None:
    summary = dynamo_moe.inspect(save(dense_model(), tmp_path / "m.onnx"))
    assert summary.moe_layers == ()
    assert "No MoE nodes" in _printed(summary)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.onnx"):
        dynamo_moe.inspect(tmp_path / "nowhere.onnx")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"not a protobuf", "not a protobuf message"),
        (onnx.ModelProto(ir_version=10).SerializeToString(), "no IR version or no graph"),
        (sizes("t", 1).SerializeToString(), "no"),
    ],
    ids=["empty", "text", "no graph", "a tensor"],
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"m\.onnx is not an ONNX model: .*{reason}") as caught:
        dynamo_moe.inspect(path)
    assert caught.value.__cause__ is None


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = save(moe_model(), tmp_path / "m.onnx")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"m\.onnx is not an ONNX model"):
        dynamo_moe.inspect(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it is not a file"):
        dynamo_moe.inspect(tmp_path)
