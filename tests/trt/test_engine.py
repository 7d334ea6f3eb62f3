"""Building engines: what is checked before TensorRT is asked, and all of it where it is."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from typer.testing import CliRunner

import dynamo_moe
import trt_plugin
from custom_ops.residency import cache_bytes
from dynamo_moe.cli import app
from dynamo_moe.files.offloading import offloaded_kernel_layers
from dynamo_moe.models import DroplessMoEMlp, swin_moe_digits
from onnx_files import dense_model, save
from small_bundles import LAYER, SMALL, program
from trt_plugin.bundle import Bundle
from trt_plugin.engine.installed import Installed, load_plugin
from trt_plugin.engine.kernels import kernels_from

without_tensorrt = pytest.mark.skipif(
    any(find_spec(name) for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")),
    reason="it is installed",
)


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


def test_an_inputs_second_shapes_are_those_of_the_second_profile():
    one, two, all_ = (((size,),) * 3 for size in (1, 2, 3))
    assert trt_plugin.join_profiles([]) == []
    assert trt_plugin.join_profiles([("a", one), ("b", two)]) == [{"a": one, "b": two}]
    assert trt_plugin.join_profiles([("a", one), ("m", all_), ("a", two)]) == [
        {"a": one, "m": all_},
        {"a": two, "m": all_},
    ]


@without_tensorrt
def test_without_tensorrt_one_line_says_what_is_missing(tmp_path):
    model = tmp_path / "model.onnx"
    model.touch()
    code, out, error = run("engine", str(model))
    assert (code, out) == (1, "")
    assert error.startswith(
        "error: building an engine needs TensorRT or TensorRT for RTX: pip install "
        "'dynamo-moe[tensorrt]', or pip install 'dynamo-moe[tensorrt-rtx]'; the lean runtime is not"
    )
    with pytest.raises(trt_plugin.EngineError, match="running an engine needs TensorRT or TensorR"):
        trt_plugin.Runner(model)
    with pytest.raises(ValueError, match="builder must be one of tensorrt, rtx; got 'trtexec'"):
        trt_plugin.Runner(model, builder="trtexec")


def test_what_makes_no_sense_is_refused(tmp_path):
    model = tmp_path / "model.onnx"
    model.touch()
    assert run("engine", "no.onnx")[0] == 2
    code, _, error = run("engine", str(model), "--shapes", "x")
    assert code == 2
    assert "--shapes: shapes must be" in error
    assert run("engine", str(model), "--kernels", "no.moek")[0] == 2
    code, _, error = run("engine", str(model), "--arch", "sm_42")
    assert code == 2
    assert "--arch: architecture must be one of sm_75, " in error
    shapes = [each for text in ("a=1", "a=2", "a=3", "b=1", "b=2") for each in ("--shapes", text)]
    code, _, error = run("engine", str(model), *shapes)
    assert code == 2
    assert (
        "inputs of several profiles must be named equally often, got a 3 times, b 2 times" in error
    )


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
    with kernels_from(None):
        assert os.environ.get(name) == before
    with kernels_from("new.moek"):
        assert os.environ[name].endswith("/new.moek")
    assert os.environ.get(name) == before


def test_the_plugin_reads_the_chosen_programs(monkeypatch, tmp_path):
    monkeypatch.setenv("DYNAMO_MOE_ARCHITECTURES", "sm_90")
    one = Bundle(SMALL.programs[:1])
    with kernels_from(tmp_path / "a.moek", one):
        named = Path(os.environ["DYNAMO_MOE_KERNELS"])
        assert trt_plugin.read(named) == one
        assert "DYNAMO_MOE_ARCHITECTURES" not in os.environ
    assert not named.exists()
    assert os.environ["DYNAMO_MOE_ARCHITECTURES"] == "sm_90"


def test_parsers_of_several_threads_take_turns(monkeypatch):
    monkeypatch.delenv("DYNAMO_MOE_KERNELS", raising=False)
    named = []

    def parse() -> None:
        with kernels_from(None):
            named.append(os.environ.get("DYNAMO_MOE_KERNELS"))

    with kernels_from("mine.moek"):
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

    def add_optimization_profile(self, profile) -> int:
        return 0

    def create_timing_cache(self, content: bytes) -> Cache | None:
        return Cache(content) if not content or content.startswith(b"good") else None

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        if cache != b"good, another device's":
            self.cache = cache
        return self.cache is cache

    def get_timing_cache(self) -> Cache | None:
        return self.cache


class ParserError:
    """What the parser says of a node."""

    def __init__(self, reason: str, name: str, operator: str, importer: str = "", *stack: str):
        self.desc, self.node_name, self.node_operator, self.func, self.local_function_stack = (
            lambda value=value: value for value in (reason, name, operator, importer, list(stack))
        )


class FakeTensorRT(ModuleType):
    """The module ``tensorrt``; tests change what its parts answer."""

    # It is its own registry, and a registry's class says which module it belongs to.
    __module__ = "tensorrt"
    __version__ = "10.9.0"
    NetworkDefinitionCreationFlag = SimpleNamespace()
    LayerType = SimpleNamespace(PLUGIN_V3="a plugin's")
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
        self.errors = [ParserError("no creator of MoE", "MoE_2", "DroplessMoE")]
        self.network_inputs: list[Any] = []
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
        return SimpleNamespace(
            parse_from_file=lambda path: self.say() or self.parses,
            num_errors=len(self.errors),
            get_error=lambda at: self.errors[at],
        )

    def say(self) -> None:
        for severity, message in self.says:
            self.logger.log(severity, message)

    def create_network(self, flags):
        return SimpleNamespace(
            num_inputs=len(self.network_inputs),
            get_input=lambda at: self.network_inputs[at],
            num_outputs=0,
            num_layers=0,
        )

    def create_builder_config(self):
        return self.config

    def create_optimization_profile(self):
        return Empty()

    def build_serialized_network(self, network, config):
        return self.plan

    # The runtime
    def Runtime(self, logger):  # noqa: N802
        self.engine = Engine()
        self.runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: self.engine)
        return self.runtime


class Engine(Empty):
    """Adds a to b, as far as one can see."""

    num_io_tensors = 3
    num_optimization_profiles = 2
    names = ("a", "b", "y")

    def get_tensor_name(self, at: int) -> str:
        return self.names[at]

    def get_tensor_mode(self, name: str) -> str:
        return "output" if name == "y" else "input"

    def get_tensor_dtype(self, name: str):
        return SimpleNamespace(name="FLOAT")

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [(1,), (4,), (8,)] if profile == 0 else [(9,), (16,), (32,)]

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profiles.append(profile)
        return True

    def create_execution_context(self, config=None):
        self.addresses, self.streams, self.profiles, self.config = {}, [], [], config
        return self

    # TensorRT for RTX
    def create_runtime_config(self):
        self.cache = None
        return self

    def create_runtime_cache(self):
        self.content = b""
        return self

    def deserialize(self, content: bytes) -> bool:
        if content.startswith(b"good"):
            self.content = content
        return self.content == content

    def set_runtime_cache(self, cache) -> None:
        self.cache = cache

    def serialize(self) -> bytes:
        return self.content + b" and more"

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


def built(tmp_path, *profiles, **options) -> bytes:
    model, engine = tmp_path / "model.onnx", tmp_path / "model.engine"
    model.touch()
    trt_plugin.build_engine(model, engine, *profiles, progress=False, **options)
    model.unlink()
    return engine.read_bytes()


def test_what_the_plugin_said_is_in_the_error(tensorrt, tmp_path):
    tensorrt.parses = False
    reason = "DroplessMoE layers.3.mlp: cannot read the kernels' bundle a.moek"
    tensorrt.says = [(1, reason), (1, "ModelImporter.cpp: no creator of MoE"), (3, "hello")]
    with pytest.raises(trt_plugin.EngineError) as caught:
        built(tmp_path)
    path = tmp_path / "model.onnx"
    assert str(caught.value) == (
        f"TensorRT 10.9.0 does not parse {path}: node 'MoE_2' (DroplessMoE): no creator of MoE; "
        f"{reason}"
    )


def test_errors_name_what_was_being_parsed(tensorrt, tmp_path):
    tensorrt.parses = False
    # As the parser says it: in an importer it knows no node, but the functions around it.
    body = ("layer (DroplessMoE)", "many (else_branch)")
    inner = ParserError("no reduction", "", "", "importScatterElements", *body)
    tensorrt.errors = [inner, inner, *(ParserError("bad", f"n{i}", "MoE") for i in range(4))]
    with pytest.raises(trt_plugin.EngineError) as caught:
        built(tmp_path)
    assert str(caught.value).split(": ", 1)[1] == (
        "a node ScatterElements in many (else_branch) in layer (DroplessMoE): no reduction; "
        "node 'n0' (MoE): bad; node 'n1' (MoE): bad; and 2 more. com.microsoft::MoE is for ONNX "
        "Runtime: export the model for target plugin, or dense"
    )


def test_a_body_that_cannot_be_parsed_tells_why_the_plugin_is_missing(tensorrt, tmp_path):
    tensorrt.registers = False
    assert built(tmp_path) == b"an engine"
    tensorrt.parses = False
    tensorrt.errors = [ParserError("bad", "", "", "importScan", "layer (DroplessMoE)")]
    with pytest.raises(trt_plugin.EngineError) as caught:
        built(tmp_path)
    message = str(caught.value)
    assert "a node Scan in layer (DroplessMoE): bad. Its MoE nodes need the plugin's" in message
    assert "It is not loaded: TensorRT 10.9.0 did not register DroplessMoE and" in message
    assert message.endswith("A file of target dense needs no plugin")


def test_shapes_that_are_missing_or_do_not_fit(tensorrt, tmp_path):
    tensorrt.network_inputs = [
        SimpleNamespace(name="x", shape=(-1, 8), dtype=SimpleNamespace(name="FLOAT")),
        SimpleNamespace(name="m", shape=(8,), dtype=SimpleNamespace(name="FLOAT")),
    ]
    for profiles, message in (
        ({}, r"symbolic sizes: x \[\?, 8\]; give .* with --shapes x=1x8:4x8:16x8$"),
        ({"y": ((1,),) * 3}, "has no input y; its inputs: x, m"),
        ({"x": ((1, 8), (4, 8), (16, 9))}, r"x has the shape \[\?, 8\] .*; \[16, 9\] does not fit"),
        ([{"x": ((1, 8),) * 3}, {"x": ((1,),) * 3}], r"\[1\] does not fit"),
    ):
        with pytest.raises(trt_plugin.EngineError, match=message):
            built(tmp_path, profiles)


def test_a_report_is_the_same_after_json(tensorrt, tmp_path):
    x = SimpleNamespace(name="x", shape=(-1, 8), dtype=SimpleNamespace(name="FLOAT"))
    tensorrt.network_inputs = [x]
    (tmp_path / "model.onnx").touch()
    report = trt_plugin.build_engine(
        tmp_path / "model.onnx", tmp_path / "a.engine", {"x": ((4, 8),) * 3}, progress=False
    ).to_dict()
    assert report["inputs"] == [{"name": "x", "dtype": "float", "shape": [-1, 8]}]
    assert json.loads(json.dumps(report)) == report


def test_architectures_are_for_tensorrt_for_rtx(tensorrt, tmp_path):
    with pytest.raises(trt_plugin.EngineError, match=r"TensorRT 10\.9\.0 builds for the device"):
        built(tmp_path, architectures=["sm_89"])


# Of one layer for sm_89 and sm_120, and of another for sm_80 and sm_120.
OTHER = LAYER._replace(experts=16)
MIXED = Bundle(
    (
        *(program(architecture=89), program(architecture=120)),
        *(program(layer=OTHER, architecture=80), program(layer=OTHER, architecture=120)),
    )
)


@pytest.fixture
def parsed(tensorrt, tmp_path) -> list[tuple[list[int], str | None]]:
    """Which programs the plugin was given when a file was parsed, and the variable beside them."""
    MIXED.save(tmp_path / "mixed.moek")
    seen = []

    def say() -> None:
        given = trt_plugin.read(os.environ["DYNAMO_MOE_KERNELS"])
        names = os.environ.get("DYNAMO_MOE_ARCHITECTURES")
        seen.append(([each.architecture for each in given.programs], names))

    tensorrt.say = say
    return seen


def test_each_layer_stores_what_the_target_runs(parsed, tmp_path):
    bundle = tmp_path / "mixed.moek"
    for architectures, stored in (
        (["sm_89"], [89, 80]),
        (["sm_120"], [120, 120]),
        ([89, 120], [89, 120, 80, 120]),
        (None, [89, 120, 80, 120]),
    ):
        built(tmp_path, kernels=bundle, architectures=architectures)
        assert parsed.pop() == (stored, None)
    with pytest.raises(
        trt_plugin.EngineError, match=r"bundle has no kernels for sm_80 of the layer .*: compile it"
    ):
        built(tmp_path, kernels=bundle, architectures=["sm_80"])


def test_errors_name_the_given_bundle(tensorrt, tmp_path):
    bundle = tmp_path / "mixed.moek"
    MIXED.save(bundle)
    tensorrt.parses = False

    def say() -> None:
        named = os.environ["DYNAMO_MOE_KERNELS"]
        message = f"DroplessMoE moe: {named} has other layers"
        tensorrt.logger.log(1, message)

    tensorrt.say = say
    with pytest.raises(
        trt_plugin.EngineError, match=f"DroplessMoE moe: {bundle} has other layers$"
    ):
        built(tmp_path, kernels=bundle, architectures=["sm_89"])


def test_the_environment_leaves_architectures_out(parsed, tmp_path, monkeypatch):
    bundle, name = tmp_path / "mixed.moek", "DYNAMO_MOE_ARCHITECTURES"
    monkeypatch.setenv(name, "120")
    built(tmp_path, kernels=bundle)
    assert parsed.pop() == ([120, 120], None)
    with pytest.raises(
        trt_plugin.EngineError, match=f"{name}=120 leaves others out has no kernels for sm_89"
    ):
        built(tmp_path, kernels=bundle, architectures=["sm_89"])
    # Then the other layer has none left.
    monkeypatch.setenv(name, "sm_89")
    with pytest.raises(
        trt_plugin.EngineError, match=f"{name}=sm_89 leaves others out has no kernels for sm_89"
    ):
        built(tmp_path, kernels=bundle, architectures=["sm_89"])
    monkeypatch.setenv(name, "sm_90")
    with pytest.raises(
        trt_plugin.EngineError, match=f"{name} is 'sm_90': .* the bundle, sm_89, sm_120, sm_80$"
    ):
        built(tmp_path, kernels=bundle)


def test_kernels_are_shared_unless_asked_otherwise(tensorrt, tmp_path, monkeypatch):
    entered = []
    monkeypatch.setattr(
        "trt_plugin.engine.building.sharing_kernels", lambda: nullcontext(entered.append("shared"))
    )
    built(tmp_path)
    assert entered == ["shared"]
    built(tmp_path, share_kernels=False)
    assert entered == ["shared"]


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
        built(tmp_path, with_library=True)


def test_a_file_that_is_not_there(tensorrt, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file: .*model\.onnx"):
        trt_plugin.build_engine(tmp_path / "model.onnx", tmp_path / "model.engine")


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


# --- TensorRT for RTX's link, without which its parser ends the process ---


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """The folder of the wheel's libraries, where the link is missing."""
    folder = tmp_path / "tensorrt_rtx_libs"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "libtensorrt_rtx.so.1").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("trt_plugin.engine.installed.load", lambda registry: None)
    return folder


def test_the_link_is_made(tensorrt, wheel):
    for _ in range(2):
        load_plugin(Installed("rtx", tensorrt))
        assert (wheel / "libtensorrt_rtx.so").readlink() == Path("libtensorrt_rtx.so.1")


def test_a_link_that_cannot_be_made_is_asked_for(tensorrt, wheel, monkeypatch):
    def refuse(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.raises(trt_plugin.EngineError) as caught:
        load_plugin(Installed("rtx", tensorrt))
    assert str(caught.value) == (
        "TensorRT for RTX would end this process: its parser looks for "
        f"{wheel}/libtensorrt_rtx.so, and the link cannot be made here (Permission denied). "
        f"Make it with: ln -sf libtensorrt_rtx.so.1 {wheel}/libtensorrt_rtx.so"
    )


def test_a_loaded_plugin_needs_the_link_too(tensorrt, wheel, tmp_path, monkeypatch):
    tensorrt.loaded.append("by trt_plugin.load()")
    link = wheel / "libtensorrt_rtx.so"
    load_plugin(Installed("rtx", tensorrt))
    assert link.readlink() == Path("libtensorrt_rtx.so.1")
    # The file might have MoE nodes: its parser would add the plugin and end the process.
    link.unlink()
    link.symlink_to("libtensorrt_rtx.so.0")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", tensorrt)
    with pytest.raises(
        trt_plugin.EngineError, match=r"is a link to libtensorrt_rtx\.so\.0, which is missing"
    ):
        built(tmp_path, builder="rtx")


# --- The command, on the same TensorRT ---


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
    tensorrt, compiled, moe_file, tmp_path, monkeypatch
):
    named = []
    tensorrt.say = lambda: named.append(os.environ.get("DYNAMO_MOE_KERNELS"))
    code, out, error = run_engine(moe_file, "--arch", "89", "--arch", "sm_120")
    assert (code, "TensorRT 10.9.0" in out) == (0, True), error
    assert compiled == [(1, ["sm_89", "sm_120"])]
    assert named[0].endswith("/model.moek")
    assert not Path(named[0]).exists()
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
        assert named.pop() == str(tmp_path / f"{bundle}.moek")
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
    assert memory["device_bytes"] == cache_bytes(4, 2, size, size)
    assert memory["weight_bytes"] == memory["host_bytes"] == 4 * 2 * size
    assert offload["shared_cache"] is True
    assert offload["path"] == str(moe_file)
    (node,) = (node for node in given_files[0].graph.node if node.op_type == "DroplessMoE")
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    assert (attributes["resident_experts"], attributes["expert_cache"]) == (2, 1)
    w1 = offload["layers"][0]["w1"]
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


def test_a_bundle_must_have_the_kernels_of_each_architecture(tensorrt, moe_file, tmp_path):
    given = []
    tensorrt.say = lambda: given.append(trt_plugin.read(os.environ["DYNAMO_MOE_KERNELS"]))
    SMALL.save(tmp_path / "model.moek")
    code, _, error = run_engine(moe_file, "--arch", "75")
    assert (code, "the bundle has no kernels for sm_75 of the layer" in error) == (1, True), error
    assert given == []
    # Of the bundle's, for sm_80 and sm_90, those for the named one.
    assert run_engine(moe_file, "--arch", "80")[0] == 0
    assert [each.architecture for each in given[0].programs] == [80]


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
    assert set(runner.entered) == {a.device}
    assert context.streams == [(7, a.device)]


def test_a_prepared_run_only_enqueues(runner):
    a, b = aligned(8), aligned(8)
    results, enqueue = runner.prepare(a=a, b=b)
    context = runner._context
    addresses = dict(context.addresses)
    assert (addresses["a"], addresses["y"]) == (a.data_ptr(), results["y"].data_ptr())
    assert context.streams == []
    for runs in (1, 2):
        enqueue()
        assert (context.streams, context.addresses) == ([(7, a.device)] * runs, addresses)
    context.execute_async_v3 = lambda stream: False
    with pytest.raises(trt_plugin.EngineError, match="does not run the engine"):
        enqueue()


def test_an_engine_that_is_refused_may_be_the_other_builders(tensorrt, tmp_path, monkeypatch):
    (tmp_path / "model.engine").touch()

    def refused(**options: str) -> str:
        with pytest.raises(trt_plugin.EngineError, match="does not load") as caught:
            trt_plugin.Runner(tmp_path / "model.engine", **options)
        return str(caught.value)

    monkeypatch.setattr(
        tensorrt,
        "Runtime",
        lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda plan: None),
    )
    hint = "builder='rtx'"
    assert hint not in refused()
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", tensorrt)
    assert refused().endswith(f". If the other TensorRT built it, name it: {hint}")
    assert hint not in refused(builder="tensorrt")


def test_the_profile_is_one_that_has_the_shapes(runner):
    context = runner._context
    for rows, selected in ((8, []), (16, [1]), (32, [1]), (4, [1, 0])):
        runner(a=aligned(rows), b=aligned(rows))
        assert context.profiles == selected
    assert runner.usual_shapes() == {"a": (4,), "b": (4,)}
    # No profile has it: TensorRT says why.
    context.set_input_shape = lambda name, shape: False
    with pytest.raises(trt_plugin.EngineError, match=r"does not take a of shape \(64,\)"):
        runner(a=aligned(64), b=aligned(64))


def test_a_runtime_cache_is_read_and_written(tensorrt, tmp_path, monkeypatch):
    engine, path = tmp_path / "model.engine", tmp_path / "cache"
    engine.touch()
    with pytest.raises(trt_plugin.EngineError, match=r"TensorRT 10\.9\.0 has no runtime cache"):
        trt_plugin.Runner(engine, runtime_cache=path)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", tensorrt)
    monkeypatch.setattr("trt_plugin.engine.running.load_plugin", lambda found: None)
    runner = trt_plugin.Runner(engine, builder="rtx", runtime_cache=path)
    assert tensorrt.engine.config.cache is tensorrt.engine
    runner.save_runtime_cache()
    assert path.read_bytes() == b" and more"
    with pytest.warns(
        UserWarning, match="cache is damaged, or of another device, driver or"
    ) as caught:
        trt_plugin.Runner(engine, builder="rtx", runtime_cache=path)
    assert caught[0].filename == __file__
    path.write_bytes(b"good")
    trt_plugin.Runner(engine, builder="rtx", runtime_cache=path).save_runtime_cache()
    assert path.read_bytes() == b"good and more"
    with pytest.raises(ValueError, match="make it with runtime_cache="):
        trt_plugin.Runner(engine, builder="rtx").save_runtime_cache()


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
