"""The C++ launcher on a real driver: to the bit what the Python launcher computes.

Legend: T tokens, E experts, K = top_k.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import gpu_cases
from gpu_cases import gpu_case, launch_poisoned, plan_of
from kernel_runs import in_out, layer_of
from moe_cases import OPS, Case, assert_matches
from trt_plugin.launcher import LauncherError, OpenProgram

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

    def program(case: Case) -> OpenProgram:
        layer = layer_of(case).canonical()
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
    """One enqueued call and the memory that it uses until its stream is done."""

    def __init__(self, program: OpenProgram, case: Case) -> None:
        x = case.arguments["x"]
        self.y = torch.full_like(x, float("nan"))
        size = program.workspace_size(len(x))
        self.workspace = torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, device="cuda")
        self.tensors = case.arguments | {"y": self.y}
        addresses = {n: t.data_ptr() for n, t in self.tensors.items() if isinstance(t, Tensor)}
        stream = torch.cuda.current_stream().cuda_stream
        program.enqueue(len(x), addresses, self.workspace.data_ptr(), size, stream)


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


def test_a_small_workspace_is_refused(opened):
    case = gpu_case("dropless", 40, dtype=BF16)
    program = opened(case)
    size = program.workspace_size(40) - 1
    tensors = case.arguments | {"y": torch.empty_like(case.arguments["x"])}
    addresses = {n: t.data_ptr() for n, t in tensors.items() if isinstance(t, Tensor)}
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    with pytest.raises(LauncherError, match="workspace"):
        program.enqueue(40, addresses, workspace.data_ptr(), size)
