"""The operators' CUDA implementation with experts in host memory, on CPU tensors.

The kernels run in Triton's interpreter; streams and queries to the device are mocked.
"""

from __future__ import annotations

import gc
import re
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import custom_ops
from custom_ops import ExpertOptions, RouterOptions, _cuda, _grouped
from custom_ops._checks import check_experts, check_trainable
from custom_ops.expert_weights import ExpertWeights
from custom_ops.kernels import launch_waves
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan
from custom_ops.layer_shape import LayerShape
from custom_ops.offload import cache_bytes
from custom_ops.offload import calls as offload_calls
from custom_ops.offload.calls import _CACHES, default_resident_experts, offload_experts
from custom_ops.options import ROUTER_OPTIONS
from custom_ops.packed_weights import PackedWeight
from custom_ops.weight_formats import STORED_SUFFIXES, plain_format
from mocked_device import Stream, mocked_device
from moe_cases import OPS, Case, make_case
from packed_cases import packed_case
from wave_runs import run_resident


@pytest.fixture(autouse=True)
def device(monkeypatch):
    yield from mocked_device(monkeypatch)


def run(case: Case) -> Tensor:
    a, options = case.arguments, dict(case.options)
    parameters = ExpertWeights(a["w1"], a["b1"], a["w2"], a["b2"])
    if case.op == "experts":
        routing = {name: a[name] for name in ("expert_ids", "expert_weights")}
        return offload_calls.forward(a["x"], routing, parameters, ExpertOptions(**options))
    routing = {name: a[name] for name in ("router_weight", "router_bias", "selection_bias")}
    names = [row.name for row in ROUTER_OPTIONS if row.name in options]
    router = RouterOptions(a["top_k"], **{name: options.pop(name) for name in names})
    return offload_calls.forward(a["x"], routing, parameters, ExpertOptions(**options), router)


def case_of(op: str = "experts", tokens: int = 9, **options: object) -> Case:
    settings = {"width": 16, "hidden": 8, "experts": 6, "top_k": 2, "dtype": torch.float16}
    return make_case(op, (tokens,), **settings | options)


def only_cache() -> offload_calls._Cache:
    (cache,) = _CACHES.values()
    return cache


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_results_and_the_default_number_of_slots(op, tokens):
    case = case_of(op, tokens)
    assert torch.equal(run(case), run_resident(case))
    assert only_cache().resident == 2


@pytest.mark.parametrize("form", ["int4", "mxfp4", "fp8 rows", "nvfp4", "int8"])
def test_packed_experts(form, monkeypatch):
    zero_points = "groups" if form == "int4" else ""
    case = packed_case("dropless", form, width=32, gated=True, zero_points=zero_points)
    monkeypatch.setattr(offload_calls, "forward_of", lambda *_: offload_calls.forward)
    monkeypatch.setattr(
        "custom_ops.packed._grouped", SimpleNamespace(forward=offload_calls.forward)
    )
    assert torch.equal(case(), run_resident(case).view_as(case.arguments["x"]))
    assert only_cache().resident == 2
    w1, w2 = (
        PackedWeight(*(case.packed[weight + suffix] for suffix in STORED_SUFFIXES))
        for weight in ("w1", "w2")
    )
    used = only_cache()
    offload_experts(w1, w2, 4, "cpu")
    assert only_cache() is not used
    before = case()
    assert only_cache().resident == 4
    case.packed["w1_scales"].add_(1)
    assert not torch.equal(case(), before)
    with pytest.raises(ValueError, match="w1 has 5 experts, w2_scales has 4"):
        offload_experts(w1, w2._replace(scales=w2.scales[:4]), 4, "cpu")


def test_offloading_chooses_the_number_of_slots_and_empties_them():
    case = case_of()
    w1, w2 = case.arguments["w1"], case.arguments["w2"]
    offload_experts(w1, w2, 5, "cpu")
    run(case)
    assert only_cache().resident == 5
    used = only_cache()
    offload_experts(w1, w2, 5, "cpu")
    assert only_cache() is not used
    assert torch.equal(run(case), run_resident(case))


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_weights_that_changed_in_place_are_read_again(name, device):
    case = case_of()
    offload_experts(case.arguments["w1"], case.arguments["w2"], 6, "cpu")
    before = run(case)
    case.arguments[name].mul_(2)
    device["capturing"] = True
    with pytest.raises(RuntimeError, match=r"the cache must be emptied, in a capture: .* changed"):
        run(case)
    device["capturing"] = False
    after = run(case)
    assert torch.equal(after, run_resident(case))
    assert not torch.equal(after, before)
    # What is in slots is not copied again; changes of `data` are not counted.
    case.arguments[name].data.mul_(2)
    assert torch.equal(run(case), after)


def test_changes_that_pytorch_does_not_count():
    with torch.inference_mode():
        assert offload_calls._change_count(torch.ones(2).mul_(2)) == 0
    weight = SimpleNamespace(is_inference=lambda: False)
    assert offload_calls._change_count(weight) == 0


def test_views_of_the_weights_share_their_cache():
    case = case_of()
    stored = {name: case.arguments[name].mT.contiguous() for name in ("w1", "w2")}
    offload_experts(stored["w1"], stored["w2"], 3, "cpu")
    viewed = case.changed(**{name: each.mT for name, each in stored.items()})
    assert torch.equal(run(viewed), run_resident(viewed))
    assert only_cache().resident == 3


def test_parts_of_the_weights_have_a_cache_of_their_own():
    case = case_of(experts=8)
    w1, w2 = case.arguments["w1"], case.arguments["w2"]
    names = ("w1", "b1", "w2", "b2")
    given = {name: each for name in names if (each := case.arguments[name]) is not None}
    few = {name: each[:3] for name, each in given.items()}
    ids = case.arguments["expert_ids"].clamp(max=2)
    # Half as many experts of twice the size lie at the same addresses.
    wide = case_of(experts=4, hidden=16).changed(w1=w1.view(4, 16, 16), w2=w2.view(4, 16, 16))
    calls = [case, case.changed(**few, expert_ids=ids), wide]
    for call in calls * 2:
        assert torch.equal(run(call), run_resident(call))
    assert len(_CACHES) == 3


@pytest.mark.usefixtures("only_new_objects")
def test_a_cache_lives_as_long_as_its_weights():
    case = case_of()
    run(case)
    view = case.arguments["w1"][1:]
    del case
    gc.collect()
    assert not _CACHES, "w2 is gone"
    case = case_of()
    run(case)
    kept = case.arguments["w1"].mT, case.arguments["w2"].mT
    del case
    gc.collect()
    assert _CACHES, "views keep the memory"
    del kept, view
    gc.collect()
    assert not _CACHES


@pytest.mark.parametrize(
    ("experts", "top_k", "slots"), [(6, 2, 2), (128, 8, 32), (8, 6, 6), (1, 1, 1)]
)
def test_default_number_of_slots(experts, top_k, slots):
    assert default_resident_experts(experts, top_k) == slots


def test_another_stream_waits_for_the_last_one(device):
    case = case_of()
    first = device["stream"]
    run(case)
    run(case)
    assert not set(first.waited) - {only_cache()._side}
    device["stream"] = second = Stream()
    run(case)
    run(case)
    assert [each for each in second.waited if each is not only_cache()._side] == [first]


def test_copies_go_ahead_of_products(device):
    case = case_of()
    run(case)
    assert only_cache()._side.priority < device["stream"].priority


def test_a_graph_captures_a_layer_that_ran_before(device):
    case = case_of()
    first = device["stream"]
    weights = case.arguments["w1"], case.arguments["w2"]
    for prepare in (lambda: None, lambda: offload_experts(*weights, 3, "cpu")):
        prepare()
        device["capturing"] = True
        with pytest.raises(RuntimeError, match="must run once before a CUDA graph captures it"):
            run(case)
        device["capturing"] = False
    run(case)
    device["capturing"] = True
    device["stream"] = capturing = Stream()
    run(case)
    # Work outside of the capture is not waited for inside.
    assert first not in capturing.waited


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_a_failed_call_empties_the_cache(made_in_inference_mode, device, monkeypatch):
    case = case_of()
    with torch.inference_mode(made_in_inference_mode):
        run(case)
    launch_in_waves = launch_waves.launch_in_waves

    def fail(plan, tensors, state, side):
        state[: plan.tables_size] = 1
        raise RuntimeError("no launch")

    monkeypatch.setattr(launch_waves, "launch_in_waves", fail)
    with pytest.raises(RuntimeError, match="no launch"):
        run(case)
    monkeypatch.setattr(launch_waves, "launch_in_waves", launch_in_waves)
    device["capturing"] = True
    with pytest.raises(RuntimeError, match=r"the cache must be emptied, in a capture: .* failed"):
        run(case)
    device["capturing"] = False
    assert torch.equal(run(case), run_resident(case))


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_weights_that_would_be_copied_are_refused(name):
    case = case_of()
    apart = torch.stack([case.arguments[name]] * 2, dim=-1)[..., 0]
    with pytest.raises(ValueError, match=f"{name} is in host memory, where it must be contiguous"):
        run(case.changed(**{name: apart}))


def test_weights_that_are_not_pinned_are_refused(device):
    device["pinned"] = False
    with pytest.raises(ValueError, match=r"w1 is in host memory that .* cannot read: pin it by"):
        run(case_of())


def test_weights_that_are_no_layer_in_host_memory_are_refused():
    with FakeTensorMode():
        w1, w2 = torch.empty(6, 8, 16), torch.empty(6, 16, 8)
        with pytest.raises(ValueError, match="w1 has 6 experts, w2 has 5"):
            offload_experts(w1, w2[1:], 2, "cpu")
        with pytest.raises(ValueError, match="w2 is on cuda:0: experts are offloaded to host"):
            offload_experts(w1, torch.empty(6, 16, 8, device="cuda:0"), 2, "cpu")


def test_offloading_again_adds_nothing_to_the_weights():
    w1, w2 = case_of().arguments["w1"], case_of().arguments["w2"]
    finalizers: Any = weakref.finalize
    before = len(finalizers._registry)
    for resident in (2, 3, 4):
        offload_experts(w1, w2, resident, "cpu")
    assert len(finalizers._registry) == before + 2


@pytest.mark.parametrize("resident", [0, 7])
def test_numbers_of_slots_that_there_cannot_be(resident):
    case = case_of()
    message = rf"resident_experts must be in 1\.\.6, got {resident}"
    with pytest.raises(ValueError, match=message):
        offload_experts(case.arguments["w1"], case.arguments["w2"], resident, "cpu")


@pytest.mark.parametrize("resident", [2.5, True])
def test_numbers_of_slots_that_are_no_integers(resident):
    case = case_of()
    with pytest.raises(TypeError, match=f"resident_experts must be an integer, got {resident}"):
        offload_experts(case.arguments["w1"], case.arguments["w2"], resident, "cpu")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"width": 12}, ValueError, "with experts in host memory: the kernels need D"),
        ({"dtype": torch.float64}, TypeError, "with experts in host memory: the kernels need"),
    ],
)
def test_layers_without_kernels_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        run(case_of(**changes))


def test_the_bytes_of_a_cache_are_those_of_the_plan():
    layer = Layer(
        LayerShape(
            33,
            64,
            24,
            2,
            torch.float32,
            plain_format(torch.float16),
            ExpertOptions("silu", gated=True),
        ),
        resident_experts=5,
    )
    planned = plan(layer, architecture("sm_80"))
    assert planned.state_size == cache_bytes(33, 5, (2 * 24 * 64 * 2, 64 * 24 * 2))


# --- Checks ---

HOST, CUDA, OTHER = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))


def fakes(
    x: torch.device, w1: torch.device, w2: torch.device, b1: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty(3, 16, device=x),
        torch.empty(6, 8, 16, device=w1),
        torch.empty(6, 8, device=b1),
        torch.empty(6, 16, 8, device=w2),
        torch.empty(6, 16, device=b1),
    )


def test_which_devices_fit_together():
    with FakeTensorMode():
        check_experts(*fakes(CUDA, HOST, HOST, CUDA), ExpertOptions())
        check_experts(*fakes(CUDA, CUDA, CUDA, CUDA), ExpertOptions())
        for devices, message in (
            ((CUDA, HOST, CUDA, CUDA), "w2 must be on w1's device cpu, got cuda:0"),
            ((CUDA, CUDA, HOST, CUDA), "w2 must be on x's device cuda:0, got cpu"),
            ((CUDA, HOST, HOST, HOST), "b1 must be on x's device cuda:0, got cpu"),
            ((CUDA, OTHER, OTHER, CUDA), "w1 must be on x's device cuda:0, got cuda:1"),
            ((HOST, CUDA, CUDA, HOST), "w1 must be on x's device cpu, got cuda:0"),
        ):
            with pytest.raises(ValueError, match=re.escape(message)):
                check_experts(*fakes(*devices), ExpertOptions())


def call_on_fakes(op: str) -> tuple[Any, ...]:
    x, w1, b1, w2, b2 = fakes(CUDA, HOST, HOST, CUDA)
    if op == "dropless":
        return x, torch.empty(6, 16, device=CUDA), w1, b1, w2, b2, 2
    ids = torch.zeros(3, 2, dtype=torch.int64, device=CUDA)
    return x, ids, torch.empty(3, 2, device=CUDA), w1, b1, w2, b2


@pytest.mark.parametrize("op", OPS)
def test_fakes_are_of_the_tokens_device(op):
    with FakeTensorMode():
        y = getattr(custom_ops, op)(*call_on_fakes(op))
        assert (y.device, y.shape) == (CUDA, (3, 16))


def test_gradients_are_refused():
    with FakeTensorMode():
        message = r"no gradients \(x is on cuda:0, w1 on cpu\): call the layer under torch.no_grad"
        with pytest.raises(NotImplementedError, match=message):
            torch.ops.moe.dropless_routed(*call_on_fakes("dropless"))
        # Fake CUDA tensors have no autograd without a GPU.
        setup_context = sys.modules["custom_ops.experts"]._setup_context
        with pytest.raises(NotImplementedError, match=message):
            setup_context(None, call_on_fakes("experts"), {}, None)


def test_who_computes():
    with FakeTensorMode():
        host, cuda = torch.empty(1), torch.empty(1, device=CUDA)
        assert offload_calls.forward_of(host, host) is _grouped.forward
        assert offload_calls.forward_of(cuda, cuda) is _cuda.forward
        assert offload_calls.forward_of(cuda, host) is offload_calls.forward
        check_trainable(host, host)
        check_trainable(cuda, cuda)
