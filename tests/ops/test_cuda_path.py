"""The operators' CUDA implementation on CPU tensors: what it passes to the kernels.

The kernels run in Triton's interpreter; only queries to the device are mocked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from custom_ops import (
    ExpertOptions,
    RouterOptions,
    _cuda,
    _cuda_backward,
    _grouped,
)
from custom_ops.expert_weights import ExpertWeights
from custom_ops.kernels.architectures import ARCHITECTURES, nearest_architecture
from custom_ops.kernels.spec import ForwardPlan
from custom_ops.offload import calls as offload_calls
from custom_ops.options import ROUTER_OPTIONS
from moe_cases import Case, assert_matches, make_case
from packed_cases import packed_case


def _enter(device: object) -> AbstractContextManager[None]:
    assert isinstance(device, int), "PyTorch takes a microsecond to find a device's index"
    return nullcontext()


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", _enter)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    for cached in (_cuda._plan, _cuda_backward._plan):
        cached.cache_clear()


@pytest.fixture
def _operators(monkeypatch):
    """The operators compute as on CUDA tensors."""
    monkeypatch.setattr(offload_calls, "forward_of", lambda x, w1: _cuda.forward)
    kernels = {
        "forward_routed": _cuda.forward_routed,
        "experts_backward": _cuda_backward.experts_backward,
    }
    for name in ("dropless", "experts"):
        module = import_module(f"custom_ops.{name}")
        monkeypatch.setattr(module, "_grouped", SimpleNamespace(**{**vars(_grouped), **kernels}))


@pytest.fixture
def launches(monkeypatch) -> list[tuple[ForwardPlan, Mapping[str, Tensor]]]:
    """What would be launched."""
    launches = []
    monkeypatch.setattr("custom_ops.kernels.launch.launch", lambda *a: launches.append(a))
    return launches


@pytest.fixture
def _only_kernels(monkeypatch):
    """Fails where PyTorch's products would compute in the kernels' place."""
    for name in ("forward", "forward_routed", "experts_backward"):
        monkeypatch.setattr(_grouped, name, None)


def run(case: Case) -> torch.Tensor:
    a = case.arguments
    options = dict(case.options)
    parameters = ExpertWeights(a["w1"], a["b1"], a["w2"], a["b2"])
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


@pytest.mark.pairwise
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
    assert not plan.layer.shape.layout.w1_transposed
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
    assert plan.layer.shape.layout.w1_transposed == ("w1" in transposed)
    assert plan.layer.shape.layout.w2_transposed == ("w2" in transposed)
    for name in ("w1", "w2"):
        given = weights.get(name, case.arguments[name])
        assert tensors[name].is_contiguous()
        assert tensors[name].data_ptr() == given.data_ptr()


@pytest.mark.pairwise
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


# --- What is remembered from call to call ---


def _dtype(*names: str) -> Callable[[Case], dict[str, Tensor]]:
    return lambda case: {name: case.arguments[name].half() for name in names}


def _transposed(name: str) -> Callable[[Case], dict[str, Tensor]]:
    return lambda case: {name: case.arguments[name].mT.contiguous().mT}


def _part(size: int, *names: str) -> Callable[[Case], dict[str, Tensor]]:
    return lambda case: {name: case.arguments[name][:size].contiguous() for name in names}


def _narrow(**ends: tuple[int, ...]) -> Callable[[Case], dict[str, Tensor]]:
    """Cuts tensors to sizes."""

    def cut(case: Case) -> dict[str, Tensor]:
        return {
            name: case.arguments[name][tuple(map(slice, sizes))].contiguous()
            for name, sizes in ends.items()
        }

    return cut


def _to(**changes: Any) -> Callable[[Case], dict[str, Any]]:
    return lambda case: changes


_EXPERTS = ("w1", "b1", "w2", "b2")
_ROUTER = ("router_weight", "router_bias", "selection_bias")
# What another call changes, and what follows it: a field of the layer, its format or options.
_CHANGES = [
    ("dropless", _dtype("x"), "tokens_dtype", torch.float16),
    ("dropless", _dtype(*_EXPERTS), "values_dtype", torch.float16),
    ("dropless", _dtype("router_weight"), "routing_dtype", torch.float16),
    ("dropless", _dtype("router_bias"), "weights_dtype", torch.float16),
    ("dropless", _dtype("selection_bias"), "selection_dtype", torch.float16),
    ("dropless", _to(router_bias=None), "weights_dtype", None),
    ("dropless", _to(selection_bias=None), "selection_dtype", None),
    ("dropless", _to(top_k=3), "top_k", 3),
    ("dropless", _to(routed_scaling=2.0), "routed_scaling", 2.0),
    ("dropless", _to(activation="silu"), "activation", "silu"),
    ("dropless", _part(4, *_EXPERTS, *_ROUTER), "experts", 4),
    ("experts", _dtype("x"), "tokens_dtype", torch.float16),
    ("experts", _dtype(*_EXPERTS), "values_dtype", torch.float16),
    ("experts", _dtype("expert_weights"), "weights_dtype", torch.float16),
    ("experts", _to(b1=None), "b1", False),
    ("experts", _to(b2=None), "b2", False),
    ("experts", _transposed("w1"), "w1_transposed", True),
    ("experts", _transposed("w2"), "w2_transposed", True),
    ("experts", _part(4, *_EXPERTS), "experts", 4),
    ("experts", _narrow(x=(9, 16), w1=(5, 24, 16), w2=(5, 16, 24), b2=(5, 16)), "width", 16),
    ("experts", _narrow(w1=(5, 16, 24), b1=(5, 16), w2=(5, 24, 16)), "hidden", 16),
    ("experts", _narrow(expert_ids=(9, 1), expert_weights=(9, 1)), "top_k", 1),
    ("experts", _to(residual=True), "residual", True),
]


@pytest.mark.usefixtures("_operators")
@pytest.mark.parametrize(("op", "change", "name", "value"), _CHANGES)
def test_what_another_call_changes_is_noticed(op, change, name, value, launches):
    case = make_case(op, (9,), width=24, hidden=24, selection_bias=op == "dropless")
    for each in (case, case.changed(**change(case)), case):
        each()
    before, changed, after = (plan for plan, _ in launches)

    def field(plan: ForwardPlan) -> Any:
        shape = plan.layer.shape
        records = (shape, shape.weight_format, shape.options, shape.router, shape.layout)
        return next(getattr(record, name) for record in records if hasattr(record, name))

    assert field(changed) == value != field(before)
    assert after is before


@pytest.mark.usefixtures("_operators")
def test_a_change_of_the_precision_of_products_is_noticed(launches):
    single, half = (
        make_case("dropless", (9,), width=16, hidden=24, dtype=dtype)
        for dtype in (torch.float32, torch.float16)
    )
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee"):
            matmul.fp32_precision = precision
            single()
            half()
    finally:
        matmul.fp32_precision = before
    assert [plan.layer.tf32 for plan, _ in launches] == [False, False, True, False, False, False]


def test_each_device_has_a_plan_for_its_architecture(monkeypatch):
    case = make_case("experts", (9,), width=16, hidden=24)
    a = case.arguments
    routing = {name: a[name] for name in ("expert_ids", "expert_weights")}
    parameters = ExpertWeights(a["w1"], a["b1"], a["w2"], a["b2"])
    fields = _cuda.layer_fields(a["x"], routing, parameters, ExpertOptions())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8 + device.index, 0))
    plans = [_cuda._plan(torch.device("cuda", index), **fields) for index in (0, 1, 0)]
    assert [plan.architecture.name for plan in plans] == ["sm_80", "sm_90", "sm_80"]


@pytest.mark.usefixtures("_operators")
@pytest.mark.parametrize("name", ["x", "router_weight", "router_bias", "w1", "b1", "w2", "b2"])
def test_what_begins_at_an_odd_address_is_copied_at_that_call(name, launches):
    case = make_case("dropless", (9,), width=16, hidden=24)
    given = case.arguments[name]
    odd = torch.empty(given.numel() + 1)[1:].view(given.shape).copy_(given)
    for each in (case, case.changed(**{name: odd}), case):
        each()
    before, copied, after = (tensors[name] for _, tensors in launches)
    assert before.data_ptr() == after.data_ptr() == given.data_ptr()
    assert copied.data_ptr() % 16 == 0 != odd.data_ptr() % 16
    assert torch.equal(copied, given)


def _in_inference_mode(case: Case) -> Tensor:
    with torch.inference_mode():
        return case()


def _without_gradients(case: Case) -> Tensor:
    with torch.no_grad():
        return case()


def _with_gradients(case: Case) -> Tensor:
    results = []

    def call(case: Case) -> Tensor:
        results.append(case())
        return results[0]

    expected = case.gradients(Case.oracle)
    for name, gradient in case.gradients(call).items():
        assert_matches(gradient, expected[name].double(), case.dtypes, name)
    return results[0].detach()


def _with_autocast(case: Case) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return case()


def _functional(case: Case) -> Tensor:
    return torch.func.functionalize(case.function)(*case.floats.values())


def _compiled(case: Case) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(case.function, fullgraph=True, backend="eager")(*case.floats.values())


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _in_a_mode(case: Case) -> Tensor:
    with _Mode():
        return case()


def _with_parameters(case: Case) -> Tensor:
    frozen = {
        name: torch.nn.Parameter(each, requires_grad=False) for name, each in case.floats.items()
    }
    return case.changed(**frozen)()


_WAYS = [
    _in_inference_mode,
    _without_gradients,
    _with_gradients,
    _with_autocast,
    _functional,
    _compiled,
    _in_a_mode,
    _with_parameters,
]


@pytest.mark.each_value
@pytest.mark.usefixtures("_operators", "_only_kernels")
@pytest.mark.parametrize("op", ["dropless", "experts"])
@pytest.mark.parametrize("way", _WAYS)
def test_a_call_in_another_way_after_a_plain_one(op, way):
    case = make_case(op, (3,), width=16, hidden=24, gated=True)
    expected = case.oracle()
    half = {torch.bfloat16} if way is _with_autocast else set()
    for call, dtypes in ((Case.__call__, set()), (way, half), (Case.__call__, set())):
        assert_matches(call(case), expected, case.dtypes | dtypes)


@pytest.mark.each_value
@pytest.mark.usefixtures("_only_kernels")
@pytest.mark.parametrize("op", ["dropless", "experts"])
@pytest.mark.parametrize("form", ["int4", "mxfp4", "fp8", "fp8 rows", "fp8 whole", "fp8 groups"])
def test_packed_experts(op, form, monkeypatch):
    monkeypatch.setattr("custom_ops.packed._grouped", SimpleNamespace(forward=_cuda.forward))
    case = packed_case(op, form, width=64, hidden=32, gated=True)
    assert_matches(case(), case.oracle(), case.plain.dtypes)
    if form == "int4":
        of_experts = torch.tensor([3, 8, 9, 15, 0], dtype=torch.int8)[:, None, None]
        case = case.changed(w1_zero_points=of_experts, w2_zero_points=of_experts)
        assert_matches(case(), case.oracle(), case.plain.dtypes)


def test_packed_experts_without_kernels(monkeypatch):
    """Groups that no blocks fit are decoded by PyTorch, as float64 is."""
    monkeypatch.setattr("custom_ops.packed._grouped", SimpleNamespace(forward=_cuda.forward))
    for options in ({"group": 24, "width": 72, "hidden": 48}, {"dtype": torch.float64}):
        case = packed_case("experts", **options)
        assert_matches(case(), case.oracle(), case.plain.dtypes)
