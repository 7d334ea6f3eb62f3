"""Times on a GPU, inside CUDA graphs, with a cold or a warm L2 cache.

A graph holds one call between two timing events that are nodes of the graph, so that a time has no
part of the host, nor of the graph's own launch. For a cold cache a read of a large buffer goes
ahead of the first event: its lines are clean, so their eviction costs the call no writing. For a
warm cache another call goes ahead. ``triton.testing.do_bench`` leaves the host's part in, and
``do_bench_cudagraph`` keeps the cache warm.

Without a GPU, :class:`HostTimer` runs the same calls under the host's clock, so that the harness
can be tried. Its times mean nothing.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.common.timing import Timing, milliseconds, turns
from benchmarks.gpu.goals import Rates

Call = Callable[[], object]

_FLUSHED_BYTES = 256 * 2**20
_COPIED_BYTES = 2**31
_MATRIX = 8192


@dataclass(frozen=True)
class Times(Timing):
    """Microseconds of one call, and how many samples they are of."""

    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Times:
        """Summarises samples."""
        return cls(statistics.median(samples), min(samples), len(samples))


@dataclass
class Results:
    """Calls' times, or why they failed, by what the calls go by."""

    times: dict[Any, Times] = field(default_factory=dict)
    failed: dict[Any, str] = field(default_factory=dict)


def samples_for(microseconds: float) -> int:
    """Returns how often to time a call that takes this long."""
    return 60 if microseconds < 10_000 else 15


def reason(error: BaseException) -> str:
    """Returns an error in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class GraphTimer:
    """Times on the current CUDA device."""

    def __init__(self) -> None:
        self._flushed = torch.randn(_FLUSHED_BYTES // 4, device="cuda")
        self._sum = torch.zeros((), device="cuda")
        self._inside = True
        self._inside = self._events_in_graphs_work()
        self.method = "events inside the graph" if self._inside else "events around a graph replay"

    def __call__(
        self, calls: Mapping[Any, Call], *, cold: bool = True, samples: int | None = None
    ) -> Results:
        """Times calls in turns, ``samples`` times each, by default as :func:`samples_for` says."""
        results = Results()
        graphs: dict[Any, _Timed] = {}
        for name, call in calls.items():
            try:
                graphs[name] = self._capture(call, cold)
                graphs[name].run()
            except Exception as error:  # The others are timed all the same.
                results.failed[name] = reason(error)
                graphs.pop(name, None)
                torch.cuda.synchronize()
        once = {name: min(graph.run(), graph.run()) for name, graph in graphs.items()}
        wanted = {name: samples or samples_for(us) for name, us in once.items()}
        microseconds: dict[Any, list[float]] = {name: [] for name in graphs}
        for turn, name in turns(graphs, max(wanted.values(), default=0)):
            if turn < wanted[name]:
                microseconds[name].append(graphs[name].run())
        results.times = {name: Times.of(each) for name, each in microseconds.items()}
        return results

    def _flush(self) -> object:
        return torch.sum(self._flushed, dim=0, out=self._sum)

    def _capture(self, call: Call, cold: bool) -> _Timed:
        for _ in range(2):
            call()
        graph = torch.cuda.CUDAGraph()
        start, end = self._event(), self._event()
        with _captured(graph):
            if self._inside:
                (self._flush if cold else call)()
                start.record()
            kept = call()
            if self._inside:
                end.record()
        before = None if self._inside else self._flush if cold else graph.replay
        return _Timed(graph, start, end, kept, before)

    def _event(self) -> torch.cuda.Event:
        if self._inside:
            return torch.cuda.Event(enable_timing=True, external=True)
        return torch.cuda.Event(enable_timing=True)

    def _events_in_graphs_work(self) -> bool:
        """Whether a known call takes as long by events inside the graph as by those around it."""
        try:
            inside = statistics.median(self._capture(self._flush, True).run() for _ in range(9))
        except (RuntimeError, TypeError):
            torch.cuda.synchronize()
            return False
        self._inside = False
        around = statistics.median(self._capture(self._flush, True).run() for _ in range(9))
        return 0.5 * around < inside < 1.2 * around


@contextmanager
def _captured(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Captures what is enqueued.

    ``torch.cuda.graph`` also collects garbage and empties the allocator's cache each time, which
    takes longer than most of what is timed here.
    """
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            # The capture has failed, and ending it raises another error.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()


@dataclass
class _Timed:
    graph: torch.cuda.CUDAGraph
    start: torch.cuda.Event
    end: torch.cuda.Event
    kept: object
    before: Call | None  # None where the events are in the graph

    def run(self) -> float:
        """Replays and returns microseconds."""
        if self.before is not None:
            self.before()
            self.start.record()
        self.graph.replay()
        if self.before is not None:
            self.end.record()
        torch.cuda.synchronize()
        ms: float = self.start.elapsed_time(self.end)
        return 1e3 * ms


class HostTimer:
    """Runs calls once under the host's clock."""

    method = "host clock, a trial of the harness"

    def __call__(
        self, calls: Mapping[Any, Call], *, cold: bool = True, samples: int | None = None
    ) -> Results:
        """Takes what :class:`GraphTimer` takes."""
        del cold, samples
        results = Results()
        for name, call in calls.items():
            try:
                results.times[name] = Times.of([1e3 * milliseconds(call)])
            except Exception as error:  # The others are timed all the same.
                results.failed[name] = reason(error)
        return results


Timer = GraphTimer | HostTimer


def measure_rates(timer: Timer, device: str) -> Rates:
    """Measures copy bandwidth, read and written, and the rate of an 8192^3 bf16 product.

    Both are the best of 20 samples: what the device can do, whatever else ran beside it.
    """
    copied, size = (_COPIED_BYTES, _MATRIX) if device == "cuda" else (2**20, 64)

    def microseconds(call: Call) -> float:
        return timer({"": call}, cold=False, samples=20).times[""].best

    source = torch.randn(copied // 4, device=device)
    target = torch.empty_like(source)
    bandwidth = 2e6 * copied / microseconds(lambda: target.copy_(source))
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    flops = 2e6 * size**3 / microseconds(lambda: torch.mm(a, b, out=product))
    return Rates(bandwidth, flops)


def release() -> None:
    """Gives freed memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
