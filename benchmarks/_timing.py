"""Timing callables against each other, and the record that makes a number worth keeping."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

__all__ = ["Timing", "interleave", "record"]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one callable."""

    median: float
    best: float


def interleave(
    callables: Mapping[str, Callable[[], object]],
    runs: int,
    warmup: int = 2,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Times callables in turns, so that a slow minute of the machine hits all.

    Args:
        callables: What to time, by name.
        runs: Timed calls of each; each round starts with another callable (A B, B A, ...).
        warmup: Untimed calls of each.
        before: Called before every timed call, for instance to flush caches.
    """
    for call in callables.values():
        for _ in range(warmup):
            call()
    times: dict[str, list[float]] = {name: [] for name in callables}
    names = list(callables)
    for run in range(runs):
        first = run % len(names)
        for name in names[first:] + names[:first]:
            before()
            start = time.perf_counter()
            callables[name]()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: Timing(statistics.median(ms), min(ms)) for name, ms in times.items()}


def record(packages: Sequence[str]) -> dict[str, object]:
    """Where and with what a measurement was taken."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
    }


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
