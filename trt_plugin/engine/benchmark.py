"""Measures engines beside each other: latencies, throughput, and how far their results differ."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_plugin.engine.installed import EngineError
from trt_plugin.engine.running import Runner

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType
    from torch import Tensor

# Engines take turns in this many rounds, so that a clock that slows down slows all of them.
_ROUNDS = 5
_DEVICE = "cuda"


@dataclass(frozen=True)
class Timing:
    """Latencies of an engine, in milliseconds between two events on the device's stream.

    Shapes and addresses are set before. Without a CUDA graph, the time that TensorRT takes to
    enqueue the run counts where the device waits for it.

    Attributes:
        engine: The engine's file.
        cuda_graph: Whether a CUDA graph was replayed, or each run enqueued.
        iterations: Number of runs.
        mean: Mean latency.
        median: Median latency.
        p90: 90 % of the runs took no longer.
        p99: 99 % of the runs took no longer.
        throughput: Rows of the first input (its batch) each second, at the mean latency.
        difference: The largest absolute difference of an output from the first engine's; NaN if
            a difference is, or outputs have other names or shapes.
    """

    engine: Path
    cuda_graph: bool
    iterations: int
    mean: float
    median: float
    p90: float
    p99: float
    throughput: float
    difference: float

    def to_dict(self) -> dict[str, Any]:
        """The timing as strings and numbers."""
        return {**asdict(self), "engine": str(self.engine)}


@dataclass(frozen=True)
class BenchmarkReport:
    """Timings of engines on the same inputs; rich prints them as a table.

    Attributes:
        device: The GPU's name.
        shapes: Shapes of the inputs.
        timings: In the order of the engines; each without and then with a CUDA graph.
    """

    device: str
    shapes: Mapping[str, tuple[int, ...]]
    timings: tuple[Timing, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, ready for ``json.dumps``."""
        return {
            "device": self.device,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "timings": [timing.to_dict() for timing in self.timings],
        }

    def __rich__(self) -> RenderableType:
        """The table that rich prints."""
        from trt_plugin.engine.view import benchmark_view

        return benchmark_view(self.to_dict())


def bench_engines(
    engines: Sequence[str | PathLike[str]],
    shapes: Mapping[str, Sequence[int]] | None = None,
    *,
    warmup: int = 10,
    iterations: int = 100,
    cuda_graph: bool = True,
    builder: str | None = None,
) -> BenchmarkReport:
    """Runs engines on the same random inputs and measures each, in turns.

    Not verified on a GPU.

    Args:
        engines: Their files; such as one of target ``plugin`` and one of target ``dense``.
        shapes: Shapes of inputs; by default the usual ones of the first engine's first profile.
        warmup: Runs of each engine before the first that is measured.
        iterations: Runs of each engine that are measured.
        cuda_graph: Whether to measure replays of a CUDA graph, too.
        builder: The builder of all of them: ``"tensorrt"`` or ``"rtx"``; see :class:`Runner`.

    Raises:
        EngineError: If TensorRT or a GPU is missing, or the engines' inputs differ.
        ValueError: If there is no engine, a shape is of no input, or iterations is below 1.
    """
    import torch

    if not engines or iterations < 1 or warmup < 0:
        raise ValueError(
            "a benchmark needs an engine, at least 1 iteration and no negative warm-up; got "
            f"{len(engines)} engines, {iterations} iterations, {warmup} runs to warm up"
        )
    if not torch.cuda.is_available():
        raise EngineError("measuring engines needs a GPU, and a PyTorch that uses it")
    runners = [Runner(engine, builder=builder) for engine in engines]
    inputs = _inputs(engines, runners, shapes or {})
    # On the default stream, TensorRT waits for the whole device around each run.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        timings = _measure(
            [Path(engine) for engine in engines], runners, inputs, warmup, iterations, cuda_graph
        )
    return BenchmarkReport(
        device=torch.cuda.get_device_name(),
        shapes={name: tuple(tensor.shape) for name, tensor in inputs.items()},
        timings=tuple(timings),
    )


def timing(
    engine: Path,
    cuda_graph: bool,
    milliseconds: Sequence[float],
    rows: int,
    difference: float,
) -> Timing:
    """Summarises the latencies of runs on ``rows`` rows."""
    mean = statistics.fmean(milliseconds)
    ordered = sorted(milliseconds)
    return Timing(
        engine=engine,
        cuda_graph=cuda_graph,
        iterations=len(ordered),
        mean=mean,
        median=statistics.median(ordered),
        p90=_percentile(ordered, 90),
        p99=_percentile(ordered, 99),
        throughput=1000 * rows / mean,
        difference=difference,
    )


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """The nearest rank: the smallest value that ``percent`` % of them do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1]


def _inputs(
    engines: Sequence[str | PathLike[str]],
    runners: Sequence[Runner],
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, Tensor]:
    import torch

    first = runners[0]
    dtypes = {name: first.dtype(name) for name in first.inputs}
    for engine, runner in zip(engines, runners, strict=True):
        others = {name: runner.dtype(name) for name in runner.inputs}
        if others != dtypes:
            raise EngineError(
                f"engines must have the same inputs: {engines[0]} has {_listed(dtypes)}, {engine} "
                f"has {_listed(others)}"
            )
    unknown = [name for name in shapes if name not in dtypes]
    if unknown:
        raise ValueError(f"there is no input {unknown[0]}; the inputs: {', '.join(dtypes)}")
    chosen = {**first.usual_shapes(), **shapes}
    torch.manual_seed(0)
    return {name: _random(tuple(chosen[name]), dtype) for name, dtype in dtypes.items()}


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    import torch

    if dtype.is_floating_point:
        return torch.randn(shape, device=_DEVICE).to(dtype)
    # Zeros and ones are valid as ids and as masks.
    return torch.randint(2, shape, device=_DEVICE).to(dtype)


def _listed(dtypes: Mapping[str, torch.dtype]) -> str:
    return ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())


def _measure(
    engines: Sequence[Path],
    runners: Sequence[Runner],
    inputs: Mapping[str, Tensor],
    warmup: int,
    iterations: int,
    cuda_graph: bool,
) -> list[Timing]:
    import torch

    rows = next((tensor.shape[0] for tensor in inputs.values() if tensor.dim()), 1)
    prepared = [runner.prepare(**inputs) for runner in runners]
    results = [outputs for outputs, _ in prepared]
    # A capture needs an earlier run, too: it loads the kernels.
    for _, enqueue in prepared:
        enqueue()
    torch.cuda.synchronize()
    differences = [_difference(results[0], outputs) for outputs in results]
    runs: dict[tuple[int, bool], Callable[[], object]] = {}
    for at, (_, enqueue) in enumerate(prepared):
        runs[at, False] = enqueue
        if cuda_graph:
            runs[at, True] = _captured(enqueue).replay
    for run in runs.values():
        for _ in range(warmup):
            run()
    times: dict[tuple[int, bool], list[float]] = {key: [] for key in runs}
    for turn in range(_ROUNDS):
        for key, run in runs.items():
            count = iterations * (turn + 1) // _ROUNDS - iterations * turn // _ROUNDS
            times[key] += _milliseconds(run, count)
    return [
        timing(engines[at], graph, measured, rows, differences[at])
        for (at, graph), measured in times.items()
    ]


def _captured(enqueue: Callable[[], None]) -> torch.cuda.CUDAGraph:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()
    return graph


def _milliseconds(run: Callable[[], object], count: int) -> list[float]:
    """Times runs on the current stream, each between two events."""
    import torch

    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(count)
    ]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def _difference(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    import torch

    if {name: tensor.shape for name, tensor in first.items()} != {
        name: tensor.shape for name, tensor in other.items()
    }:
        return float("nan")
    distances = [
        (tensor.double() - other[name].double()).abs().max()
        for name, tensor in first.items()
        if tensor.numel()
    ]
    # A tensor's maximum is NaN if any element is; Python's depends on the order.
    return float(torch.stack(distances).max()) if distances else 0.0
