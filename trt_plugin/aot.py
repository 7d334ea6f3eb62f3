"""Compiles layers ahead of time, on a machine with or without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path

from custom_ops.kernels.architectures import ARCHITECTURES, architecture
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan
from custom_ops.kernels.spec import ForwardPlan
from trt_plugin._compiled import Compiled, CompileError
from trt_plugin._programs import layer_record, program_for
from trt_plugin._tasks import Task, sources_hash, task_for
from trt_plugin._workers import compile_tasks
from trt_plugin.bundle import Bundle
from trt_plugin.cache import KernelCache, default_folder

__all__ = ["CompileError", "compile", "compile_plans", "limit_tokens"]

#: Told how many kernels are done, of how many.
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
    """Compiles what layers need on architectures.

    Args:
        layers: The layers; those that compute the same share a program.
        architectures: Such as ``"sm_90"``.
        output: File to write.
        max_tokens: Most tokens that the layers will be run with; kernels for more are left out.
        jobs: Number of processes. Default: one for each core.
        progress: Whether to show a bar on standard error, or what to call instead.
        cache: Whether kernels are kept and found in the user's cache folder, or another folder.

    Returns:
        One program for each layer and architecture, in this order.

    Raises:
        CompileError: If a kernel does not compile.
        ImportError: If Triton is not installed.
        ValueError: If there are no layers, or an architecture is unknown.
    """
    known = dict.fromkeys(architecture(name) for name in architectures)
    given = [layers] if isinstance(layers, Layer) else layers
    distinct = {layer_record(layer): layer.canonical() for layer in given}
    plans = [plan(layer, device) for layer in distinct.values() for device in known]
    if not plans:
        missing = "layer" if not distinct else "architecture"
        raise ValueError(f"compiling needs at least one {missing}")
    if max_tokens is not None:
        plans = [limit_tokens(each, max_tokens) for each in plans]
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
        replace(each, last=min(each.last, most)) for each in plan.ranges if each.first <= most
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

    tasks = [task_for(kernel, each.architecture) for each in plans for kernel in each.kernels()]
    distinct = {task.to_json(): task for task in tasks}
    store = KernelCache(
        _folder(cache),
        # It brings its own LLVM and ptxas.
        f"triton {triton.__version__}",
        {module: sources_hash(module) for module in {task.module for task in tasks}},
    )
    compiled: dict[str, Compiled] = {}
    for line, task in distinct.items():
        kept = store.get(task)
        if kept is not None:
            compiled[line] = kept
    missing = [task for line, task in distinct.items() if line not in compiled]
    with _shown(progress, len(distinct), len(compiled)) as advance:

        def done(task: Task, result: Compiled) -> None:
            check_shared_memory(task, result)
            store.put(task, result)
            compiled[task.to_json()] = result
            advance()

        compile_tasks(missing, jobs or len(os.sched_getaffinity(0)), done)

    return Bundle(tuple(program_for(each, compiled) for each in plans))


def _folder(cache: bool | str | PathLike[str]) -> Path | None:
    if isinstance(cache, bool):
        return default_folder() if cache else None
    return Path(cache)


def check_shared_memory(task: Task, result: Compiled) -> None:
    """Refuses a kernel whose blocks the architecture has no room for.

    Raises:
        CompileError: If so.
    """
    device = ARCHITECTURES[task.capability]
    needed = result.shared_memory + result.info.static_shared_memory
    if needed > device.shared_memory:
        raise CompileError(
            f"{task} cannot be launched",
            f"it needs {needed} bytes of shared memory, {device.name} has {device.shared_memory}",
            task.values,
        )


@contextmanager
def _shown(progress: bool | Progress, total: int, done: int) -> Iterator[Callable[[], None]]:
    """Yields what to call when a kernel is done."""
    if callable(progress):
        count = done
        progress(count, total)

        def advance() -> None:
            nonlocal count
            count += 1
            progress(count, total)

        yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not progress or not console.is_terminal or done == total,
    ) as bar:
        shown = bar.add_task("Compiling kernels", total=total, completed=done)
        yield lambda: bar.advance(shown)
