"""Engines from ONNX files, by TensorRT's parser and builder."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_plugin.bundle import read
from trt_plugin.engine.engine_file import EngineContents, read_engine
from trt_plugin.engine.installed import (
    EngineError,
    Installed,
    installed_tensorrt,
    is_plugin_loaded,
    load_plugin,
)
from trt_plugin.engine.kernels import choose_kernels, giving_kernels
from trt_plugin.engine.log import Log, progress_monitor
from trt_plugin.engine.shapes import Profile, add_profiles
from trt_plugin.native import library_path
from trt_plugin.output import write_whole
from trt_plugin.plugin import PLUGINS, sharing_kernels

if TYPE_CHECKING:
    from rich.console import RenderableType

# Operators of target onnxruntime, which only ONNX Runtime has.
_ONNXRUNTIME = ("MoE", "QMoE")
# A file of many layers may have as many errors.
_SHOWN = 3


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of an engine.

    Attributes:
        name: Its name.
        dtype: TensorRT's name of its dtype, in lower case: ``"float"``, ``"half"``, ``"int64"``.
        shape: Its sizes; -1 for a symbolic one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """The tensor as strings, and its shape as a list."""
        return {**asdict(self), "shape": list(self.shape)}


@dataclass(frozen=True)
class PluginLayer:
    """A layer that a plugin computes.

    Attributes:
        name: The layer's name, which is the node's.
        plugin: The plugin's name: ``"DroplessMoE"``.
    """

    name: str
    plugin: str


@dataclass(frozen=True)
class EngineReport:
    """An engine that was built; rich prints it as a table.

    Attributes:
        path: The engine's file.
        builder: The builder and its version: ``"TensorRT for RTX 1.7.1.116"``.
        architectures: The compute capabilities that it was built for, such as ``("sm_89",)``. Empty
            if the builder chose them: TensorRT takes its device, TensorRT for RTX its default.
        seconds: How long parsing and building took.
        layers: Number of layers of the network that was parsed, which the builder fuses.
        plugin_layers: Those that are plugins.
        inputs: The engine's inputs.
        outputs: The engine's outputs.
        profiles: Number of optimisation profiles.
        contents: The file's contents.
    """

    path: Path
    builder: str
    architectures: tuple[str, ...]
    seconds: float
    layers: int
    plugin_layers: tuple[PluginLayer, ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    profiles: int
    contents: EngineContents

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, ready for ``json.dumps``."""
        return {
            "path": str(self.path),
            "builder": self.builder,
            "architectures": list(self.architectures),
            "seconds": round(self.seconds, 3),
            "layers": self.layers,
            "plugin_layers": [asdict(layer) for layer in self.plugin_layers],
            "inputs": [tensor.to_dict() for tensor in self.inputs],
            "outputs": [tensor.to_dict() for tensor in self.outputs],
            "profiles": self.profiles,
            "contents": self.contents.to_dict(),
        }

    def __rich__(self) -> RenderableType:
        """The table that rich prints."""
        from trt_plugin.engine.view import report_view

        return report_view(self.to_dict())


def build_engine(
    onnx_path: str | PathLike[str],
    output: str | PathLike[str],
    profiles: Mapping[str, Profile] | Sequence[Mapping[str, Profile]] = (),
    *,
    architectures: Iterable[str | int] | None = None,
    builder: str | None = None,
    kernels: str | PathLike[str] | None = None,
    timing_cache: str | PathLike[str] | None = None,
    share_kernels: bool = True,
    with_library: bool = False,
    workspace: int | None = None,
    progress: bool = True,
) -> EngineReport:
    """Builds an engine; its MoE nodes become the plugin.

    The network is strongly typed: it computes in the file's dtypes.

    Args:
        onnx_path: File of target ``plugin`` or ``dense``.
        output: The engine's file, which is written whole or not at all.
        profiles: The shapes of each input with symbolic dimensions; for several profiles, a
            sequence of them.
        architectures: The GPUs to build for, such as ``["sm_89", "sm_120"]``. TensorRT for RTX
            builds for those that it knows, on any machine. By default it builds for the
            architectures of ``kernels``; without ``kernels``, it chooses. TensorRT builds for the
            device that it runs on: they only choose which of ``kernels`` the engine stores.
        builder: ``"tensorrt"`` or ``"rtx"``; by default TensorRT if it is installed, and else
            TensorRT for RTX.
        kernels: The bundle of the layers' kernels. The engine stores those that
            ``architectures`` run, or else all; the environment variable
            ``DYNAMO_MOE_ARCHITECTURES`` leaves out others. A node's own attribute ``kernels`` comes
            first. By default the bundle that the plugin finds, see the reference of the plugin,
            which is not compared with ``architectures``.
        timing_cache: File that measured tactics are read from and written to, with TensorRT. One
            that it refuses, such as another device's, is started anew, with a warning.
        share_kernels: Whether equal layers store their kernels once, see
            :func:`trt_plugin.sharing_kernels`; otherwise each layer is self-contained.
        with_library: Whether the engine also holds the plugin's library, so that TensorRT loads it
            by itself where its runtime allows host code: ``Runner(…, allow_host_code=True)``.
        workspace: Most bytes that a layer may use at a time; by default TensorRT's own limit.
        progress: Whether to show a bar on standard error.

    Raises:
        EngineError: If TensorRT is missing, cannot build for an architecture, does not take a node
            of the file, which is named, or fails otherwise; or if ``kernels`` lacks a layer's
            kernels for an architecture.
        OSError: If a file cannot be read or written.
        ValueError: If there is no such builder or architecture, or ``kernels`` is no bundle.
    """
    started = time.perf_counter()
    if not Path(onnx_path).is_file():
        raise FileNotFoundError(f"no such file: {onnx_path}")
    installed = installed_tensorrt("building an engine", builder)
    trt = installed.module
    if timing_cache is not None and installed.is_rtx:
        raise EngineError("TensorRT for RTX measures nothing when it builds: no timing cache")
    bundle = None if kernels is None else read(kernels)
    targets, chosen = choose_kernels(installed, architectures, bundle)
    missing = _load_plugin(installed, needed=with_library or kernels is not None)
    log = Log(trt)
    trt_builder = trt.Builder(log.logger)
    network = trt_builder.create_network(_strongly_typed(trt))
    parser = trt.OnnxParser(network, log.logger)
    sharing = sharing_kernels() if share_kernels and not missing else nullcontext()
    with giving_kernels(chosen, str(kernels)), sharing:
        parsed = parser.parse_from_file(str(onnx_path))
    if not parsed:
        raise EngineError(_refusal(installed, onnx_path, parser, log, missing))
    config = trt_builder.create_builder_config()
    if installed.is_rtx:
        _set_targets(trt, config, targets)
    if workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    if with_library:
        config.plugins_to_serialize = [str(library_path())]
    count = add_profiles(trt_builder, network, config, profiles)
    with _timing_cache(config, timing_cache), progress_monitor(trt, progress) as monitor:
        config.progress_monitor = monitor
        plan = trt_builder.build_serialized_network(network, config)
        for warning in log.warnings_of_plugin:
            warnings.warn(warning, stacklevel=2)
        if plan is None:
            raise EngineError(f"{installed.title} builds no engine of {onnx_path}: {log.text()}")
        write_whole(Path(output), memoryview(plan))
    return EngineReport(
        path=Path(output),
        builder=installed.title,
        architectures=tuple(targets) if installed.is_rtx else (),
        seconds=time.perf_counter() - started,
        layers=network.num_layers,
        plugin_layers=tuple(_plugin_layers(trt, network)),
        inputs=tuple(_info(network.get_input(at)) for at in range(network.num_inputs)),
        outputs=tuple(_info(network.get_output(at)) for at in range(network.num_outputs)),
        profiles=count,
        contents=read_engine(output),
    )


def _set_targets(trt: Any, config: Any, targets: Sequence[str]) -> None:
    if not targets:
        # The builder chooses.
        return
    config.num_compute_capabilities = len(targets)
    for at, name in enumerate(targets):
        capability = getattr(trt.ComputeCapability, name.replace("sm_", "SM"))
        config.set_compute_capability(capability, at)


def _load_plugin(installed: Installed, *, needed: bool) -> str | None:
    """Loads the plugin's library; returns why it cannot, as a file without MoE nodes needs none."""
    try:
        load_plugin(installed)
    except (EngineError, FileNotFoundError) as error:
        # A plugin that is loaded, but that the parser cannot add, would end the process.
        if needed or is_plugin_loaded(installed):
            raise
        return str(error)
    return None


def _refusal(
    installed: Installed,
    path: str | PathLike[str],
    parser: Any,
    log: Log,
    missing: str | None,
) -> str:
    """The error for a file that the parser does not take."""
    errors = [parser.get_error(at) for at in range(parser.num_errors)]
    said = list(dict.fromkeys(_node_error(error) for error in errors))
    rest = [f"and {len(said) - _SHOWN} more"] if len(said) > _SHOWN else []
    text = "; ".join((*said[:_SHOWN], *rest, *log.errors_of_plugin()))
    hints = []
    if missing and any(plugin in text for plugin in PLUGINS):
        hints.append(
            "Its MoE nodes need the plugin's library, as their bodies are for ONNX Runtime. It is "
            f"not loaded: {missing}. A file of target dense needs no plugin"
        )
    if any(error.node_operator() in _ONNXRUNTIME for error in errors):
        hints.append(
            "com.microsoft::MoE is for ONNX Runtime: export the model for target plugin, or dense"
        )
    return ". ".join((f"{installed.title} does not parse {path}: {text}", *hints))


def _node_error(error: Any) -> str:
    """One of the parser's errors: the node, its operator, and what is wrong."""
    # Where the parser fails inside a node's importer, it names no node, but the importer.
    operator = error.node_operator() or error.func().removeprefix("import")
    name = error.node_name()
    node = f"node {name!r} ({operator})" if name else f"a node {operator}"
    # Of the innermost function first.
    inside = [f"in {frame}" for frame in reversed(error.local_function_stack())]
    return f"{' '.join((node, *inside))}: {error.desc()}"


def _plugin_layers(trt: Any, network: Any) -> Iterator[PluginLayer]:
    for at in range(network.num_layers):
        layer = network.get_layer(at)
        if layer.type == trt.LayerType.PLUGIN_V3:
            name = layer.name
            # TensorRT's Python shows a layer by its base class until told its own.
            layer.__class__ = trt.IPluginV3Layer
            core = layer.plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
            yield PluginLayer(name, core.plugin_name)


def _info(tensor: Any) -> TensorInfo:
    return TensorInfo(tensor.name, tensor.dtype.name.lower(), tuple(tensor.shape))


def _strongly_typed(trt: Any) -> int:
    # From TensorRT 11 on, every network is, and the flag may be missing.
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


@contextmanager
def _timing_cache(config: Any, file: str | PathLike[str] | None) -> Iterator[None]:
    """Gives the builder a file's measurements, and writes the file when it has built."""
    if file is None:
        yield
        return
    path = Path(file)
    content = path.read_bytes() if path.exists() else b""
    cache = config.create_timing_cache(content)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        warnings.warn(
            f"{path} is damaged, or of another device or TensorRT: the timing cache starts anew",
            stacklevel=4,
        )
        empty = config.create_timing_cache(b"")
        if empty is not None:
            config.set_timing_cache(empty, ignore_mismatch=False)
    yield
    measured = config.get_timing_cache()
    if measured is not None:
        write_whole(path, bytes(measured.serialize()))
