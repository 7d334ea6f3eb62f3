"""Tables and JSON of the GPU benchmark."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import triton
from rich.table import Table

from benchmarks._gpu_breakdown import LaunchTime
from benchmarks._gpu_cells import DENSE, FUSED, GROUPED, OURS, Result
from benchmarks._gpu_floor import Rates
from benchmarks._gpu_goals import PEER_GOALS, geometric_mean
from benchmarks._timing import record

__all__ = [
    "breakdown_table",
    "environment",
    "goals_table",
    "peer_means",
    "shape_table",
    "to_json",
]


def environment(device: str) -> dict[str, Any]:
    """The machine, its software and the date."""
    # Not by their distributions: Triton comes under several names.
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    found = record([]) | {"versions": versions}
    if device != "cuda":
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
        found = subprocess.run(query, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.splitlines()[0].strip() if found.stdout.strip() else None


def _microseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def shape_table(results: Sequence[Result]) -> Table:
    """The cells of one layer."""
    shape = results[0].cell.shape
    sizes = f"D {shape.width}, H {shape.hidden}, E {shape.experts}, k {shape.top_k}"
    table = Table(title=f"{shape.title} ({sizes}), us", title_justify="left")
    table.add_column("batch" if shape.is_vision else "T", justify="right")
    table.add_column("routing")
    for name in ("ours", "warm", "floor", "split floor", "share", GROUPED, FUSED, DENSE):
        table.add_column(name, justify="right")
    table.add_column("goal")
    for result in results:
        table.add_row(
            str(result.cell.count),
            result.cell.routing,
            _microseconds(result.cold[OURS].median) if OURS in result.cold else "failed",
            _microseconds(result.warm[OURS].median) if OURS in result.warm else "",
            _microseconds(result.floor.fused),
            _microseconds(result.floor.split),
            "" if result.share is None else f"{100 * result.share:.0f} %",
            *(_times(result.ratio(name)) for name in (GROUPED, FUSED, DENSE)),
            _goal(result),
        )
    return table


def _goal(result: Result) -> str:
    if result.wrong:
        return "WRONG: " + "; ".join(f"{name} {why}" for name, why in result.wrong.items())
    verdict = result.verdict
    if verdict is None:
        return ""
    said = "met" if verdict.met else "missed"
    if not verdict.possible:
        said += ", below the floor"
    return f"{said} (<= {_microseconds(verdict.limit)})"


def peer_means(results: Iterable[Result]) -> dict[str, dict[str, Any]]:
    """Geometric means of the peers' times over ours, with uniform routing."""
    uniform = [result for result in results if result.cell.routes]
    means = {}
    for name, goal in PEER_GOALS.items():
        ratios = [ratio for ratio in (each.ratio(name) for each in uniform) if ratio is not None]
        mean = geometric_mean(ratios)
        means[name] = {"mean": mean, "cells": len(ratios), "goal": goal, "met": mean >= goal}
    return means


def goals_table(results: Sequence[Result]) -> Table:
    """How many cells meet each goal."""
    table = Table("goal", "met", title="goals", title_justify="left")
    verdicts = [each.verdict for each in results if each.verdict is not None]
    for goal in dict.fromkeys(verdict.goal for verdict in verdicts):
        same = [verdict for verdict in verdicts if verdict.goal == goal]
        impossible = sum(not verdict.possible for verdict in same)
        note = f" ({impossible} below the floor)" if impossible else ""
        table.add_row(goal, f"{sum(verdict.met for verdict in same)} of {len(same)}{note}")
    for name, mean in peer_means(results).items():
        said = "met" if mean["met"] else "missed"
        value = f"{said}: {mean['mean']:.2f}x over {mean['cells']} cells"
        table.add_row(f"{name}: {mean['goal']}x", value)
    return table


def breakdown_table(title: str, launches: Sequence[LaunchTime]) -> Table:
    """Each launch by itself."""
    table = Table(title=f"{title}, each launch by itself, us", title_justify="left")
    table.add_column("kernel")
    for name in ("programs", "cold", "warm", "floor", "share"):
        table.add_column(name, justify="right")
    for each in launches:
        table.add_row(
            each.kernel,
            str(each.programs),
            _microseconds(each.cold),
            _microseconds(each.warm),
            _microseconds(each.floor) if each.floor else "",
            f"{100 * each.floor / each.cold:.0f} %" if each.floor else "",
        )
    return table


def to_json(
    found: dict[str, Any],
    method: str,
    rates: Rates,
    results: Sequence[Result],
    breakdowns: dict[str, list[LaunchTime]],
    left_out: Sequence[str],
) -> dict[str, Any]:
    """All of a run as JSON's types."""
    return found | {
        "method": method,
        "rates": {"copy bytes/s": rates.bandwidth, "bf16 product flop/s": rates.flops},
        "geometric means": peer_means(results),
        "cells": [result.to_json() for result in results],
        "breakdowns": {
            name: [asdict(each) for each in launches] for name, launches in breakdowns.items()
        },
        "left out": list(left_out),
    }
