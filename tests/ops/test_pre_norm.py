"""Both operators with the norm before the experts and the residual around them.

Legend: T tokens, D model width, K = top_k.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from custom_ops import RouterOptions
from custom_ops.routing import route
from moe_cases import DTYPES, NORM_FORMS, OPS, Case, assert_matches, make_case

each_op = pytest.mark.parametrize("op", OPS)
each_norm = pytest.mark.parametrize("norm", NORM_FORMS)
on_either_side = pytest.mark.parametrize(
    "weight_on_input", [False, True], ids=["on output", "on input"]
)


@pytest.mark.pairwise
@each_op
@each_norm
@on_either_side
@pytest.mark.parametrize("biases", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize(("x_dtype", "dtype"), DTYPES)
def test_result_and_gradients_are_the_oracle_s(
    op: str,
    x_dtype: torch.dtype,
    dtype: torch.dtype,
    biases: bool,
    weight_on_input: bool,
    norm: dict[str, Any],
) -> None:
    case = make_case(
        op, (33,), x_dtype=x_dtype, dtype=dtype, biases=biases, weight_on_input=weight_on_input,
        gated=True, activation="silu", **norm,
    )  # fmt: skip
    result = case()
    assert result.dtype == x_dtype
    assert_matches(result, case.oracle(), case.dtypes)
    expected = case.gradients(Case.oracle)
    for name, gradient in case.gradients().items():
        assert gradient.dtype == case.arguments[name].dtype
        assert_matches(gradient, expected[name], case.dtypes, name)


@each_op
@each_norm
@on_either_side
def test_gradcheck(op: str, weight_on_input: bool, norm: dict[str, Any]) -> None:
    case = make_case(
        op, (4,), width=3, hidden=3, experts=3, dtype=torch.float64,
        weight_on_input=weight_on_input, **norm,
    ).with_grad()  # fmt: skip
    assert torch.autograd.gradcheck(case.function, tuple(case.floats.values()))


@each_op
@each_norm
def test_opcheck(op: str, norm: dict[str, Any]) -> None:
    case = make_case(op, (2, 3), **norm).with_grad()
    torch.library.opcheck(case.overload, tuple(case.arguments.values()), case.options)


@each_op
@each_norm
def test_a_compiled_layer_gives_the_same(op: str, norm: dict[str, Any]) -> None:
    case = make_case(op, **norm)
    compiled = torch.compile(case.function, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(*case.floats.values()), case())


def _with_rms_norm(case: Case) -> Tensor:
    """The layer as models write it: a norm with a weight before it, a sum after it."""
    a, options = case.arguments, dict(case.options)
    norm = nn.RMSNorm(a["x"].shape[-1], eps=options.pop("norm_eps"))
    norm.weight = nn.Parameter(torch.linspace(0.5, 1.5, a["x"].shape[-1]))
    del options["pre_norm"], options["residual"]
    ids, weights = route(a["x"], a["router_weight"], a["router_bias"], RouterOptions(a["top_k"]))
    parameters = [a[name] for name in ("w1", "b1", "w2", "b2")]
    return a["x"] + torch.ops.moe.experts(norm(a["x"]), ids, weights, *parameters, **options)


@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_s_weight_belongs_into_w1(gated: bool) -> None:
    case = make_case("dropless", (19,), gated=gated, pre_norm="rms", norm_eps=1e-6, residual=True)
    folded = case.changed(w1=case.arguments["w1"] * torch.linspace(0.5, 1.5, 12))
    assert_matches(folded(), _with_rms_norm(case).double(), case.dtypes)


def test_the_router_sees_the_token_itself() -> None:
    case = make_case("dropless", (19,), pre_norm="rms", residual=True)
    a = case.arguments
    routing = route(a["x"], a["router_weight"], a["router_bias"], RouterOptions(2))
    parameters = [a[name] for name in ("w1", "b1", "w2", "b2")]
    expected = torch.ops.moe.experts(a["x"], *routing, *parameters, **case.options)
    assert torch.equal(case(), expected)


@pytest.mark.parametrize("factor", [2.0**-8, 2.0**8])
def test_a_larger_token_has_the_same_sum(factor: float) -> None:
    case = make_case("experts", (19,), pre_norm="rms", norm_eps=1e-30)
    assert torch.equal(case.changed(x=case.arguments["x"] * factor)(), case())


@pytest.mark.parametrize(("x_dtype", "dtype"), DTYPES)
def test_a_token_without_experts_is_its_result(x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    case = make_case("experts", x_dtype=x_dtype, dtype=dtype, pre_norm="rms", residual=True)
    case.arguments["expert_ids"][3:6] = -1
    assert torch.equal(case()[3:6], case.arguments["x"][3:6])
    dy = torch.ones_like(case.arguments["x"])
    case = case.with_grad()
    (dx,) = torch.autograd.grad(case(), case.arguments["x"], dy)
    assert torch.equal(dx[3:6], dy[3:6])


@each_op
def test_a_token_of_zeros_has_no_nan(op: str) -> None:
    case = make_case(op, (5,), pre_norm="rms", norm_eps=2.0**-126, residual=True)
    case.arguments["x"][2] = 0
    assert case().isfinite().all()
    assert_matches(case()[2], case.oracle()[2], case.dtypes)


@each_op
@each_norm
def test_no_token_and_nan_in_one(op: str, norm: dict[str, Any]) -> None:
    empty = make_case(op, (0,), **norm)
    assert empty().shape == (0, 12)
    for gradient in empty.gradients().values():
        assert gradient.eq(0).all()
    case = make_case(op, (6,), **norm)
    expected = case()
    case.arguments["x"][2, 3] = float("nan")
    others = torch.arange(6) != 2
    # Another expert may have its row, and products of other sizes may round otherwise.
    torch.testing.assert_close(case()[others], expected[others])
    # The residual leaves a NaN in its element; the router and the experts spread it over the row.
    assert case()[2].isnan().all()


def test_scale_and_residual_are_of_the_token_as_it_is() -> None:
    # In bfloat16, 1 + little is 1, and its reciprocal, as a hidden row, 1 - 2**-8.
    little = 3 * 2.0**-10
    x = torch.full((1, 4), 1 + little)
    eye = torch.eye(4, dtype=torch.bfloat16)[None]
    ids, ones = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)

    def layer(w2: Tensor, **options: Any) -> Tensor:
        return torch.ops.moe.experts(
            x, ids, ones, eye, None, w2, None, activation="relu", **options
        )

    assert torch.equal(layer(eye * 0, residual=True), x)
    assert layer(eye, pre_norm="rms").eq(1 - 2.0**-8).all()


@each_norm
def test_blocks_of_tokens_change_nothing(
    norm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case("experts", (20,), **norm)
    monkeypatch.setattr("custom_ops._grouped._TOKENS_PER_BLOCK", 7)
    assert_matches(case(), case.oracle(), case.dtypes)


@each_op
def test_autocast_keeps_the_residual(op: str) -> None:
    case = make_case(op, pre_norm="rms", residual=True)
    case.arguments["w2"].zero_()
    case.arguments["b2"].zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = case()
    assert torch.equal(result, case.arguments["x"])
