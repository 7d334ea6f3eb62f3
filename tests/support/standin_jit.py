"""A stand-in for what Triton's JIT makes of a kernel: compiled kernels that the interpreter runs.

A compiled kernel gets addresses and integers, as on a GPU. They are read according to the kernel's
declaration, so a misplaced argument leads to wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from custom_ops.kernels.spec import (
    ForwardPlan,
    KernelSpec,
    Scalar,
    StatePointer,
    TensorMap,
    TensorPointer,
    WorkspacePointer,
)
from interpreted_gpu import tensor_at

STREAM = 7


class StandinJit:
    """The JIT's form of a kernel, in place of ``spec.function``; it counts its launches."""

    def __init__(self, spec: KernelSpec, *, specialize: bool = False) -> None:
        self.spec, self.fn, self.arg_names = spec, spec.function.fn, spec.function.arg_names
        self.pre_run_hooks: list[Any] = []
        scalars = {name for name, each in spec.arguments.items() if isinstance(each, Scalar)}
        self.params = [
            SimpleNamespace(name=name, do_not_specialize=name in scalars and not specialize)
            for name in self.arg_names
        ]
        self.jit_launches = self.direct_launches = self.hooked_launches = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., CompiledKernel]:
        def run(**arguments: Any) -> CompiledKernel:
            self.jit_launches += 1
            self.spec.function[grid](**arguments)
            return _StandinCompiled(self)

        return run


class _StandinCompiled(CompiledKernel):
    def __init__(self, kernel: StandinJit) -> None:
        self.kernel = kernel
        self.module = None  # Nothing to unload.
        self.function, self.packed_metadata = object(), object()

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def run(*values: Any, stream: int) -> None:
            self.kernel.hooked_launches += 1
            self._run_on(grid, stream, values)

        return run

    @property
    def run(self) -> Callable[..., None]:
        def run(*launch: Any) -> None:
            grid, (stream, *compiled), hooks, values = (
                launch[:3], launch[3:6], launch[6:9], launch[9:],
            )  # fmt: skip
            assert compiled == [self.function, self.packed_metadata]
            assert hooks == (None, None, None)
            self._run_on(grid, stream, values)

        return run

    def _run_on(self, grid: tuple[int, int, int], stream: int, values: tuple[Any, ...]) -> None:
        assert stream == STREAM
        self.kernel.direct_launches += 1
        arguments = self.kernel.spec.arguments
        read = {
            name: _read(argument, value)
            for (name, argument), value in zip(arguments.items(), values, strict=True)
        }
        self.kernel.spec.function[grid](**read)


def _read(argument: Any, value: Any) -> Any:
    match argument:
        case TensorPointer(_, dtype) | WorkspacePointer(_, dtype) | StatePointer(_, dtype):
            return tensor_at(value, dtype)
        case TensorMap(_, dtype):
            assert value.base.dtype == dtype
            base = tensor_at(value.base.data_ptr(), dtype)
            return TensorDescriptor(base, value.shape, value.strides, value.block_shape)
        case _:
            return value


def with_standin_jit(plan: ForwardPlan) -> tuple[ForwardPlan, list[StandinJit]]:
    """Returns a plan whose kernels are stand-ins for the JIT's, and these."""
    kernels = []

    def replaced(spec: KernelSpec) -> KernelSpec:
        kernels.append(StandinJit(spec))
        return replace(spec, function=kernels[-1])

    ranges = tuple(
        replace(
            each,
            launches=tuple(map(replaced, each.launches)),
            wave=tuple(replace(one, kernel=replaced(one.kernel)) for one in each.wave),
            epilogue=tuple(map(replaced, each.epilogue)),
        )
        for each in plan.ranges
    )
    return replace(plan, ranges=ranges), kernels
