"""``dynamo-moe engine``, on a TensorRT that only answers."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch

import dynamo_moe
import trt_plugin
from custom_ops.offload import cache_bytes
from dynamo_moe.files.offloading import offloaded_kernel_layers
from dynamo_moe.files.rank_files import record_of
from dynamo_moe.models import DroplessMoEMlp
from fake_tensorrt import run
from onnx_files import dense_model, save
from small_bundles import SMALL, program
from small_models import mlp_model
from trt_plugin.bundle import Bundle

pytest_plugins = ("fake_tensorrt",)


@pytest.fixture
def compiled(monkeypatch) -> list[tuple[int, list[str]]]:
    """For how many layers, and for which architectures, the command has compiled."""
    calls = []

    def compile(layers, architectures, output, *, progress):  # noqa: A001
        calls.append((len(layers), architectures))
        numbers = [int(name.removeprefix("sm_")) for name in architectures]
        Bundle(tuple(program(architecture=each) for each in numbers)).save(output)

    monkeypatch.setattr(trt_plugin, "compile", compile, raising=False)
    return calls


@pytest.fixture
def moe_file(tensorrt, tmp_path) -> Path:
    model = DroplessMoEMlp(16, 24, num_experts=4, top_k=2).eval()
    dynamo_moe.convert(model)
    dynamo_moe.export(model, torch.randn(4, 16), tmp_path / "model.onnx", input_names=["x"])
    tensorrt.network_inputs = [
        SimpleNamespace(name="x", shape=(-1, 16), dtype=SimpleNamespace(name="FLOAT"))
    ]
    return tmp_path / "model.onnx"


def run_engine(file: Path, *options: str) -> tuple[int, str, str]:
    return run("engine", str(file), "--shapes", "x=4x16", *options)


def test_kernels_are_compiled_if_there_is_no_bundle(
    given_kernels, compiled, moe_file, tmp_path, monkeypatch
):
    code, out, error = run_engine(moe_file, "--arch", "89", "--arch", "sm_120")
    assert (code, "TensorRT 10.9.0" in out) == (0, True), error
    assert compiled == [(1, ["sm_89", "sm_120"])]
    ((name, architectures),) = given_kernels
    assert (Path(name).name, architectures) == ("model.moek", [89, 120])
    assert not Path(name).exists()
    assert (tmp_path / "model.engine").read_bytes() == b"an engine"
    # For this machine's GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert run_engine(moe_file, "--json")[0] == 0
    assert compiled.pop() == (1, ["sm_90"])
    # The bundle beside the file comes first, and one that is named before that.
    SMALL.save(tmp_path / "model.moek")
    SMALL.save(tmp_path / "other.moek")
    for bundle, options in (("model", []), ("other", ["--kernels", str(tmp_path / "other.moek")])):
        assert run_engine(moe_file, *options)[0] == 0
        assert given_kernels.pop()[0] == str(tmp_path / f"{bundle}.moek")
    assert len(compiled) == 1


@pytest.fixture
def given_files(tensorrt, monkeypatch) -> list[onnx.ModelProto]:
    """The files that the parser was given."""
    files = []

    def parse(path: str) -> bool:
        files.append(onnx.load(path))
        return tensorrt.parses

    parser = SimpleNamespace(
        parse_from_file=parse, num_errors=1, get_error=lambda at: tensorrt.errors[at]
    )
    monkeypatch.setattr(tensorrt, "OnnxParser", lambda network, logger: parser, raising=False)
    return files


def test_experts_are_offloaded(tensorrt, given_files, moe_file, tmp_path, monkeypatch):
    layers = []

    def compile(given, architectures, output, *, progress):  # noqa: A001
        layers.extend(given)
        Bundle((program(architecture=80),)).save(output)

    monkeypatch.setattr(trt_plugin, "compile", compile, raising=False)
    content = moe_file.read_bytes()
    # Of a bundle beside the file nobody knows whether its layers are offloaded.
    SMALL.save(tmp_path / "model.moek")
    options = ("--arch", "80", "--resident-experts", "2", "--share-expert-cache")
    code, out, error = run_engine(moe_file, *options, "--json")
    assert code == 0, error
    # The kernels are those that `compile` makes with the same option.
    assert layers == offloaded_kernel_layers(moe_file, resident_experts=2)
    offload = json.loads(out)["offload"]
    memory = offload["memory"]
    # Four experts of float32, 16 wide and 24 inside.
    size = 4 * 16 * 24
    assert memory["device_bytes"] == cache_bytes(4, 2, (size, size))
    assert memory["weight_bytes"] == memory["host_bytes"] == 4 * 2 * size
    assert offload["shared_cache"] is True
    assert offload["path"] == str(moe_file)
    (node,) = (node for node in given_files[0].graph.node if node.op_type == "DroplessMoE")
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    assert (attributes["resident_experts"], attributes["expert_cache"]) == (2, 1)
    w1 = offload["layers"][0]["tensors"]["w1"]
    assert attributes["w1_source"].decode().startswith(f"{w1['offset']} {w1['bytes']} ")
    assert attributes["w1_source"].decode().endswith(f" {w1['path']}")
    # The checksum of the file's header, which has a hash of the values.
    checksum = attributes["w1_source"].decode().split()[4]
    weights = tmp_path / f"model.engine.experts.{checksum}.safetensors"
    assert (offload["weights_file"], w1["path"]) == (str(weights), str(weights))
    assert re.fullmatch("[0-9a-f]{8}", checksum)
    assert [*tmp_path.glob("*.safetensors")] == [weights]
    assert [layer.resident_experts for layer in layers] == [2]
    assert moe_file.read_bytes() == content

    options = ("--arch", "80", "--resident-memory", "4.2kB", "-o", str(tmp_path / "e.plan"))
    code, out, error = run_engine(moe_file, *options)
    assert (code, "1 of 4" in out, "take 2 waves" in out) == (0, True, True), error
    # Equal weights, equal names.
    (written,) = tmp_path.glob("e.plan.experts.*.safetensors")
    assert written.name == f"e.plan.experts.{checksum}.safetensors"


def test_errors_name_the_file_of_which_a_copy_is_built(tensorrt, given_files, moe_file, compiled):
    tensorrt.parses = False
    code, _, error = run_engine(moe_file, "--arch", "80", "--resident-experts", "2")
    assert (code, f"TensorRT 10.9.0 does not parse {moe_file}: node" in error) == (1, True), error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--resident-experts", "two"), "--resident-experts takes R or LAYER=R, got 'two'"),
        (("--resident-experts", "=2"), "--resident-experts takes R or LAYER=R, got '=2'"),
        (
            ("--resident-experts", "a=2", "--resident-experts", "a=3"),
            "--resident-experts is given twice for a",
        ),
        (("--resident-memory", "8XB"), "--resident-memory takes a size such as 8GB or 7.5GiB"),
        (
            ("--resident-memory", "8GB", "--resident-experts", "2"),
            "give either --resident-experts or --resident-memory",
        ),
        (("--share-expert-cache",), "--share-expert-cache needs --resident-experts or"),
        (("--resident-experts", "2"), "name a GPU architecture with --arch"),
    ],
)
def test_offloading_that_makes_no_sense_is_refused(tensorrt, moe_file, tmp_path, options, message):
    code, _, error = run_engine(moe_file, *options)
    assert (code, message in error) == (2, True), error
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]


def test_without_moe_nodes_nothing_is_compiled(tensorrt, compiled, tmp_path):
    file = save(dense_model(), tmp_path / "dense.onnx")
    sizes = [
        size.dim_value or -1 for size in dense_model().graph.input[0].type.tensor_type.shape.dim
    ]
    tensorrt.network_inputs = [
        SimpleNamespace(name="x", shape=tuple(sizes), dtype=SimpleNamespace(name="FLOAT"))
    ]
    shape = "x".join(str(abs(size)) for size in sizes)
    assert run("engine", str(file), "--arch", "89", "--shapes", f"x={shape}")[0] == 0
    assert compiled == []


def test_what_no_engine_can_be_built_for_is_refused_before_kernels_are_compiled(
    tensorrt, compiled, moe_file, monkeypatch
):
    code, _, error = run("engine", str(moe_file), "--arch", "89")
    assert (code, "symbolic sizes: x [?, 16]; give" in error) == (1, True), error
    code, _, error = run("engine", str(moe_file), "--arch", "89", "--shapes", "y=1")
    assert (code, "the file has no input y; its inputs: x" in error) == (1, True), error
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", tensorrt)
    tensorrt.ComputeCapability = SimpleNamespace(__members__=("NONE", "SM89", "SM120"))
    code, _, error = run_engine(moe_file, "--builder", "rtx", "--arch", "sm_90")
    shown = "does not build for sm_90; it builds for sm_89, sm_120"
    assert (code, shown in error) == (1, True), error
    assert compiled == []


def test_a_bundle_must_have_the_kernels_of_each_architecture(given_kernels, moe_file, tmp_path):
    SMALL.save(tmp_path / "model.moek")
    code, _, error = run_engine(moe_file, "--arch", "75")
    assert (code, "the bundle has no kernels for sm_75 of the layer" in error) == (1, True), error
    assert given_kernels == []
    # Of the bundle's, for sm_80 and sm_90, those for the named one.
    assert run_engine(moe_file, "--arch", "80")[0] == 0
    assert given_kernels == [(str(tmp_path / "model.moek"), [80])]


def test_the_file_is_opened_once(tensorrt, compiled, moe_file, monkeypatch):
    opened = []
    path_open = Path.open

    def counting(path: Path, *arguments, **options):
        opened.append(path)
        return path_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", counting)
    for options in ((), ("--resident-experts", "2")):
        code, _, error = run_engine(moe_file, "--arch", "80", *options)
        assert code == 0, error
        assert opened.count(moe_file) == 1
        opened.clear()


@pytest.fixture
def rank_files(moe_file, tmp_path) -> Path:
    """The name of the files of two ranks, in a folder of their own."""
    model = mlp_model(layers=1)
    dynamo_moe.convert(model)
    (tmp_path / "ranks").mkdir()
    path = tmp_path / "ranks" / "model.onnx"
    dynamo_moe.export(model, torch.randn(3, 16), path, ranks=2, input_names=["x"])
    return path


def engines(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.suffix != ".onnx")


def test_the_engines_of_all_ranks(tensorrt, compiled, given_files, moe_file, rank_files):
    code, out, error = run_engine(rank_files, "--ranks", "--arch", "89", "--json")
    assert code == 0, error
    names = [f"model.rank{rank}.engine" for rank in range(2)]
    assert [report["path"] for report in json.loads(out)["ranks"]] == [
        str(rank_files.with_name(name)) for name in names
    ]
    assert engines(rank_files.parent) == names
    # Each has its own experts: three of six, the first three and the last.
    assert [record_of(file).rank for file in given_files] == [0, 1]
    assert compiled == [(1, ["sm_89"])] * 2
    # Any rank's file stands for all of them, and offloaded experts lie beside each engine.
    options = ("--arch", "89", "--resident-experts", "2", "-o", str(rank_files.parent / "o.plan"))
    code, out, error = run_engine(rank_files.with_name("model.rank1.onnx"), "--ranks", *options)
    assert (code, "o.rank1.plan" in out) == (0, True), error
    found = [name for name in engines(rank_files.parent) if name.startswith("o.")]
    assert [name.split(".experts.")[0] for name in found] == ["o.rank0.plan"] * 2 + [
        "o.rank1.plan"
    ] * 2
    # A whole model of the name that they have in common lies beside them.
    shutil.copy(moe_file, rank_files)
    code, _, error = run_engine(rank_files, "--ranks", "--arch", "89")
    assert code == 0, error


def test_a_rank_that_fails_leaves_what_was_there(
    tensorrt, compiled, rank_files, monkeypatch, tmp_path
):
    earlier = rank_files.with_name("model.rank0.engine")
    earlier.write_bytes(b"an earlier engine")
    plans = iter((b"an engine", None))
    monkeypatch.setattr(tensorrt, "build_serialized_network", lambda *_: next(plans))
    options = ("--ranks", "--arch", "89", "--resident-experts", "2")
    code, _, error = run_engine(rank_files, *options)
    assert (code, "builds no engine of" in error, "rank1.onnx" in error) == (1, True, True), error
    assert engines(rank_files.parent) == ["model.rank0.engine"]
    assert earlier.read_bytes() == b"an earlier engine"


@pytest.mark.parametrize(
    ("file", "code", "message"),
    [
        ("ranks/model.onnx", 1, "the file of rank 1 of 2 is missing"),
        ("other.onnx", 2, "no such file"),
        ("model.onnx", 1, "is a file for one device, not for a rank of several"),
    ],
)
def test_files_that_are_no_ranks(
    tensorrt, compiled, rank_files, tmp_path, monkeypatch, file, code, message
):
    rank_files.with_name("model.rank1.onnx").unlink()
    found, _, error = run_engine(tmp_path / file, "--ranks", "--arch", "89")
    assert (found, message in error) == (code, True), error
    assert engines(rank_files.parent) == compiled == []
