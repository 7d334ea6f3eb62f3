"""Layers whose experts do not all fit on the device, through the C++ launcher on the stand-in."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.plan import plan
from interpreted_gpu import uncompiled_program
from kernel_runs import call_tensors, layer_of, run_kernels
from moe_cases import Case, make_case
from small_bundles import LAYER, offloaded
from standin import LAUNCH_FAILED, RESOURCES
from streams_gpu import StreamsGpu, first_used, last_used
from trt_plugin.launcher import Cache, LauncherError, OpenProgram

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)

NOTHING = dict.fromkeys(RESOURCES, 0)


class Gpu:
    """A device with a context, whose streams work when they are asked to."""

    def __init__(self, driver, device: str = "sm_80") -> None:
        self.driver = driver
        self.architecture = architecture(device)
        self.streams = StreamsGpu(driver)
        self.context = driver.create_context(driver.add_device(self.architecture.capability))
        driver.set_context(self.context)

    def open(self, case: Case, resident: int) -> OpenProgram:
        layer = replace(layer_of(case), resident_experts=resident)
        planned = plan(layer, self.architecture)
        program = uncompiled_program(planned)
        self.streams.register(planned, program)
        for kernel in program.kernels:
            self.driver.add_image(kernel.image)
        return OpenProgram(program.data)


class Call:
    """The memory of a call: y and a workspace full of NaN. It must live until the call has run."""

    def __init__(self, program: OpenProgram, case: Case) -> None:
        self.tensors = call_tensors(case)
        self.tokens = len(self.tensors["x"])
        self.size = program.workspace_size(self.tokens)
        self.memory = torch.full((self.size + 3 * 256,), 0xFF, dtype=torch.uint8)
        self.begin = -self.memory.data_ptr() % 256 + 256

    def enqueue(self, cache: Cache, stream: int = 0) -> None:
        addresses = {name: tensor.data_ptr() for name, tensor in self.tensors.items()}
        workspace = self.memory.data_ptr() + self.begin
        cache.enqueue(self.tokens, addresses, workspace, self.size, stream)

    @property
    def y(self) -> Tensor:
        """The result; nothing around the workspace was written."""
        assert (self.memory[: self.begin] == 0xFF).all()
        assert (self.memory[self.begin + self.size :] == 0xFF).all()
        return self.tensors["y"]


def small_case(tokens: int = 5, seed: int = 0, **options) -> Case:
    sizes = {"width": 16, "hidden": 24, "experts": 6} | options
    return make_case("experts", (tokens,), seed=seed, **sizes)


@pytest.mark.each_value
@pytest.mark.parametrize(("device", "order"), [("sm_80", first_used), ("sm_90", last_used)])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("resident", [1, 2, 6])
def test_the_same_bits_as_fully_resident(driver, resident, tokens, device, order):
    case = small_case(tokens, dtype=torch.float16, activation="silu", gated=True)
    gpu = Gpu(driver, device)
    with gpu.open(case, resident) as program, program.open_cache() as cache:
        for _ in range(2):
            call = Call(program, case)
            call.enqueue(cache)
            gpu.streams.synchronize(order)
            assert torch.equal(call.y, run_kernels(case, device))
    assert driver.live() == NOTHING


# --- Sequences of calls ---


def routed(case: Case, experts: list[list[int]]) -> Case:
    """The case with each token's experts chosen."""
    ids = torch.tensor(experts, dtype=case.arguments["expert_ids"].dtype)
    return case.changed(expert_ids=ids)


def any_routing(case: Case, choose: torch.Generator) -> Case:
    tokens, top_k = case.arguments["expert_ids"].shape
    scores = torch.rand(tokens, len(case.arguments["w1"]), generator=choose)
    return routed(case, scores.argsort()[:, :top_k].tolist())


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picked(ready: list[Any], generator: torch.Generator) -> Any:
    return ready[int(torch.randint(len(ready), (), generator=generator))]


def check(call: Call, case: Case) -> None:
    assert torch.equal(call.y, run_kernels(case, "sm_80"))


@pytest.mark.parametrize("order", [first_used, last_used])
@pytest.mark.parametrize("resident", [1, 2, 5])
@pytest.mark.first(2)
def test_any_sequence_of_routings(driver, resident, order):
    gpu, choose = Gpu(driver), seeded(resident)
    base = small_case(3)
    with gpu.open(base, resident) as program, program.open_cache() as cache:
        for _ in range(5):
            case = any_routing(base, choose)
            call = Call(program, case)
            call.enqueue(cache)
            gpu.streams.synchronize(order)
            check(call, case)


def test_calls_are_enqueued_without_waiting(driver):
    """Every order of streams that several calls' events permit gives the same."""
    gpu, choose = Gpu(driver), seeded(3)
    base = small_case(3)
    with gpu.open(base, 2) as program, program.open_cache() as cache:
        for seed in range(2):
            pick = seeded(seed)
            cases = [any_routing(base, choose) for _ in range(3)]
            calls = [Call(program, case) for case in cases]
            for call in calls:
                call.enqueue(cache)
            gpu.streams.synchronize(partial(picked, generator=pick))
            for call, case in zip(calls, cases, strict=True):
                check(call, case)


def test_no_tokens_need_no_cache(driver):
    gpu = Gpu(driver)
    case = small_case(0)
    with gpu.open(case, 2) as program, program.open_cache() as cache:
        cache.enqueue(0, {}, 0, 0)
        assert driver.live() == NOTHING


# --- Failures ---

CALLED = {
    "cuMemAlloc": 1,
    "cuCtxGetStreamPriorityRange": 1,
    "cuStreamCreateWithPriority": 1,
    "cuEventCreate": 7,
    "cuMemsetD8Async": 4,
    "cuStreamSynchronize": 1,
    "cuStreamIsCapturing": 1,
    "cuEventRecord": 14,
    "cuStreamWaitEvent": 12,
    "cuLaunchKernelEx": 15,
}


def test_what_a_call_asks_the_driver_for(driver):
    gpu = Gpu(driver)
    case = routed(small_case(3), [[0, 1], [2, 3], [4, 5]])
    with gpu.open(case, 2) as program, program.open_cache() as cache:
        call = Call(program, case)
        call.enqueue(cache)
        assert {name: driver.calls(name) for name in CALLED} == CALLED
        gpu.streams.synchronize()


@pytest.mark.parametrize("function", CALLED)
@pytest.mark.first(3)
def test_the_call_after_a_failing_one_is_right(driver, function):
    case = routed(small_case(3), [[0, 1], [2, 3], [4, 5]])
    other = routed(case, [[5, 3], [1, 0], [0, 2]])
    # The first call, one in the middle of the waves, the last.
    for at in {0, CALLED[function] // 2, CALLED[function] - 1}:
        driver.reset()
        gpu = Gpu(driver)
        with gpu.open(case, 2) as program, program.open_cache() as cache:
            driver.fail(function, LAUNCH_FAILED, calls_before=at)
            failed = Call(program, case)
            with pytest.raises(LauncherError, match=f"{function}: CUDA_ERROR_LAUNCH_FAILED"):
                failed.enqueue(cache)
            # What the failed call has enqueued runs now, or together with the next one.
            if at == 0:
                gpu.streams.synchronize()
            for each, order in ((other, last_used), (case, first_used)):
                call = Call(program, each)
                call.enqueue(cache)
                gpu.streams.synchronize(order)
                check(call, each)
        assert driver.live() == NOTHING


@pytest.mark.parametrize(
    ("at", "clears"),
    [
        pytest.param(at, clears, marks=() if clears == at % 2 else pytest.mark.every)
        for at in range(CALLED["cuLaunchKernelEx"])
        for clears in (0, 1)
    ],
)
@pytest.mark.first(4)
def test_a_replay_after_a_failing_call_is_right(driver, at, clears):
    """If the cache cannot be emptied at once, it is by the next call."""
    gpu = Gpu(driver)
    base = routed(small_case(3), [[0, 1], [2, 3], [4, 5]])
    other = routed(base, [[5, 3], [1, 0], [0, 2]])
    weights = {name: base.arguments[name] for name in ("w1", "w2")}
    stream = driver.create_stream(gpu.context)
    with gpu.open(base, 2) as program, program.open_cache() as cache:
        cache.prepare()
        call, failed = Call(program, base), Call(program, other)
        call.tensors |= weights
        failed.tensors |= weights
        graph = gpu.streams.capture(stream, lambda: call.enqueue(cache, stream))
        gpu.streams.replay(graph)
        gpu.streams.synchronize()
        driver.fail("cuLaunchKernelEx", LAUNCH_FAILED, calls_before=at)
        if not clears:
            driver.fail("cuMemsetD8Async", LAUNCH_FAILED)
        with pytest.raises(LauncherError, match="cuLaunchKernelEx"):
            failed.enqueue(cache, stream)
        if not clears:
            failed.enqueue(cache, stream)
        gpu.streams.replay(graph)
        gpu.streams.synchronize(last_used)
        check(call, base)


def test_what_has_launched_nothing_leaves_the_cache_as_it_is(driver):
    gpu = Gpu(driver)
    case = small_case(3)
    stream = driver.create_stream(gpu.context)
    with gpu.open(case, 2) as program, program.open_cache() as cache:
        cache.prepare()
        cleared = driver.calls("cuMemsetD8Async")
        call = Call(program, case)
        addresses = {name: each.data_ptr() for name, each in call.tensors.items()}
        with pytest.raises(LauncherError, match="need a workspace of"):
            cache.enqueue(3, addresses, 256, 0, stream)
        # Neither must it be emptied before it is captured.
        assert gpu.streams.capture(stream, lambda: call.enqueue(cache, stream))
        assert driver.calls("cuMemsetD8Async") == cleared


def test_w1_and_w2_at_other_addresses_are_others(driver):
    gpu = Gpu(driver)
    first, second = small_case(3, seed=1), small_case(3, seed=2)
    with gpu.open(first, 5) as program, program.open_cache() as cache:
        for case in (first, second, first):
            call = Call(program, case)
            call.enqueue(cache)
            gpu.streams.synchronize()
            check(call, case)


def test_a_cache_stays_in_its_context(driver):
    gpu = Gpu(driver)
    case = small_case(3)
    with gpu.open(case, 2) as program, program.open_cache() as cache:
        cache.prepare()
        driver.set_context(driver.create_context())
        with pytest.raises(LauncherError, match="the expert cache lies in another CUDA context"):
            Call(program, case).enqueue(cache)
        driver.set_context(gpu.context)


def test_what_a_context_had_is_gone_with_it(driver):
    gpu = Gpu(driver)
    with gpu.open(small_case(3), 2) as program, program.open_cache() as cache:
        cache.prepare()
        driver.destroy_context(gpu.context)
        driver.set_context(driver.create_context())
    assert driver.calls("cuMemFree") == 0


def test_who_needs_a_cache(driver):
    gpu = Gpu(driver)
    case = small_case(3)
    with gpu.open(case, 2) as program:
        assert program.state_size() > 0
        tensors = {name: each.data_ptr() for name, each in call_tensors(case).items()}
        with pytest.raises(LauncherError, match="offloaded: it needs a cache of them"):
            program.enqueue(3, tensors, 256, 2**40)
    planned = plan(layer_of(case), gpu.architecture)
    with OpenProgram(uncompiled_program(planned).data) as program, program.open_cache() as cache:
        assert program.state_size() == 0
        with pytest.raises(LauncherError, match="not offloaded: it has no cache"):
            cache.enqueue(3, tensors, 256, 2**40)


def test_experts_whose_bytes_cannot_be_counted():
    layer = LAYER._replace(resident_experts=4, experts=1024, width=2**31, hidden=2**30)
    with (
        OpenProgram(offloaded(layer=layer).data) as program,
        pytest.raises(LauncherError, match=r"the layer's experts would have 2\^64 bytes or more"),
    ):
        program.open_cache(("0", "0"))


# --- Streams ---


@pytest.mark.each_value
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("order", [first_used, last_used])
def test_calls_on_two_streams(driver, shared, order):
    """Those of a shared cache wait for one another; else the caller sees to it."""
    gpu, choose = Gpu(driver), seeded(1)
    base = small_case(3)
    streams = [driver.create_stream(gpu.context) for _ in range(2)]
    with gpu.open(base, 2) as program, program.open_cache(shared=shared) as cache:
        for first in (0, 1):
            cases = [any_routing(base, choose) for _ in range(2)]
            calls = [Call(program, case) for case in cases]
            for call, stream in zip(calls, (streams[first], streams[1 - first]), strict=True):
                call.enqueue(cache, stream)
                if not shared:
                    gpu.streams.synchronize(order)
            gpu.streams.synchronize(order)
            for call, case in zip(calls, cases, strict=True):
                check(call, case)


def test_calls_of_a_shared_cache_wait_for_one_another_whatever_their_handles(driver):
    """The handle of the default stream of each thread is the same in all threads."""
    gpu = Gpu(driver)
    case = small_case(3)
    waits = {}
    for shared in (False, True):
        with gpu.open(case, 2) as program, program.open_cache(shared=shared) as cache:
            calls = [Call(program, case) for _ in range(2)]
            calls[0].enqueue(cache)
            before = driver.calls("cuStreamWaitEvent")
            calls[1].enqueue(cache)
            waits[shared] = driver.calls("cuStreamWaitEvent") - before
            gpu.streams.synchronize()
    assert waits[True] == waits[False] + 1


def test_a_call_on_another_stream_waits_for_one_that_failed(driver):
    gpu = Gpu(driver)
    case = routed(small_case(3), [[0, 1], [2, 3], [4, 5]])
    streams = [driver.create_stream(gpu.context) for _ in range(2)]
    with gpu.open(case, 2) as program, program.open_cache(shared=True) as cache:
        for order in (first_used, last_used):
            failed, call = Call(program, case), Call(program, case)
            driver.fail("cuLaunchKernelEx", LAUNCH_FAILED, calls_before=9)
            with pytest.raises(LauncherError, match="cuLaunchKernelEx"):
                failed.enqueue(cache, streams[0])
            call.enqueue(cache, streams[1])
            gpu.streams.synchronize(order)
            check(call, case)


# --- Captures ---


@pytest.mark.each_value
@pytest.mark.parametrize("order", [first_used, last_used])
@pytest.mark.parametrize("run_before", [False, True])
def test_a_captured_call_is_replayed_with_other_routings(driver, run_before, order):
    gpu, choose = Gpu(driver), seeded(2)
    base = small_case(3)
    stream = driver.create_stream(gpu.context)
    with gpu.open(base, 2) as program, program.open_cache() as cache:
        cache.prepare()
        if run_before:
            call = Call(program, base)
            call.tensors |= {name: base.arguments[name] for name in ("w1", "w2")}
            call.enqueue(cache, stream)
            gpu.streams.synchronize(order)
        call = Call(program, base)
        call.tensors |= {name: base.arguments[name] for name in ("w1", "w2")}
        graph = gpu.streams.capture(stream, lambda: call.enqueue(cache, stream))
        for _ in range(4):
            case = any_routing(base, choose)
            call.tensors["expert_ids"].copy_(case.arguments["expert_ids"])
            gpu.streams.replay(graph)
            gpu.streams.synchronize(order)
            check(call, case)


def test_a_capture_allocates_nothing(driver):
    gpu = Gpu(driver)
    case = small_case(3)
    stream = driver.create_stream(gpu.context)
    with gpu.open(case, 2) as program, program.open_cache() as cache:
        cache.prepare()
        before = {name: driver.calls(name) for name in ("cuMemAlloc", "cuEventCreate")}
        driver.set_capturing(True)
        call = Call(program, case)
        gpu.streams.capture(stream, lambda: call.enqueue(cache, stream))
        assert {name: driver.calls(name) for name in before} == before
        driver.set_capturing(False)


def test_a_shared_cache_is_not_captured(driver):
    gpu = Gpu(driver)
    case = small_case(3)
    stream = driver.create_stream(gpu.context)
    with gpu.open(case, 2) as program, program.open_cache(shared=True) as cache:
        cache.prepare()
        call = Call(program, case)
        message = "share cannot be captured: a graph does not wait for the others' calls"
        with pytest.raises(LauncherError, match=message):
            gpu.streams.capture(stream, lambda: call.enqueue(cache, stream))
        assert not gpu.streams.graph


def test_a_cache_that_must_be_emptied_is_not_captured(driver):
    gpu = Gpu(driver)
    case = small_case(3)
    stream = driver.create_stream(gpu.context)
    with gpu.open(case, 2) as program, program.open_cache() as cache:
        call = Call(program, case)
        cache.prepare()
        driver.fail("cuLaunchKernelEx", LAUNCH_FAILED, calls_before=1)
        # It cannot be emptied at once either.
        driver.fail("cuMemsetD8Async", LAUNCH_FAILED)
        with pytest.raises(LauncherError, match="cuLaunchKernelEx"):
            call.enqueue(cache, stream)
        message = "must be emptied, since a call has failed: run the layer once outside"
        with pytest.raises(LauncherError, match=message):
            gpu.streams.capture(stream, lambda: call.enqueue(cache, stream))
        call.enqueue(cache, stream)
        gpu.streams.synchronize()
        graph = gpu.streams.capture(stream, lambda: call.enqueue(cache, stream))
        assert graph


def test_what_fails_in_a_capture_has_not_run(driver):
    gpu = Gpu(driver)
    case = small_case(3)
    stream = driver.create_stream(gpu.context)
    with gpu.open(case, 2) as program, program.open_cache() as cache:
        cache.prepare()
        call = Call(program, case)
        driver.fail("cuLaunchKernelEx", LAUNCH_FAILED, calls_before=5)
        with pytest.raises(LauncherError, match="cuLaunchKernelEx"):
            gpu.streams.capture(stream, lambda: call.enqueue(cache, stream))
        graph = gpu.streams.capture(stream, lambda: call.enqueue(cache, stream))
        gpu.streams.replay(graph)
        gpu.streams.synchronize()
        check(call, case)
