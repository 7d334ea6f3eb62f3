"""Both operators on a GPU, against the time that no implementation can beat, and against others.

    python -m benchmarks.gpu_moe --json result.json --plot result.png

Copy bandwidth and the rate of a large matrix product are measured first; from them follows the
floor of every cell. Then ours (``torch.ops.moe.*``), PyTorch's ``grouped_mm`` in the order of
transformers, a Triton MoE of the usual structure, and every expert on every token are timed in
turns, each captured in a CUDA graph, with a cold and with a warm L2 cache. Inputs are random.
With uniform routing each version has its router; with Zipf's law, and with all on one expert, all
get the same expert ids and weights. Results are compared before anything is timed.

``--breakdown qwen3:1024`` times each launch of ours by itself. ``--dry-run`` runs the harness
without a GPU, on a tiny layer; its times mean nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks._device import HAS_GPU
from benchmarks._gpu_breakdown import LaunchTime, break_down
from benchmarks._gpu_cells import DENSE, FUSED, GROUPED, Bench, Cell, Result
from benchmarks._gpu_compile import Job, PeerJob, compile_jobs, jobs_of
from benchmarks._gpu_floor import Rates, expected_active, floor
from benchmarks._gpu_fused_moe import Config, candidates
from benchmarks._gpu_plot import plot as draw_plot
from benchmarks._gpu_report import (
    breakdown_table,
    environment,
    goals_table,
    shape_table,
    to_json,
)
from benchmarks._gpu_shapes import SHAPES, Shape, chosen, parameters
from benchmarks._gpu_timing import GraphTimer, HostTimer, Timer, measure_rates, release
from custom_ops.kernels.architectures import architecture, nearest_architecture
from custom_ops.kernels.plan import plan

# Skewed routing is measured here only: the rest of the time is better spent on other cells.
SKEWED_COUNTS = {16, 64, 1024, 4096}
RESERVE = 10
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def cells_of(shapes: Sequence[Shape], counts: set[int], routings: Sequence[str]) -> Iterator[Cell]:
    """Yields what to measure, the most important first: uniform routing, then the others."""
    for routing in routings:
        for shape in shapes:
            for count in shape.counts:
                asked = not counts or count in counts
                skewed = routing != "uniform" and not counts and shape.name != "tiny"
                if asked and (not skewed or count in SKEWED_COUNTS):
                    yield Cell(shape, count, routing)


def runs_of(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Splits cells where the layer changes, whose parameters then are made anew."""
    runs: list[list[Cell]] = []
    for cell in cells:
        if not runs or runs[-1][-1].shape != cell.shape:
            runs.append([])
        runs[-1].append(cell)
    return runs


def compile_ahead(
    cells: Sequence[Cell], dtype: torch.dtype, versions: Sequence[str], console: Console
) -> None:
    """Compiles what the cells need, in parallel."""
    device = nearest_architecture(*torch.cuda.get_device_capability())
    ours: dict[str, Job] = {}
    peers: dict[object, Job] = {}
    for cell in cells:
        layer = cell.shape.layer(dtype, router=cell.routes)
        ours.update(jobs_of(layer, device, [cell.tokens]))
        if FUSED in versions:
            for config in candidates(cell.shape, cell.tokens):
                peers[cell.shape.name, config] = PeerJob(cell.shape, dtype, config)
    jobs = [*ours.values(), *peers.values()]
    started = time.monotonic()
    wrong = compile_jobs(jobs)
    console.print(f"{len(jobs)} compilations in {time.monotonic() - started:.0f} s")
    for index, reason in wrong.items():
        console.print(f"not compiled ahead: {jobs[index]}: {reason}", highlight=False)


def measure_cells(
    runs: Sequence[Sequence[Cell]],
    timer: Timer,
    rates: Rates,
    dtype: torch.dtype,
    versions: tuple[str, ...],
    deadline: float,
    console: Console,
) -> tuple[list[Result], list[str]]:
    """Measures cells until the deadline; returns results, and what was left out."""
    results: list[Result] = []
    left_out: list[str] = []
    device = "cuda" if isinstance(timer, GraphTimer) else "cpu"
    configs = None if device == "cuda" else (Config(16, 16, 16, 2, 4, 2),)
    for run in runs:
        if time.monotonic() > deadline:
            left_out += map(str, run)
            continue
        shape = run[0].shape
        bench = Bench(
            shape, parameters(shape, dtype, device), timer, rates, versions, configs=configs
        )
        measured = []
        for cell in run:
            if time.monotonic() > deadline:
                left_out.append(str(cell))
                continue
            try:
                measured.append(bench.measure(cell))
            except torch.OutOfMemoryError as error:
                left_out.append(f"{cell} ({str(error).splitlines()[0]})")
        if measured:
            console.print(shape_table(measured))
        results += measured
        del bench
        release()
    return results, left_out


def measure_breakdown(
    wanted: str, timer: Timer, rates: Rates, dtype: torch.dtype
) -> list[LaunchTime]:
    """Times each launch of ours for ``shape:count``."""
    name, _, count = wanted.partition(":")
    cell = Cell(SHAPES[name], int(count))
    on_gpu = isinstance(timer, GraphTimer)
    given = parameters(cell.shape, dtype, "cuda" if on_gpu else "cpu")
    x = Bench(cell.shape, given, timer, rates).tokens(cell)
    tensors = {key: tensor for key, tensor in given.items() if tensor is not None}
    tensors |= {"x": x, "y": torch.empty_like(x)}
    device = (
        nearest_architecture(*torch.cuda.get_device_capability())
        if on_gpu
        else architecture("sm_80")
    )
    shape = cell.shape
    active = expected_active(shape.experts, shape.top_k, cell.tokens)
    shortest = floor(shape, cell.tokens, active, rates, itemsize=dtype.itemsize)
    return break_down(plan(shape.layer(dtype), device), tensors, timer, shortest)


def main(
    shapes: Annotated[
        str, typer.Option(help=f"Beginnings of names, of {', '.join(SHAPES)}. Default: all.")
    ] = "",
    tokens: Annotated[
        str, typer.Option(help="Numbers of tokens, or of images, such as 1,16. Default: all.")
    ] = "",
    routing: Annotated[str, typer.Option(help="Of uniform, zipf and one.")] = "uniform,zipf,one",
    versions: Annotated[
        str, typer.Option(help="What to compare ours with.")
    ] = f"{GROUPED},{FUSED},{DENSE}",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    budget: Annotated[
        float, typer.Option(help="Seconds, after which no further cell is begun.")
    ] = 240,
    breakdown: Annotated[
        list[str] | None, typer.Option(help="Layer and count, as qwen3:1024. Repeatable.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw results here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Try the harness without a GPU.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The summary alone.")] = False,
) -> None:
    """Measures both operators on a GPU."""
    started = time.monotonic()
    console = Console(width=150 if not os.environ.get("COLUMNS") else None, soft_wrap=False)
    details = Console(quiet=quiet, width=console.width)
    try:
        wanted = chosen("tiny" if dry_run and not shapes else shapes)
        counts = {int(count) for count in tokens.split(",") if count}
        kind = DTYPES[dtype]
    except (ValueError, KeyError) as error:
        raise typer.BadParameter(str(error)) from None
    if not dry_run and not HAS_GPU:
        console.print("needs a CUDA device; --dry-run tries the harness without one")
        raise typer.Exit(2)
    if dry_run:
        kind = torch.float32
    with torch.inference_mode():
        failed = _run(
            wanted, counts, routing.split(","), tuple(versions.split(",")), kind,
            started + budget, breakdown or [], json_file, plot_file,
            quick=quick, dry_run=dry_run, console=console, details=details,
        )  # fmt: skip
    if failed:
        raise typer.Exit(1)


def _run(
    shapes: Sequence[Shape],
    counts: set[int],
    routings: Sequence[str],
    versions: tuple[str, ...],
    dtype: torch.dtype,
    deadline: float,
    breakdowns: Sequence[str],
    json_file: Path | None,
    plot_file: Path | None,
    *,
    quick: bool,
    dry_run: bool,
    console: Console,
    details: Console,
) -> bool:
    """Runs it all; returns whether a result was wrong."""
    device = "cpu" if dry_run else "cuda"
    found = environment(device) | {"dtype": str(dtype).removeprefix("torch.")}
    timer: Timer = HostTimer() if dry_run else GraphTimer(quick=quick)
    rates = measure_rates(timer, device)
    console.print(
        f"{found['hardware']}: copy {rates.bandwidth / 1e12:.2f} TB/s, 8192^3 bf16 product "
        f"{rates.flops / 1e12:.0f} TFLOP/s; times by {timer.method}",
        highlight=False,
    )
    runs = runs_of(list(cells_of(shapes, counts, routings)))
    if not dry_run:
        compile_ahead([cell for run in runs for cell in run], dtype, versions, console)
    results, left_out = measure_cells(
        runs, timer, rates, dtype, versions, deadline - RESERVE, details
    )
    launches = {each: measure_breakdown(each, timer, rates, dtype) for each in breakdowns}
    for name, times in launches.items():
        console.print(breakdown_table(name, times))
    if not dry_run:
        console.print(goals_table(results))
    if left_out:
        console.print(f"left out for lack of time or memory: {', '.join(left_out)}")
    written = to_json(found, timer.method, rates, results, launches, left_out)
    if json_file is not None:
        json_file.write_text(json.dumps(written, indent=1) + "\n")
    if plot_file is not None:
        draw_plot(written, plot_file)
    return any(result.wrong for result in results)


if __name__ == "__main__":
    typer.run(main)
