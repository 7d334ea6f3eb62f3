"""The vector products for few tokens: layouts of the weights, numbers of slots, blocks, stages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from custom_ops import ExpertOptions
from custom_ops.kernels.architectures import ARCHITECTURES, Architecture, architecture
from custom_ops.kernels.configs import FewConfig, RangeConfig, default_ranges
from custom_ops.kernels.launch import launch
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan_with
from custom_ops.kernels.spec import MAX_TOKENS
from custom_ops.layer_shape import LayerShape
from custom_ops.options import WeightLayout
from custom_ops.weight_formats import plain_format
from kernel_runs import call_tensors, in_out, layer_of
from moe_cases import Case, assert_matches, make_case
from trt_plugin.compiling import compile_plans, limit_tokens

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = [
    pytest.param(w1, w2, id=f"w1-{'in-out' if w1 else 'out-in'}-w2-{'in-out' if w2 else 'out-in'}")
    for w1 in (False, True)
    for w2 in (False, True)
]
GATINGS = {
    "plain": {"activation": "gelu"},
    "gated": {"activation": "silu", "gated": True},
    "interleaved": {"activation": "clamped_swiglu", "gated": True, "interleaved": True},
}
# Neither fills 24 nor 40.
SMALL = (FewConfig(16, 16, 4, 3), FewConfig(16, 32, 4, 1))


def run(
    case: Case,
    w1_transposed: bool = False,
    w2_transposed: bool = False,
    blocks: tuple[FewConfig, FewConfig] | None = None,
) -> torch.Tensor:
    """The kernels' result for weights that lie in memory as given."""
    case = in_out(case, *["w1"] * w1_transposed, *["w2"] * w2_transposed)
    layer, tensors = layer_of(case), call_tensors(case)
    # With dependent launch, where the second kernel reads weights ahead.
    on = architecture("sm_90")
    few = RangeConfig(MAX_TOKENS, "few", *(blocks or few_blocks(layer, on)))
    launch(plan_with(layer, on, (few,)), tensors)
    return tensors["y"]


def few_blocks(layer: Layer, on: Architecture) -> tuple[FewConfig, FewConfig]:
    first = default_ranges(layer, on)[0]
    assert isinstance(first.up, FewConfig)
    assert isinstance(first.down, FewConfig)
    return first.up, first.down


@pytest.mark.parametrize(("w1_transposed", "w2_transposed"), LAYOUTS)
@pytest.mark.parametrize(("gating", "dtype"), list(zip(GATINGS, FLOATS, strict=True)))
def test_layouts(w1_transposed, w2_transposed, gating, dtype):
    case = make_case("experts", (2,), width=24, hidden=40, dtype=dtype, **GATINGS[gating])
    result = run(case, w1_transposed, w2_transposed, SMALL)
    assert_matches(result, case.oracle(), case.dtypes)


@pytest.mark.each_value
@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("top_k", [1, 3, 6, 8, 32])
def test_numbers_of_slots(transposed, top_k):
    case = make_case(
        "experts", (2,), width=72, hidden=24, experts=33, top_k=top_k, dtype=torch.bfloat16,
        **GATINGS["interleaved"],
    )  # fmt: skip
    case.arguments["expert_ids"][1, 0] = -1
    assert_matches(run(case, transposed, transposed), case.oracle(), case.dtypes)


@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_results_are_summed_in_slot_order(order, transposed):
    # In float32, (1e8 + 1) - 1e8 = 0, but (1e8 - 1e8) + 1 = 1.
    case = make_case(
        "experts", (1,), width=8, hidden=8, experts=3, top_k=3, biases=False, activation="relu"
    )
    values = torch.tensor([1e8, 1.0, -1e8])
    ids = torch.tensor([order])
    weights = values[ids]
    identity = torch.eye(8).expand(3, 8, 8).contiguous()
    case = case.changed(
        x=torch.ones(1, 8), expert_ids=ids, expert_weights=weights, w1=identity, w2=identity
    )
    expected = (weights[0, 0] + weights[0, 1]) + weights[0, 2]
    assert run(case, transposed, transposed).tolist() == [[expected.item()] * 8]


def layer(
    width: int,
    hidden: int,
    experts: int,
    top_k: int,
    *,
    transposed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **options: object,
) -> Layer:
    return Layer(
        LayerShape(
            experts,
            width,
            hidden,
            top_k,
            dtype,
            plain_format(dtype),
            ExpertOptions(**options),
            layout=WeightLayout(w1_transposed=transposed, w2_transposed=transposed),
        )
    )


MIXTRAL = layer(4096, 14336, 8, 2, **GATINGS["gated"])
QWEN = layer(2048, 768, 128, 8, **GATINGS["gated"])
GPT_OSS = layer(2880, 2880, 32, 4, transposed=True, **GATINGS["interleaved"])
DEEPSEEK = layer(7168, 2048, 256, 8, **GATINGS["gated"])


@pytest.mark.parametrize(
    ("layer", "up", "down"),
    [
        (MIXTRAL, FewConfig(16, 256, 4, 4), FewConfig(16, 256, 4, 4)),
        (QWEN, FewConfig(16, 256, 4, 4), FewConfig(8, 128, 4, 4)),
        # Of 2880 columns, wider blocks would leave 45 programs.
        (GPT_OSS, FewConfig(32, 128, 2, 4), FewConfig(32, 64, 4, 4)),
        (DEEPSEEK, FewConfig(16, 256, 4, 4), FewConfig(16, 64, 4, 4)),
    ],
    ids=["mixtral", "qwen", "gpt-oss", "deepseek"],
)
def test_blocks(layer, up, down):
    assert few_blocks(layer, architecture("sm_90")) == (up, down)


@given(
    width=st.integers(1, 2000).map(lambda n: 8 * n),
    hidden=st.integers(1, 2000).map(lambda n: 8 * n),
    top_k=st.integers(1, 32),
    gating=st.sampled_from(list(GATINGS)),
    transposed=st.booleans(),
    dtype=st.sampled_from(FLOATS),
    on=st.sampled_from(list(ARCHITECTURES.values())),
)
def test_a_block_fits_into_registers_and_shared_memory(
    width, hidden, top_k, gating, transposed, dtype, on
):
    planned = layer(width, hidden, 32, top_k, transposed=transposed, dtype=dtype, **GATINGS[gating])
    up, down = few_blocks(planned, on)
    gates, slots = planned.shape.options.rows_per_hidden, 1 << (top_k - 1).bit_length()
    for block, depth, vectors, rows in (
        (up, width, 1, gates * up.block_n),
        (down, hidden, slots, down.block_n),
    ):
        elements = vectors * rows * block.block_k
        assert elements * dtype.itemsize <= 16 * 1024
        assert elements / (32 * block.num_warps) <= 128
        assert all(n & (n - 1) == 0 for n in (block.block_n, block.block_k, block.num_warps))
        # Little of a block lies beyond the end of the vector, unless it is small anyway.
        assert block.block_k * dtype.itemsize <= 128 or -depth % block.block_k <= depth / 8
        # The vectors and the weights of the stages under way.
        stage = (elements + vectors * block.block_k) * dtype.itemsize
        assert (block.num_stages - 1) * stage <= on.shared_memory - 4096


@pytest.mark.every
def test_stages_take_shared_memory_and_nothing_spills():
    on = architecture("sm_90")
    plans = [
        plan_with(layer, on, (RangeConfig(MAX_TOKENS, "few", *few_blocks(layer, on)),))
        for layer in (QWEN, GPT_OSS)  # Rows and columns.
    ]
    bundle = compile_plans([limit_tokens(planned, 1) for planned in plans], jobs=1, progress=False)
    for program in bundle.programs:
        assert [kernel.name for kernel in program.kernels] == ["few_up_kernel", "few_down_kernel"]
        for kernel in program.kernels:
            # Three stages under way, of 16 KiB of weights each.
            assert kernel.shared_memory >= 3 * 16 * 1024
            assert kernel.local_memory == 0
