"""The Python launcher: runs a plan with Triton's JIT on a GPU, or its interpreter on a CPU.

The launches of a plan for a number of tokens are worked out once. Triton's JIT compiles a
kernel at its first launch; it would look it up by all its arguments at each later one, which takes
longer than a small layer runs, so these start the compiled kernel itself, with addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from operator import itemgetter, or_
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from custom_ops.kernels.spec import (
    Constant,
    ForwardPlan,
    KernelSpec,
    Scalar,
    StatePointer,
    TensorMap,
    TensorPointer,
    WorkspacePointer,
)

# Triton compiles for pointers to multiples of it, and apart for others.
_ALIGNMENT = 16

# The values that the arguments of a call's launches are taken from: the addresses of tensors and
# buffers by name, and all else by number.
_Values = dict[str | int, Any]


def launch(
    plan: ForwardPlan, tensors: Mapping[str, Tensor], workspace: Tensor | None = None
) -> None:
    """Runs a plan, writing its results among ``tensors``, on the current stream.

    Args:
        plan: The plan.
        tensors: The operator's by argument, and the results, such as y, each contiguous; x and y
            are ``[T, D]``, and all on the current device. One under the name of a workspace buffer
            takes that buffer's place: it has its dtype and at least its size.
        workspace: uint8 of at least ``plan.workspace_size(T)`` bytes, aligned to 256; allocated
            where None. It need not be initialised.
    """
    tokens = tensors["x"].shape[0]
    if tokens == 0:
        return
    prepared = _prepare(plan, tokens)
    if workspace is None:
        size = prepared.workspace_size
        workspace = torch.empty(size, dtype=torch.uint8, device=tensors["x"].device)
    _start(prepared, tensors, workspace)


def launch_kernel(spec: KernelSpec, tensors: Mapping[str, Tensor]) -> None:
    """Runs a kernel that needs no workspace; its results are among ``tensors``.

    Args:
        spec: The kernel; its symbols are T alone.
        tensors: Contiguous, by the names that the spec gives them; x is ``[T, D]``, not empty, and
            on the current device.
    """
    prepared = _prepare_kernel(spec, tensors["x"].shape[0])
    _start(prepared, tensors, torch.empty(0, dtype=torch.uint8, device=tensors["x"].device))


def bound_kernel(
    spec: KernelSpec, sizes: Mapping[str, int]
) -> Callable[[Mapping[str, Tensor]], None]:
    """Returns a function that launches a kernel on the current stream, given its tensors by name.

    Args:
        spec: The kernel.
        sizes: The values of its symbols.
    """
    prepared = _prepared((spec,), sizes)
    names = {"x"}  # It says which device is meant.
    for argument in spec.arguments.values():
        match argument:
            case TensorPointer(n) | WorkspacePointer(n) | StatePointer(n) | TensorMap(n):
                names.add(n)

    def start(tensors: Mapping[str, Tensor]) -> None:
        # It has no offsets, so nothing lies in the workspace.
        _start(prepared, {name: tensors[name] for name in names}, workspace=tensors["x"])

    return start


@dataclass(frozen=True)
class _Kernel:
    """A kernel, and Triton's compiled form of it on each device.

    Attributes:
        spec: The kernel.
        descriptors: By parameter, a function from an address to a tensor map's descriptor.
        compiled: By the device's index, for aligned addresses.
    """

    spec: KernelSpec
    descriptors: Mapping[str, Callable[[int], TensorDescriptor]]
    compiled: dict[int, CompiledKernel] = field(default_factory=dict)


@dataclass(frozen=True)
class _Launch:
    """A launch for a number of tokens.

    Attributes:
        kernel: The kernel.
        grid: Programs along x, y and z.
        keys: Under which the values of a call have an argument for each parameter.
        arguments: Returns these arguments of a call's values.
    """

    kernel: _Kernel
    grid: tuple[int, int, int]
    keys: tuple[str | int, ...]
    arguments: Callable[[_Values], tuple[Any, ...]]


@dataclass(frozen=True)
class _Prepared:
    """The launches for a number of tokens.

    Attributes:
        launches: The launches, in order.
        constants: The values that are the same at every call.
        maps: The numbers of tensor maps, their tensors, and the functions of their descriptors.
        workspace_size: Bytes of the workspace.
        offsets: Where the workspace's buffers begin.
    """

    launches: tuple[_Launch, ...]
    constants: _Values
    maps: tuple[tuple[int, str, Callable[[int], TensorDescriptor]], ...]
    workspace_size: int
    offsets: tuple[tuple[str, int], ...]


@lru_cache(maxsize=1024)
def _prepare(plan: ForwardPlan, tokens: int) -> _Prepared:
    sizes = {**plan.layer.shape.sizes, "T": tokens}
    span = plan.at(tokens)
    offsets = span.offsets(sizes)
    size = offsets.pop("")
    return _prepared(span.launches, sizes, size, tuple(offsets.items()))


@lru_cache(maxsize=1024)
def _prepare_kernel(spec: KernelSpec, tokens: int) -> _Prepared:
    return _prepared((spec,), {"T": tokens})


# Kernels that many calls share stay compiled when the records of some numbers of tokens go.
@lru_cache(maxsize=4096)
def _kernel(spec: KernelSpec) -> _Kernel:
    descriptors = {
        name: lru_cache(maxsize=1024)(partial(_descriptor, argument))
        for name, argument in spec.arguments.items()
        if isinstance(argument, TensorMap)
    }
    return _Kernel(spec, descriptors)


def _prepared(
    specs: Iterable[KernelSpec],
    sizes: Mapping[str, int],
    workspace_size: int = 0,
    offsets: tuple[tuple[str, int], ...] = (),
) -> _Prepared:
    launches, maps = [], []
    constants: _Values = {}
    for spec in specs:
        kernel = _kernel(spec)
        keys: list[str | int] = []
        for parameter, argument in spec.arguments.items():
            number = len(constants)
            match argument:
                case TensorPointer(name) | WorkspacePointer(name) | StatePointer(name):
                    keys.append(name)
                    continue
                case Constant(value):
                    constants[number] = value
                case Scalar(expression):
                    constants[number] = expression.evaluate(sizes)
                case TensorMap(tensor):
                    constants[number] = None  # Its place.
                    maps.append((number, tensor, kernel.descriptors[parameter]))
            keys.append(number)
        x, y, z = (axis.evaluate(sizes) for axis in spec.grid)
        launches.append(_Launch(kernel, (x, y, z), tuple(keys), itemgetter(*keys)))
    return _Prepared(tuple(launches), constants, tuple(maps), workspace_size, offsets)


def _start(prepared: _Prepared, tensors: Mapping[str, Tensor], workspace: Tensor) -> None:
    base = workspace.data_ptr()
    addresses: _Values = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    aligned = reduce(or_, addresses.values(), base) % _ALIGNMENT == 0
    buffers: _Values = {name: base + offset for name, offset in prepared.offsets}
    values = {**prepared.constants, **buffers, **addresses}
    for number, tensor, descriptor in prepared.maps:
        values[number] = descriptor(values[tensor])
    device = tensors["x"].get_device()
    hooked = _has_launch_hooks()
    stream = None
    for kernel_launch in prepared.launches:
        kernel = kernel_launch.kernel
        compiled = kernel.compiled.get(device) if aligned else None
        if compiled is None or kernel.spec.function.pre_run_hooks:
            jit_compiled = _start_by_jit(kernel_launch, prepared, tensors, workspace)
            if aligned and _serves_all_calls(kernel.spec, jit_compiled):
                kernel.compiled[device] = jit_compiled
            continue
        if stream is None:
            stream = driver.active.get_current_stream(device)
        if hooked:
            compiled[kernel_launch.grid](*kernel_launch.arguments(values), stream=stream)
            continue
        # The same without the hooks' metadata, which takes 3 us a launch; this takes 1.
        compiled.run(
            *kernel_launch.grid,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *kernel_launch.arguments(values),
        )


def _has_launch_hooks() -> bool:
    """Whether Triton calls anything before or after each launch, such as a profiler."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # Each is a chain, to which calls are added, or was replaced by a function or None.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _serves_all_calls(spec: KernelSpec, compiled: Any) -> bool:
    """Whether the JIT compiled a kernel, and for any number of tokens; the interpreter does not."""
    return isinstance(compiled, CompiledKernel) and all(
        parameter.do_not_specialize
        for parameter in spec.function.params
        if isinstance(spec.arguments[parameter.name], Scalar)
    )


def _start_by_jit(
    kernel_launch: _Launch, prepared: _Prepared, tensors: Mapping[str, Tensor], workspace: Tensor
) -> Any:
    """Launches a kernel as Triton documents it, by tensors; returns the JIT's compiled kernel."""
    spec, offsets = kernel_launch.kernel.spec, dict(prepared.offsets)
    arguments: dict[str, Any] = {}
    for (name, argument), key in zip(spec.arguments.items(), kernel_launch.keys, strict=True):
        match argument:
            case TensorPointer(tensor) | StatePointer(tensor):
                arguments[name] = tensors[tensor]
            case WorkspacePointer(buffer) if buffer in tensors:
                arguments[name] = tensors[buffer]
            case WorkspacePointer(buffer, dtype):
                rest = workspace[offsets[buffer] :]
                rest = rest[: rest.numel() // dtype.itemsize * dtype.itemsize]
                arguments[name] = rest.view(dtype)
            case TensorMap(tensor, _, shape, strides, box):
                lists = map(list, (shape, strides, box))
                arguments[name] = TensorDescriptor(tensors[tensor], *lists)
            case _:
                arguments[name] = prepared.constants[key]
    return spec.function[kernel_launch.grid](
        **arguments,
        num_warps=spec.num_warps,
        num_stages=spec.num_stages,
        launch_pdl=spec.dependent_launch,
        # Triton 3.10 changes the default; ahead of time, kernels are compiled with it.
        enable_fp_fusion=True,
    )


@dataclass(frozen=True)
class _Memory:
    """The attributes that a tensor descriptor reads of a tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def _descriptor(argument: TensorMap, address: int) -> TensorDescriptor:
    """Returns a descriptor that holds no tensor.

    It says where and how memory is viewed, which is as right for a later tensor at that address.
    """
    lists = map(list, (argument.shape, argument.strides, argument.box))
    return TensorDescriptor(_Memory(address, argument.dtype), *lists)
