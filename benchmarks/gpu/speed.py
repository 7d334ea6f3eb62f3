"""Does the kernel reach its goals on a GPU?

    python -m benchmarks.gpu.speed --json result.json

docs/explanation/performance.md says what is compared, how it is timed, and what the floor of a
cell is: the time that no implementation can beat. Ours is ``torch.ops.moe.*``.

``--dry-run`` runs the harness without a GPU, on a tiny layer; its times mean nothing.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
import triton

from benchmarks.common.report import conditions, parser, table, write_json
from benchmarks.gpu import HAS_GPU
from benchmarks.gpu.cells import (
    OURS,
    PEERS,
    Bench,
    Cell,
    Result,
)
from benchmarks.gpu.compiling import Compilation, compile_jobs, compile_only, plan_jobs
from benchmarks.gpu.fused_moe import Config, candidates, compile_for
from benchmarks.gpu.goals import PEER_GOALS, Rates, geometric_mean
from benchmarks.gpu.layers import ROUTINGS, SHAPES, Shape, matching, parameters_of
from benchmarks.gpu.timing import GraphTimer, HostTimer, Timer, measure_rates, release
from custom_ops.kernels.architectures import Architecture, architecture, nearest_architecture

# Skewed routing is measured here only: the rest of the time is better spent on other cells.
SKEWED_COUNTS = {16, 64, 1024, 4096}
# Seconds for the last cell, and for reports.
RESERVE = 10
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Device:
    """What is measured on: the GPU, or the host's stand-in for it."""

    name: str  # as PyTorch calls it
    architecture: Architecture  # what kernels are planned for
    timer: Timer

    @classmethod
    def chosen(cls, dry_run: bool) -> Device:
        """Returns the GPU, or its stand-in for a dry run; ends the process where there is none."""
        if dry_run:
            return cls("cpu", architecture(80), HostTimer())
        if not HAS_GPU:
            print("needs a CUDA device; --dry-run tries the harness without one", file=sys.stderr)
            raise SystemExit(2)
        nearest = nearest_architecture(*torch.cuda.get_device_capability())
        return cls("cuda", nearest, GraphTimer())

    def conditions(self) -> dict[str, Any]:
        """The machine, its software and the date."""
        # Triton's distribution has several names, so its version is asked of the module.
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        found = conditions([]) | {"versions": versions}
        if self.name == "cpu":
            return found | {"hardware": platform.processor() or platform.machine()}
        properties = torch.cuda.get_device_properties(0)
        return found | {
            "hardware": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory GiB": round(properties.total_memory / 2**30, 1),
            "L2 MiB": round(properties.L2_cache_size / 2**20, 1),
            "driver": _driver(),
            "cuda": torch.version.cuda,
        }


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.partition("\n")[0].strip() or None


def cells_of(
    shapes: Sequence[Shape], counts: Collection[int], routings: Sequence[str]
) -> Iterator[Cell]:
    """Yields what to measure, the most important first: uniform routing, then the others."""
    for routing in routings:
        for shape in shapes:
            for count in shape.counts:
                asked = not counts or count in counts
                skewed = routing != "uniform" and not counts and shape.name != "tiny"
                if asked and (not skewed or count in SKEWED_COUNTS):
                    yield Cell(shape, count, routing)


def measuring_jobs(
    cells: Iterable[Cell], on: Architecture, dtype: torch.dtype
) -> dict[object, Compilation]:
    """Returns the compilations that the cells need."""
    jobs: dict[object, Compilation] = {}
    for cell in cells:
        layer = cell.shape.layer(dtype, router=cell.routes)
        jobs |= plan_jobs(layer, on, [cell.tokens])
        for config in candidates(cell.shape, cell.tokens):
            job = partial(compile_for, cell.shape, dtype, config, compile_only)
            jobs[cell.shape.name, config] = job
    return jobs


def compile_ahead(cells: Sequence[Cell], device: Device, dtype: torch.dtype) -> None:
    """Compiles what the cells need, in parallel."""
    jobs = measuring_jobs(cells, device.architecture, dtype)
    started = time.monotonic()
    failed = compile_jobs(jobs)
    print(f"{len(jobs)} compilations in {time.monotonic() - started:.0f} s")
    for name, why in failed.items():
        print(f"not compiled ahead: {name}: {why}")


@dataclass
class Results:
    """All that a run found."""

    rates: Rates
    cells: list[Result] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # cells, for lack of time or memory

    def to_json(self) -> dict[str, Any]:
        """The results as JSON's types."""
        return {
            "rates": {
                "copy bytes/s": self.rates.bandwidth,
                "bf16 product flop/s": self.rates.flops,
            },
            "geometric means": peer_means(self.cells),
            "cells": [result.to_json() for result in self.cells],
            "left out": self.left_out,
        }


def measure_cells(
    cells: Iterable[Cell],
    device: Device,
    dtype: torch.dtype,
    deadline: float,
    results: Results,
    save: Callable[[], None] = lambda: None,
) -> None:
    """Measures cells until the deadline, saving each; neighbours' parameters are made once."""
    # Without a GPU, one small block is tried in place of those for servers.
    configs = (Config(16, 16, 16, 2, 4, 2),) if device.name == "cpu" else None
    for shape, same in groupby(cells, key=lambda cell: cell.shape):
        bench = None
        measured: list[Result] = []
        for cell in same:
            if time.monotonic() > deadline:
                results.left_out.append(str(cell))
                continue
            try:
                if bench is None:
                    parameters = parameters_of(shape, dtype, device.name)
                    bench = Bench(shape, parameters, device.timer, results.rates, configs=configs)
                    del parameters
                measured.append(bench.measure(cell))
            except torch.OutOfMemoryError as error:
                results.left_out.append(f"{cell} ({str(error).splitlines()[0]})")
            else:
                results.cells.append(measured[-1])
                save()
        if measured:
            print(shape_table(measured))
        del bench
        release()


def shape_table(results: Sequence[Result]) -> str:
    """Returns the cells of one layer."""
    rows = []
    for result in results:
        wrong = "; ".join(f"{name} {why}" for name, why in result.wrong.items())
        ratios = [result.ratio(name) for name in PEERS]
        rows.append([
            result.cell.count,
            result.cell.routing,
            result.cold[OURS].median if OURS in result.cold else "failed",
            result.warm[OURS].median if OURS in result.warm else None,
            result.floor.fused,
            result.floor.split,
            None if result.share is None else f"{100 * result.share:.0f} %",
            *(None if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
            f"WRONG: {wrong}" if wrong else result.verdict,
        ])  # fmt: skip
    shape = results[0].cell.shape
    sizes = f"D {shape.width}, H {shape.hidden}, E {shape.experts}, k {shape.top_k}"
    columns = ["batch" if shape.is_vision else "T", "routing", "ours", "warm", "floor"]
    columns += ["split floor", "share", *PEERS, "goal"]
    return table(f"{shape.title} ({sizes}), us", columns, rows)


def peer_means(results: Iterable[Result]) -> dict[str, dict[str, Any]]:
    """Returns geometric means of the peers' times over ours, with uniform routing."""
    uniform = [result for result in results if result.cell.routes]
    means = {}
    for name, goal in PEER_GOALS.items():
        ratios = [ratio for each in uniform if (ratio := each.ratio(name)) is not None]
        mean = geometric_mean(ratios)
        means[name] = {"mean": mean, "cells": len(ratios), "goal": goal, "met": mean >= goal}
    return means


def goals_table(results: Sequence[Result]) -> str:
    """Returns how many cells meet each goal."""
    verdicts = [verdict for each in results if (verdict := each.verdict) is not None]
    rows = []
    for goal in dict.fromkeys(verdict.goal for verdict in verdicts):
        same = [verdict for verdict in verdicts if verdict.goal == goal]
        impossible = sum(not verdict.possible for verdict in same)
        note = f" ({impossible} below the floor)" if impossible else ""
        rows.append([goal, f"{sum(verdict.met for verdict in same)} of {len(same)}{note}"])
    for name, mean in peer_means(results).items():
        word = "met" if mean["met"] else "missed"
        rows.append(
            [f"{name}: {mean['goal']}x", f"{word}: {mean['mean']:.2f}x over {mean['cells']} cells"]
        )
    return table("goals", ["goal", "met"], rows)


def gpu_parser(doc: str | None, budget: float, *outputs: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that measuring and tuning share."""
    known = parser(doc, *outputs)
    known.add_argument(
        "--shapes", default="", help=f"beginnings of names, of {', '.join(SHAPES)}; default: all"
    )
    known.add_argument("--tokens", default="", help="numbers of tokens, or of images, as in 1,16")
    known.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of all tensors")
    known.add_argument("--budget", type=float, default=budget, help="seconds to take")
    known.add_argument("--dry-run", action="store_true", help="try it without a GPU")
    return known


def parsed(known: argparse.ArgumentParser, given: argparse.Namespace) -> argparse.Namespace:
    """Returns the command line with shapes, numbers of tokens and dtypes as objects."""
    try:
        given.shapes = matching("tiny" if given.dry_run and not given.shapes else given.shapes)
        given.tokens = sorted({int(count) for count in given.tokens.split(",") if count})
    except ValueError as error:
        known.error(str(error))
    given.dtype = torch.float32 if given.dry_run else DTYPES[given.dtype]
    return given


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    known = gpu_parser(__doc__, 240, "json")
    known.add_argument("--routing", default=",".join(ROUTINGS), help="kinds of routing")
    given = parsed(known, known.parse_args())
    given.routing = given.routing.split(",")
    if unknown := set(given.routing) - set(ROUTINGS):
        known.error(f"--routing takes {', '.join(ROUTINGS)}; got {', '.join(sorted(unknown))}")
    return given


@torch.inference_mode()
def main() -> None:
    """Measures both operators on a GPU."""
    started, given = time.monotonic(), arguments()
    device, dtype = Device.chosen(given.dry_run), given.dtype
    described = device.conditions() | {"dtype": str(dtype).removeprefix("torch.")}
    described["method"] = device.timer.method
    rates = measure_rates(device.timer, device.name)
    results = Results(rates)
    print(
        f"{described['hardware']}: copy {rates.bandwidth / 1e12:.2f} TB/s, 8192^3 bf16 "
        f"product {rates.flops / 1e12:.0f} TFLOP/s; times by {device.timer.method}"
    )
    cells = list(cells_of(given.shapes, given.tokens, given.routing))
    if not given.dry_run:
        compile_ahead(cells, device, dtype)

    def save() -> None:
        write_json(given.json, described | results.to_json())

    measure_cells(cells, device, dtype, started + given.budget - RESERVE, results, save)
    if not given.dry_run:
        print(goals_table(results.cells))
    if results.left_out:
        print(f"left out for lack of time or memory: {', '.join(results.left_out)}")
    save()
    if any(cell.wrong for cell in results.cells):
        sys.exit("some results are wrong")


if __name__ == "__main__":
    main()
