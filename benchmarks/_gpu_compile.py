"""Compiles kernels in parallel, into Triton's cache, before anything is timed.

Triton's JIT compiles at a kernel's first launch, one at a time, for seconds each. Here processes
take the launches of a plan with ``warmup``, which compiles and does not launch; the measuring
process then finds them in the cache.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from benchmarks._gpu_fused_moe import Config, warm_up
from benchmarks._gpu_shapes import Shape
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.configs import RangeConfig
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan, plan_with
from custom_ops.kernels.spec import (
    Constant,
    ForwardPlan,
    KernelSpec,
    Scalar,
    TensorMap,
    TensorPointer,
    WorkspacePointer,
)

__all__ = ["Job", "PeerJob", "PlanJob", "compile_jobs", "jobs_of", "kernel_key"]


@dataclass(frozen=True)
class PlanJob:
    """One launch of a layer's plan.

    Attributes:
        layer: The layer.
        architecture: Where it runs.
        ranges: Its configurations; None for the plan that the operators use.
        span: Which range of tokens.
        launch: Which of its launches.
    """

    layer: Layer
    architecture: Architecture
    ranges: tuple[RangeConfig, ...] | None
    span: int
    launch: int

    def run(self) -> None:
        """Compiles it."""
        planned = _plan(self.layer, self.architecture, self.ranges).ranges[self.span]
        sizes = {**self.layer.sizes, "T": planned.first}
        _warm(planned.launches[self.launch], sizes)


@dataclass(frozen=True)
class PeerJob:
    """The kernels of :mod:`benchmarks._gpu_fused_moe` for a shape and a configuration."""

    shape: Shape
    dtype: torch.dtype
    config: Config

    def run(self) -> None:
        """Compiles them."""
        warm_up(self.shape, self.dtype, self.config)


Job = PlanJob | PeerJob


def kernel_key(spec: KernelSpec) -> str:
    """Returns the same for launches that share their compiled kernel."""
    arguments = {
        name: "i32" if isinstance(argument, Scalar) else argument
        for name, argument in spec.arguments.items()
    }
    return f"{spec.name} {spec.num_warps} {spec.num_stages} {spec.dependent_launch} {arguments}"


def jobs_of(
    layer: Layer,
    architecture: Architecture,
    tokens: Iterable[int],
    ranges: tuple[RangeConfig, ...] | None = None,
) -> Iterator[tuple[str, PlanJob]]:
    """Yields the launches for some token counts, each with its :func:`kernel_key`."""
    planned = _plan(layer, architecture, ranges)
    for span in sorted({planned.ranges.index(planned.at(each)) for each in tokens}):
        for index, spec in enumerate(planned.ranges[span].launches):
            yield kernel_key(spec), PlanJob(layer, architecture, ranges, span, index)


def compile_jobs(
    jobs: Sequence[Job],
    *,
    deadline: float = float("inf"),
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[int, str]:
    """Runs jobs in a process for each core.

    Args:
        jobs: What to compile, the most important first.
        deadline: By :func:`time.monotonic`; what has not begun by then is left out.
        report: Told how many are done, of how many.

    Returns:
        What went wrong, by a job's index; jobs that were left out too.
    """
    wrong: dict[int, str] = {}
    if not jobs:
        return wrong
    workers = min(len(os.sched_getaffinity(0)), len(jobs))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        running: dict[Future[str], int] = {
            pool.submit(_run, job): index for index, job in enumerate(jobs)
        }
        total, pending = len(jobs), set(running)
        while pending:
            done, pending = wait(pending, timeout=1)
            for future in done:
                if future.cancelled():
                    wrong[running[future]] = "not compiled in time"
                elif future.exception() or future.result():
                    wrong[running[future]] = str(future.exception() or future.result())
            report(total - len(pending), total)
            if time.monotonic() > deadline:
                for future in pending:
                    future.cancel()
    return wrong


def _run(job: Job) -> str:
    try:
        job.run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@lru_cache(maxsize=4096)
def _plan(
    layer: Layer, architecture: Architecture, ranges: tuple[RangeConfig, ...] | None
) -> ForwardPlan:
    if ranges is None:
        return plan(layer, architecture)
    return plan_with(layer, architecture, ranges)


def _warm(spec: KernelSpec, sizes: dict[str, int]) -> None:
    arguments: dict[str, Any] = {}
    for name, argument in spec.arguments.items():
        match argument:
            case Constant(value):
                arguments[name] = value
            case Scalar(value):
                arguments[name] = value.evaluate(sizes)
            case TensorPointer(_, dtype) | WorkspacePointer(_, dtype):
                arguments[name] = _aligned(dtype)
            case TensorMap(_, dtype, shape, strides, box):
                from triton.tools.tensor_descriptor import TensorDescriptor

                arguments[name] = TensorDescriptor(
                    _aligned(dtype), list(shape), list(strides), list(box)
                )
    spec.function.warmup(
        grid=tuple(axis.evaluate(sizes) for axis in spec.grid),
        **arguments,
        num_warps=spec.num_warps,
        num_stages=spec.num_stages,
        launch_pdl=spec.dependent_launch,
    )


def _aligned(dtype: torch.dtype) -> torch.Tensor:
    # A kernel is compiled for a pointer's dtype and alignment, whatever its size.
    return torch.empty(16, dtype=dtype, device="cuda")
