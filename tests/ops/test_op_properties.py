"""Both operators on random configurations: the oracle's result, and changes without effect."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from custom_ops import ACTIVATIONS, SCORINGS
from custom_ops.options import GATINGS, PRE_NORMS
from moe_cases import OPS, Case, assert_matches, make_case
from random_layers import groups

FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Compiling kernels and the first call of each product take longer than any deadline.
bounded = settings(derandomize=True, deadline=None, max_examples=150, database=None)


@st.composite
def cases(
    draw: st.DrawFn, ops: tuple[str, ...] = OPS, dtypes: tuple[torch.dtype, ...] = FLOAT_TYPES
) -> Case:
    """Calls with every option and any size up to a few tiles of a vector unit."""
    op = draw(st.sampled_from(ops))
    activation = draw(st.sampled_from(ACTIVATIONS))
    gated = activation in GATINGS or draw(st.booleans())
    options: dict[str, Any] = {
        "activation": activation,
        "gated": gated,
        "interleaved": gated and draw(st.booleans()),
        "weight_on_input": draw(st.booleans()),
        "alpha": draw(st.sampled_from([1.0, 1.702])),
        "limit": draw(st.sampled_from([0.5, 7.0])),
        "pre_norm": draw(st.sampled_from(PRE_NORMS)),
        "norm_eps": draw(st.sampled_from([1e-6, 0.5])),
        "residual": draw(st.booleans()),
    }
    experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, experts))
    if op == "dropless":
        options |= draw(groups(experts, top_k)) | {
            "scoring": draw(st.sampled_from(SCORINGS)),
            "renormalize": draw(st.booleans()),
            "routed_scaling": draw(st.sampled_from([1.0, 0.5, 2.5])),
        }
    dtype, x_dtype = draw(st.sampled_from(dtypes)), draw(st.sampled_from(dtypes))
    # Errors are relative to the RMS of the result, and one number may be small by chance.
    narrowest = 8 if {dtype, x_dtype} & {torch.float16, torch.bfloat16} else 1
    case = make_case(
        op,
        (draw(st.integers(0, 17)),),
        width=draw(st.integers(narrowest, 20)),
        hidden=draw(st.integers(1, 20)),
        experts=experts,
        top_k=top_k,
        dtype=dtype,
        x_dtype=x_dtype,
        biases=draw(st.booleans()),
        selection_bias=op == "dropless" and draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        **options,
    )
    if op == "experts" and draw(st.booleans()):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
        ids = torch.randint(-1, experts, case.arguments["expert_ids"].shape, generator=generator)
        case = case.changed(expert_ids=ids.to(draw(st.sampled_from([torch.int32, torch.int64]))))
    return case


@given(cases())
@bounded
def test_result_is_the_oracle_s(case: Case) -> None:
    result = case()
    assert result.dtype == case.arguments["x"].dtype
    assert_matches(result, case.oracle(), case.dtypes)


@given(cases(dtypes=(torch.float64,)))
@bounded
def test_gradients_are_the_oracle_s(case: Case) -> None:
    expected = case.gradients(Case.oracle)
    for name, gradient in case.gradients().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-9)


@given(cases(dtypes=(torch.float64,)), st.integers(0, 2**16))
@bounded
def test_tokens_in_another_order_have_the_same_results(case: Case, seed: int) -> None:
    order = torch.randperm(len(case.arguments["x"]), generator=torch.Generator().manual_seed(seed))
    inputs = [n for n in ("x", "expert_ids", "expert_weights") if n in case.arguments]
    permuted = case.changed(**{name: case.arguments[name][order] for name in inputs})
    assert_matches(permuted(), case()[order], case.dtypes)


@given(cases(ops=("experts",)), st.integers(0, 9))
@bounded
def test_a_slot_of_no_expert_changes_nothing(case: Case, place: int) -> None:
    ids, weights = case.arguments["expert_ids"], case.arguments["expert_weights"]
    place = min(place, ids.shape[1])

    def widened(tensor: Tensor, fill: float) -> Tensor:
        slot = torch.full_like(tensor[:, :1], fill)
        return torch.cat([tensor[:, :place], slot, tensor[:, place:]], dim=1)

    wider = case.changed(expert_ids=widened(ids, -1), expert_weights=widened(weights, float("nan")))
    # Not bit for bit: rows at another alignment take another path through a product.
    assert_matches(wider(), case().double(), case.dtypes)


@given(cases(dtypes=(torch.float64,)), st.integers(0, 2**16))
@bounded
def test_experts_in_another_order_are_the_same_layer(case: Case, seed: int) -> None:
    experts = case.arguments["w1"].shape[0]
    groups_GS = torch.arange(experts).view(case.options.get("n_group", 1), -1)
    generator = torch.Generator().manual_seed(seed)
    # Groups among themselves, and experts in their groups.
    first, second = (torch.randperm(size, generator=generator) for size in groups_GS.shape)
    order = groups_GS[first][:, second].flatten()
    names = ("router_weight", "router_bias", "selection_bias", "w1", "b1", "w2", "b2")
    renamed = {n: t[order] for n in names if (t := case.arguments.get(n)) is not None}
    if case.op == "experts":
        # The new number of each old expert; -1 selects the last entry, which stays -1.
        numbers = torch.cat([order.argsort(), torch.tensor([-1])])
        renamed["expert_ids"] = numbers[case.arguments["expert_ids"].long()]
    assert_matches(case.changed(**renamed)(), case(), case.dtypes)
