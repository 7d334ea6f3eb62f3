"""The C++ launcher on a real driver: to the bit what the Python launcher computes.

Legend: T tokens, E experts, K = top_k.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gpu_cases
from custom_ops.kernels.launch import launch
from custom_ops.kernels.plan import plan
from gpu_cases import gpu_case, launch_poisoned, plan_of
from kernel_runs import call_tensors, in_out, layer_of
from moe_cases import OPS, Case, assert_matches
from packed_cases import packed_case
from trt_plugin.launcher import Cache, LauncherError, OpenProgram
from weights_files import save_experts

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
TOKENS = (1, 2, 16, 40, 129, 1500)
OPTIONS = {
    "norm": {"pre_norm": "rms", "residual": True},
    "groups": {"scoring": "sigmoid", "group_scoring": "top2_sum", "n_group": 8, "topk_group": 4},
}


@pytest.fixture(scope="module")
def opened():
    """Opens the program of a case, compiled once for all cases of the same layer."""
    import trt_plugin

    programs: dict[object, OpenProgram] = {}

    def program(case: Case, resident_experts: int | None = None) -> OpenProgram:
        layer = replace(layer_of(case).canonical(), resident_experts=resident_experts)
        if layer not in programs:
            device = gpu_cases.architecture().name
            bundle = trt_plugin.compile([layer], [device], progress=False)
            programs[layer] = OpenProgram(bundle.programs[0].data)
        return programs[layer]

    yield program
    torch.cuda.synchronize()
    for each in programs.values():
        each.close()


class Enqueued:
    """One enqueued call and the memory that it uses until its stream is done.

    With a cache, ``weights`` are w1 and w2 in pinned memory; none where the cache has files.
    """

    def __init__(
        self, program: OpenProgram, case: Case, cache: Cache | None = None, **weights: Tensor
    ) -> None:
        x = case.arguments["x"]
        self.y = torch.full_like(x, float("nan"))
        size = program.workspace_size(len(x))
        self.workspace = torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, device="cuda")
        self.tensors = case.arguments | {"y": self.y} | weights
        addresses = {n: t.data_ptr() for n, t in self.tensors.items() if isinstance(t, Tensor)}
        stream = torch.cuda.current_stream().cuda_stream
        called = cache or program
        called.enqueue(len(x), addresses, self.workspace.data_ptr(), size, stream)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [96, 136])
def test_the_same_bits_as_the_python_launcher(opened, op, tokens, width):
    case = gpu_case(op, tokens, width=width, dtype=BF16, activation="silu", gated=True)
    result = Enqueued(opened(case), case).y
    assert_matches(result, case.oracle(), case.dtypes)
    assert torch.equal(result, launch_poisoned(plan_of(case), case))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("tokens", [2, 40, 1500])
def test_options_give_the_same_bits_too(opened, tokens, options):
    sizes = {"experts": 64, "top_k": 4, "selection_bias": True}
    case = gpu_case("dropless", tokens, dtype=BF16, **sizes, **options)
    result = Enqueued(opened(case), case).y
    assert_matches(result, case.oracle(), case.dtypes)
    assert torch.equal(result, launch_poisoned(plan_of(case), case))


@pytest.mark.parametrize("weights", [("w1",), ("w2",), ("w1", "w2")])
@pytest.mark.parametrize("tokens", TOKENS)
def test_weights_that_lie_as_in_out_give_the_same_bits_too(opened, tokens, weights):
    case = in_out(gpu_case("dropless", tokens, dtype=BF16, activation="silu", gated=True), *weights)
    result = Enqueued(opened(case), case).y
    assert_matches(result, case.oracle(), case.dtypes)
    assert torch.equal(result, launch_poisoned(plan_of(case), case))


@pytest.mark.parametrize("form", ["int4", "mxfp4", "fp8", "nvfp4", "int8"])
@pytest.mark.parametrize("tokens", [2, 40, 1500])
def test_packed_weights_give_the_same_bits_too(opened, tokens, form):
    sizes = {"width": 512, "hidden": 256, "experts": 8}
    on_host = packed_case("experts", form, group=32, shape=(tokens,), dtype=BF16, **sizes)
    tensors = {n: t.cuda() for n, t in on_host.arguments.items() if isinstance(t, Tensor)}
    case = on_host.changed(**tensors)
    result = Enqueued(opened(case), case).y
    assert_matches(result.cpu(), on_host.decoded().oracle(), on_host.plain.dtypes)
    expected = call_tensors(case)
    launch(plan(layer_of(case), gpu_cases.architecture()), expected)
    assert torch.equal(result, expected["y"])


def test_no_tokens(opened):
    case = gpu_case("dropless", 0, dtype=BF16)
    assert Enqueued(opened(case), case).y.shape == (0, 136)


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_graph(opened, tokens):
    case = gpu_case("dropless", tokens, dtype=BF16)
    program = opened(case)
    expected = Enqueued(program, case).y
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = Enqueued(program, case)
    captured.y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.y, expected)


def test_threads_and_streams_at_once(opened):
    cases = [gpu_case("dropless", tokens, dtype=BF16) for tokens in (2, 40, 300, 1500)]
    program = opened(cases[0])
    expected = [Enqueued(program, case).y for case in cases]
    torch.cuda.synchronize()
    wrong: list[object] = []

    def work(case: Case, right: Tensor) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(25):
                    result = Enqueued(program, case).y
                    torch.cuda.current_stream().synchronize()
                    if not torch.equal(result, right):
                        wrong.append(len(right))
        except RuntimeError as error:
            wrong.append(error)

    threads = [
        threading.Thread(target=work, args=each) for each in zip(cases, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- Offloaded experts ---


def offloaded_case(tokens: int, seed: int = 0) -> Case:
    gated = {"dtype": BF16, "activation": "silu", "gated": True}
    return gpu_case("experts", tokens, experts=16, seed=seed, **gated)


def pinned(case: Case) -> dict[str, Tensor]:
    return {name: case.arguments[name].cpu().pin_memory() for name in ("w1", "w2")}


@pytest.mark.parametrize("resident", [1, 2, 15, 16])
@pytest.mark.parametrize("tokens", TOKENS)
def test_offloaded_experts_give_the_same_bits(opened, tokens, resident):
    case = offloaded_case(tokens)
    expected = Enqueued(opened(case), case).y
    program = opened(case, resident)
    weights = pinned(case)
    with program.open_cache() as cache:
        for _ in range(3):
            result = Enqueued(program, case, cache, **weights).y
            torch.cuda.synchronize()
            assert torch.equal(result, expected)


def test_offloaded_experts_of_a_file(opened, tmp_path: Path):
    case = offloaded_case(40)
    expected = Enqueued(opened(case), case).y
    program = opened(case, 4)
    on_cpu = case.changed(**{name: case.arguments[name].cpu() for name in ("w1", "w2")})
    sources = save_experts(tmp_path / "experts.safetensors", on_cpu)
    with program.open_cache(sources) as cache:
        for _ in range(3):
            result = Enqueued(program, case, cache).y
            torch.cuda.synchronize()
            assert torch.equal(result, expected)
        # Not every file system's pages can be pinned.
        assert not cache.note() or "are copied to pinned memory" in cache.note()


def test_a_graph_of_offloaded_experts_is_replayed_with_other_routings(opened):
    case = offloaded_case(2)
    resident, program, weights = opened(case), opened(case, 4), pinned(case)
    with program.open_cache() as cache:
        cache.prepare()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = Enqueued(program, case, cache, **weights)
        ids = case.arguments["expert_ids"]
        for shift in range(8):
            ids.copy_((ids + shift) % 16)
            graph.replay()
            torch.cuda.synchronize()
            expected = Enqueued(resident, case).y
            torch.cuda.synchronize()
            assert torch.equal(captured.y, expected)


def test_contexts_that_share_a_cache(opened):
    cases = [offloaded_case(tokens) for tokens in (1, 2, 40, 129)]
    resident, program = opened(cases[0]), opened(cases[0], 4)
    same = [case.changed(**{n: cases[0].arguments[n] for n in ("w1", "w2")}) for case in cases]
    expected = [Enqueued(resident, case).y for case in same]
    torch.cuda.synchronize()
    weights = pinned(cases[0])
    with program.open_cache(shared=True) as cache:
        streams = [torch.cuda.Stream() for _ in same]
        for _ in range(10):
            calls = []
            for case, stream in zip(same, streams, strict=True):
                with torch.cuda.stream(stream):
                    calls.append(Enqueued(program, case, cache, **weights))
            torch.cuda.synchronize()
            for call, right in zip(calls, expected, strict=True):
                assert torch.equal(call.y, right)


def test_a_small_workspace_is_refused(opened):
    case = gpu_case("dropless", 40, dtype=BF16)
    program = opened(case)
    size = program.workspace_size(40) - 1
    tensors = case.arguments | {"y": torch.empty_like(case.arguments["x"])}
    addresses = {n: t.data_ptr() for n, t in tensors.items() if isinstance(t, Tensor)}
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    with pytest.raises(LauncherError, match="workspace"):
        program.enqueue(40, addresses, workspace.data_ptr(), size)
