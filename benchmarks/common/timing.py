"""Timing calls against each other, and the memory of a process."""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """How long one call takes; in milliseconds where nothing else is said."""

    median: float
    best: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Summarises samples."""
        return cls(statistics.median(samples), min(samples))


def turns(items: Iterable[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yields the round, from 0, and an item; each round starts with another: A B, B A, ...

    A slow minute of the machine then hits all of them.
    """
    order = list(items)
    for number in range(rounds):
        first = number % len(order) if order else 0
        yield from ((number, item) for item in order[first:] + order[:first])


def milliseconds(call: Callable[[], object]) -> float:
    """Returns how long one call takes."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def time_in_turns(
    calls: Mapping[T, Callable[[], object]], runs: int, before: Callable[[], object]
) -> dict[T, Timing]:
    """Times calls in turns, after two untimed calls of each; ``before`` each may flush caches."""
    for call in calls.values():
        for _ in range(2):
            call()
    samples: dict[T, list[float]] = {name: [] for name in calls}
    for _, name in turns(calls, runs):
        before()
        samples[name].append(milliseconds(calls[name]))
    return {name: Timing.of(each) for name, each in samples.items()}


def fresh_processes() -> ProcessPoolExecutor:
    """Returns an executor that runs each call in a process of its own, one at a time."""
    return ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1)


def resident_bytes(*, peak: bool = False) -> int:
    """Returns this process's resident set, or its peak so far (Linux)."""
    field = "VmHWM" if peak else "VmRSS"
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def reset_peak() -> None:
    """Lets the peak of the resident set start again from here, where Linux permits it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
