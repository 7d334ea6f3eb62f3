"""Engines measured beside each other, on runners and a clock of the tests' own."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import trt_plugin
from dynamo_moe.cli import app
from trt_plugin.engine import benchmark

# Milliseconds of one run of each engine; a graph's replay takes half of it.
MILLISECONDS = {"plugin.engine": 2.0, "dense.engine": 5.0}


class Clock:
    """The device's time, and the order in which engines ran on it."""

    now = 0.0
    capturing = None
    stream = None

    def __init__(self):
        self.ran: list[tuple[str, bool]] = []

    @contextmanager
    def on(self, stream):
        self.stream = stream
        yield
        self.stream = None

    def run(self, name: str, graph: bool = False) -> None:
        assert self.stream is not None, "TensorRT waits for the device on the default stream"
        self.ran.append((name, graph))
        self.now += MILLISECONDS[name] / (2 if graph else 1)


class Runner:
    """Adds a constant of its own to x."""

    clock: Clock
    inputs, outputs = ("x", "ids"), ("y",)

    def __init__(self, engine, *, builder=None):
        self.name = engine.name
        self.builder = builder

    def dtype(self, name: str) -> torch.dtype:
        return torch.int64 if name == "ids" else torch.float32

    def usual_shapes(self):
        return {"x": (4, 8), "ids": (4, 2)}

    def prepare(self, x, ids):
        assert ids.max() <= 1
        # Not in the time of a run.
        self.clock.now += 1000
        y = torch.full_like(x, torch.nan)

        def enqueue() -> None:
            if self.clock.capturing is None:
                self.clock.run(self.name)
            else:
                self.clock.capturing.name = self.name
            y.copy_(x + (0.25 if self.name == "dense.engine" else 0.0))

        return {"y": y}, enqueue


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now

        def elapsed_time(self, end):
            return end.at - self.at

    class Graph:
        name: str

        def replay(self):
            clock.run(self.name, graph=True)

    class Capture(nullcontext):
        def __enter__(self):
            clock.capturing = self.enter_result

        def __exit__(self, *error):
            clock.capturing = None

    monkeypatch.setattr(Runner, "clock", clock, raising=False)
    monkeypatch.setattr(benchmark, "Runner", Runner)
    monkeypatch.setattr(benchmark, "_DEVICE", "cpu")
    for name, value in {
        "is_available": lambda: True,
        "get_device_name": lambda: "a GPU",
        "synchronize": lambda: None,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": Capture,
        "Stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
        "current_stream": lambda: "the default",
        "stream": clock.on,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return clock


@pytest.fixture
def engines(tmp_path):
    paths = [tmp_path / name for name in MILLISECONDS]
    for path in paths:
        path.touch()
    return paths


def test_engines_are_measured_in_turns(clock, engines):
    report = trt_plugin.bench_engines(engines, warmup=3, iterations=10)
    assert (report.device, report.shapes) == ("a GPU", {"x": (4, 8), "ids": (4, 2)})
    assert [
        (each.engine.name, each.cuda_graph, each.iterations, each.mean) for each in report.timings
    ] == [
        ("plugin.engine", False, 10, 2.0),
        ("plugin.engine", True, 10, 1.0),
        ("dense.engine", False, 10, 5.0),
        ("dense.engine", True, 10, 2.5),
    ]
    first = report.timings[0]
    assert (first.throughput, first.difference) == (4 / 0.002, 0.0)
    assert report.timings[2].difference == pytest.approx(0.25, abs=1e-6)
    # One run each for the results, the warm-up, then five rounds.
    runs = [(name, graph) for name in MILLISECONDS for graph in (False, True)]
    once = [(name, False) for name in MILLISECONDS]
    warm = [run for run in runs for _ in range(3)]
    assert clock.ran == once + warm + 5 * [run for run in runs for _ in range(2)]


def test_iterations_that_rounds_do_not_divide(clock, engines):
    report = trt_plugin.bench_engines(engines, warmup=0, iterations=7, cuda_graph=False)
    assert [each.iterations for each in report.timings] == [7, 7]


def test_percentiles_are_measured_values():
    times = [float(at) for at in range(1, 201)]
    summary = benchmark.timing(None, False, times[::-1], 8, 0.0)
    assert (summary.median, summary.p90, summary.p99) == (100.5, 180.0, 198.0)
    assert summary.throughput == 8000 / summary.mean == 8000 / 100.5
    single = benchmark.timing(None, False, [3.0], 1, 0.0)
    assert (single.median, single.p90, single.p99) == (3.0, 3.0, 3.0)


def test_outputs_of_other_shapes_have_no_difference():
    first = {"y": torch.zeros(2)}
    assert math.isnan(benchmark._difference(first, {"y": torch.zeros(3)}))
    assert math.isnan(benchmark._difference(first, {"z": torch.zeros(2)}))
    assert benchmark._difference(first, {"y": torch.tensor([0.5, -2.0])}) == 2.0
    assert benchmark._difference({"y": torch.zeros(0)}, {"y": torch.zeros(0)}) == 0.0


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_difference_that_is_nan_stays(at):
    first = {name: torch.zeros(2) for name in "abc"}
    other = {name: torch.ones(2) for name in "abc"}
    other["abc"[at]][1] = math.nan
    assert math.isnan(benchmark._difference(first, other))


def test_what_makes_no_sense(clock, engines, monkeypatch):
    with pytest.raises(ValueError, match=r"needs an engine, .* got 0 engines, 100 iterations"):
        trt_plugin.bench_engines([])
    with pytest.raises(ValueError, match="there is no input z; the inputs: x, ids"):
        trt_plugin.bench_engines(engines, {"z": (1,)})
    monkeypatch.setattr(
        Runner,
        "dtype",
        lambda self, name: torch.float16 if self.name == "dense.engine" else torch.float32,
    )
    with pytest.raises(
        trt_plugin.EngineError, match=r"same inputs: .* x torch\.float32, .* x torch\.float16"
    ):
        trt_plugin.bench_engines(engines)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(trt_plugin.EngineError, match="needs a GPU"):
        trt_plugin.bench_engines(engines)


def test_the_command_prints_one_table(clock, engines):
    arguments = ["bench-engine", *map(str, engines), "--iterations", "5", "--shape", "x=2x8"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    report = json.loads(done.stdout)
    assert report["shapes"] == {"x": [2, 8], "ids": [4, 2]}
    assert [each["mean"] for each in report["timings"]] == [2.0, 1.0, 5.0, 2.5]
    printed = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}).stdout
    assert printed.splitlines()[0].strip() == "a GPU, x [2, 8], ids [4, 2]"
    row = next(line for line in printed.splitlines() if "dense.engine" in line)
    assert row.split()[1:] == ["no", *4 * ["5.000"], "400", "2.5e-01"]
    for wrong in ("x=2x8:4x8:8x8", "x"):
        done = CliRunner().invoke(app, ["bench-engine", str(engines[0]), "--shape", wrong])
        assert done.exit_code == 2
        assert "--shape" in done.stderr
