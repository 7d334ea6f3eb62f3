"""Compiles layers ahead of time, on machines with or without a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from custom_ops.kernels.architectures import ARCHITECTURES, architecture
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan
from custom_ops.kernels.spec import ForwardPlan
from trt_plugin.bundle import Bundle
from trt_plugin.compiling.cache import KernelCache, default_folder
from trt_plugin.compiling.packing import layer_record, program_for
from trt_plugin.compiling.tasks import Compiled, CompileError, Task, sources_hash, task_for
from trt_plugin.compiling.workers import compile_tasks
from trt_plugin.output import progress_bars

#: Called with the number of kernels that are done, and the number of all.
Progress = Callable[[int, int], None]


def compile(  # noqa: A001  As torch.compile: it is called by its package's name.
    layers: Layer | Iterable[Layer],
    architectures: Iterable[str | int],
    output: str | PathLike[str] | None = None,
    *,
    max_tokens: int | None = None,
    jobs: int | None = None,
    progress: bool | Progress = True,
    cache: bool | str | PathLike[str] = True,
) -> Bundle:
    """Compiles the kernels of layers for architectures.

    Args:
        layers: The layers; those that compute the same share a program.
        architectures: Such as ``"sm_90"``.
        output: File to write.
        max_tokens: Most tokens that the layers will run with; kernels for more are left out.
        jobs: Number of processes. Default: one for each core.
        progress: Whether to show a bar on standard error, or a function to call instead.
        cache: Whether to keep kernels in the user's cache folder, or the folder to keep them in.

    Returns:
        One program for each layer and architecture, in this order.

    Raises:
        CompileError: If a kernel does not compile.
        ImportError: If Triton is not installed.
        ValueError: If there are no layers, or an architecture is unknown.
    """
    known = dict.fromkeys(architecture(name) for name in architectures)
    requested = [layers] if isinstance(layers, Layer) else layers
    distinct = {layer_record(layer): layer.canonical() for layer in requested}
    plans = [plan(layer, device) for layer in distinct.values() for device in known]
    if not plans:
        missing = "layer" if not distinct else "architecture"
        raise ValueError(f"compiling needs at least one {missing}")
    if max_tokens is not None:
        plans = [limit_tokens(full, max_tokens) for full in plans]
    bundle = compile_plans(plans, jobs=jobs, progress=progress, cache=cache)
    if output is not None:
        bundle.save(output)
    return bundle


def limit_tokens(plan: ForwardPlan, most: int) -> ForwardPlan:
    """Returns a plan for up to ``most`` tokens.

    Raises:
        ValueError: If ``most`` is below 1.
    """
    if most < 1:
        raise ValueError(f"max_tokens must be at least 1, got {most}")
    ranges = (
        replace(token_range, last=min(token_range.last, most))
        for token_range in plan.ranges
        if token_range.first <= most
    )
    return replace(plan, ranges=tuple(ranges))


def compile_plans(
    plans: Sequence[ForwardPlan],
    *,
    jobs: int | None = None,
    progress: bool | Progress = True,
    cache: bool | str | PathLike[str] = True,
) -> Bundle:
    """Compiles plans as they are; see :func:`compile`."""
    import triton

    tasks = [task_for(kernel, plan.architecture) for plan in plans for kernel in plan.kernels()]
    distinct = {task.to_json(): task for task in tasks}
    store = KernelCache(
        _folder(cache),
        # Triton brings its own LLVM and ptxas, so its version is all that matters.
        f"triton {triton.__version__}",
        {module: sources_hash(module) for module in {task.module for task in tasks}},
    )
    compiled = {line: kept for line, task in distinct.items() if (kept := store.get(task))}
    missing = [task for line, task in distinct.items() if line not in compiled]
    bars = progress_bars(shown=progress is True and bool(missing))
    bar = bars.add_task("Compiling kernels", total=len(distinct))
    counting = threading.Lock()

    def report() -> None:
        bars.update(bar, completed=len(compiled))
        if callable(progress):
            progress(len(compiled), len(distinct))

    def done(task: Task, result: Compiled) -> None:
        check_shared_memory(task, result)
        store.put(task, result)
        with counting:
            compiled[task.to_json()] = result
            report()

    with bars:
        report()
        compile_tasks(missing, jobs or len(os.sched_getaffinity(0)), done)

    return Bundle(tuple(program_for(plan, compiled) for plan in plans))


def _folder(cache: bool | str | PathLike[str]) -> Path | None:
    if isinstance(cache, bool):
        return default_folder() if cache else None
    return Path(cache)


def check_shared_memory(task: Task, result: Compiled) -> None:
    """Checks that the architecture has enough shared memory for a kernel's blocks.

    Raises:
        CompileError: If it has not.
    """
    device = ARCHITECTURES[task.capability]
    needed = result.shared_memory + result.info.static_shared_memory
    if needed > device.shared_memory:
        raise CompileError(
            f"{task} cannot be launched",
            f"it needs {needed} bytes of shared memory, {device.name} has {device.shared_memory}",
            task.values,
        )
