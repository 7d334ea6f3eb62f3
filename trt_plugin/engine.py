"""Engines from ONNX files, run on torch tensors: TensorRT's builder and runtime, thinly.

Not verified: no machine of this project's tests has the full TensorRT.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_plugin.native import library_path
from trt_plugin.output import progress_bars, write_whole
from trt_plugin.plugin import PLUGINS, PluginLoadError, load

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_KERNELS = "DYNAMO_MOE_KERNELS"
# The variable belongs to the process: parsers take turns.
_NAMING = threading.Lock()
# TensorRT asks for addresses at multiples of this.
_ALIGNMENT = 256

#: Smallest, usual and largest shape of an input.
Profile = tuple[Sequence[int], Sequence[int], Sequence[int]]


class EngineError(RuntimeError):
    """TensorRT failed to parse, build, load or run; the message repeats what it logged."""


def build_engine(
    onnx_path: str | PathLike[str],
    output: str | PathLike[str],
    profiles: Mapping[str, Profile] | None = None,
    *,
    kernels: str | PathLike[str] | None = None,
    timing_cache: str | PathLike[str] | None = None,
    with_library: bool = False,
    workspace: int | None = None,
    progress: bool = True,
) -> None:
    """Builds an engine; its MoE nodes become the plugin.

    The network is strongly typed: it computes in the file's dtypes.

    Args:
        onnx_path: File of target ``plugin``.
        output: The engine's file, which is written whole or not at all.
        profiles: The shapes of each input with symbolic dimensions.
        kernels: The bundle of the layers' kernels; by default the one that the plugin finds, see
            the reference of the plugin.
        timing_cache: File that measured tactics are read from and written to. One that TensorRT
            refuses, such as another device's, is started anew, with a warning.
        with_library: Whether the engine also holds the plugin's library, so that TensorRT loads it
            by itself where its runtime allows host code: ``Runner(…, allow_host_code=True)``.
        workspace: Most bytes that a layer may use at a time; by default TensorRT's own limit.
        progress: Whether to show a bar on standard error.

    Raises:
        EngineError: If TensorRT is missing, or fails.
        OSError: If a file cannot be read or written.
    """
    trt = _tensorrt("building an engine")
    _load_once(trt)
    log = _Log(trt)
    builder = trt.Builder(log.logger)
    network = builder.create_network(_strongly_typed(trt))
    parser = trt.OnnxParser(network, log.logger)
    with _kernels_from(kernels):
        parsed = parser.parse_from_file(str(onnx_path))
    if not parsed:
        said = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise EngineError(
            f"TensorRT does not parse {onnx_path}: {'; '.join(said + log.errors_of_plugin())}"
        )
    config = builder.create_builder_config()
    if workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    if with_library:
        config.plugins_to_serialize = [str(library_path())]
    _add_profile(builder, network, config, profiles or {})
    if timing_cache is not None:
        _use_timing_cache(config, Path(timing_cache))
    with _progress(trt, progress) as monitor:
        config.progress_monitor = monitor
        plan = builder.build_serialized_network(network, config)
    for warning in log.warnings_of_plugin:
        warnings.warn(warning, stacklevel=2)
    if plan is None:
        raise EngineError(f"TensorRT builds no engine of {onnx_path}: {log.text()}")
    write_whole(Path(output), bytes(plan))
    if timing_cache is not None:
        measured = config.get_timing_cache()
        if measured is not None:
            write_whole(Path(timing_cache), bytes(measured.serialize()))


class Runner:
    """Runs an engine on torch tensors.

    All calls share one execution context, and its memory. One that follows on another stream must
    wait for the earlier one's stream, as by ``stream.wait_stream(earlier)``.

    Args:
        engine: An engine's file.
        allow_host_code: Whether TensorRT may load and run a library that the engine holds, such as
            the plugin's that ``build_engine(…, with_library=True)`` stores. The installed library
            is not loaded then. Only for engines whose origin you trust.

    Raises:
        EngineError: If TensorRT is missing, or refuses the engine or the plugin.
    """

    def __init__(self, engine: str | PathLike[str], *, allow_host_code: bool = False) -> None:
        trt = _tensorrt("running an engine")
        self._log = _Log(trt)
        self._runtime = trt.Runtime(self._log.logger)
        if allow_host_code:
            self._runtime.engine_host_code_allowed = True
        else:
            _load_once(trt)
        self._engine = self._runtime.deserialize_cuda_engine(Path(engine).read_bytes())
        if self._engine is None:
            raise EngineError(f"TensorRT does not load {engine}: {self._log.text()}")
        self._context = self._engine.create_execution_context()
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        modes = {name: self._engine.get_tensor_mode(name) for name in names}
        self.inputs = [name for name in names if modes[name] == trt.TensorIOMode.INPUT]
        self.outputs = [name for name in names if modes[name] == trt.TensorIOMode.OUTPUT]

    def __call__(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Runs on the current CUDA stream of the inputs' device, which it does not wait for.

        Args:
            tensors: Tensors of one CUDA device by the inputs' names, in the engine's dtypes. Those
                that are not contiguous, or do not begin at a multiple of 256 bytes, are copied.

        Returns:
            The outputs by name.

        Raises:
            EngineError: If TensorRT refuses a shape, or fails.
            TypeError: If an input's dtype is not the engine's, or the inputs are not all on one
                CUDA device.
            ValueError: If inputs are missing or unknown.
        """
        import torch

        if set(tensors) != set(self.inputs):
            raise ValueError(f"the inputs are {', '.join(self.inputs)}; got {', '.join(tensors)}")
        for name, tensor in tensors.items():
            dtype = self._dtype(name)
            if tensor.dtype != dtype:
                raise TypeError(f"input {name} must be {dtype}, got {tensor.dtype}")
            if not tensor.is_cuda:
                raise TypeError(f"input {name} must be on a CUDA device, got {tensor.device}")
        devices = {tensor.device: None for tensor in tensors.values()}
        if len(devices) > 1:
            raise TypeError(f"inputs must be on one device, got {', '.join(map(str, devices))}")
        device = next(iter(devices), torch.device("cuda"))
        with torch.cuda.device(device):
            return self._run(tensors, device)

    def _run(self, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        import torch

        held = {}
        for name, tensor in tensors.items():
            held[name] = tensor.contiguous()
            if held[name].data_ptr() % _ALIGNMENT:
                held[name] = held[name].clone()
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise EngineError(
                    f"the engine does not take {name} of shape {tuple(tensor.shape)}: "
                    f"{self._log.text()}"
                )
            self._context.set_tensor_address(name, held[name].data_ptr())
        results = {}
        for name in self.outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            results[name] = torch.empty(shape, dtype=self._dtype(name), device=device)
            self._context.set_tensor_address(name, results[name].data_ptr())
        stream = torch.cuda.current_stream(device)
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise EngineError(f"TensorRT does not run the engine: {self._log.text()}")
        for tensor in held.values():
            tensor.record_stream(stream)
        return results

    def _dtype(self, name: str) -> torch.dtype:
        import torch

        # DataType.HALF is torch.float16; most names are the same.
        names = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}
        given = self._engine.get_tensor_dtype(name).name
        dtype: torch.dtype = getattr(torch, names.get(given, given.lower()))
        return dtype


def parse_shapes(text: str) -> tuple[str, Profile]:
    """Reads ``name=MIN:USUAL:MAX`` or ``name=SHAPE``, with shapes such as ``4x3x224x224``.

    Raises:
        ValueError: If it is neither.

    Example:
        >>> parse_shapes("x=1x8:4x8:16x8")
        ('x', ((1, 8), (4, 8), (16, 8)))
    """
    name, _, shapes = text.partition("=")
    parts = shapes.split(":")
    try:
        read = [tuple(int(size) for size in part.split("x")) for part in parts]
    except ValueError:
        read = []
    if not name or len(read) not in (1, 3) or len({len(shape) for shape in read}) != 1:
        raise ValueError(
            f"shapes must be NAME=SHAPE or NAME=MIN:USUAL:MAX, with SHAPE like 4x8; got {text!r}"
        )
    smallest, usual, largest = read if len(read) == 3 else read * 3
    for few, more in pairwise((smallest, usual, largest)):
        if any(low > high for low, high in zip(few, more, strict=True)):
            raise ValueError(f"shapes must grow from the smallest to the largest, got {text!r}")
    return name, (smallest, usual, largest)


def _tensorrt(what: str) -> Any:
    """Returns the module tensorrt, which has the builder and the whole runtime."""
    if find_spec("tensorrt") is None:
        raise EngineError(f"{what} needs the package tensorrt; the lean runtime is not enough")
    import tensorrt

    return tensorrt


def _load_once(trt: Any) -> None:
    if trt.get_plugin_registry().get_creator(PLUGINS[0], "1", "") is None:
        try:
            load()
        except PluginLoadError as error:
            raise EngineError(str(error)) from error


def _strongly_typed(trt: Any) -> int:
    # From TensorRT 11 on, every network is, and the flag may be missing.
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


@contextmanager
def _kernels_from(bundle: str | PathLike[str] | None) -> Iterator[None]:
    """Tells the plugin where the bundle is: it reads the bundle when the parser creates it."""
    with _NAMING:
        old = os.environ.get(_KERNELS)
        if bundle is not None:
            os.environ[_KERNELS] = str(Path(bundle).resolve())
        try:
            yield
        finally:
            if bundle is not None:
                os.environ.pop(_KERNELS)
                if old is not None:
                    os.environ[_KERNELS] = old


def _add_profile(builder: Any, network: Any, config: Any, profiles: Mapping[str, Profile]) -> None:
    inputs = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
    unknown = [name for name in profiles if name not in inputs]
    if unknown:
        raise EngineError(f"the file has no input {unknown[0]}; its inputs: {', '.join(inputs)}")
    symbolic = [name for name, tensor in inputs.items() if -1 in tuple(tensor.shape)]
    missing = [name for name in symbolic if name not in profiles]
    if missing:
        raise EngineError(
            f"input {missing[0]} has the shape {tuple(inputs[missing[0]].shape)}: give its "
            "smallest, usual and largest"
        )
    if profiles:
        profile = builder.create_optimization_profile()
        for name, (smallest, usual, largest) in profiles.items():
            profile.set_shape(name, tuple(smallest), tuple(usual), tuple(largest))
        if config.add_optimization_profile(profile) < 0:
            raise EngineError(f"TensorRT refuses the shapes {dict(profiles)}")


def _use_timing_cache(config: Any, path: Path) -> None:
    content = path.read_bytes() if path.exists() else b""
    cache = config.create_timing_cache(content)
    if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
        return
    warnings.warn(
        f"{path} is damaged, or of another device or TensorRT: the timing cache starts anew",
        stacklevel=3,
    )
    empty = config.create_timing_cache(b"")
    if empty is not None:
        config.set_timing_cache(empty, ignore_mismatch=False)


class _Log:
    """Keeps TensorRT's errors and the plugin's warnings.

    The logger raises nothing: an exception could not pass through TensorRT.
    """

    def __init__(self, trt: Any) -> None:
        lines: list[str] = []
        warnings_of_plugin: list[str] = []
        levels = trt.ILogger.Severity

        class Logger(trt.ILogger):  # type: ignore[misc]
            def log(self, severity: Any, message: str) -> None:
                if severity in (levels.ERROR, levels.INTERNAL_ERROR):
                    lines.append(message)
                elif severity == levels.WARNING and message.startswith(PLUGINS):
                    warnings_of_plugin.append(message)

        self.logger = Logger()
        self.warnings_of_plugin = warnings_of_plugin
        self._lines = lines

    def errors_of_plugin(self) -> list[str]:
        """Returns the plugin's errors since the last call of :meth:`text`."""
        return [line for line in self._lines if line.startswith(PLUGINS)]

    def text(self) -> str:
        """Returns the errors since the last call."""
        text = "; ".join(self._lines) or "its log says no more"
        self._lines.clear()
        return text


@contextmanager
def _progress(trt: Any, shown: bool) -> Iterator[Any]:
    """Yields TensorRT's progress monitor, one bar for each phase."""
    with progress_bars(shown=shown) as bars:
        tasks: dict[str, Any] = {}

        class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
            def phase_start(
                self, phase_name: str, parent_phase: str | None, num_steps: int
            ) -> None:
                tasks[phase_name] = bars.add_task(phase_name, total=num_steps)

            def step_complete(self, phase_name: str, step: int) -> bool:
                bars.update(tasks[phase_name], completed=step + 1)
                return True

            def phase_finish(self, phase_name: str) -> None:
                bars.remove_task(tasks.pop(phase_name))

        yield Monitor()
