"""Files of ranks: ``export(ranks=...)``, and ``verify`` of all of them together."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

import dynamo_moe
from dynamo_moe import exporting, model_graph
from dynamo_moe.cli import app
from dynamo_moe.files.rank_files import KEY, files_of_ranks, record_of
from dynamo_moe.verification.ranks import parts_of
from moe_architectures import ARCHITECTURES
from small_models import mlp_model

TARGETS = ("plugin", "dense", "onnxruntime")
SUMS = {
    "plugin": ("moe", "SumOverRanks"),
    "dense": ("trt", "DistCollective"),
    "onnxruntime": ("com.microsoft", "AllReduce"),
}


def converted(model: Any) -> Any:
    assert dynamo_moe.convert(model).replaced
    return model.eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return converted(mlp_model(layers=2))


@pytest.fixture
def files(model: nn.Module, tmp_path: Path) -> Path:
    dynamo_moe.export(model, torch.randn(3, 16), tmp_path / "m.onnx", ranks=3)
    return tmp_path / "m.rank0.onnx"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.first(1)
def test_targets(model: nn.Module, tmp_path: Path, target: Any) -> None:
    report = dynamo_moe.export(
        model, torch.randn(3, 16), tmp_path / "m.onnx", target=target, ranks=4
    )
    assert [file.name for file in report.files] == [f"m.rank{rank}.onnx" for rank in range(4)]
    assert report.ranks == 4
    graph = onnx.load(report.path).graph
    assert [(node.domain, node.op_type) for node in graph.node].count(SUMS[target]) == 2
    # ONNX Runtime's MoE has another form of GELU, for which verify has its tolerance.
    assert dynamo_moe.verify(tmp_path / "m.rank2.onnx", model).passed


def test_only_the_ranks_own_experts(files: Path) -> None:
    counts = []
    for path, proto in files_of_ranks(files):
        record = record_of(proto)
        assert record is not None
        assert {share.total for share in record.layers.values()} == {6}
        counts.append([share.count for share in record.layers.values()])
        sizes = {tensor.name: list(tensor.dims) for tensor in onnx.load(path).graph.initializer}
        stacks = [dims for name, dims in sizes.items() if "local_experts.part" in name]
        assert {dims[0] for dims in stacks} == {2}
    assert counts == [[2, 2]] * 3


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", *(pytest.param(n, marks=pytest.mark.every) for n in ("qwen3_moe", "gpt_oss"))],
)
@pytest.mark.every
def test_language_models(tmp_path: Path, family: str) -> None:
    model = converted(ARCHITECTURES[family].build())
    path = tmp_path / "m.onnx"
    report = dynamo_moe.export_language_model(model, path, ranks=2)
    assert report.operators.keys() == {"DroplessMoEExperts"}
    assert dynamo_moe.verify(report.path, model).passed
    for options, named in (
        ({"folder": "genai"}, "a folder for 'genai'"),
        ({"task": "image-text-to-text"}, "task 'image-text-to-text'"),
    ):
        with pytest.raises(ValueError, match=f"{named} has files for one device"):
            dynamo_moe.export_language_model(model, tmp_path / "folder", ranks=2, **options)


@pytest.mark.parametrize("target", TARGETS)
def test_bfloat16(tmp_path: Path, target: Any) -> None:
    """ONNX Runtime has no products of it: all ranks are computed in float32."""
    model = converted(mlp_model(layers=2)).bfloat16()
    x = torch.randn(3, 16).bfloat16()
    report = dynamo_moe.export(model, x, tmp_path / "m.onnx", target=target, ranks=2)
    verified = dynamo_moe.verify(report.path, model)
    assert verified.passed
    assert verified.missing
    with torch.no_grad():
        next(model.parameters()).neg_()
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(report.path, model)


def test_packed_experts(tmp_path: Path) -> None:
    model = converted(mlp_model(width=32, hidden=32))
    dynamo_moe.quantize(model, "int4")
    dynamo_moe.export(model, torch.randn(3, 32), tmp_path / "m.onnx", ranks=4)
    assert dynamo_moe.verify(tmp_path / "m.rank0.onnx", model).passed
    proto = onnx.load(tmp_path / "m.rank3.onnx")
    assert any(node.op_type == "DroplessMoEExpertsPacked" for node in proto.graph.node)


def test_a_streamed_checkpoint(tmp_path: Path) -> None:
    source = ARCHITECTURES["qwen3_moe"].build()
    source.config._experts_implementation = None
    source.save_pretrained(tmp_path / "checkpoint")
    opened = converted(dynamo_moe.open_checkpoint(tmp_path / "checkpoint"))
    (tmp_path / "out").mkdir()
    report = dynamo_moe.export_language_model(
        opened, tmp_path / "out" / "m.onnx", ranks=2, external_data=True
    )
    assert len(report.files) == 4
    assert dynamo_moe.verify(report.path, converted(source)).passed


@pytest.mark.every
def test_a_linked_checkpoint(tmp_path: Path) -> None:
    """Stacked experts stay where they are: a rank's file refers to its own rows."""
    source = ARCHITECTURES["qwen3_moe"].build()
    source.config._experts_implementation = None
    source.save_pretrained(tmp_path, save_original_format=False)
    opened = converted(dynamo_moe.open_checkpoint(tmp_path))
    report = dynamo_moe.export_language_model(
        opened, tmp_path / "m.onnx", ranks=2, link_weights=True
    )
    assert sum(file.stat().st_size for file in report.files) < 2**19
    offsets = []
    for path, _ in files_of_ranks(report.path):
        initializers = onnx.load(path, load_external_data=False).graph.initializer
        [experts] = [
            t for t in initializers if t.name.endswith("layers.1.mlp.experts.local_experts.part.w1")
        ]
        facts = {entry.key: entry.value for entry in experts.external_data}
        assert facts["location"].endswith(".safetensors")
        offsets.append((int(facts["offset"]), int(facts["length"])))
    assert offsets[1][0] == sum(offsets[0])
    assert dynamo_moe.verify(report.path, converted(source)).passed


def changed(path: Path, change: Any) -> None:
    proto = onnx.load(path)
    change(proto)
    onnx.save(proto, path)


def negated_experts(proto: onnx.ModelProto) -> None:
    tensor = next(t for t in proto.graph.initializer if t.name.endswith("part.w2"))
    values = onnx.numpy_helper.to_array(tensor)
    tensor.CopyFrom(onnx.numpy_helper.from_array(-values, tensor.name))


def test_wrong_weights_of_one_rank(model: nn.Module, files: Path) -> None:
    changed(files.with_name("m.rank2.onnx"), negated_experts)
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(files, model)


def other_inputs(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].name = "other"
    for node in proto.graph.node:
        node.input[:] = ["other" if name == "input" else name for name in node.input]


def without_a_rank(proto: onnx.ModelProto) -> None:
    del proto.metadata_props[:]


def of_other_experts(proto: onnx.ModelProto) -> None:
    [entry] = [entry for entry in proto.metadata_props if entry.key == KEY]
    record = json.loads(entry.value)
    record["layers"]["1.mlp"]["first"] = 3
    entry.value = json.dumps(record)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_inputs, "has other inputs than"),
        (without_a_rank, "must be for rank 1 of 3, and is for no rank"),
        (of_other_experts, r"experts 3 to 4 of 6 of 1\.mlp; .* must begin at 2 of 6"),
    ],
)
def test_files_that_do_not_fit(model: nn.Module, files: Path, change: Any, message: str) -> None:
    changed(files.with_name("m.rank1.onnx"), change)
    with pytest.raises(ValueError, match=message):
        dynamo_moe.verify(files, model)
    assert dynamo_moe.inspect(files).rank_problem


def test_a_missing_file(model: nn.Module, files: Path) -> None:
    files.with_name("m.rank1.onnx").unlink()
    with pytest.raises(FileNotFoundError, match="rank 1 of 3 is missing"):
        dynamo_moe.verify(files, model)
    assert "rank 1 of 3 is missing" in dynamo_moe.inspect(files).rank_problem
    shutil.copy(files, files.with_name("other.onnx"))
    with pytest.raises(ValueError, match=r"without '\.rank0' in its name"):
        dynamo_moe.verify(files.with_name("other.onnx"), model)


def test_a_file_for_all(model: nn.Module, tmp_path: Path) -> None:
    dynamo_moe.export(model, torch.randn(3, 16), tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="a file for one device"):
        files_of_ranks(tmp_path / "m.onnx")
    assert dynamo_moe.inspect(tmp_path / "m.onnx").rank is None


@pytest.mark.each_value
@pytest.mark.parametrize("shapes", ["batch", None])
@pytest.mark.parametrize("target", TARGETS)
def test_more_ranks_than_experts(tmp_path: Path, target: Any, shapes: Any) -> None:
    model = converted(mlp_model(experts=2))
    dynamo_moe.export(
        model,
        torch.randn(3, 16),
        tmp_path / "m.onnx",
        target=target,
        ranks=3,
        dynamic_shapes=shapes,
    )
    inputs = None if shapes else [(torch.randn(3, 16),)]
    assert dynamo_moe.verify(tmp_path / "m.rank2.onnx", model, inputs).passed


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.first(1)
def test_equal_blocks_as_functions(tmp_path: Path, target: Any) -> None:
    model = converted(mlp_model(layers=5))
    report = dynamo_moe.export(
        model, torch.randn(3, 16), tmp_path / "m.onnx", target=target, ranks=2,
        layers_as_functions=True,
    )  # fmt: skip
    assert report.blocks == ("5 of Residual: 3 traced",)
    assert dynamo_moe.verify(tmp_path / "m.rank0.onnx", model).passed


class WithHead(nn.Module):
    """Has a layer of all ranks behind its experts, and returns a buffer too."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.moe = mlp_model(layers=1)
        self.head = nn.Linear(16, 3)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.moe(x)), self.scale


def negated_head(proto: onnx.ModelProto) -> None:
    for name in ("head.weight", "head.bias"):
        tensor = next(t for t in proto.graph.initializer if t.name == name)
        values = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(-values, tensor.name))


def test_what_follows_the_last_sum_on_another_rank(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = converted(WithHead())
    dynamo_moe.export(model, torch.randn(3, 16), tmp_path / "m.onnx", ranks=2)
    assert dynamo_moe.verify(tmp_path / "m.rank0.onnx", model).passed
    changed(tmp_path / "m.rank1.onnx", negated_head)
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(tmp_path / "m.rank0.onnx", model)


def uneven(path: Path, target: Any) -> None:
    dynamo_moe.export(
        converted(mlp_model(layers=5)), torch.randn(3, 16), path, target=target, ranks=4
    )


def packed(path: Path, target: Any) -> None:
    model = converted(mlp_model(width=32, hidden=32))
    dynamo_moe.quantize(model, "int4")
    dynamo_moe.export(model, torch.randn(3, 32), path, target=target, ranks=4)


def more_than_experts(path: Path, target: Any) -> None:
    dynamo_moe.export(
        converted(mlp_model(experts=2)), torch.randn(3, 16), path, target=target, ranks=4
    )


def split_heads(path: Path, target: Any) -> None:
    model = converted(ARCHITECTURES["qwen3_moe"].build(num_hidden_layers=4))
    dynamo_moe.export_language_model(
        model, path, ranks=2, plan="experts+heads", target=target, external_data=True
    )


def linked(path: Path, target: Any) -> None:
    """Three of five layers are traced, and no weight is in memory."""
    source = ARCHITECTURES["qwen3_moe"].build(num_hidden_layers=5)
    source.config._experts_implementation = None
    if not path.with_name("config.json").exists():
        source.save_pretrained(path.parent, save_original_format=False)
    model = converted(dynamo_moe.open_checkpoint(path.parent))
    dynamo_moe.export_language_model(model, path, ranks=2, link_weights=True, target=target)


@pytest.mark.each_value
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("write", [uneven, packed, more_than_experts, split_heads, linked])
@pytest.mark.first(2)
def test_a_ranks_file_is_that_of_its_own_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, target: Any
) -> None:
    """Ranks whose tensors have one layout share a trace."""
    monkeypatch.setattr("uuid.uuid4", lambda: uuid.UUID(int=1))
    traced = []
    trace = model_graph._traced
    monkeypatch.setattr(
        "dynamo_moe.model_graph._traced", lambda *args: traced.append(args) or trace(*args)
    )
    torch.manual_seed(0)
    write(tmp_path / "m.onnx", target)
    shared = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    # One for each number of experts.
    assert len(traced) <= 2
    traced.clear()
    monkeypatch.setattr("dynamo_moe.exporting.layout_of", lambda model: object())
    torch.manual_seed(0)
    write(tmp_path / "m.onnx", target)
    assert len(traced) == len([*tmp_path.glob("*.onnx")])
    own = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert own.keys() == shared.keys()
    assert [name for name in own if own[name] != shared[name]] == []


def test_files_of_two_exports(model: nn.Module, files: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    dynamo_moe.export(model, torch.randn(3, 16), tmp_path / "other" / "m.onnx", ranks=3)
    shutil.copy(tmp_path / "other" / "m.rank1.onnx", files.parent)
    with pytest.raises(ValueError, match="written by different exports"):
        dynamo_moe.verify(files, model)


def test_what_runs_one_file_alone(model: nn.Module, files: Path) -> None:
    with pytest.raises(ValueError, match="is for rank 0 of 3"):
        dynamo_moe.session(files)
    with (
        dynamo_moe.sharded(model, 0, 2),
        pytest.raises(ValueError, match="training files are for one device"),
    ):
        dynamo_moe.export_training(
            model, torch.randn(3, 16), nn.functional.mse_loss, torch.randn(3, 16), files
        )


def test_inspect(files: Path) -> None:
    summary = dynamo_moe.inspect(files.with_name("m.rank1.onnx"))
    assert summary.rank is not None
    assert summary.to_dict()["rank"]["layers"]["0.mlp"] == {"first": 2, "count": 2, "total": 6}
    console = Console(width=200)
    with console.capture() as shown:
        console.print(summary)
    assert "1 of 3: experts 2 to 3 of 6" in shown.get()


@pytest.mark.parametrize("ranks", [0, -1, True, "2"])
def test_a_number_of_ranks(model: nn.Module, tmp_path: Path, ranks: Any) -> None:
    with pytest.raises(ValueError, match="ranks must be an integer of at least 1"):
        dynamo_moe.export(model, torch.randn(3, 16), tmp_path / "m.onnx", ranks=ranks)


def test_a_rank_that_fails_leaves_earlier_files(
    model: nn.Module, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file: file.read_bytes() for file in files.parent.iterdir()}
    write = exporting._write

    def fail_at_rank_2(*args: Any) -> Any:
        if ".rank2." in args[4].name:
            raise OSError("the disk is full")
        return write(*args)

    monkeypatch.setattr("dynamo_moe.exporting._write", fail_at_rank_2)
    with pytest.raises(OSError, match="the disk is full"):
        dynamo_moe.export(model, torch.randn(3, 16), files.with_name("m.onnx"), ranks=3)
    assert {file: file.read_bytes() for file in files.parent.iterdir()} == before


def test_command_line(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text("from small_models import mlp_model as build\n")
    out = tmp_path / "m.onnx"
    arguments = ["export", str(tmp_path / "made.py"), str(out), "--shape", "3,16", "--ranks", "2"]
    result = CliRunner().invoke(app, [*arguments, "--verify", "--json"])
    assert result.exit_code == 0, result.output
    assert sorted(file.name for file in tmp_path.glob("*.onnx")) == ["m.rank0.onnx", "m.rank1.onnx"]
    result = CliRunner().invoke(app, [*arguments, "--format", "genai"])
    assert result.exit_code == 2


def test_parts_between_sums(files: Path) -> None:
    graph = onnx.load(files).graph
    parts = parts_of(graph)
    assert [part.summed is None for part in parts] == [False, False, True]
    nodes = [node.name for part in parts for node in part.nodes]
    sums = [node.name for node in graph.node if node.op_type == "SumOverRanks"]
    assert sorted([*nodes, *sums]) == sorted(node.name for node in graph.node)
