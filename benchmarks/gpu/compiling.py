"""Compiles kernels in parallel, into Triton's cache, before anything is timed.

Triton's JIT compiles at a kernel's first launch, one at a time, for seconds each. Here processes
compile without launching; the measuring process then finds the kernels in the cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.gpu.timing import reason
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.configs import RangeConfig
from custom_ops.kernels.launch import bound_kernel
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan, plan_with
from custom_ops.kernels.spec import (
    ForwardPlan,
    KernelSpec,
    Scalar,
    StatePointer,
    TensorMap,
    TensorPointer,
    TokenRange,
    WorkspacePointer,
)

Job = Callable[[], None]
T = TypeVar("T")


class Compilation(Protocol):
    """Compiles kernels for tensors that would be on a device."""

    def __call__(self, device: str = "cuda") -> None:
        """Compiles them."""


@dataclass(frozen=True)
class PlanJob:
    """Compiles one launch of a layer's plan."""

    layer: Layer
    architecture: Architecture
    ranges: tuple[RangeConfig, ...] | None  # None for the plan that the operators use
    span: int  # the number of the range of tokens
    index: int  # the number of the launch in it

    @property
    def spec(self) -> KernelSpec:
        """The launch."""
        return list(self._range.kernels())[self.index]

    @property
    def _range(self) -> TokenRange:
        return _plan(self.layer, self.architecture, self.ranges).ranges[self.span]

    def __call__(self, device: str = "cuda") -> None:
        """Makes the launch with a kernel that is compiled only, on memory without values."""
        spec = replace(self.spec, function=_Compiled(self.spec.function))
        memory = {"x": torch.empty(16, device=device)}  # It names the device.
        for argument in spec.arguments.values():
            match argument:
                case (
                    TensorPointer(name, dtype)
                    | WorkspacePointer(name, dtype)
                    | StatePointer(name, dtype)
                    | TensorMap(name, dtype)
                ):
                    # A kernel is compiled for a pointer's dtype and alignment, whatever the size.
                    memory[name] = torch.empty(16, dtype=dtype, device=device)
        bound_kernel(spec, {**self.layer.shape.sizes, "T": self._range.first, "wave": 0})(memory)


class _Compiled:
    """A kernel that compiles where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names, self.fn, self._kernel = kernel.arg_names, kernel.fn, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(compile_only, self._kernel, grid)


def compile_only(kernel: Any, grid: tuple[int, ...], **arguments: object) -> None:
    """Compiles a kernel for a launch."""
    kernel.warmup(grid=grid, **arguments)


def kernel_key(spec: KernelSpec) -> str:
    """Returns the same for launches that share their compiled kernel."""
    arguments = {
        name: "i32" if isinstance(argument, Scalar) else argument
        for name, argument in spec.arguments.items()
    }
    return f"{spec.name} {spec.num_warps} {spec.num_stages} {spec.dependent_launch} {arguments}"


def plan_jobs(
    layer: Layer,
    architecture: Architecture,
    tokens: Iterable[int],
    ranges: tuple[RangeConfig, ...] | None = None,
) -> Iterator[tuple[str, PlanJob]]:
    """Yields the launches for some token counts, each with its :func:`kernel_key`."""
    planned = _plan(layer, architecture, ranges)
    for span in sorted({planned.ranges.index(planned.at(each)) for each in tokens}):
        for index, spec in enumerate(planned.ranges[span].kernels()):
            yield kernel_key(spec), PlanJob(layer, architecture, ranges, span, index)


@lru_cache(maxsize=4096)
def _plan(
    layer: Layer, architecture: Architecture, ranges: tuple[RangeConfig, ...] | None
) -> ForwardPlan:
    return plan(layer, architecture) if ranges is None else plan_with(layer, architecture, ranges)


def compile_jobs(jobs: Mapping[T, Job], *, seconds: float | None = None) -> dict[T, str]:
    """Runs jobs, the most important first, in a process for each core; returns why some failed.

    Jobs that have not begun after ``seconds`` are left out, and returned too.
    """
    failed: dict[T, str] = {}
    workers, spawn = len(os.sched_getaffinity(0)), get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        names = {pool.submit(_failure, job): name for name, job in jobs.items()}
        try:
            for future in as_completed(names, timeout=seconds):
                if problem := future.exception() or future.result():
                    failed[names[future]] = str(problem)
        except TimeoutError:
            for future, name in names.items():
                if future.cancel():
                    failed[name] = "not compiled in time"
    return failed


def _failure(job: Job) -> str:
    """Runs a job; returns why it failed, as text, since not every error can be pickled."""
    try:
        job()
    except Exception as error:  # A compiler may fail in any way.
        return reason(error)
    return ""
