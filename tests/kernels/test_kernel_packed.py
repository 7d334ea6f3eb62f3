"""The kernels with packed weights in Triton's interpreter, against the oracle."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.gpu import packed_code
from benchmarks.gpu.kernel_code import disassemble
from benchmarks.gpu.layers import SHAPES
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.backward_plan import backward_plan
from custom_ops.kernels.configs import (
    FewConfig,
    GemmConfig,
    MlpConfig,
    RangeConfig,
    default_ranges,
)
from custom_ops.kernels.launch_waves import launch_in_waves
from custom_ops.kernels.layer import NoKernelsError
from custom_ops.kernels.plan import plan, plan_with
from custom_ops.kernels.spec import MAX_TOKENS
from custom_ops.kernels.weights import _decoded, packed_products, sums_of_row
from custom_ops.packed_weights import ENCODINGS, WHOLE
from custom_ops.weight_formats import packed_format
from kernel_runs import call_tensors, layer_of, run_kernels
from moe_cases import assert_matches
from packed_cases import SHAPE, PackedCase, packed_case
from trt_plugin.compiling.tasks import Compiled, Task, task_for
from trt_plugin.compiling.workers import compile_tasks
from wave_runs import new_state, plan_in_waves

OTHERS = ("sm_80", "sm_100", "sm_120")

# Blocks of a depth that has several scales of a row, one, and a part of one.
PATHS = {
    "few": (FewConfig(16, 64, 4), FewConfig(32, 16, 4)),
    "gemm": (GemmConfig(16, 16, 64, 4, 2), GemmConfig(16, 32, 16, 4, 2)),
    "gemm-swapped": (
        GemmConfig(16, 32, 32, 4, 2, swapped=True),
        GemmConfig(16, 32, 16, 4, 2, persistent=True, swapped=True),
    ),
}
FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"weight_format": "int4", "group": 8},
    "int4 zero points": {"weight_format": "int4", "group": 8, "zero_points": "groups"},
    "int4 zero point": {"weight_format": "int4", "group": 8, "zero_points": "experts"},
    "int4 half scales": {"weight_format": "int4", "group": 32, "scales_dtype": torch.bfloat16},
    "mxfp4": {"weight_format": "mxfp4"},
    "fp8": {"weight_format": "fp8"},
    "fp8 rows": {"weight_format": "fp8 rows"},
    "fp8 whole": {"weight_format": "fp8 whole", "scales_dtype": torch.float16},
    "fp8 groups": {"weight_format": "fp8 groups", "scales_dtype": torch.bfloat16},
    "nvfp4": {"weight_format": "nvfp4"},
    "int8": {"weight_format": "int8", "group": 16, "scales_dtype": torch.bfloat16},
}


def tokens_of(path: str) -> tuple[int, ...]:
    """A block of few tokens has one, so a few of them show what many do."""
    return (3,) if path == "few" else SHAPE


def check(case: PackedCase, path: str) -> None:
    ranges = (RangeConfig(MAX_TOKENS, path.partition("-")[0], *PATHS[path]),)
    # The weights are rounded to the tokens' dtype before the products.
    assert_matches(run_kernels(case, ranges=ranges), case.decoded().oracle(), case.plain.dtypes)


@pytest.mark.each_value
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formats(path: str, form: str, dtype: torch.dtype) -> None:
    sizes = {"shape": tokens_of(path), "width": 160, "hidden": 96}
    case = packed_case(
        "experts", dtype=dtype, activation="silu", gated=True, **sizes, **FORMATS[form]
    )
    check(case, path)


@pytest.mark.each_value
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["int4 zero points", "mxfp4", "fp8", "nvfp4", "int8"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gated": True, "interleaved": True, "biases": False},
        {"weight_on_input": True, "pre_norm": "rms", "residual": True},
    ],
    ids=["plain", "interleaved", "norm"],
)
def test_options(path: str, form: str, options: dict[str, Any]) -> None:
    """At sizes that no block divides."""
    sizes = {"shape": tokens_of(path), "width": 288, "hidden": 32}
    case = packed_case("experts", dtype=torch.float16, **sizes, **FORMATS[form], **options)
    check(case, path)


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [2, 40])
def test_default_configurations(form: str, tokens: int) -> None:
    """Those that a call takes, of few tokens and of more, behind a router."""
    case = packed_case(
        "dropless", dtype=torch.bfloat16, shape=(tokens,), width=64, hidden=64, **FORMATS[form]
    )
    ranges = default_ranges(layer_of(case), architecture("sm_90"))
    assert {chosen.path for chosen in ranges} == {"few", "gemm"}
    assert not any(chosen.up.tensor_maps for chosen in ranges if isinstance(chosen.up, GemmConfig))
    assert_matches(run_kernels(case, "sm_90"), case.decoded().oracle(), case.plain.dtypes)


@triton.jit
def _decoding_kernel(
    w_ptr, scales_ptr, global_scales_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr,
    ENCODING: tl.constexpr, SCALE_K: tl.constexpr,
):  # fmt: skip
    n, k = tl.arange(0, N)[:, None].to(tl.int64), tl.arange(0, K)[None, :]
    tile = _decoded(
        w_ptr, scales_ptr, None, global_scales_ptr, 0, n, 0, n < N, N, K, K, ENCODING, 1, SCALE_K,
        False,
    )  # fmt: skip
    tl.store(out_ptr + n * K + k, tile)


@pytest.mark.parametrize("weight_format", ENCODINGS)
def test_every_code(weight_format: str) -> None:
    """Every byte, and of E8M0 and E4M3 every scale, has the bits of PyTorch's decoding."""
    encoding = ENCODINGS[weight_format]
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.int8)
    values = codes.repeat(256, 1)
    columns = 256 * encoding.per_byte
    scales, shared = torch.linspace(0.1, 3, 256)[:, None].contiguous(), columns
    if encoding.scale_elements:
        shared = encoding.block[1]
        scales = codes[:, None].expand(256, columns // shared).contiguous()
    factors = torch.linspace(0.1, 3, 256)[:, None] if encoding.has_global_scales else None
    out = torch.empty(256, columns)
    _decoding_kernel[(1,)](values, scales, factors, out, 256, columns, weight_format, shared)
    expected = encoding.decode(values, scales, None, factors, dtype=torch.float32)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _products_kernel(
    w_ptr, scales_ptr, x_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr, ENCODING: tl.constexpr,
    SCALE_K: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    n, place = tl.arange(0, N)[:, None].to(tl.int64), tl.arange(0, SUMS)[None, :]
    products = packed_products(
        w_ptr, scales_ptr, None, x_ptr, None, 0, n, 0, n < N, True, tl.float32, N, K, K, ENCODING,
        1, SCALE_K, False,
    )  # fmt: skip
    tl.store(out_ptr + n * SUMS + place, products)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_format", ENCODINGS)
def test_every_code_of_few_tokens(weight_format: str, dtype: torch.dtype) -> None:
    """The product with a vector that has a 1 in one place of each sum is the weight there."""
    encoding = ENCODINGS[weight_format]
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.int8)
    values = codes.repeat(256, 1)
    columns = 256 * encoding.per_byte
    shared, scales = columns, torch.linspace(0.1, 3, 256)[:, None].contiguous()
    if encoding.scale_elements:
        shared = encoding.block[1]
        scales = codes[:, None].expand(256, columns // shared).contiguous()
    factors = torch.ones(256, 1) if encoding.has_global_scales else None
    expected = encoding.decode(values, scales, None, factors, dtype=torch.float32)
    sums = sums_of_row(weight_format, shared, columns, columns)
    terms = columns // sums
    for place in range(terms):
        x = torch.zeros(columns, dtype=dtype)
        x[place::terms] = 1
        out = torch.empty(256, sums)
        _products_kernel[(1,)](
            *(values, scales, x, out), *(256, columns, weight_format, shared, sums)
        )
        # A NaN beside is one of the sum's terms.
        is_nan = expected.isnan().view(256, -1, terms).any(-1)
        assert torch.equal(out.isnan(), is_nan)
        wanted = expected[:, place::terms]
        torch.testing.assert_close(out[~is_nan], wanted[~is_nan], rtol=0, atol=0)


@pytest.mark.parametrize("token", [2.0**51, 2.0**-51])
@pytest.mark.parametrize("weight_format", ["int4", "int8"])
def test_the_largest_and_the_smallest_tokens(weight_format: str, token: float) -> None:
    """Codes are numbers near the least float32, and tokens are multiplied to make up for it."""
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.int8)[:, None]
    values, scales = values.repeat(1, 16), torch.ones(256, 1)
    columns = 16 * ENCODINGS[weight_format].per_byte
    sums = sums_of_row(weight_format, columns, columns, columns)
    out = torch.empty(256, sums)
    x = torch.full((columns,), token)
    _products_kernel[(1,)](values, scales, x, out, 256, columns, weight_format, columns, sums)
    decoded = ENCODINGS[weight_format].decode(values, scales, None, None, dtype=torch.float32)
    expected = decoded.view(256, sums, -1).sum(-1) * token
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_shared_columns_that_blocks_do_not_fit() -> None:
    case = packed_case("experts", group=24, width=72, hidden=48)
    with pytest.raises(NoKernelsError, match=r"a power of two of columns from 8 on, .*; got 24"):
        layer_of(case)


def test_what_takes_no_packed_weights() -> None:
    layer = layer_of(packed_case("experts", "fp8"))
    on = architecture("sm_90")
    maps = replace(PATHS["gemm"][0], tensor_maps=True)
    with pytest.raises(TypeError, match="tensor maps have no packed weights; got fp8"):
        plan_with(layer, on, (RangeConfig(MAX_TOKENS, "gemm", maps, maps),))
    with pytest.raises(TypeError, match="products in one kernel have no packed weights"):
        plan_with(layer, on, (RangeConfig(MAX_TOKENS, "mlp", MlpConfig(16, 16, 4, 2), None),))
    with pytest.raises(TypeError, match="backward passes have no packed weights"):
        backward_plan(layer, on, train_parameters=True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.first(1)
def test_nothing_is_read_beyond_a_row(path: str) -> None:
    """The code 0 is -8 times the scale, which float16 may not have, and infinity times 0 is NaN."""
    sizes = {"shape": tokens_of(path), "width": 152, "hidden": 152}
    case = packed_case("experts", group=152, dtype=torch.float16, **sizes)
    codes = torch.full_like(case.arguments["w1"], -0x78)  # 0x88: zeros.
    codes[..., 0] = -0x77
    scales = torch.full_like(case.arguments["w1_scales"], 9000.0)
    weights = {"w1": codes, "w2": codes, "w1_scales": scales, "w2_scales": scales}
    tokens = case.arguments["x"] * 1e-5
    check(case.changed(**weights, x=tokens, b1=None, b2=None), path)


@pytest.mark.each_value
@pytest.mark.parametrize("resident", [1, 3])
@pytest.mark.parametrize("form", ["int4 zero points", "mxfp4", "fp8 rows", "nvfp4"])
def test_offloaded_experts(form: str, resident: int) -> None:
    case = packed_case("experts", dtype=torch.bfloat16, gated=True, **FORMATS[form])
    planned = plan_in_waves(case, resident)
    slots = {f"{name}_slots" for name, tensor in case.packed.items() if tensor is not None}
    assert slots <= {buffer.name for buffer in planned.state}
    state = new_state(planned)
    for _ in range(2):  # The second call finds experts of the first.
        tensors = call_tensors(case)
        launch_in_waves(planned, tensors, state)
        assert_matches(tensors["y"], case.decoded().oracle(), case.plain.dtypes)


# --- Machine code ---


@pytest.mark.slow
@pytest.mark.skipif(
    not packed_code.read_record(triton.__version__), reason="no record of this version of Triton"
)
@pytest.mark.every
def test_a_weight_costs_no_more_than_recorded() -> None:
    """Of docs/benchmarks/packed_code.json; `python -m benchmarks.gpu.packed_code` writes it."""
    record = packed_code.read_record(triton.__version__)
    found = packed_code.measure([architecture("sm_90")], progress=False)
    assert len(found) == 2 * len(packed_code.FORMATS)
    for name, cost in found.items():
        for figure in ("bytes", "instructions", "registers", "local_memory"):
            assert cost[figure] <= record[name][figure], (name, figure)
        if name.startswith("sm_90 int4"):
            assert cost["bytes"] < 2 / 3.3
        if name.startswith("sm_90 fp8") and "up" in name:
            # The memory's speed is what limits it.
            assert cost["instructions"] < cost["affordable"]


@pytest.mark.parametrize(
    ("device", "whole"),
    [
        pytest.param("sm_90", False, marks=pytest.mark.every),
        *(pytest.param(name, True, marks=pytest.mark.every) for name in ("sm_90", *OTHERS)),
    ],
)
def test_nothing_spills_and_bytes_are_read_at_once(device: str, whole: bool) -> None:
    """At the sizes of Qwen3-30B-A3B: for a few tokens, and for more of both kinds of product.

    Each format is compiled for one of these in turn, or for all.
    """
    plain = SHAPES["qwen3"].layer(torch.bfloat16)
    on = architecture(device)
    tasks = []
    formats = (
        packed_format("int4", torch.bfloat16, torch.bfloat16, (1, 32)),
        packed_format("int4", torch.bfloat16, torch.bfloat16, (1, 128), zero_points_block=(1, 128)),
        packed_format("mxfp4", torch.bfloat16, torch.int8, (1, 32)),
        packed_format("fp8", torch.bfloat16, torch.float32, (128, 128)),
        packed_format("nvfp4", torch.bfloat16, torch.int8, (1, 16)),
        packed_format("int8", torch.bfloat16, torch.bfloat16, (1, WHOLE)),
    )
    for number, weight_format in enumerate(formats):
        layer = replace(plain, shape=replace(plain.shape, weight_format=weight_format))
        few, small, *_, large = plan(layer, on).ranges
        spans = (few, small, large) if whole else ((few, small, large)[number % 3],)
        launches = [launch for span in spans for launch in span.launches]
        tasks += [
            task_for(launch, on) for launch in launches if re.match("few|expert", launch.name)
        ]
    problems = []

    def done(task: Task, result: Compiled) -> None:
        code = disassemble(result.cubin)
        if result.info.local_memory or not re.search(r"(LDGSTS|LDG)\S*\.128", code):
            problems.append((str(task), result.info))

    compile_tasks(tasks, 1 + whole, done)
    assert len(tasks) == len(formats) * len(spans) * 2
    assert not problems
