"""``torch.ops.moe.experts``: what an expert computes, and which experts process a token."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from custom_ops import _grouped
from custom_ops.options import POINTWISE
from moe_cases import DTYPES, EXPERT_FORMS, Case, assert_matches, make_case, of_size

NAN = float("nan")


@pytest.mark.pairwise
@pytest.mark.parametrize("form", EXPERT_FORMS)
@pytest.mark.parametrize("biases", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize(("x_dtype", "dtype"), DTYPES)
def test_result_is_the_oracle_s(
    x_dtype: torch.dtype, dtype: torch.dtype, biases: bool, form: dict[str, Any]
) -> None:
    case = make_case("experts", x_dtype=x_dtype, dtype=dtype, biases=biases, **form)
    result = case()
    assert result.dtype == x_dtype
    assert_matches(result, case.oracle(), case.dtypes)


@pytest.mark.pairwise
@pytest.mark.parametrize("form", EXPERT_FORMS)
@pytest.mark.parametrize("weight_on_input", [False, True], ids=["on output", "on input"])
@pytest.mark.parametrize(("x_dtype", "dtype"), DTYPES)
def test_gradients_are_the_oracle_s(
    x_dtype: torch.dtype, dtype: torch.dtype, weight_on_input: bool, form: dict[str, Any]
) -> None:
    case = make_case(
        "experts", (33,), x_dtype=x_dtype, dtype=dtype, weight_on_input=weight_on_input, **form
    )
    # The input is exact in every dtype, so that no pre-activation crosses a kink.
    powers_of_two = 2.0 ** -torch.arange(66).remainder(3).view(33, 2)
    case = case.changed(expert_weights=powers_of_two.to(case.arguments["expert_weights"].dtype))
    expected = case.gradients(Case.oracle)
    for name, gradient in case.gradients().items():
        assert gradient.dtype == case.arguments[name].dtype
        assert_matches(gradient, expected[name], case.dtypes, name)


@pytest.mark.parametrize("missing", ["b1", "b2"])
def test_either_bias_may_be_missing(missing: str) -> None:
    case = make_case("experts").changed(**{missing: None})
    assert_matches(case(), case.oracle(), case.dtypes)
    assert missing not in case.gradients()


@pytest.mark.parametrize(("x_dtype", "dtype"), DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_weights_on_the_input(x_dtype: torch.dtype, dtype: torch.dtype, gated: bool) -> None:
    case = make_case("experts", x_dtype=x_dtype, dtype=dtype, gated=gated, weight_on_input=True)
    assert_matches(case(), case.oracle(), case.dtypes)


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_dtype(weight_dtype: torch.dtype) -> None:
    case = make_case("experts")
    case = case.changed(expert_weights=case.arguments["expert_weights"].to(weight_dtype))
    assert_matches(case(), case.oracle(), case.dtypes)
    assert case.gradients()["expert_weights"].dtype == weight_dtype


def test_ids_of_32_bits_give_the_same_bits() -> None:
    case = make_case("experts")
    narrow = case.changed(expert_ids=case.arguments["expert_ids"].int())
    assert torch.equal(narrow(), case())
    wide_gradients = case.gradients()
    for name, gradient in narrow.gradients().items():
        assert torch.equal(gradient, wide_gradients[name])


def test_an_expert_may_be_chosen_twice() -> None:
    case = make_case("experts", (7,), top_k=3)
    case.arguments["expert_ids"][:5] = torch.tensor(
        [[1, 1, 1], [0, 2, 0], [4, 4, 3], [2, 0, 0], [1, 3, 1]]
    )
    assert_matches(case(), case.oracle(), case.dtypes)
    expected = case.gradients(Case.oracle)
    for name, gradient in case.gradients().items():
        assert_matches(gradient, expected[name], case.dtypes, name)


@pytest.mark.parametrize("expert", [0, 3, 4])
def test_one_expert_may_get_every_token(expert: int) -> None:
    case = make_case("experts", (40,), top_k=1)
    case.arguments["expert_ids"].fill_(expert)
    assert_matches(case(), case.oracle(), case.dtypes)
    for name in ("w1", "b1", "w2", "b2"):
        others = case.gradients()[name]
        assert others[expert].abs().sum() > 0
        others[expert] = 0
        assert torch.equal(others, torch.zeros_like(others))


@pytest.mark.parametrize("weight_on_input", [False, True], ids=["on output", "on input"])
def test_a_slot_of_no_expert_counts_nothing_whatever_its_weight(weight_on_input: bool) -> None:
    case = make_case("experts", (9,), top_k=3, weight_on_input=weight_on_input)
    ids, weights = case.arguments["expert_ids"], case.arguments["expert_weights"]
    ids[0], ids[1, 0], ids[2, 2], ids[3, 1:] = -1, -1, -1, -1
    silent = case.changed(expert_weights=weights.masked_fill(ids < 0, 0.0))
    for nothing in (NAN, float("inf"), 3.0):
        loud = case.changed(expert_weights=weights.masked_fill(ids < 0, nothing))
        assert torch.equal(loud(), silent())
        expected = silent.gradients()
        for name, gradient in loud.gradients().items():
            assert torch.equal(gradient, expected[name]), name
    assert_matches(silent(), silent.oracle(), case.dtypes)
    assert torch.equal(silent()[0], torch.zeros(12))
    assert silent.gradients()["expert_weights"][ids < 0].eq(0).all()


def test_without_any_expert_result_and_gradients_are_zero() -> None:
    case = make_case("experts", (3,))
    case.arguments["expert_ids"].fill_(-1)
    for tensor in (case(), *case.gradients().values()):
        assert torch.equal(tensor, torch.zeros_like(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_idle_experts_are_not_read(dtype: torch.dtype) -> None:
    case = make_case("experts", dtype=dtype)
    ids = case.arguments["expert_ids"]
    ids[ids == 2] = -1
    expected = case()
    for name in ("w1", "b1", "w2", "b2"):
        case.arguments[name][2] = NAN
    assert torch.equal(case(), expected)
    for name, gradient in case.gradients().items():
        assert gradient.isfinite().all(), name


@pytest.mark.parametrize("size", [1e-4, 30.0, 1e4])
def test_small_and_large_numbers(size: float) -> None:
    for activation in POINTWISE:
        case = of_size(activation, size)
        assert_matches(case(), case.oracle(), case.dtypes, activation)
        for gradient in case.gradients().values():
            assert gradient.isfinite().all(), activation


@pytest.mark.parametrize("size", [1e-4, 30.0, 1e4, 1e30, 1e38])
def test_softcaps_of_small_and_large_numbers(size: float) -> None:
    case = make_case(
        "experts", (9,), width=16, hidden=24, activation="softcapped_silu", gated=True, alpha=4.0,
        limit=25.0,
    )  # fmt: skip
    case = case.changed(x=case.arguments["x"].sign() * size)
    # Sums of these do not overflow: each hidden unit reads two numbers of a token.
    case.arguments["w1"][..., 2:] = 0
    assert_matches(case(), case.oracle(), case.dtypes)
    gradients, expected = case.gradients(), case.gradients(Case.oracle)
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        if name != "w1":  # Of tokens so large it is rounding errors times the token.
            assert_matches(gradient, expected[name], case.dtypes, name)


@pytest.mark.parametrize("activation", ["gelu", "hardswish", "elu", "leaky_relu"])
def test_nan_stays_in_its_row(activation: str) -> None:
    case = make_case("experts", (6,), activation=activation)
    expected = case()
    case.arguments["x"][2, 3] = NAN
    result = case()
    others = torch.arange(6) != 2
    assert result[2].isnan().all()
    assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_results_are_summed_in_slot_order(order: tuple[int, ...]) -> None:
    # In float32, (1e8 + 1) - 1e8 = 0, but (1e8 - 1e8) + 1 = 1.
    values = torch.tensor([1e8, 1.0, -1e8])
    one = torch.ones(3, 1, 1)
    ids = torch.tensor([order])
    weights = values[ids]
    expected = (weights[0, 0] + weights[0, 1]) + weights[0, 2]
    result = torch.ops.moe.experts(
        torch.ones(1, 1), ids, weights, one, None, one, None, activation="relu"
    )
    assert result.item() == expected.item()


@pytest.mark.parametrize(
    ("x_dtype", "dtype"),
    [
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
)
def test_where_numbers_are_rounded(x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    little = torch.finfo(dtype).eps / 4  # 1 + little is 1 in the experts' dtype, but not in x's.

    def relu_expert(x: list[float], w1: list[list[float]], w2: list[list[float]]) -> float:
        w1_EFD, w2_EDH = torch.tensor([w1], dtype=dtype), torch.tensor([w2], dtype=dtype)
        x_TD, ids = torch.tensor([x], dtype=x_dtype), torch.zeros(1, 1, dtype=torch.int64)
        ones = torch.ones(1, 1)
        y_TD = torch.ops.moe.experts(x_TD, ids, ones, w1_EFD, None, w2_EDH, None, activation="relu")
        return y_TD[0, 0].item()

    zeros = [0.0, 0.0]
    assert relu_expert([1 + little, 1], [[1, -1], zeros], [[1, 0], zeros]) == 0  # tokens
    assert relu_expert([1, little], [[1, 1], zeros], [[1, 0], zeros]) == 1  # hidden rows
    assert relu_expert([1, 0], [[1, 0], [1, 0]], [[1, little], zeros]) == 1 + little  # not results


def _integers(case: Case) -> Case:
    """The same case with small integers: every sum is exact, so any order gives the same bits."""
    generator = torch.Generator().manual_seed(0)
    integers: dict[str, Tensor] = {
        name: torch.randint(-3, 4, t.shape, generator=generator).to(t.dtype)
        for name, t in case.floats.items()
    }
    return case.changed(**integers)


@pytest.mark.pairwise
@pytest.mark.parametrize("block", [1, 2, 7, 16, 19])
@pytest.mark.parametrize(("x_dtype", "dtype"), DTYPES)
def test_blocks_of_tokens_change_nothing(
    x_dtype: torch.dtype, dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case("experts", (20,), x_dtype=x_dtype, dtype=dtype, activation="relu")
    case.arguments["expert_ids"][3:9, 1] = -1
    exact = _integers(case)
    whole = exact()
    monkeypatch.setattr(_grouped, "_TOKENS_PER_BLOCK", block)
    assert torch.equal(exact(), whole)
    assert_matches(case(), case.oracle(), case.dtypes)


@pytest.mark.parametrize("form", EXPERT_FORMS)
def test_by_onednn_the_result_is_the_oracle_s(
    form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is for larger weights than any of a test."""
    monkeypatch.setattr(_grouped, "_ONEDNN_WEIGHTS", 0)
    case = make_case("experts", **form)
    assert_matches(case(), case.oracle(), case.dtypes)
    expected = case.gradients(Case.oracle)
    for name, gradient in case.gradients().items():
        assert_matches(gradient, expected[name], case.dtypes, name)


def test_by_onednn_biases_may_have_any_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_grouped, "_ONEDNN_WEIGHTS", 0)
    case = make_case("experts")
    biases = {name: case.arguments[name].t().contiguous().t() for name in ("b1", "b2")}
    assert not any(bias[0].is_contiguous() for bias in biases.values())
    assert_matches(case.changed(**biases)(), case.oracle(), case.dtypes)


def test_onednn_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _grouped._find_onednn_linear() is _grouped._ONEDNN_LINEAR
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert _grouped._find_onednn_linear() is None
