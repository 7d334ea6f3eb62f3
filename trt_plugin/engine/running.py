"""Runs engines on torch tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_plugin.engine.communicator import Communicator, before_joining
from trt_plugin.engine.installed import (
    BUILDERS,
    EngineError,
    Installed,
    installed_tensorrt,
    is_installed,
    load_plugin,
)
from trt_plugin.engine.log import Log
from trt_plugin.output import write_whole

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

# TensorRT asks for addresses at multiples of this.
_ALIGNMENT = 256


def _hint(installed: Installed, builder: str | None) -> str:
    """The advice where the builder was not named, and the other one is installed, too."""
    others = [name for name in BUILDERS if name != installed.name and is_installed(name)]
    if builder is not None or not others:
        return ""
    return f". If the other TensorRT built it, name it: builder={others[0]!r}"


class Runner:
    """Runs an engine on torch tensors.

    The experts of offloaded layers are read from their files when the engine first runs: from the
    folder that the environment variable ``DYNAMO_MOE_WEIGHTS`` names, if it has them, or else from
    where they were when the engine was built.

    All calls share one execution context, and its memory. One that follows on another stream must
    wait for the earlier one's stream, as by ``stream.wait_stream(earlier)``.

    Not verified on a GPU.

    Args:
        engine: An engine's file.
        builder: ``"tensorrt"`` or ``"rtx"``, as it was built; by default TensorRT if it is
            installed, and else TensorRT for RTX.
        runtime_cache: File of the kernels that TensorRT for RTX compiled for this machine's device
            in earlier runs; :meth:`save_runtime_cache` writes it. One that is refused, such as
            another device's, is started anew, with a warning.
        allow_host_code: Whether TensorRT may load and run a library that the engine holds, such as
            the plugin's that ``build_engine(…, with_library=True)`` stores. The installed library
            is not loaded then. Only for engines whose origin you trust.
        group: For an engine of a rank, the process group of all ranks, of ``torch.distributed``.
            NCCL's communicator is made through it; every rank makes its runner at the same time,
            with a CUDA device of its own, the current one. Where one of them fails, all do.

    Attributes:
        inputs: Names of the inputs.
        outputs: Names of the outputs.

    Raises:
        EngineError: If TensorRT is missing, or refuses the engine, the plugin or the communicator;
            or NCCL is missing or fails.
        FileNotFoundError: If there is no such file, or the plugin's library is missing.
    """

    def __init__(
        self,
        engine: str | PathLike[str],
        *,
        allow_host_code: bool = False,
        builder: str | None = None,
        runtime_cache: str | PathLike[str] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        with before_joining(group):
            installed = installed_tensorrt("running an engine", builder)
            if runtime_cache is not None and not installed.is_rtx:
                raise EngineError(f"{installed.title} has no runtime cache; TensorRT for RTX has")
            if not allow_host_code:
                load_plugin(installed)
            trt = installed.module
            self._log = Log(trt)
            self._runtime = trt.Runtime(self._log.logger)
            if self._runtime is None:
                raise EngineError(f"{installed.title} has no runtime here: {self._log.text()}")
            if allow_host_code:
                self._runtime.engine_host_code_allowed = True
            self._engine = self._runtime.deserialize_cuda_engine(Path(engine).read_bytes())
            if self._engine is None:
                raise EngineError(
                    f"{installed.title} does not load {engine}: {self._log.text()}"
                    f"{_hint(installed, builder)}"
                )
            self._cache_path = None if runtime_cache is None else Path(runtime_cache)
            self._cache: Any = None
            self._context = self._create_context()
            if self._context is None:
                raise EngineError(f"{installed.title} does not run {engine}: {self._log.text()}")
            if group is not None and not hasattr(self._context, "set_communicator"):
                raise EngineError("an engine of several ranks needs TensorRT 10.16 or later")
        self._communicator = None if group is None else self._join(group)
        self._profile = 0
        self._nowhere: Any = None
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        modes = {name: self._engine.get_tensor_mode(name) for name in names}
        self.inputs = [name for name in names if modes[name] == trt.TensorIOMode.INPUT]
        self.outputs = [name for name in names if modes[name] == trt.TensorIOMode.OUTPUT]
        # TensorRT 10 before its caches has no such question.
        input_of = getattr(self._engine, "get_aliased_input_tensor", lambda _: None)
        aliases = {name: input_of(name) for name in self.outputs}
        self._updated = {output: name for output, name in aliases.items() if name}

    def save_runtime_cache(self) -> None:
        """Writes what TensorRT for RTX has compiled so far, for the next :class:`Runner`.

        Raises:
            OSError: If the file cannot be written.
            ValueError: If the runner was made without ``runtime_cache``.
        """
        if self._cache_path is None:
            raise ValueError("this Runner has no file to write to: make it with runtime_cache=…")
        write_whole(self._cache_path, bytes(self._cache.serialize()))

    def usual_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the inputs' usual shapes in the first profile."""
        return {name: self._range(name, 0)[1] for name in self.inputs}

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of an input or output."""
        import torch

        # DataType.HALF is torch.float16; most names are the same.
        names = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}
        trt_name = self._engine.get_tensor_dtype(name).name
        dtype: torch.dtype = getattr(torch, names.get(trt_name, trt_name.lower()))
        return dtype

    def __call__(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Runs on the current CUDA stream of the inputs' device.

        It does not wait for the results. On the default stream, TensorRT itself waits for the
        device: use another one, as in ``with torch.cuda.stream(torch.cuda.Stream())``, for speed.

        Args:
            tensors: Tensors of one CUDA device by the inputs' names, in the engine's dtypes. Those
                that are not contiguous, or do not begin at a multiple of 256 bytes, are copied.

        Returns:
            The outputs by name. One that the engine updates in place, such as a cache of a fixed
            length, is the input itself, or its copy where it was copied.

        Raises:
            EngineError: If TensorRT refuses a shape, or fails.
            TypeError: If an input's dtype is not the engine's, or the inputs are not all on one
                CUDA device.
            ValueError: If inputs are missing or unknown.
        """
        import torch

        results, enqueue, bound = self._prepared(tensors)
        enqueue()
        for tensor in bound:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return results

    def prepare(self, **tensors: Tensor) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Sets the shapes and addresses of inputs and outputs, once for many runs.

        Args:
            tensors: As of a call.

        Returns:
            The outputs by name, and a function that enqueues the engine on the current stream of
            their device: it reads these inputs and writes these outputs each time. It is valid
            until the runner is called or prepared again.

        Raises:
            EngineError: If TensorRT refuses a shape; the function raises it if TensorRT fails.
            TypeError: As of a call.
            ValueError: As of a call.
        """
        results, enqueue, _ = self._prepared(tensors)
        return results, enqueue

    def _prepared(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Callable[[], None], list[Tensor]]:
        """Returns the outputs, a function that enqueues the engine, and its inputs."""
        import torch

        device = self._device(tensors)
        with torch.cuda.device(device):
            results, bound = self._bind(tensors, device)

        # It holds the inputs, which TensorRT knows by their addresses only.
        def enqueue(bound: list[Tensor] = bound) -> None:
            with torch.cuda.device(device):
                stream = torch.cuda.current_stream(device).cuda_stream
                if not self._context.execute_async_v3(stream):
                    raise EngineError(f"TensorRT does not run the engine: {self._log.text()}")

        return results, enqueue, bound

    def _device(self, tensors: Mapping[str, Tensor]) -> torch.device:
        """Checks inputs; returns the device that they are on."""
        import torch

        if set(tensors) != set(self.inputs):
            raise ValueError(f"the inputs are {', '.join(self.inputs)}; got {', '.join(tensors)}")
        for name, tensor in tensors.items():
            dtype = self.dtype(name)
            if tensor.dtype != dtype:
                raise TypeError(f"input {name} must be {dtype}, got {tensor.dtype}")
            if not tensor.is_cuda:
                raise TypeError(f"input {name} must be on a CUDA device, got {tensor.device}")
        devices = {tensor.device: None for tensor in tensors.values()}
        if len(devices) > 1:
            raise TypeError(f"inputs must be on one device, got {', '.join(map(str, devices))}")
        return next(iter(devices), torch.device("cuda"))

    def _bind(
        self, tensors: Mapping[str, Tensor], device: torch.device
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Gives the context its shapes and addresses; returns the outputs and the inputs."""
        import torch

        if self._engine.num_optimization_profiles > 1:
            self._select_profile(tensors, torch.cuda.current_stream(device).cuda_stream)
        bound = {}
        for name, tensor in tensors.items():
            aligned = tensor.contiguous()
            if aligned.data_ptr() % _ALIGNMENT:
                aligned = aligned.clone()
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise EngineError(
                    f"the engine does not take {name} of shape {tuple(tensor.shape)}: "
                    f"{self._log.text()}"
                )
            self._context.set_tensor_address(name, aligned.data_ptr())
            bound[name] = aligned
        results = {}
        for name in self.outputs:
            if name in self._updated:
                results[name] = bound[self._updated[name]]
            else:
                shape = tuple(self._context.get_tensor_shape(name))
                results[name] = torch.empty(shape, dtype=self.dtype(name), device=device)
            self._context.set_tensor_address(name, self._address(results[name]))
        return results, [*bound.values()]

    def _address(self, output: Tensor) -> int:
        """Returns where an output lies; one without elements is nowhere, which TensorRT refuses."""
        if not output.numel() and self._nowhere is None:
            self._nowhere = output.new_empty(1)
        return output.data_ptr() or self._nowhere.data_ptr()

    def _create_context(self) -> Any:
        if self._cache_path is None:
            return self._engine.create_execution_context()
        config = self._engine.create_runtime_config()
        self._cache = config.create_runtime_cache()
        path = self._cache_path
        if path.exists() and not self._cache.deserialize(path.read_bytes()):
            warnings.warn(
                f"{path} is damaged, or of another device, driver or TensorRT: the runtime cache "
                "starts anew",
                stacklevel=3,
            )
        config.set_runtime_cache(self._cache)
        return self._engine.create_execution_context(config)

    def _join(self, group: dist.ProcessGroup) -> Communicator:
        """Gives the context a communicator of the group, which has to outlive it."""
        communicator = Communicator(group)
        if not self._context.set_communicator(communicator.capsule):
            raise EngineError(f"TensorRT does not take the communicator: {self._log.text()}")
        return communicator

    def _select_profile(self, tensors: Mapping[str, Tensor], stream: int) -> None:
        """Selects the first profile that has the tensors' shapes, if the current one has not."""
        count = self._engine.num_optimization_profiles
        profiles = [self._profile, *(at for at in range(count) if at != self._profile)]
        for at in profiles:
            if all(self._fits(name, tensor, at) for name, tensor in tensors.items()):
                break
        else:
            # None has: set_input_shape says why.
            return
        if at != self._profile:
            if not self._context.set_optimization_profile_async(at, stream):
                raise EngineError(f"TensorRT does not take profile {at}: {self._log.text()}")
            self._profile = at

    def _fits(self, name: str, tensor: Tensor, profile: int) -> bool:
        smallest, _, largest = self._range(name, profile)
        return len(smallest) == tensor.dim() and all(
            low <= size <= high
            for low, size, high in zip(smallest, tensor.shape, largest, strict=True)
        )

    def _range(self, name: str, profile: int) -> list[tuple[int, ...]]:
        """The smallest, usual and largest shape of an input."""
        shapes = self._engine.get_tensor_profile_shape(name, profile)
        return [tuple(shape) for shape in shapes]
