"""The whole forward pass of the kernels, in Triton's interpreter, against the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from custom_ops import ACTIVATIONS, SCORINGS
from custom_ops.kernels.configs import FewConfig, GemmConfig, MlpConfig, RangeConfig
from custom_ops.kernels.expert_mlp import split_width
from custom_ops.kernels.spec import MAX_TOKENS
from custom_ops.options import CLAMPED
from kernel_runs import run_kernels
from moe_cases import EXPERT_FORMS, OPS, Case, assert_matches, make_case

bounded = settings(derandomize=True, deadline=None, max_examples=40, database=None)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
PATHS = {
    "few": (FewConfig(4, 16, 4), FewConfig(8, 32, 4)),
    "gemm": (GemmConfig(16, 16, 16, 4, 2, group_m=3), GemmConfig(16, 32, 16, 4, 2)),
    "gemm-tensor-maps": (
        GemmConfig(16, 16, 16, 4, 2, group_m=3, tensor_maps=True),
        GemmConfig(16, 32, 16, 4, 2, tensor_maps=True),
    ),
    "mlp": (MlpConfig(16, 16, 4, 2), None),
}


def ranges(path: str) -> tuple[RangeConfig, ...]:
    up, down = PATHS[path]
    return (RangeConfig(MAX_TOKENS, path.split("-", maxsplit=1)[0], up, down),)


def check(case: Case, path: str | None = None, device: str = "sm_80") -> None:
    result = run_kernels(case, device, ranges(path) if path else ())
    assert_matches(result, case.oracle(), case.dtypes)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", EXPERT_FORMS)
def test_every_form_of_expert(path, form):
    check(make_case("experts", (5,), width=24, hidden=40, dtype=torch.float16, **form), path)


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
@pytest.mark.parametrize("width", [8, 16, 56, 72, 96, 128, 192])
def test_widths(path, width):
    check(make_case("experts", (6,), width=width, hidden=8, dtype=torch.float16), path)


@pytest.mark.parametrize("path", PATHS)
def test_weight_on_input(path):
    case = make_case(
        "experts", (6,), width=16, hidden=24, dtype=torch.bfloat16, weight_on_input=True
    )
    check(case, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_slots_without_expert(path, ids_dtype):
    case = make_case("experts", (9,), width=16, hidden=16, experts=3, top_k=3)
    ids = torch.tensor([[0, -1, 2], [-1, -1, -1], [1, 1, 1]] * 3, dtype=ids_dtype)
    check(case.changed(expert_ids=ids), path)


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


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", ["sm_75", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
def test_plans_of_architectures(op, device, tokens):
    case = make_case(
        op, (tokens,), width=136, hidden=72, experts=5, dtype=torch.float16, gated=True,
        activation="silu",
    )  # fmt: skip
    check(case, device=device)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    activation = draw(st.sampled_from(ACTIVATIONS))
    gated = activation in CLAMPED or draw(st.booleans())
    op = draw(st.sampled_from(OPS))
    options = {
        "activation": activation,
        "gated": gated,
        "interleaved": gated and draw(st.booleans()),
        "weight_on_input": draw(st.booleans()),
        "limit": draw(st.sampled_from([0.5, 7.0])),
    }
    if op == "dropless":
        options |= {
            "scoring": draw(st.sampled_from(SCORINGS)),
            "renormalize": draw(st.booleans()),
            "routed_scaling": draw(st.sampled_from([1.0, 2.5])),
        }
    experts = draw(st.integers(1, 40))
    return make_case(
        op,
        (draw(st.integers(0, 50)),),
        width=8 * draw(st.integers(1, 20)),
        hidden=8 * draw(st.integers(1, 10)),
        experts=experts,
        top_k=draw(st.integers(1, min(experts, 8))),
        dtype=draw(st.sampled_from(FLOATS)),
        x_dtype=draw(st.sampled_from(FLOATS)),
        biases=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        **options,
    )


@bounded
@given(case=cases(), device=st.sampled_from(["sm_80", "sm_90"]))
def test_any_layer(case, device):
    check(case, device=device)


@given(width=st.integers(1, 32).map(lambda n: 8 * n))
def test_the_parts_of_a_width_hold_it(width):
    first, rest = split_width(width)
    assert first + rest >= width
    assert all(part == 0 or (part >= 16 and part & (part - 1) == 0) for part in (first, rest))
    assert first + rest <= max(16, 1 << (width - 1).bit_length())
