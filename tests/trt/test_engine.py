"""Building engines: what is checked before TensorRT is asked, and all of it where it is."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from typer.testing import CliRunner

import dynamo_moe
import trt_plugin
from dynamo_moe.cli import app
from dynamo_moe.models import swin_moe_digits
from trt_plugin.engine import _kernels_from

without_tensorrt = pytest.mark.skipif(find_spec("tensorrt") is not None, reason="it is installed")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x=4x8", ("x", ((4, 8),) * 3)),
        ("input.1=1x8:4x8:16x8", ("input.1", ((1, 8), (4, 8), (16, 8)))),
        ("x=0:1:2", ("x", ((0,), (1,), (2,)))),
    ],
)
def test_shapes(text, expected):
    assert trt_plugin.parse_shapes(text) == expected


@pytest.mark.parametrize("text", ["", "x", "x=", "=4", "x=4:5", "x=4x8:4:4", "x=ax4", "x=1:2:3:4"])
def test_shapes_that_are_none(text):
    with pytest.raises(ValueError, match=r"shapes must be NAME=SHAPE or NAME=MIN:USUAL:MAX"):
        trt_plugin.parse_shapes(text)


def test_shapes_must_grow():
    with pytest.raises(ValueError, match="must grow from the smallest to the largest"):
        trt_plugin.parse_shapes("x=4x8:2x8:8x8")


@without_tensorrt
def test_without_tensorrt_one_line_says_what_is_missing(tmp_path):
    model = tmp_path / "model.onnx"
    model.touch()
    code, out, error = run("engine", str(model))
    assert (code, out) == (1, "")
    assert error.startswith("error: building an engine needs the package tensorrt; the lean")
    with pytest.raises(trt_plugin.EngineError, match="running an engine needs the package tensor"):
        trt_plugin.Runner(model)


def test_what_makes_no_sense_is_refused(tmp_path):
    model = tmp_path / "model.onnx"
    model.touch()
    assert run("engine", "no.onnx")[0] == 2
    code, _, error = run("engine", str(model), "--shapes", "x")
    assert code == 2
    assert "--shapes: shapes must be" in error
    assert run("engine", str(model), "--kernels", "no.moek")[0] == 2


def test_the_librarys_place_is_told():
    code, out, _ = run("plugin-path")
    assert code == 0
    assert out.strip() == str(trt_plugin.library_path())


@pytest.mark.parametrize("before", [None, "old.moek"])
def test_the_bundle_is_named_to_the_plugin_for_as_long_as_it_is_parsed(monkeypatch, before):

    name = "DYNAMO_MOE_KERNELS"
    monkeypatch.delenv(name, raising=False)
    if before:
        monkeypatch.setenv(name, before)
    with _kernels_from(None):
        assert os.environ.get(name) == before
    with _kernels_from("new.moek"):
        assert os.environ[name].endswith("/new.moek")
    assert os.environ.get(name) == before


def test_parsers_of_several_threads_take_turns(monkeypatch):
    monkeypatch.delenv("DYNAMO_MOE_KERNELS", raising=False)
    named = []

    def parse() -> None:
        with _kernels_from(None):
            named.append(os.environ.get("DYNAMO_MOE_KERNELS"))

    with _kernels_from("mine.moek"):
        other = threading.Thread(target=parse)
        other.start()
        other.join(0.1)
        assert other.is_alive()
    other.join()
    assert named == [None]


# --- On a TensorRT that only answers ---


class Empty:
    """What a call of TensorRT returns that nobody looks at."""

    def __getattr__(self, name):
        return lambda *arguments, **named: None


class Cache(bytes):
    def serialize(self) -> bytes:
        return self + b" and more"


class Config(Empty):
    """Takes the timing caches that begin with b"good", of which one is of another device."""

    cache = None

    def create_timing_cache(self, content: bytes) -> Cache | None:
        return Cache(content) if not content or content.startswith(b"good") else None

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        if cache != b"good, another device's":
            self.cache = cache
        return self.cache is cache

    def get_timing_cache(self) -> Cache | None:
        return self.cache


class FakeTensorRT(ModuleType):
    """The module ``tensorrt``; tests change what its parts answer."""

    __version__ = "10.9.0"
    NetworkDefinitionCreationFlag = SimpleNamespace()
    IProgressMonitor = object
    TensorIOMode = SimpleNamespace(INPUT="input", OUTPUT="output")

    class ILogger:
        Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1, WARNING=2, INFO=3)

    def __init__(self) -> None:
        super().__init__("tensorrt")
        self.__spec__ = ModuleSpec("tensorrt", None)
        self.loaded: list[Any] = []
        self.registers = True
        self.says: list[Any] = []
        self.parses, self.plan = True, b"an engine"
        self.config = Config()
        self.runtime = None

    # The registry
    def get_plugin_registry(self):
        return self

    def load_library(self, path: str) -> None:
        self.loaded.append(path)

    def get_creator(self, *name):
        return self if self.loaded and self.registers else None

    # The builder
    def Builder(self, logger):  # noqa: N802
        self.logger = logger
        return self

    def OnnxParser(self, network, logger):  # noqa: N802
        error = SimpleNamespace(desc=lambda: "no creator of MoE")
        return SimpleNamespace(
            parse_from_file=lambda path: self.say() or self.parses,
            num_errors=1,
            get_error=lambda at: error,
        )

    def say(self) -> None:
        for severity, message in self.says:
            self.logger.log(severity, message)

    def create_network(self, flags):
        return SimpleNamespace(num_inputs=0)

    def create_builder_config(self):
        return self.config

    def build_serialized_network(self, network, config):
        return self.plan

    # The runtime
    def Runtime(self, logger):  # noqa: N802
        self.runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: Engine())
        return self.runtime


class Engine(Empty):
    """Adds a to b, as far as one can see."""

    num_io_tensors = 3
    names = ("a", "b", "y")

    def get_tensor_name(self, at: int) -> str:
        return self.names[at]

    def get_tensor_mode(self, name: str) -> str:
        return "output" if name == "y" else "input"

    def get_tensor_dtype(self, name: str):
        return SimpleNamespace(name="FLOAT")

    def create_execution_context(self):
        self.addresses, self.streams = {}, []
        return self

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = shape
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shape

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        self.streams.append(stream)
        return True


@pytest.fixture
def tensorrt(monkeypatch):
    fake = FakeTensorRT()
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    return fake


def built(tmp_path, **options) -> bytes:
    engine = tmp_path / "model.engine"
    trt_plugin.build_engine(tmp_path / "model.onnx", engine, progress=False, **options)
    return engine.read_bytes()


def test_what_the_plugin_said_is_in_the_error(tensorrt, tmp_path):
    tensorrt.parses = False
    reason = "DroplessMoE layers.3.mlp: cannot read the kernels' bundle a.moek"
    tensorrt.says = [(1, reason), (1, "ModelImporter.cpp: no creator of MoE"), (3, "hello")]
    with pytest.raises(trt_plugin.EngineError) as caught:
        built(tmp_path)
    path = tmp_path / "model.onnx"
    assert str(caught.value) == f"TensorRT does not parse {path}: no creator of MoE; {reason}"


def test_what_the_plugin_warns_of_is_a_warning(tensorrt, tmp_path):
    warning = "DroplessMoEExperts layers.3.mlp: no kernels with x float32"
    tensorrt.says = [(2, "another's warning"), (2, warning)]
    with pytest.warns(UserWarning, match="no kernels with x") as caught:
        assert built(tmp_path) == b"an engine"
    assert [str(each.message) for each in caught] == [warning]
    assert caught[0].filename == __file__


def test_a_plugin_that_cannot_be_loaded(tensorrt, tmp_path):
    tensorrt.registers = False
    with pytest.raises(trt_plugin.EngineError, match="did not register DroplessMoE"):
        built(tmp_path)


def test_a_timing_cache_grows(tensorrt, tmp_path):
    path = tmp_path / "timing"
    for content in (b" and more", b"good and more"):
        built(tmp_path, timing_cache=path)
        assert path.read_bytes() == content
        path.write_bytes(b"good")
    assert {each.name for each in tmp_path.iterdir()} == {"timing", "model.engine"}


@pytest.mark.parametrize("content", [b"damaged", b"good, another device's"])
def test_a_timing_cache_that_is_refused_starts_anew(tensorrt, tmp_path, content):
    path = tmp_path / "timing"
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="timing is damaged, or of another device or TensorRT"):
        assert built(tmp_path, timing_cache=path) == b"an engine"
    assert path.read_bytes() == b" and more"


def test_a_tensorrt_without_timing_caches(tensorrt, tmp_path):
    tensorrt.config.create_timing_cache = lambda content: None
    with pytest.warns(UserWarning, match="starts anew"):
        assert built(tmp_path, timing_cache=tmp_path / "timing") == b"an engine"
    assert not (tmp_path / "timing").exists()


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True

    def record_stream(self, stream) -> None:
        pass


class OnOtherGpu(OnGpu):
    device = torch.device("cuda", 1)


@pytest.fixture
def runner(tensorrt, tmp_path, monkeypatch):
    (tmp_path / "model.engine").write_bytes(b"an engine")
    entered = []
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: entered.append(device) or nullcontext()
    )
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=(7, device))
    )
    runner = trt_plugin.Runner(tmp_path / "model.engine")
    runner.entered = entered
    return runner


def aligned(*shape: int, offset: int = 0) -> torch.Tensor:
    """A tensor that begins ``offset`` bytes after a multiple of 256."""
    memory = torch.zeros(1024)
    begin = (-memory.data_ptr() % 256 + offset) // 4
    return memory[begin : begin + shape[0]].as_subclass(OnGpu)


def test_inputs_stay_where_they_are_if_they_are_aligned(runner):
    a, b = aligned(8), aligned(8, offset=64)
    result = runner(a=a, b=b)
    context = runner._context
    assert context.addresses["a"] == a.data_ptr()
    assert context.addresses["b"] != b.data_ptr()
    assert list(result) == ["y"]
    assert result["y"].shape == (8,)
    # On the inputs' device, and its stream.
    assert runner.entered == [a.device]
    assert context.streams == [(7, a.device)]


def test_inputs_are_of_one_cuda_device(runner):
    a, other = aligned(8), torch.zeros(8).as_subclass(OnOtherGpu)
    with pytest.raises(TypeError, match="input b must be on a CUDA device, got cpu"):
        runner(a=a, b=torch.zeros(8))
    with pytest.raises(TypeError, match="inputs must be on one device, got cpu, cuda:1"):
        runner(a=a, b=other)
    with pytest.raises(TypeError, match=r"input a must be torch\.float32, got torch\.float64"):
        runner(a=a.double(), b=other)
    assert runner._context.addresses == {}


@pytest.mark.parametrize("allowed", [False, True])
def test_an_engine_that_holds_the_library(tensorrt, tmp_path, allowed):
    (tmp_path / "model.engine").touch()
    trt_plugin.Runner(tmp_path / "model.engine", allow_host_code=allowed)
    assert getattr(tensorrt.runtime, "engine_host_code_allowed", False) is allowed
    assert bool(tensorrt.loaded) is not allowed


@pytest.mark.gpu
@pytest.mark.tensorrt
def test_an_engine_gives_pytorchs_results(tmp_path):
    model = swin_moe_digits().eval()
    dynamo_moe.convert(model)
    path = tmp_path / "swin.onnx"
    dynamo_moe.export(model, torch.randn(4, 1, 8, 8), path)
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    bundle = tmp_path / "swin.moek"
    assert run("compile", str(path), "--arch", capability, "-o", str(bundle))[0] == 0
    name = onnx.load(path).graph.input[0].name
    profile = ((1, 1, 8, 8), (4, 1, 8, 8), (16, 1, 8, 8))
    engine = tmp_path / "swin.engine"
    trt_plugin.build_engine(path, engine, {name: profile}, kernels=bundle, progress=False)
    runner = trt_plugin.Runner(engine)
    for batch in (1, 4, 16):
        x = torch.randn(batch, 1, 8, 8)
        (result,) = runner(**{name: x.cuda()}).values()
        torch.testing.assert_close(result.cpu(), model(x), atol=1e-3, rtol=1e-3)
