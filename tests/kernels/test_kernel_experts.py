"""The kernels' whole forward pass in Triton's interpreter, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.configs import FewConfig, GemmConfig, MlpConfig, RangeConfig
from custom_ops.kernels.expert_mlp import split_width
from custom_ops.kernels.plan import plan_with
from custom_ops.kernels.spec import MAX_TOKENS
from kernel_runs import in_out, layer_of, run_kernels
from moe_cases import KERNEL_FORMS, NORM_FORMS, OPS, Case, assert_matches, make_case
from random_layers import bounded, cases

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
PATHS = {
    "few": (FewConfig(16, 16, 4), FewConfig(8, 32, 4)),
    "gemm": (GemmConfig(16, 16, 16, 4, 2, group_m=3), GemmConfig(16, 32, 16, 4, 2)),
    "gemm-tensor-maps": (
        GemmConfig(16, 16, 16, 4, 2, group_m=3, tensor_maps=True),
        GemmConfig(16, 32, 16, 4, 2, tensor_maps=True),
    ),
    "gemm-swapped": (
        GemmConfig(16, 32, 16, 4, 2, group_m=3, swapped=True),
        GemmConfig(16, 32, 16, 4, 2, tensor_maps=True, persistent=True, swapped=True),
    ),
    "gemm-persistent": (
        GemmConfig(16, 16, 16, 4, 2, group_m=3, persistent=True),
        GemmConfig(16, 32, 16, 4, 2, tensor_maps=True, persistent=True),
    ),
    "mlp": (MlpConfig(16, 16, 4, 2), None),
}


def ranges(path: str) -> tuple[RangeConfig, ...]:
    up, down = PATHS[path]
    return (RangeConfig(MAX_TOKENS, path.split("-", maxsplit=1)[0], up, down),)


def check(case: Case, path: str | None = None, device: str = "sm_80") -> None:
    result = run_kernels(case, device, ranges(path) if path else ())
    assert_matches(result, case.oracle(), case.dtypes)


@pytest.mark.pairwise
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", KERNEL_FORMS)
def test_every_form_of_expert(path, form):
    check(make_case("experts", (5,), width=24, hidden=40, dtype=torch.float16, **form), path)


@pytest.mark.pairwise
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("transposed", [("w1",), ("w2",), ("w1", "w2")])
@pytest.mark.parametrize("form", ["plain", "gated", "interleaved"])
def test_weights_as_in_by_out(path, transposed, form):
    case = make_case(
        "experts", (5,), width=24, hidden=40, dtype=torch.float16,
        gated=form != "plain", interleaved=form == "interleaved",
    )  # fmt: skip
    check(in_out(case, *transposed), path)


@pytest.mark.parametrize("gated", [False, True])
def test_tiles_stored_in_halves(gated):
    tile = GemmConfig(16, 128, 64, 4, 2, persistent=gated)
    case = make_case("experts", (9,), width=200, hidden=72, dtype=torch.float16, gated=gated)
    result = run_kernels(case, ranges=(RangeConfig(MAX_TOKENS, "gemm", tile, tile),))
    assert_matches(result, case.oracle(), case.dtypes)


@pytest.mark.parametrize("multiprocessors", [1, 3, 1000])
def test_programs_that_take_several_tiles_or_none(multiprocessors):
    case = make_case(
        "experts", (37,), width=40, hidden=72, experts=6, dtype=torch.float16, gated=True
    )
    ids = case.arguments["expert_ids"].clamp(max=3)
    ids[::5, 1] = -1
    case = case.changed(expert_ids=ids)
    device = replace(architecture("sm_90"), multiprocessors=multiprocessors)
    result = run_kernels(case, device, ranges("gemm-persistent"))
    assert_matches(result, case.oracle(), case.dtypes)


@pytest.mark.pairwise
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("experts_dtype", FLOATS)
@pytest.mark.parametrize("tokens_dtype", FLOATS)
def test_every_pair_of_dtypes(path, tokens_dtype, experts_dtype):
    case = make_case(
        "experts", (7,), width=24, hidden=24, dtype=experts_dtype, x_dtype=tokens_dtype,
        activation="silu", gated=True,
    )  # fmt: skip
    check(case, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "width",
    [8, 16, 56, 72, 128, *(pytest.param(width, marks=pytest.mark.every) for width in (96, 192))],
)
def test_widths(path, width):
    check(make_case("experts", (6,), width=width, hidden=8, dtype=torch.float16), path)


@pytest.mark.parametrize("path", PATHS)
def test_weight_on_input(path):
    case = make_case(
        "experts", (6,), width=16, hidden=24, dtype=torch.bfloat16, weight_on_input=True
    )
    check(case, path)


@pytest.mark.pairwise
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("norm", NORM_FORMS)
@pytest.mark.parametrize("weight_on_input", [False, True], ids=["on output", "on input"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_norm_and_residual(path, norm, weight_on_input, dtype):
    # Two blocks of rows for an expert; the path of few tokens has no such blocks.
    tokens = 9 if path == "few" else 21
    case = make_case(
        "experts", (tokens,), width=72, hidden=24, dtype=dtype, weight_on_input=weight_on_input,
        activation="silu", gated=True, **norm,
    )  # fmt: skip
    case.arguments["x"].mul_(torch.logspace(-2, 1, tokens)[:, None])
    ids = case.arguments["expert_ids"]
    ids[3], ids[5, 0], ids[7, 1] = -1, -1, -1
    result = run_kernels(case, ranges=ranges(path))
    assert_matches(result, case.oracle(), case.dtypes)
    if norm["residual"]:
        assert torch.equal(result[3], case.arguments["x"][3])


@pytest.mark.parametrize("path", PATHS)
def test_a_norm_of_rows_that_blocks_do_not_fill(path):
    for width in (8, 24, 136):
        case = make_case(
            "experts", (5,), width=width, hidden=8, gated=True, pre_norm="rms", norm_eps=1e-3
        )
        check(case, path)


def test_a_norm_of_wide_rows_and_of_zeros():
    case = make_case("experts", (4,), width=4104, hidden=8, pre_norm="rms", norm_eps=2.0**-126)
    case.arguments["x"][1] = 0
    check(case)


@pytest.mark.parametrize("path", PATHS)
def test_norm_and_residual_cost_nothing_where_they_are_off(path):
    def launches(**norm):
        case = make_case("experts", width=16, hidden=8, gated=True, norm_eps=0.5, **norm)
        planned = plan_with(layer_of(case), architecture("sm_90"), ranges(path))
        assert planned.layer.shape.options.norm_eps == (0.5 if "pre_norm" in norm else 1e-6)
        return {spec.name: spec for spec in planned.ranges[0].launches}

    plain, normed, residual = launches(), launches(pre_norm="rms"), launches(residual=True)
    assert set(normed) - set(plain) == {"row_scale_kernel"}
    assert set(residual) == set(plain)
    for name, spec in plain.items():
        if spec.constants.get("GATED"):
            assert spec.constants["row_scale_ptr"] is None
            assert "row_scale_ptr" in normed[name].parameters
        elif "y_ptr" in spec.parameters:
            assert spec.constants["x_ptr"] is None
            assert "x_ptr" in residual[name].parameters


@pytest.mark.each_value
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_slots_without_expert(path, ids_dtype):
    case = make_case("experts", (9,), width=16, hidden=16, experts=3, top_k=3)
    ids = torch.tensor([[0, -1, 2], [-1, -1, -1], [1, 1, 1]] * 3, dtype=ids_dtype)
    check(case.changed(expert_ids=ids), path)


@pytest.mark.each_value
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("biases", [True, False])
def test_all_tokens_on_one_expert(path, biases):
    case = make_case("experts", (37,), width=16, hidden=16, experts=6, top_k=2, biases=biases)
    check(case.changed(expert_ids=torch.full((37, 2), 4)), path)


@pytest.mark.parametrize("path", PATHS)
def test_a_nan_stays_in_its_row(path):
    case = make_case("experts", (20,), width=16, hidden=24, dtype=torch.float16)
    clean = run_kernels(case, ranges=ranges(path))
    x = case.arguments["x"].clone()
    x[3, 5] = float("nan")
    result = run_kernels(case.changed(x=x), ranges=ranges(path))
    assert result[3].isnan().all()
    others = torch.arange(20) != 3
    assert torch.equal(result[others], clean[others])


@pytest.mark.parametrize("path", PATHS)
def test_the_same_bits_again(path):
    case = make_case("dropless", (19,), width=24, hidden=24, dtype=torch.bfloat16)
    first, second = (run_kernels(case, ranges=ranges(path)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.pairwise
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", ["sm_75", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
def test_plans_of_architectures(op, device, tokens):
    case = make_case(
        op, (tokens,), width=136, hidden=72, experts=5, dtype=torch.float16, gated=True,
        activation="silu",
    )  # fmt: skip
    check(case, device=device)


@pytest.mark.slow
@bounded
@given(case=cases(), device=st.sampled_from(["sm_80", "sm_90"]))
@pytest.mark.every
def test_any_layer(case, device):
    check(case, device=device)


@given(width=st.integers(1, 32).map(lambda n: 8 * n))
def test_the_parts_of_a_width_hold_it(width):
    first, rest = split_width(width)
    assert first + rest >= width
    assert all(part == 0 or (part >= 16 and part & (part - 1) == 0) for part in (first, rest))
    assert first + rest <= max(16, 1 << (width - 1).bit_length())
