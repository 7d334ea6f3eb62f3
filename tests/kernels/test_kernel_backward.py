"""The kernels' backward pass in Triton's interpreter, against autograd through the oracle."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from custom_ops import (
    ExpertOptions,
    RouterOptions,
    _cuda,
    _cuda_backward,
    _grouped,
    reference,
)
from custom_ops.expert_weights import ExpertWeights
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.backward_plan import backward_plan
from custom_ops.kernels.layer import Layer
from custom_ops.layer_shape import LayerShape
from custom_ops.options import ROUTER_OPTIONS
from custom_ops.weight_formats import plain_format
from dynamo_moe.tolerances import tolerance_for
from kernel_runs import run_kernels
from moe_cases import KERNEL_FORMS, NORM_FORMS, ROUTER_FORMS, Case, assert_matches, make_case
from random_layers import bounded, cases

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NAMES = ("x", "expert_weights", "w1", "b1", "w2", "b2")
ROUTER_NAMES = {row.name for row in ROUTER_OPTIONS}


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    for cached in (_cuda._plan, _cuda_backward._plan):
        cached.cache_clear()


def gradients(case: Case, *, module: Any = _cuda_backward, train: bool = True) -> dict[str, Tensor]:
    """The gradients of an ``experts`` case by the arguments' names, for a fixed ``dy``."""
    a = case.arguments
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(a["x"].shape, generator=generator).bfloat16().to(a["x"].dtype)
    results = module.experts_backward(
        dy,
        a["x"],
        a["expert_ids"],
        a["expert_weights"],
        ExpertWeights(a["w1"], a["b1"], a["w2"], a["b2"]),
        ExpertOptions(**case.options),
        train_parameters=train,
    )
    return dict(zip(NAMES, results, strict=True))


def check(case: Case) -> dict[str, Tensor]:
    actual, expected = gradients(case), case.gradients(Case.oracle)
    for name, gradient in expected.items():
        assert actual[name].dtype == case.arguments[name].dtype
        # Autograd rounds its result to the same dtype as the kernel does, each by half a spacing:
        # of an element far beyond the RMS, that is more than the tolerance.
        rounding = torch.finfo(gradient.dtype).eps * gradient.double().abs()
        low, high = gradient.double() - rounding, gradient.double() + rounding
        nearest = actual[name].double().clamp(low, high)
        assert_matches(actual[name], nearest, case.dtypes, name)
    return actual


@pytest.mark.parametrize("form", KERNEL_FORMS)
def test_every_form_of_expert(form):
    check(make_case("experts", (7,), width=24, hidden=40, **form))


@pytest.mark.parametrize("experts_dtype", FLOATS)
@pytest.mark.parametrize("tokens_dtype", FLOATS)
def test_every_pair_of_dtypes(tokens_dtype, experts_dtype):
    case = make_case(
        "experts", (7,), width=24, hidden=24, dtype=experts_dtype, x_dtype=tokens_dtype,
        activation="silu", gated=True,
    )  # fmt: skip
    check(case)


@pytest.mark.parametrize(("width", "hidden"), [(8, 104), (72, 8), (136, 104)])
def test_widths(width, hidden):
    check(make_case("experts", (6,), width=width, hidden=hidden, gated=True, activation="silu"))


@pytest.mark.pairwise
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("norm", [*NORM_FORMS, pytest.param({}, id="plain")])
@pytest.mark.parametrize("weight_on_input", [False, True], ids=["on output", "on input"])
def test_norm_residual_and_weights_on_input(weight_on_input, norm, biases):
    case = make_case(
        "experts", (11,), width=40, hidden=24, weight_on_input=weight_on_input, biases=biases,
        activation="silu", gated=True, **norm,
    )  # fmt: skip
    ids = case.arguments["expert_ids"]
    ids[3], ids[5, 0], ids[7, 1] = -1, -1, -1
    case.arguments["expert_weights"][9] = 0
    check(case)


def test_several_tiles_of_an_expert():
    case = make_case("experts", (75,), width=8, hidden=8, experts=2)
    check(case.changed(expert_ids=torch.ones(75, 2, dtype=torch.int32)))


@pytest.mark.parametrize("transposed", [("w1",), ("w2",), ("w1", "w2")])
def test_weights_that_lie_as_in_out(transposed, monkeypatch):
    case = make_case("experts", (9,), width=24, hidden=40, gated=True, activation="silu")
    views = {name: case.arguments[name].mT.contiguous().mT for name in transposed}
    expected = gradients(case)
    monkeypatch.setattr(_cuda, "aligned", lambda tensor: tensor)  # Nothing is copied.
    actual = check(case.changed(**views))
    for name in NAMES:
        assert torch.equal(actual[name], expected[name]), name
    for name in transposed:
        assert actual[name].stride() == views[name].stride()


def test_tensors_of_any_other_strides():
    case = make_case("experts", (9,), width=24, hidden=40)
    views = {
        name: tensor.movedim(0, -1).contiguous().movedim(-1, 0)
        for name, tensor in case.arguments.items()
    }
    assert not any(view.is_contiguous() for view in views.values())
    actual = check(case.changed(**views))
    for name in ("w1", "b1", "w2", "b2"):
        assert actual[name].stride() == views[name].stride()


@pytest.mark.parametrize("routing", ["no token", "no expert", "one expert", "idle experts"])
def test_unusual_routing(routing):
    tokens = 0 if routing == "no token" else 19
    case = make_case("experts", (tokens,), width=16, hidden=24, experts=6)
    ids = {"no token": 0, "no expert": -1, "one expert": 4, "idle experts": 0}[routing]
    chosen = torch.full((tokens, 2), ids)
    if routing == "idle experts":
        chosen[:, 1] = 5
        for name in ("w1", "b1", "w2", "b2"):
            case.arguments[name][1:5] = float("nan")
        actual = gradients(case.changed(expert_ids=chosen))
        for name in ("w1", "b1", "w2", "b2"):
            assert not actual[name][1:5].any()
            case.arguments[name][1:5] = 0
    actual = check(case.changed(expert_ids=chosen))
    if routing in ("no token", "no expert"):
        assert not any(gradient.any() for gradient in actual.values())


def assert_nan_stays(
    actual: dict[str, Tensor], clean: dict[str, Tensor], token: int, chosen: Tensor
) -> None:
    """A NaN in a token reaches the gradients of that token and of its experts alone."""
    others = torch.arange(len(clean["x"])) != token
    idle = torch.ones(len(clean["w1"]), dtype=torch.bool)
    idle[chosen] = False
    assert idle.any()
    for name, gradient in actual.items():
        if name.startswith("router"):  # Every token has a share in them.
            continue
        kept = others if name in ("x", "expert_weights") else idle
        assert torch.equal(gradient[kept], clean[name][kept]), name
        assert gradient[~kept].isnan().any() or name in ("b1", "b2"), name


# Rows beyond an expert's last stand for slot 0, and so for token 0.
@pytest.mark.pairwise
@pytest.mark.parametrize("weight_on_input", [False, True], ids=["on output", "on input"])
@pytest.mark.parametrize("norm", ["none", "rms"])
@pytest.mark.parametrize("token", [0, 3])
def test_a_nan_stays_with_its_token_and_its_experts(token, norm, weight_on_input):
    case = make_case(
        "experts", (20,), width=16, hidden=24, experts=8, pre_norm=norm,
        weight_on_input=weight_on_input,
    )  # fmt: skip
    clean = gradients(case)
    case.arguments["x"][token, 5] = float("nan")
    assert_nan_stays(gradients(case), clean, token, case.arguments["expert_ids"][token])


@pytest.mark.parametrize("weight_on_input", [False, True], ids=["on output", "on input"])
@pytest.mark.parametrize("slot", [(0, 0), (3, 1)])
def test_a_nan_weight_of_no_expert_has_no_effect(slot, weight_on_input):
    case = make_case("experts", (20,), width=16, hidden=24, weight_on_input=weight_on_input)
    case.arguments["expert_ids"][slot] = -1
    clean = gradients(case)
    case.arguments["expert_weights"][slot] = float("nan")
    actual = gradients(case)
    for name in NAMES:
        assert torch.equal(actual[name], clean[name]), name


@pytest.mark.parametrize("weight_on_input", [False, True], ids=["on output", "on input"])
def test_a_nan_stays_with_its_experts_through_the_operator(weight_on_input, monkeypatch):
    kernels = SimpleNamespace(
        forward_routed=_cuda.forward_routed, experts_backward=_cuda_backward.experts_backward
    )
    monkeypatch.setattr(import_module("custom_ops.dropless"), "_grouped", kernels)
    case = make_case(
        "dropless", (20,), width=16, hidden=24, experts=8, pre_norm="rms",
        weight_on_input=weight_on_input,
    )  # fmt: skip
    # A token whose logits are NaN goes to the first experts. So does this one, or other tokens'
    # rows would move: on some CPUs a row's last bit depends on its place among the others.
    a = case.arguments
    falling = torch.arange(8.0, 0, -1) - a["router_bias"]
    a["x"][0] = torch.linalg.pinv(a["router_weight"]) @ falling
    clean, (before, _) = case.gradients(), route(case)
    a["x"][0, 5] = float("nan")
    actual, (after, _) = case.gradients(), route(case)
    assert torch.equal(before, after)
    assert_nan_stays(actual, clean, 0, after[0])


def test_frozen_parameters_have_no_gradients():
    case = make_case("experts", (9,), width=16, hidden=24, gated=True, pre_norm="rms")
    all_of_them, actual = gradients(case), gradients(case, train=False)
    for name in ("x", "expert_weights"):
        assert torch.equal(actual[name], all_of_them[name])
    assert [actual[name].numel() for name in NAMES[2:]] == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_same_bits_again(dtype):
    case = make_case("experts", (40,), width=24, hidden=24, dtype=dtype, pre_norm="rms")
    first, second = gradients(case), gradients(case)
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_derivatives_are_those_of_finite_differences():
    case = make_case(
        "experts", (9,), width=24, hidden=24, activation="silu", gated=True, pre_norm="rms",
        norm_eps=0.5, residual=True,
    )  # fmt: skip
    actual = gradients(case)
    exact = case.changed(**{name: tensor.double() for name, tensor in case.floats.items()})
    dy = torch.randn(9, 24, generator=torch.Generator().manual_seed(1)).bfloat16().double()
    generator = torch.Generator().manual_seed(2)
    for name, tensor in exact.floats.items():
        direction = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        ahead, behind = (
            (exact.changed(**{name: tensor + step * direction}).oracle() * dy).sum()
            for step in (1e-5, -1e-5)
        )
        expected = (ahead - behind) / 2e-5
        along = (actual[name].double() * direction).sum()
        scale = actual[name].double().norm() * direction.norm() / tensor.numel() ** 0.5
        assert abs(along - expected) <= tolerance_for({torch.float32}).max * scale, name


def test_the_host_waits_for_nothing(monkeypatch):
    case = make_case("experts", (9,), width=16, hidden=24, gated=True, pre_norm="rms")
    expected = gradients(case)

    def wait(*_: Any, **__: Any) -> None:
        raise AssertionError("this waits for the device")

    with monkeypatch.context() as patch:
        for name in ("__bool__", "__int__", "__index__", "item", "tolist", "nonzero", "aminmax"):
            patch.setattr(torch.Tensor, name, wait)
        for name in ("aminmax", "bincount", "nonzero"):
            patch.setattr(torch, name, wait)
        actual = gradients(case)
        with pytest.raises(AssertionError, match="waits for the device"):
            gradients(case, module=_grouped)
    assert all(torch.equal(actual[name], expected[name]) for name in NAMES)


@pytest.mark.parametrize("changes", [{"dtype": torch.float64}, {"width": 12}, {"hidden": 20}])
def test_layers_without_kernels_take_the_products_of_torch(changes):
    case = make_case("experts", (9,), **({"width": 16, "hidden": 24} | changes))
    actual, expected = gradients(case), gradients(case, module=_grouped)
    assert all(torch.equal(actual[name], expected[name]) for name in NAMES)


# The pages give the figure for the layer of Qwen3.
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tile", "norm"),
    [(torch.bfloat16, 64, "none"), (torch.bfloat16, 64, "rms"), (torch.float32, 32, "none")],
)
def test_the_workspace_is_what_the_pages_say(dtype, tile, norm, train):
    T, D, H, K = 4096, 2048, 768, 8
    options = ExpertOptions("silu", gated=True, pre_norm=norm)
    layer = Layer(LayerShape(128, D, H, K, torch.bfloat16, plain_format(dtype), options=options))
    planned = backward_plan(layer, architecture("sm_90"), train_parameters=train)
    size = planned.workspace_size(T)
    inner = dtype.itemsize * (3 * H if train else 2 * H)
    parts = 4 * (2 if norm == "rms" else 1) * (-(-H // tile) + 1)
    assert 0 <= size - T * K * (inner + 2 * D + parts + 4) < 2**18
    if (dtype, norm, train) == (torch.bfloat16, "none", True):
        assert round(size / 2**20) == 274


# --- The router's choice ---


def route(case: Case, **changes: Any) -> tuple[Tensor, Tensor]:
    a = case.changed(**changes).arguments
    options = {name: case.options[name] for name in ROUTER_NAMES & set(case.options)}
    parameters = ExpertWeights(a["w1"], a["b1"], a["w2"], a["b2"])
    routing = {name: a[name] for name in ("router_weight", "router_bias", "selection_bias")}
    _, ids, weights = _cuda.forward_routed(
        a["x"],
        routing,
        parameters,
        ExpertOptions(gated=case.options.get("gated", False)),
        RouterOptions(a["top_k"], **options),
    )
    return ids, weights


def routed(case: Case) -> Case:
    """The case as one of ``experts``, with the kernels' choice."""
    ids, weights = route(case)
    parameters = {name: case.arguments[name] for name in NAMES[2:]}
    options = {name: value for name, value in case.options.items() if name not in ROUTER_NAMES}
    routing = {"x": case.arguments["x"], "expert_ids": ids, "expert_weights": weights}
    return Case("experts", routing | parameters, options)


@pytest.mark.slow
@settings(bounded, max_examples=10)
@given(case=cases())
@pytest.mark.every
def test_any_layer(case):
    check(case if case.op == "experts" else routed(case))


@pytest.mark.pairwise
@pytest.mark.parametrize("router", ROUTER_FORMS)
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_the_choice_is_the_oracles(tokens, router):
    case = make_case("dropless", (tokens,), width=16, hidden=24, **router)
    ids, weights = route(case)
    a = case.arguments
    expected_ids, expected = reference.router(
        a["x"], a["router_weight"], a["router_bias"], RouterOptions(2, **router)
    )
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(ids.long(), expected_ids)
    assert_matches(weights, expected, {torch.float32})


def test_the_choice_is_that_of_the_forward_pass():
    case = make_case("dropless", (9,), width=16, hidden=24, dtype=torch.bfloat16, gated=True)
    assert torch.equal(run_kernels(routed(case)), run_kernels(case))


def test_a_choice_that_only_float64_tells_apart():
    case = make_case("dropless", (1,), width=8, hidden=8, experts=2, top_k=1, biases=False)
    x, router = torch.zeros(1, 8), torch.zeros(2, 8)
    x[0, :2] = torch.tensor([1.0, 2.0**-30])
    router[:, 0] = 1
    router[1, 1] = 1
    ids, _ = route(case, x=x, router_weight=router)
    exact, _ = reference.router(x, router, None, RouterOptions(1))
    assert (ids.item(), exact.item()) == (0, 1)


def test_a_router_in_float64_is_that_of_torch():
    case = make_case("dropless", (9,), dtype=torch.float64)
    ids, weights = route(case)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float64)
