"""``torch.ops.moe.dropless``: the router, and a whole layer."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from custom_ops import SCORINGS, RouterOptions, dropless, reference
from custom_ops.dtypes import accumulation_dtype
from custom_ops.options import ROUTER_OPTIONS
from custom_ops.routing import route, route_backward
from moe_cases import (
    DTYPES,
    EXPERT_FORMS,
    GROUP_FORMS,
    ROUNDING_FORMS,
    ROUTER_FORMS,
    Case,
    assert_matches,
    in_steps,
    make_case,
    pruned,
)

NAN = float("nan")
FLOAT_TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
all_scorings = pytest.mark.parametrize("scoring", SCORINGS)


def _assert_gradients_match(case: Case) -> None:
    expected = case.gradients(Case.oracle)
    for name, gradient in case.gradients().items():
        assert gradient.dtype == case.arguments[name].dtype
        assert_matches(gradient, expected[name], case.dtypes, name)


def _chosen(case: Case) -> Tensor:
    a = case.arguments
    router = {row.name: case.options.get(row.name, row.default) for row in ROUTER_OPTIONS}
    options = RouterOptions(a["top_k"], **router)
    return route(a["x"], a["router_weight"], a["router_bias"], options, a["selection_bias"])[0]


@pytest.mark.pairwise
@pytest.mark.parametrize("router", ROUTER_FORMS)
@pytest.mark.parametrize("biases", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize(("x_dtype", "dtype"), DTYPES)
def test_every_router_is_the_oracle_s(
    x_dtype: torch.dtype, dtype: torch.dtype, biases: bool, router: dict[str, Any]
) -> None:
    case = make_case("dropless", (33,), x_dtype=x_dtype, dtype=dtype, biases=biases, **router)
    result = case()
    assert result.dtype == x_dtype
    assert_matches(result, case.oracle(), case.dtypes)
    _assert_gradients_match(case)


@pytest.mark.parametrize("form", ROUTER_FORMS)
def test_a_selection_bias_chooses_but_weighs_nothing(form: dict[str, Any]) -> None:
    case = make_case("dropless", (33,), selection_bias=True, **form)
    a = case.arguments
    assert_matches(case(), case.oracle(), case.dtypes)
    _assert_gradients_match(case)
    options = RouterOptions(2, **form)
    given = (a["x"], a["router_weight"], a["router_bias"], options)
    plain_ids, _ = route(*given)
    ids, weights = route(*given, a["selection_bias"])
    assert not torch.equal(ids, plain_ids)
    same = (ids.sort().values == plain_ids.sort().values).all(-1)
    assert 0 < same.sum() < 33
    _, plain = route(*given)
    torch.testing.assert_close(weights.sum(-1)[same], plain.sum(-1)[same])


@pytest.mark.pairwise
@all_scorings
@pytest.mark.parametrize("selection_bias", [True, False], ids=["biased", "unbiased"])
@pytest.mark.parametrize("form", ROUNDING_FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_router_that_rounds_is_the_oracle_s(
    dtype: torch.dtype, form: dict[str, Any], selection_bias: bool, scoring: str
) -> None:
    case = make_case(
        "dropless", (33,), x_dtype=dtype, selection_bias=selection_bias, scoring=scoring, **form
    )
    case = case.changed(**in_steps(case.arguments))
    a, options = case.arguments, RouterOptions(2, scoring, **form)
    routed, expected = (
        choose(a["x"], a["router_weight"], a["router_bias"], options, a["selection_bias"])
        for choose in (route, reference.router)
    )
    assert torch.equal(routed[0], expected[0])
    rounds_weights = "routing_weights_dtype" in form
    assert torch.equal(routed[1], routed[1].to(dtype).float()) == rounds_weights
    assert_matches(routed[1], expected[1], {dtype if rounds_weights else torch.float32}, "weights")
    assert_matches(case(), case.oracle(), case.dtypes)
    _assert_gradients_match(case)


@all_scorings
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_that_of_a_linear_layer_in_half_precision(
    dtype: torch.dtype, scoring: str
) -> None:
    a = make_case("dropless", (200,), experts=20, x_dtype=dtype).arguments
    x, weight, bias = in_steps(a).values()
    logits = nn.functional.linear(x, weight.to(dtype), bias.to(dtype)).float()
    exact = nn.functional.linear(x.float(), weight, bias)
    assert (logits != exact).any()
    options = RouterOptions(3, scoring, logits_dtype="tokens")
    ids, weights = route(x, weight, bias, options)
    expected = route(logits, torch.eye(20), None, RouterOptions(3, scoring))
    assert torch.equal(ids, expected[0])
    assert torch.equal(weights, expected[1])
    options = RouterOptions(3, scoring, logits_dtype="tokens", routing_weights_dtype="tokens")
    again, rounded = route(x, weight, bias, options)
    assert torch.equal(again, ids)
    assert torch.equal(rounded, weights.to(dtype).float())
    assert not torch.equal(rounded, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ROUNDING_FORMS)
def test_rounding_changes_nothing_for_wide_tokens(form: dict[str, Any], dtype: torch.dtype) -> None:
    case = make_case("dropless", (33,), dtype=dtype)
    assert torch.equal(case.changed(**form)(), case())


@pytest.mark.parametrize("selection_bias", [True, False], ids=["biased", "unbiased"])
@pytest.mark.parametrize("form", GROUP_FORMS)
def test_every_choice_of_groups_is_the_oracle_s(form: dict[str, Any], selection_bias: bool) -> None:
    case = make_case(
        "dropless", (33,), experts=6, top_k=3, selection_bias=selection_bias, biases=False, **form
    )
    assert_matches(case(), case.oracle(), case.dtypes)
    _assert_gradients_match(case)
    groups = _chosen(case) // 2
    assert all(len(set(row)) <= 2 for row in groups.tolist())


@pytest.mark.parametrize("form", GROUP_FORMS)
def test_pruned_experts_are_chosen_in_their_groups(form: dict[str, Any]) -> None:
    # Three of two groups of two: one of the chosen is pruned.
    case = make_case("dropless", (33,), experts=6, top_k=3, selection_bias=True, **form)
    case = pruned(case)
    assert_matches(case(), case.oracle(), case.dtypes)
    groups = _chosen(case) // 2
    assert all(len(set(row)) == 2 for row in groups.tolist())


def test_a_pruned_expert_of_the_best_group_comes_before_other_groups() -> None:
    options = RouterOptions(2, "sigmoid", group_scoring="max", n_group=2, topk_group=1)
    x, router = torch.tensor([[0.0, 0.0, 1.0, 0.0]]), torch.eye(4)
    bias = torch.tensor([0.0, 0.0, 0.0, -math.inf])
    for choose in (route, reference.router):
        ids, _ = choose(x, router, None, options, bias)
        assert ids.tolist() == [[2, 3]]


def test_groups_are_scored_by_their_best_experts() -> None:
    # Logits of six experts in three groups: the best expert is in the last group.
    logits = torch.tensor([[1.0, 1.0, 0.5, 1.2, -9.0, 1.5]])
    chosen = {
        scoring: route(
            logits, torch.eye(6), None, RouterOptions(1, "topk_softmax", True, 1.0, scoring, 3, 1)
        )[0].item()
        for scoring in ("max", "top2_sum")
    }
    assert chosen == {"max": 5, "top2_sum": 0}


def test_equal_groups_are_chosen_from_the_lower_on() -> None:
    options = RouterOptions(4, "sigmoid", group_scoring="top2_sum", n_group=4, topk_group=2)
    ids, _ = route(torch.zeros(3, 5), torch.randn(8, 5), None, options)
    assert torch.equal(ids, torch.arange(4).expand(3, 4))


def test_experts_below_the_fill_of_other_models_are_chosen_in_their_groups() -> None:
    # All biased scores of the best group are negative: a fill of 0 would choose outside of it.
    bias = torch.tensor([-2.0, -2.0, -9.0, -9.0])
    options = RouterOptions(2, "sigmoid", group_scoring="max", n_group=2, topk_group=1)
    ids, _ = route(torch.zeros(1, 3), torch.randn(4, 3), None, options, bias)
    assert ids.tolist() == [[0, 1]]


def test_a_choice_of_all_groups_is_none() -> None:
    options = RouterOptions(2, group_scoring="max", n_group=3, topk_group=3)
    assert options.canonical() == RouterOptions(2)


@all_scorings
def test_the_router_s_gradients_need_no_float64_on_cuda(scoring: str) -> None:
    dtypes = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **kwargs or {})
            dtypes.add(getattr(result, "dtype", None))
            return result

    with FakeTensorMode(), Recorder():
        x, dweights, router = (
            torch.empty(size, device="cuda", dtype=torch.bfloat16)
            for size in ((9, 16), (9, 2), (6, 16))
        )
        ids = torch.empty(9, 2, device="cuda", dtype=torch.int64)
        options = RouterOptions(2, scoring)
        dx, *_ = route_backward(dweights.float(), x, router, None, ids, options)
    assert dx.device.type == "cuda"
    assert torch.float32 in dtypes
    assert torch.float64 not in dtypes


@all_scorings
def test_a_choice_of_all_groups_is_the_one_without_groups(scoring: str) -> None:
    # In float64 the sigmoids of all are one.
    x, router = torch.tensor([[40.0, 41.0, 43.0, 42.0, 39.0, 38.0]]), torch.eye(6)
    groups = {"group_scoring": "top2_sum", "n_group": 3, "topk_group": 3}
    for choose in (route, reference.router):
        for options in ({}, groups):
            ids, _ = choose(x, router, None, RouterOptions(3, scoring, **options))
            assert ids.tolist() == [[2, 3, 1]]


@pytest.mark.pairwise
@pytest.mark.parametrize("form", EXPERT_FORMS)
@pytest.mark.parametrize("weight_on_input", [False, True], ids=["on output", "on input"])
def test_every_expert_is_the_oracle_s(weight_on_input: bool, form: dict[str, Any]) -> None:
    case = make_case("dropless", weight_on_input=weight_on_input, **form)
    assert_matches(case(), case.oracle(), case.dtypes)
    _assert_gradients_match(case)


@pytest.mark.parametrize("form", EXPERT_FORMS)
def test_it_is_the_router_and_then_the_experts(form: dict[str, Any]) -> None:
    case = make_case("dropless", **form)
    x, router_weight, *parameters, top_k, router_bias, _ = case.arguments.values()
    routing = route(x, router_weight, router_bias, RouterOptions(top_k))
    assert torch.equal(case(), torch.ops.moe.experts(x, *routing, *parameters, **form))


@pytest.mark.pairwise
@pytest.mark.parametrize("router_weight_dtype", FLOAT_TYPES)
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@all_scorings
def test_router_computes_in_float32_at_least(
    scoring: str, dtype: torch.dtype, router_weight_dtype: torch.dtype
) -> None:
    a = make_case("dropless", (300,), experts=16, x_dtype=dtype).arguments
    router_weight = a["router_weight"].to(router_weight_dtype)
    options = RouterOptions(4, scoring)
    ids, weights = route(a["x"], router_weight, a["router_bias"], options)
    expected_ids, expected_weights = reference.router(
        a["x"], router_weight, a["router_bias"], options
    )
    assert torch.equal(ids, expected_ids)
    assert weights.dtype == accumulation_dtype(a["x"])
    assert_matches(weights, expected_weights, {weights.dtype})


@all_scorings
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_any_top_k_up_to_all_experts(top_k: int, scoring: str) -> None:
    renormalize = top_k > 1
    case = make_case("dropless", (33,), top_k=top_k, scoring=scoring, renormalize=renormalize)
    assert_matches(case(), case.oracle(), case.dtypes)
    if top_k > 1 or scoring != "topk_softmax":
        _assert_gradients_match(case)


@all_scorings
def test_a_sole_renormalized_expert_has_weight_one(scoring: str) -> None:
    case = make_case("dropless", (33,), top_k=1, scoring=scoring)
    assert_matches(case(), case.oracle(), case.dtypes)
    gradients, expected = case.gradients(), case.gradients(Case.oracle)
    for name in ("router_weight", "router_bias"):
        assert gradients.pop(name).abs().max() < 1e-5  # The result is constant: only rounding.
    for name, gradient in gradients.items():
        assert_matches(gradient, expected[name], case.dtypes, name)


@all_scorings
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(tokens: int, scoring: str) -> None:
    case = make_case("dropless", (tokens,), scoring=scoring)
    assert_matches(case(), case.oracle(), case.dtypes)
    for name, gradient in case.gradients().items():
        assert gradient.shape == case.arguments[name].shape
        assert gradient.abs().sum() > 0 or tokens == 0
        assert gradient.isfinite().all()


@all_scorings
def test_ties_go_to_the_lower_expert(scoring: str) -> None:
    case = make_case("dropless", (50,), experts=64, top_k=8, scoring=scoring)
    a = case.arguments
    level = case.changed(
        router_weight=torch.zeros_like(a["router_weight"]),
        router_bias=torch.zeros_like(a["router_bias"]),
    )
    assert torch.equal(_chosen(level), torch.arange(8).expand(50, 8))
    assert_matches(level(), level.oracle(), level.dtypes)

    pairs = case.changed(
        router_weight=a["router_weight"][:32].repeat_interleave(2, dim=0),
        router_bias=a["router_bias"][:32].repeat_interleave(2),
    )
    ids = _chosen(pairs)
    assert (ids[:, ::2] % 2 == 0).all()
    assert torch.equal(ids[:, 1::2], ids[:, ::2] + 1)


def test_sigmoid_scores_that_are_all_one_still_choose() -> None:
    case = make_case("dropless", scoring="sigmoid", top_k=3)
    case.arguments["router_weight"].zero_()
    case.arguments["router_bias"][:] = torch.tensor([40.0, 50.0, 41.0, 50.0, 60.0])
    assert torch.equal(_chosen(case), torch.tensor([[4, 1, 3]]).expand(11, 3))
    assert_matches(case(), case.oracle(), case.dtypes)
    for renormalize in (True, False):
        _assert_gradients_match(case.changed(renormalize=renormalize))


def test_all_tokens_may_choose_one_expert() -> None:
    case = make_case("dropless", (40,), top_k=1)
    case.arguments["router_bias"][3] += 100
    assert _chosen(case).eq(3).all()
    assert_matches(case(), case.oracle(), case.dtypes)
    assert case.gradients()["w1"][:3].eq(0).all()


def test_equal_tokens_have_equal_results() -> None:
    case = make_case("dropless", (6,))
    x = case.arguments["x"]
    x[3:] = x[:3]
    result = case()
    assert_matches(result, case.oracle(), case.dtypes)
    torch.testing.assert_close(result[3:], result[:3], rtol=1e-5, atol=1e-6)


@all_scorings
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_what_is_not_finite_stays_in_its_row(value: float, scoring: str) -> None:
    case = make_case("dropless", (7,), scoring=scoring)
    expected = case()
    case.arguments["x"][4, 5] = value
    result = case()
    others = torch.arange(7) != 4
    assert not result[4].isfinite().any()
    assert_matches(result[others], expected[others].double(), case.dtypes)


def test_scores_that_underflow_give_zero_instead_of_nan() -> None:
    case = make_case("dropless", scoring="sigmoid")
    case.arguments["router_bias"][:] = -200
    assert torch.equal(case(), torch.zeros(11, 12))
    for name, gradient in case.gradients().items():
        assert gradient.isfinite().all(), name


def test_parameters_of_idle_experts_are_not_read() -> None:
    case = make_case("dropless")
    case.arguments["router_bias"][2] = -100
    expected = case()
    for name in ("w1", "b1", "w2", "b2"):
        case.arguments[name][2] = NAN
    assert torch.equal(case(), expected)
    for name, gradient in case.gradients().items():
        assert gradient.isfinite().all(), name


class _Layer(nn.Module):
    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(experts, width) / width**0.5)
        self.w1 = nn.Parameter(torch.randn(experts, 2 * hidden, width) / width**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return dropless(
            x, self.router, self.w1, None, self.w2, None, 2, activation="silu", gated=True
        )


def test_a_layer_trains() -> None:
    torch.manual_seed(0)
    teacher, student = _Layer(8, 16, 4), _Layer(8, 16, 4)
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    x = torch.randn(256, 8)
    target = teacher(x).detach()
    losses = []
    for _ in range(150):
        loss = (student(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    for name, p in student.named_parameters():
        assert not torch.equal(p, before[name]), name


def test_the_backward_pass_takes_the_choice_of_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case("dropless")
    expected = case.gradients()
    calls = []

    def another_choice_each_time(*arguments: Any) -> tuple[Tensor, Tensor]:
        ids, weights = route(*arguments)
        calls.append(ids)
        return (ids + len(calls) - 1) % 5, weights

    monkeypatch.setattr("custom_ops._grouped.route", another_choice_each_time)
    for name, gradient in case.gradients().items():
        assert torch.equal(gradient, expected[name]), name
    assert len(calls) == 1


def test_inference_keeps_no_choice() -> None:
    case = make_case("dropless").with_grad()
    for training in (True, False):
        with torch.profiler.profile() as profile, torch.set_grad_enabled(training):
            result = case()
        names = {event.name for event in profile.events()}
        assert ("moe::dropless_routed" in names) == training
        assert result.requires_grad == training


_WITHOUT_PRIVATE_NAMES = """
import torch
kept = torch._C._AutoDispatchBelowAutograd
del torch._C._AutoDispatchBelowAutograd
import custom_ops
torch._C._AutoDispatchBelowAutograd = kept
from moe_cases import make_case
case = make_case("dropless")
moved = case.gradients()
routed = torch.ops.moe.dropless_routed
direct = case.gradients(lambda same: routed(*same.arguments.values(), **same.options)[0])
assert all(torch.equal(moved[name], direct[name]) for name in direct)
assert "dropless_routed" not in repr(case.with_grad()().grad_fn)
"""


def test_training_works_by_public_names() -> None:
    paths = [str(Path(__file__).parents[1] / "support"), *sys.path]
    subprocess.run(
        [sys.executable, "-c", _WITHOUT_PRIVATE_NAMES],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
