"""The parts of the GPU benchmark that need no GPU: floors, goals, routing, reports, a trial run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from benchmarks.gpu import compiling, fused_moe, speed, timing
from benchmarks.gpu.cells import GROUPED, OURS, Bench, Cell, Result, launches_alone
from benchmarks.gpu.compiling import kernel_key, plan_jobs
from benchmarks.gpu.fused_moe import CONFIGS, Config, candidates, fused_router
from benchmarks.gpu.goals import Rates, expected_active, floor, geometric_mean, judge
from benchmarks.gpu.layers import (
    LLM_TOKENS,
    ROUTINGS,
    SHAPES,
    SWIN_BATCHES,
    matching,
    parameters_of,
    random_routing,
)
from benchmarks.gpu.peers import grouped, torch_router
from benchmarks.gpu.timing import HostTimer, Times, samples_for
from custom_ops import reference
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.launch import launch
from custom_ops.kernels.plan import plan
from moe_cases import assert_matches

ROOT = Path(__file__).parents[2]
# Rates of one H200.
RATES = Rates(bandwidth=4.3e12, flops=790e12)
# Fused and split floors in us, calculated once by hand from the layers' sizes.
FLOORS = {
    "mixtral": "164/164 649/649 656/656 913/917 3654/3685 14615/14739",
    "qwen3": "17.7/17.7 181/181 281/281 283/299 394/437 1577/1722",
    "deepseek": "165/165 2090/2090 5155/5155 5252/5322 5272/5571 14690/15181",
    "gpt-oss": "46/46 327/327 371/371 373/373 1033/1065 4132/4260",
    "swin1": "1.2/1.5 9.4/20 38/99 75/206 151/413",
    "swin2": "1.2/1.3 9.4/10.5 38/42 75/101 150/207",
    "swin3": "4.5/4.5 9.4/9.9 38/40 75/79 150/168",
    "swin4": "17.6/17.6 17.8/17.8 38/39 75/77 150/154",
}


@pytest.mark.parametrize("name", FLOORS)
def test_floors(name):
    shape = SHAPES[name]
    for count, cell in zip(shape.counts, FLOORS[name].split(), strict=True):
        tokens = count * shape.per_image
        active = expected_active(shape.experts, shape.top_k, tokens)
        found = floor(shape, tokens, active, RATES)
        for text, value in zip(cell.split("/"), (found.fused, found.split), strict=True):
            unit = 0.1 if "." in text else 1
            assert abs(value - float(text)) <= 0.6 * unit, f"{count}: {value}, not {text}"


def test_a_floor_without_router_has_no_router():
    shape = SHAPES["qwen3"]
    assert floor(shape, 16, 82, RATES, router=False).router == 0
    assert floor(shape, 16, 82, RATES, router=False).split < floor(shape, 16, 82, RATES).split


@given(tokens=st.integers(1, 2**16), name=st.sampled_from(sorted(SHAPES)))
def test_no_floor_is_above_that_of_the_stages(tokens, name):
    shape = SHAPES[name]
    found = floor(shape, tokens, expected_active(shape.experts, shape.top_k, tokens), RATES)
    assert 0 < found.fused <= found.split * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "count", "goal", "limit"),
    [
        ("qwen3", 1, "one token: floor + 8 us", 25.7),
        ("deepseek", 1024, "memory-bound, T >= 16: 92 % of the floor", 5785),
        ("mixtral", 4096, "Mixtral and gpt-oss, T >= 4096: 80 % of the floor", 4606),
        ("gpt-oss", 16384, "Mixtral and gpt-oss, T >= 4096: 80 % of the floor", 5325),
        ("qwen3", 16384, "Qwen3, T = 16384: 70 % of the floor", 2460),
        ("swin1", 1, "Swin, batch 1: 15 us", 15),
        ("swin2", 64, "Swin, batch 64: 60 % of the floor", 168),
        ("swin2", 8, None, None),
        ("mixtral", 1024, None, None),
    ],
)
def test_goals(name, count, goal, limit):
    shape = SHAPES[name]
    tokens = count * shape.per_image
    found = floor(shape, tokens, expected_active(shape.experts, shape.top_k, tokens), RATES)
    if goal is None:
        assert judge(shape, count, found, 1.0) is None
        return
    met, missed = (judge(shape, count, found, limit * f) for f in (0.995, 1.005))
    assert met.goal == missed.goal == goal
    assert met.met
    assert not missed.met


def test_a_goal_below_the_floor_says_so():
    shape = SHAPES["swin4"]
    found = floor(shape, 49, expected_active(8, 2, 49), RATES)
    assert not judge(shape, 1, found, 20.0).possible


def test_geometric_mean():
    assert geometric_mean([1, 4]) == pytest.approx(2)
    assert math.isnan(geometric_mean([]))


@pytest.mark.parametrize("kind", ROUTINGS)
def test_routing(kind):
    ids, weights = random_routing(kind, 4000, 16, 4)
    assert ids.shape == weights.shape == (4000, 4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4000))
    counts = ids.flatten().bincount(minlength=16).sort(descending=True).values.tolist()
    if kind == "one":
        assert counts == [16000, *[0] * 15]
        return
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert max(counts) < (4000 if kind == "zipf" else 1200)
    assert (counts[0] > 4 * counts[-1]) == (kind == "zipf")
    assert torch.equal(ids, random_routing(kind, 4000, 16, 4)[0])


def test_an_unknown_routing_is_refused():
    with pytest.raises(ValueError, match=r"uniform, zipf, one; got 'even'"):
        random_routing("even", 1, 2, 1)


def test_names_of_shapes():
    assert [shape.name for shape in matching("swin,qwen3")] == [
        *("swin1", "swin2", "swin3", "swin4", "qwen3")
    ]
    assert "tiny" not in [shape.name for shape in matching("")]
    with pytest.raises(ValueError, match=r"shapes must be among mixtral.*got 'llama'"):
        matching("qwen3,llama")


def test_every_shape_is_a_layer_with_kernels():
    for shape in SHAPES.values():
        for router in (True, False):
            layer = shape.layer(torch.bfloat16, router=router)
            assert plan(layer, architecture("sm_90")).at(max(shape.counts))


def small(name: str):
    shape = SHAPES[name]
    router = replace(shape.router, top_k=2)
    if router.limits_groups:
        router = replace(router, n_group=3, topk_group=2)
    return replace(shape, width=32, hidden=24, experts=6, top_k=2, router=router)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "swin1"])
def test_peers_compute_the_layer(name, kind):
    shape = small(name)
    given_ = parameters_of(shape, torch.float32, "cpu")
    x = torch.randn(37, 32, generator=torch.Generator().manual_seed(0))
    routing = random_routing(kind, 37, 6, 2)
    experts = (given_["w1"], given_.get("b1"), given_["w2"], given_.get("b2"))
    expected = reference.experts(x, *routing, *experts, shape.options)
    assert_matches(grouped(shape, given_, x, routing), expected, {torch.float32})
    fused = fused_moe.fused_moe(shape, given_, x, routing, Config(16, 32, 16, 2, 4, 2))
    assert_matches(fused, expected, {torch.float32})


@pytest.mark.parametrize("name", ["qwen3", "deepseek", "gpt-oss"])
def test_peers_route_like_the_layer(name):
    shape = small(name)
    given_ = parameters_of(shape, torch.float32, "cpu")
    x = torch.randn(37, 32, generator=torch.Generator().manual_seed(0))
    ids, weights = reference.router(
        x,
        given_["router_weight"],
        given_.get("router_bias"),
        shape.router,
        given_.get("selection_bias"),
    )
    for router in (torch_router, fused_router):
        found = router(shape, given_, x)
        assert torch.equal(found[0].long(), ids)
        torch.testing.assert_close(found[1].double(), weights, rtol=1e-5, atol=1e-6)


def test_every_number_of_tokens_has_configurations_of_the_peer():
    for shape in SHAPES.values():
        for count in shape.counts:
            found = candidates(shape, count * shape.per_image)
            assert found
            assert set(found) <= set(CONFIGS)


def test_cells_in_order_of_importance():
    cells = list(speed.cells_of(matching(""), set(), ROUTINGS))
    uniform = len(LLM_TOKENS) * 4 + len(SWIN_BATCHES) * 4
    assert [cell.routing for cell in cells[:uniform]] == ["uniform"] * uniform
    assert {cell.count for cell in cells[uniform:]} == {16, 64, 1024, 4096}
    asked = list(speed.cells_of(matching("qwen3"), {16384}, ["zipf"]))
    assert [str(cell) for cell in asked] == ["qwen3:16384:zipf"]


def test_samples():
    assert samples_for(100) >= 50
    assert samples_for(9_000) >= 50
    assert 10 <= samples_for(14_000) < 50


# --- Results without a GPU ---


def result(name: str, count: int, **cold: float) -> Result:
    shape = SHAPES[name]
    cell = Cell(shape, count)
    active = expected_active(shape.experts, shape.top_k, cell.tokens)
    times = {version: Times(us, us, 60) for version, us in cold.items()}
    return Result(cell, round(active), floor(shape, cell.tokens, active, RATES), times, dict(times))


RESULTS = [
    result("qwen3", 1, ours=20, grouped_mm=60, fused_moe=40),
    result("qwen3", 4096, ours=600, grouped_mm=900, fused_moe=600),
    result("swin4", 1, ours=19, grouped_mm=80, fused_moe=50),
]


def test_tables():
    text = speed.shape_table(RESULTS[:2])
    assert "3.00x" in text
    assert "met (<= 25.7)" in text
    assert "missed" not in text
    goals = speed.goals_table(RESULTS)
    assert "0 of 1 (1 below the floor)" in goals
    assert "met: 2.67x over 3 cells" in goals
    wrong = replace(RESULTS[0], wrong={GROUPED: "3 of 4 rows differ from ours"})
    assert "WRONG: grouped_mm 3 of 4 rows" in speed.shape_table([wrong])


def test_a_cell_in_which_ours_failed():
    failed = result("qwen3", 16, grouped_mm=200)
    assert failed.share is None
    assert failed.verdict is None
    assert "failed" in speed.shape_table([failed])
    assert speed.peer_means([failed])[GROUPED]["cells"] == 0


def test_json():
    found = speed.Device.chosen(dry_run=True).conditions() | {"dtype": "bfloat16"}
    results = speed.Results(RATES, RESULTS, ["mixtral:1"])
    again = json.loads(json.dumps(found | results.to_json()))
    assert again["cells"][0]["cold us"]["ours"]["median"] == 20
    assert again["geometric means"][GROUPED]["mean"] == pytest.approx(
        (3 * 1.5 * 80 / 19) ** (1 / 3)
    )
    assert again["versions"]["torch"]


def test_a_wrong_version_is_found(monkeypatch):
    shape = small("qwen3")
    bench = Bench(shape, parameters_of(shape, torch.float32, "cpu"), HostTimer(), RATES, (GROUPED,))
    good = bench.measure(Cell(shape, 50))
    assert not good.wrong
    assert set(good.cold) == set(good.warm) == {OURS, GROUPED}
    monkeypatch.setattr("benchmarks.gpu.cells.grouped", lambda *a: 1.1 * grouped(*a))
    assert bench.measure(Cell(shape, 50)).wrong == {GROUPED: "50 of 50 rows differ from ours"}


@pytest.mark.every
def test_each_cell_is_saved():
    """What ends the process between two cells loses neither."""
    results = speed.Results(RATES)
    saved: list[list[int]] = []
    speed.measure_cells(
        [Cell(SHAPES["tiny"], count, "one") for count in (1, 5)],
        *(speed.Device.chosen(dry_run=True), torch.float32, math.inf, results),
        lambda: saved.append([each.cell.count for each in results.cells]),
    )
    assert saved == [[1], [1, 5]]


def test_a_version_that_fails_is_left_out(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such product\nand more")

    shape = small("swin1")
    monkeypatch.setattr("benchmarks.gpu.cells.grouped", broken)
    bench = Bench(shape, parameters_of(shape, torch.float32, "cpu"), HostTimer(), RATES, (GROUPED,))
    found = bench.measure(Cell(shape, 2))
    assert found.left_out == {GROUPED: "RuntimeError: no such product"}
    assert set(found.cold) == {OURS}


def test_launches_one_by_one_are_the_layer():
    shape = small("qwen3")
    parameters = parameters_of(shape, torch.float32, "cpu")
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    planned = plan(shape.layer(torch.float32), architecture("sm_80"))
    together, apart = torch.empty_like(x), torch.empty_like(x)
    launch(planned, {**parameters, "x": x, "y": together})
    for _, call in launches_alone(planned, {**parameters, "x": x, "y": apart}):
        call()
    assert torch.equal(apart, together)


# --- Timing, on a fake device ---


class FakeCuda:
    """The parts of torch.cuda that the timer uses; calls advance a clock, graphs replay nothing."""

    def __init__(self, *, inside: bool) -> None:
        self.clock = 0.0
        self.captures = 0
        cuda = self

        class Event:
            def __init__(self, *, enable_timing: bool, external: bool = False) -> None:
                if external and not inside:
                    raise TypeError("no argument external")
                self.at = math.nan

            def record(self) -> None:
                self.at = cuda.clock

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class CUDAGraph:
            def capture_begin(self, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                cuda.captures += 1

            def capture_end(self) -> None:
                pass

            def replay(self) -> None:
                cuda.clock += 1.0

        self.Event, self.CUDAGraph, self.Stream = Event, CUDAGraph, object

    def stream(self, _: object):
        return nullcontext()

    def synchronize(self) -> None:
        pass


def fake_torch(cuda: FakeCuda) -> SimpleNamespace:
    def add(*_: object, **__: object) -> None:
        cuda.clock += 1.0

    return SimpleNamespace(
        cuda=cuda, randn=lambda *_, **__: None, zeros=lambda *_, **__: None, sum=add
    )


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("cold", [True, False])
def test_calls_take_turns(monkeypatch, cold, inside):
    cuda = FakeCuda(inside=inside)
    monkeypatch.setattr(timing, "torch", fake_torch(cuda))
    timer = timing.GraphTimer()
    assert timer.method.startswith("events inside" if inside else "events around")

    def call(milliseconds: float) -> None:
        cuda.clock += milliseconds

    def broken() -> None:
        raise ValueError("not today\nnor tomorrow")

    calls = {"a": lambda: call(1), "b": lambda: call(3), "c": broken}
    found = timer(calls, cold=cold)
    assert found.failed == {"c": "ValueError: not today"}
    expected = (1000, 3000) if inside else (1000, 1000)
    assert (found.times["a"].median, found.times["b"].median) == expected
    assert all(times.samples == 60 for times in found.times.values())
    assert timer({"c": broken}).times == {}
    assert timer({"a": calls["a"]}, samples=5).times["a"].samples == 5


def test_a_capture_that_fails_is_ended(monkeypatch):
    cuda = FakeCuda(inside=True)
    monkeypatch.setattr(timing, "torch", fake_torch(cuda))
    timer = timing.GraphTimer()
    before = cuda.captures

    def synchronises() -> None:
        if cuda.captures > before:
            raise RuntimeError("operation not permitted when stream is capturing")

    assert "not permitted" in timer({"a": synchronises}).failed["a"]


# --- Compiling in advance ---


def test_launches_that_share_a_kernel_are_compiled_once():
    layer = SHAPES["qwen3"].layer(torch.bfloat16)
    on = architecture("sm_90")
    jobs = list(plan_jobs(layer, on, [1, 2, 16, 1024, 16384]))
    planned = plan(layer, on)
    spans = {planned.ranges.index(planned.at(t)) for t in (1, 2, 16, 1024, 16384)}
    assert len(jobs) == sum(len(planned.ranges[span].launches) for span in spans)
    assert len(dict(jobs)) <= len(jobs)
    assert [kernel_key(job.spec) for _, job in jobs] == [key for key, _ in jobs]


def test_a_kernel_is_compiled_for_the_arguments_of_its_launch(monkeypatch):
    layer = SHAPES["gpt-oss"].layer(torch.bfloat16)
    seen: list[dict[str, object]] = []
    monkeypatch.setattr(compiling, "compile_only", lambda kernel, grid, **given: seen.append(given))
    jobs = [job for _, job in plan_jobs(layer, architecture("sm_90"), [1, 16, 33, 16384])]
    for job in jobs:
        job(device="cpu")
    for job, given_ in zip(jobs, seen, strict=True):
        assert tuple(given_)[: len(job.spec.arguments)] == tuple(job.spec.arguments)
        assert given_["num_warps"] == job.spec.num_warps
        assert given_["launch_pdl"] == job.spec.dependent_launch


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "swin1"])
def test_the_peer_is_compiled_for_what_it_launches(monkeypatch, name):
    """Compiling takes the same kernels, constants and dtypes, in the same order, as a call does."""
    shape, config = small(name), Config(16, 32, 16, 2, 4, 2)

    def kinds(arguments):
        return {
            key: value.dtype if isinstance(value, torch.Tensor) else value
            for key, value in arguments.items()
            if isinstance(value, torch.Tensor) or key.isupper() or value is None
        }

    def noting(to):
        return lambda kernel, grid, **given: to.append((kernel.fn.__name__, kinds(given)))

    compiled: list[Any] = []
    launched: list[Any] = []
    fused_moe.compile_for(shape, torch.float32, config, noting(compiled), device="cpu")
    parameters = parameters_of(shape, torch.float32, "cpu")
    x, start = torch.randn(37, 32), noting(launched)
    ids, weights = fused_router(shape, parameters, x, start)
    for routing in ((ids, weights), (ids.long(), weights)):
        fused_moe.fused_moe(shape, parameters, x, routing, config, start)
    assert compiled == launched


@dataclass(frozen=True)
class FakeJob:
    problem: str = ""

    def __call__(self) -> None:
        if self.problem:
            raise RuntimeError(self.problem)


@pytest.fixture
def one_core(monkeypatch):
    """Every process that compiles takes long to start."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})


@pytest.mark.every
def test_jobs_that_fail_are_told_apart():
    jobs = {"a": FakeJob(), "b": FakeJob("no registers left"), "c": FakeJob()}
    assert compiling.compile_jobs(jobs) == {"b": "RuntimeError: no registers left"}
    assert compiling.compile_jobs({}) == {}


def test_jobs_that_do_not_begin_in_time_are_left_out(one_core):
    jobs = dict.fromkeys(range(500), partial(time.sleep, 0.01))
    late = compiling.compile_jobs(jobs, seconds=0.0)
    assert late
    assert set(late.values()) == {"not compiled in time"}


# --- The commands ---


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["speed", "tune_kernels"])
def test_without_a_gpu(name):
    found = run(f"benchmarks.gpu.{name}")
    assert found.returncode == 2
    assert "needs a CUDA device; --dry-run" in found.stderr


def test_the_check_needs_nothing_but_torch_triton_numpy_and_pytest():
    absent = (
        "hypothesis matplotlib onnx onnx_ir onnxruntime onnxscript rich transformers typer xdist"
    )
    needed = (
        "benchmarks.gpu.check benchmarks.gpu.speed benchmarks.gpu.tune_kernels "
        "trt_plugin.compiling.ahead_of_time test_gpu test_gpu_launcher"
    )
    folders = (ROOT, *(ROOT / "tests" / name for name in ("support", "ops", "trt")))
    code = (
        f"import importlib, sys; sys.modules |= dict.fromkeys({absent.split()})\n"
        f"for name in {needed.split()}: importlib.import_module(name)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
