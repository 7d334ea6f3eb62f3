"""The operators' CUDA implementation on CPU tensors: what it passes to the kernels.

The kernels run in Triton's interpreter; only queries to the device are mocked.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from custom_ops import ExpertOptions, RouterOptions, _cuda
from custom_ops._grouped import ExpertParameters
from custom_ops.kernels.architectures import ARCHITECTURES, nearest_architecture
from custom_ops.options import ROUTER_OPTIONS
from moe_cases import Case, assert_matches, make_case


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))


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


def test_tensors_that_kernels_cannot_read_are_copied():
    case = make_case("experts", (9,), width=16, hidden=24)
    x = torch.empty(9 * 16 + 1)[1:].view(9, 16).copy_(case.arguments["x"])
    w1 = case.arguments["w1"].mT.contiguous().mT
    assert x.data_ptr() % 16
    assert not w1.is_contiguous()
    odd = case.changed(x=x, w1=w1)
    assert torch.equal(run(odd), run(case))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 12}, r"D, the model width, to be a multiple of 8, got 12"),
        ({"hidden": 20}, r"H, the hidden width, to be a multiple of 8, got 20"),
        ({"experts": 1025}, r"experts in 1..1024, got 1025"),
        ({"experts": 40, "top_k": 33}, r"top_k in 1..32, got 33"),
    ],
)
def test_sizes_without_kernels_are_refused(changes, message):
    case = make_case("experts", (2,), **({"width": 8, "hidden": 8} | changes))
    with pytest.raises(ValueError, match=message):
        run(case)


def test_a_newer_device_takes_the_plan_of_the_nearest_older_one():
    assert nearest_architecture(8, 8).name == "sm_87"
    assert nearest_architecture(13, 0).name == "sm_121"
    assert all(nearest_architecture(*divmod(c, 10)).capability == c for c in ARCHITECTURES)
    with pytest.raises(ValueError, match=r"capability 7\.5 or later, the device has 7\.0"):
        nearest_architecture(7, 0)
