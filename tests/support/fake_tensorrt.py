"""A TensorRT that only answers, and the command line on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import trt_plugin
from dynamo_moe.cli import app
from trt_plugin.bundle import Bundle
from trt_plugin.engine.kernels import giving_kernels


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})
    return result.exit_code, result.stdout, result.stderr


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
    refuses_communicators = False
    # Outputs that are inputs, by name.
    aliases: Mapping[str, str] = {}

    def get_tensor_name(self, at: int) -> str:
        return self.names[at]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

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

    def set_communicator(self, capsule) -> bool:
        self.communicator = capsule
        return not self.refuses_communicators

    def execute_async_v3(self, stream: int) -> bool:
        self.streams.append(stream)
        return True


@pytest.fixture
def given_kernels(monkeypatch) -> list[tuple[str, list[int]]]:
    """What parsers' threads were given: the name of each bundle, and its architectures."""
    given = []

    @contextmanager
    def giving(bundle: Bundle | None, name: str) -> Iterator[None]:
        if bundle is not None:
            given.append((name, [program.architecture for program in bundle.programs]))
        with giving_kernels(bundle, name):
            yield

    monkeypatch.setattr("trt_plugin.engine.building.giving_kernels", giving)
    return given


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
