"""The operators' CUDA implementation on CPU tensors: what it passes to the kernels.

The kernels run in Triton's interpreter; only queries to the device are mocked.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from custom_ops import ExpertOptions, RouterOptions, _cuda
from custom_ops._grouped import ExpertParameters
from custom_ops.kernels.architectures import ARCHITECTURES, nearest_architecture
from custom_ops.kernels.spec import ForwardPlan
from custom_ops.options import ROUTER_OPTIONS
from moe_cases import Case, assert_matches, make_case


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    _cuda._plan.cache_clear()


@pytest.fixture
def launches(monkeypatch) -> list[tuple[ForwardPlan, Mapping[str, Tensor]]]:
    """What would be launched."""
    launches = []
    monkeypatch.setattr("custom_ops.kernels.launch.launch", lambda *a: launches.append(a))
    return launches


def run(case: Case) -> torch.Tensor:
    a = case.arguments
    options = dict(case.options)
    parameters = ExpertParameters(a["w1"], a["b1"], a["w2"], a["b2"])
    if case.op == "experts":
        routing = {name: a[name] for name in ("expert_ids", "expert_weights")}
        return _cuda.forward(a["x"], routing, parameters, ExpertOptions(**options))
    routing = {name: a[name] for name in ("router_weight", "router_bias", "selection_bias")}
    names = [row.name for row in ROUTER_OPTIONS if row.name in options]
    router = {name: options.pop(name) for name in names}
    return _cuda.forward(
        a["x"],
        routing,
        parameters,
        ExpertOptions(**options),
        RouterOptions(a["top_k"], **router),
    )


@pytest.mark.parametrize("op", ["dropless", "experts"])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_results(op, biases, dtype):
    case = make_case(op, (9,), width=16, hidden=24, dtype=dtype, biases=biases, gated=True)
    assert_matches(run(case), case.oracle(), case.dtypes)


def test_tensors_that_kernels_cannot_read_are_copied(launches):
    case = make_case("experts", (9,), width=16, hidden=24)
    x = torch.empty(9 * 16 + 1)[1:].view(9, 16).copy_(case.arguments["x"])
    w1 = torch.stack([case.arguments["w1"]] * 2, dim=-1)[..., 0]
    assert x.data_ptr() % 16
    assert not w1.is_contiguous()
    run(case.changed(x=x, w1=w1))
    [(plan, tensors)] = launches
    assert not plan.layer.w1_transposed
    for name, given in (("x", x), ("w1", w1)):
        assert tensors[name].is_contiguous()
        assert tensors[name].data_ptr() % 16 == 0
        assert torch.equal(tensors[name], given)


@pytest.mark.parametrize("transposed", [("w1",), ("w2",), ("w1", "w2"), ()])
def test_weights_are_read_as_they_lie(launches, transposed):
    case = make_case("experts", (9,), width=16, hidden=24)
    weights = {name: case.arguments[name].mT.contiguous().mT for name in transposed}
    run(case.changed(**weights))
    [(plan, tensors)] = launches
    assert plan.layer.w1_transposed == ("w1" in transposed)
    assert plan.layer.w2_transposed == ("w2" in transposed)
    for name in ("w1", "w2"):
        given = weights.get(name, case.arguments[name])
        assert tensors[name].is_contiguous()
        assert tensors[name].data_ptr() == given.data_ptr()


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (40, 16), (40, 136)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_weights_that_lie_as_in_out_give_the_same_result(
    capability, tokens, width, interleaved, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    case = make_case(
        "experts", (tokens,), width=width, hidden=24, dtype=torch.float16,
        gated=True, interleaved=interleaved,
    )  # fmt: skip
    weights = {name: case.arguments[name].mT.contiguous().mT for name in ("w1", "w2")}
    assert_matches(run(case.changed(**weights)), case.oracle(), case.dtypes)


def test_a_weight_that_lies_both_ways_is_not_transposed():
    w1 = torch.randn(5, 1, 24).mT
    assert w1.is_contiguous()
    assert w1.mT.is_contiguous()
    assert not _cuda._is_transposed(w1)


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 12},
        {"hidden": 20},
        {"width": 1},
        {"experts": 1025},
        {"experts": 40, "top_k": 33},
        {"dtype": torch.float64},
    ],
)
@pytest.mark.parametrize("op", ["dropless", "experts"])
def test_what_has_no_kernels_is_computed_by_pytorch(op, changes, launches):
    case = make_case(op, (2,), **({"width": 8, "hidden": 8} | changes))
    assert_matches(run(case), case.oracle(), case.dtypes)
    assert not launches


def test_more_slots_than_kernels_count_are_computed_by_pytorch(launches, monkeypatch):
    ranges = [SimpleNamespace(last=3), SimpleNamespace(last=8)]
    monkeypatch.setattr(_cuda, "_plan", lambda *_, **layer: SimpleNamespace(ranges=ranges))
    for tokens, launched in ((8, 1), (9, 0)):
        launches.clear()
        case = make_case("experts", (tokens,), width=16, hidden=24)
        y = run(case)
        assert len(launches) == launched
    assert_matches(y, case.oracle(), case.dtypes)


def test_other_errors_are_raised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    case = make_case("experts", (2,), width=16, hidden=24)
    with pytest.raises(ValueError, match=r"capability 7\.5 or later, the device has 7\.0"):
        run(case)


def test_a_newer_device_takes_the_plan_of_the_nearest_older_one():
    assert nearest_architecture(8, 8).name == "sm_87"
    assert nearest_architecture(13, 0).name == "sm_121"
    assert all(nearest_architecture(*divmod(c, 10)).capability == c for c in ARCHITECTURES)
    with pytest.raises(ValueError, match=r"capability 7\.5 or later, the device has 7\.0"):
        nearest_architecture(7, 0)
