"""Blocks that repeat as calls of one function: the same graph, the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import dynamo_moe
from dynamo_moe.cli import app
from dynamo_moe.files import metadata
from dynamo_moe.files.block_functions import DOMAIN, inline_blocks, inlined
from dynamo_moe.files.kernel_layers import kernel_layers
from dynamo_moe.models import DroplessMoEMlp
from tensorrt_builds import build, parse
from transformer_models import LENGTH, gemma2, language_model, mixtral, swin

WIDTH = 8


class Block(nn.Module):
    """A residual block."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x))) * self.scale


class MoEBlock(nn.Module):
    """A residual MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = DroplessMoEMlp(WIDTH, 16, num_experts=4, top_k=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x)


def moe_blocks(count: int = 5) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(MoEBlock() for _ in range(count))).eval()
    dynamo_moe.convert(model)
    return model


def calls_of(path: Path) -> dict[str, list[str]]:
    """Returns the names of the calls by function."""
    found: dict[str, list[str]] = {}
    for node in onnx.load(path, load_external_data=False).graph.node:
        if node.domain == DOMAIN:
            found.setdefault(node.op_type, []).append(node.name)
    return found


def check_same_graph(path: Path, default: Path) -> None:
    """Checks that a file without its functions is another one, up to names."""
    model, other = ir.load(path), ir.load(default)
    inline_blocks(model)
    assert list(model.functions) == list(other.functions)

    def constant(value: ir.Value) -> ir.TensorProtocol | None:
        if value.is_initializer():
            return value.const_value
        producer = value.producer()
        constant = producer is not None and producer.op_type == "Constant"
        return producer.attributes["value"].as_tensor() if constant else None

    twins: dict[ir.Value, ir.Value] = {}
    remaining = list(zip(model.graph.outputs, other.graph.outputs, strict=True))
    while remaining:
        value, its = remaining.pop()
        if value is None or its is None or value in twins:
            assert (value if value is None else twins.get(value)) is its
            continue
        twins[value] = its
        one, two = constant(value), constant(its)
        if one is not None or two is not None:
            assert one.dtype == two.dtype
            assert one.tobytes() == two.tobytes()
            continue
        node, its_node = value.producer(), its.producer()
        if node is None:
            assert (value.name, its_node) == (its.name, None)
            continue
        assert node.op_identifier() == its_node.op_identifier()
        assert str(node.attributes) == str(its_node.attributes)
        remaining += zip(node.outputs, its_node.outputs, strict=True)
        remaining += zip(node.inputs, its_node.inputs, strict=True)
    counts = [sum(n.op_type != "Constant" for n in each.graph) for each in (model, other)]
    assert counts[0] == counts[1]


def run(path: Path, feeds: dict[str, Tensor]) -> list[np.ndarray]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = {each.name: feeds[each.name].numpy() for each in session.get_inputs()}
    return session.run(None, given)


def llama() -> tuple[nn.Module, dict[str, Any]]:
    return language_model("Llama", num_hidden_layers=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "calls"),
    [
        pytest.param(
            llama,
            {"LlamaDecoderLayer": [f"model.layers.{n}" for n in range(6)]},
            marks=pytest.mark.every,
        ),
        (mixtral, {"MixtralDecoderLayer": [f"model.layers.{n}" for n in range(5)]}),
        (
            swin,
            {
                "SwinLayer": [
                    f"encoder.layers.1.blocks.{n}-encoder.layers.1.blocks.{n + 1}"
                    for n in range(0, 8, 2)
                ]
            },
        ),
        pytest.param(
            gemma2,
            {
                "Gemma2DecoderLayer": [
                    f"model.layers.{n}-model.layers.{n + 1}" for n in range(0, 8, 2)
                ]
            },
            marks=pytest.mark.every,
        ),
    ],
)
@pytest.mark.first(1)
def test_architectures(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]],
    calls: dict[str, list[str]],
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model, feeds = make()
    dynamo_moe.convert(model.eval())
    shapes = {name: LENGTH for name in feeds if name != "pixel_values"}
    path, default = tmp_path / "functions.onnx", tmp_path / "default.onnx"
    options = {"kwargs": feeds, "dynamic_shapes": shapes}
    report = dynamo_moe.export(model, (), path, layers_as_functions=True, **options)
    other = dynamo_moe.export(model, (), default, **options)
    assert calls_of(path) == calls
    assert report.layers == other.layers
    assert sum(report.nodes.values()) < sum(other.nodes.values()) / 2
    assert report.file_bytes < other.file_bytes
    check_same_graph(path, default)
    for ours, theirs in zip(run(path, feeds), run(default, feeds), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    verified = dynamo_moe.verify(path, model)
    if report.layers:
        assert {case.routing_agreement for case in verified.cases if not case.excepted} == {1.0}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, nn.Module]:
    """MoE blocks as calls, and as nodes."""
    folder = tmp_path_factory.mktemp("blocks")
    model = moe_blocks()
    for name in ("functions", "default"):
        dynamo_moe.export(
            model,
            torch.zeros(2, WIDTH),
            folder / f"{name}.onnx",
            external_data=True,
            layers_as_functions=name == "functions",
        )
    return folder / "functions.onnx", folder / "default.onnx", model


def test_moe_nodes_are_inside_of_the_function(files: tuple[Path, Path, nn.Module]) -> None:
    path, default, model = files
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    assert calls_of(path) == {"MoEBlock": [str(number) for number in range(5)]}
    (function,) = (each for each in proto.functions if each.domain == DOMAIN)
    assert [node.op_type for node in function.node] == ["Constant", "DroplessMoE", "Add"]
    assert list(function.output) == ["output"]
    assert list(function.input)[:2] == ["input", "experts.router.weight"]
    assert {(each.domain, each.version) for each in function.opset_import} == {("", 20), ("moe", 1)}
    check_same_graph(path, default)
    assert {case.routing_agreement for case in dynamo_moe.verify(path, model).cases} == {1.0}


def test_the_record_of_layers_names_values_of_the_inlined_graph(
    files: tuple[Path, Path, nn.Module],
) -> None:
    path, default, _ = files
    graph = inlined(onnx.load(path)).graph
    known = {name for node in graph.node for name in node.output}
    known |= {each.name for each in (*graph.input, *graph.initializer)}
    layers = metadata.layers_of(onnx.load(path))
    assert {name for each in layers for name in each.inputs if name} <= known
    assert [each.name for each in layers] == [
        each.name for each in metadata.layers_of(onnx.load(default))
    ]


def test_readers_of_layers_look_inside(files: tuple[Path, Path, nn.Module], tmp_path: Path) -> None:
    path, default, _ = files
    found, wanted = (dynamo_moe.inspect(each).moe_layers for each in (path, default))
    assert [(each.name, each.bytes) for each in found] == [
        (each.name, each.bytes) for each in wanted
    ]
    assert kernel_layers(path) == kernel_layers(default)
    reports = [
        dynamo_moe.offload_file(each, tmp_path / each.name, resident_experts=2)
        for each in (path, default)
    ]
    assert [each.name for each in reports[0].layers] == [each.name for each in reports[1].layers]
    assert not calls_of(tmp_path / path.name)
    assert dynamo_moe.draw(path, tmp_path / "picture.svg").stat().st_size


@pytest.mark.parametrize("target", ["dense", "onnxruntime"])
def test_other_targets(target: Any, tmp_path: Path) -> None:
    model, path = moe_blocks(), tmp_path / "m.onnx"
    example = torch.zeros(2, WIDTH)
    options = {"target": target, "dynamic_shapes": None}
    report = dynamo_moe.export(model, example, path, layers_as_functions=True, **options)
    assert calls_of(path) == {"MoEBlock": [str(number) for number in range(5)]}
    assert len(report.layers) == 5
    assert {case.routing_agreement for case in dynamo_moe.verify(path, model).cases} == {1.0}


def test_a_function_is_not_called_like_an_operator(tmp_path: Path) -> None:
    kind = type("Gelu", (Block,), {})
    model = nn.Sequential(*(kind() for _ in range(4)), nn.Linear(WIDTH, WIDTH)).eval()
    path = tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.zeros(2, WIDTH), path, layers_as_functions=True)
    assert list(calls_of(path)) == ["Gelu_2"]
    dynamo_moe.verify(path, model)


def test_two_runs_of_one_class_have_two_functions(tmp_path: Path) -> None:
    runs = [nn.Sequential(*(Block(scale) for _ in range(4))) for scale in (1.0, 0.5)]
    model, path = nn.Sequential(*runs).eval(), tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.zeros(2, WIDTH), path, layers_as_functions=True)
    assert calls_of(path) == {
        "Block": [f"0.{number}" for number in range(4)],
        "Block_2": [f"1.{number}" for number in range(4)],
    }
    dynamo_moe.verify(path, model)


def test_the_report_says_where_there_are_no_equal_blocks(tmp_path: Path) -> None:
    model = nn.Sequential(*(Block() for _ in range(3))).eval()
    report = dynamo_moe.export(
        model, torch.zeros(2, WIDTH), tmp_path / "m.onnx", layers_as_functions=True
    )
    assert any("no blocks were found" in note for note in report.notes)
    assert not calls_of(tmp_path / "m.onnx")


def test_tensorrt_expands_functions(tmp_path: Path) -> None:
    model, path = moe_blocks(4), tmp_path / "m.onnx"
    options = {"target": "dense", "layers_as_functions": True}
    dynamo_moe.export(model, torch.zeros(2, WIDTH), path, **options)
    built = build(path, "SM89")
    assert built.built, built.reason()


def test_plugins_are_not_found_in_functions(files: tuple[Path, Path, nn.Module]) -> None:
    """The command says so before TensorRT's parser reports an operator of a body."""
    path = files[0].with_name("m.onnx")
    report = dynamo_moe.export(files[2], torch.zeros(2, WIDTH), path, layers_as_functions=True)
    assert any("looks for no plugin" in note for note in report.notes)
    refused = parse(path)
    assert not refused.parsed
    assert "y_EPD" in refused.reason(), refused.reason()


def test_command(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        "from torch import nn\n"
        "class Block(nn.Linear): pass\n"
        "def build(): return nn.Sequential(*(Block(8, 8) for _ in range(4)))\n"
    )
    out = tmp_path / "m.onnx"
    arguments = ["export", f"{tmp_path}/made.py:build", str(out), "--shape", "2,8"]
    done = CliRunner().invoke(app, [*arguments, "--layers-as-functions"])
    assert not done.exit_code, done.output
    assert list(calls_of(out)) == ["Block"]


class Attending(MoEBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + F.scaled_dot_product_attention(x, x, x))


def test_the_librarys_operators_in_functions_of_unknown_sizes(tmp_path: Path) -> None:
    """A size that it does not know is the number -1 for the runtime, which operators then read."""
    model = nn.Sequential(*(Attending() for _ in range(4))).eval()
    dynamo_moe.convert(model)
    x, path = torch.randn(2, 5, WIDTH), tmp_path / "m.onnx"
    sizes = {"input": {0: "batch", 1: "tokens"}}
    dynamo_moe.export(model, x, path, layers_as_functions=True, dynamic_shapes=sizes)
    x = torch.randn(3, 9, WIDTH)
    [y] = dynamo_moe.session(path).run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x), rtol=1e-4, atol=1e-5)
