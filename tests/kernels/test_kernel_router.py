"""The router's kernels, on all three paths, against the oracle and torch's sort."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from custom_ops import SCORINGS, RouterOptions, reference
from custom_ops.kernels.architectures import ARCHITECTURES, architecture
from custom_ops.kernels.configs import RouterConfig, router_config
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.router import router_step, router_step_with
from custom_ops.kernels.spec import MAX_TOKENS, Constant, Step
from custom_ops.layer_shape import LayerShape
from custom_ops.options import GROUP_SCORINGS
from custom_ops.routing import route
from custom_ops.weight_formats import plain_format
from interpreter import ON, run_step
from moe_cases import GROUP_FORMS, ROUNDING_FORMS, ROUTER_FORMS, assert_matches, in_steps
from random_layers import groups

# NumPy's warnings about NaN and infinity in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

bounded = settings(derandomize=True, deadline=None, max_examples=40, database=None)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
PATHS = ("fused", "fused_vectors", "tiles", "vectors")
INF, NAN = float("inf"), float("nan")


def config_of(path: str, places: int) -> RouterConfig:
    """Small blocks, so that a few tokens and experts already need several."""
    if path == "vectors":
        return RouterConfig("vectors", 1, 32, 32, num_warps=4, num_stages=2)
    if path == "fused_vectors":
        return RouterConfig("fused", 1, places, 32, num_warps=4, num_stages=2)
    block_e = max(16, places) if path == "fused" else 64
    return RouterConfig(path, 16, block_e, 16, num_warps=4, num_stages=2)


def layer_of(
    experts: int,
    width: int,
    top_k: int,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None] = (torch.float32,) * 3,
    selection_dtype: torch.dtype | None = None,
    **options: Any,
) -> Layer:
    """A layer with the given dtypes of tokens, router weight and router bias."""
    x, weight, bias = dtypes
    router = RouterOptions(top_k, **options)
    return Layer(
        LayerShape(
            experts,
            width,
            8,
            top_k,
            x,
            plain_format(torch.float32),
            router=router,
            routing_dtype=weight,
            weights_dtype=bias,
            selection_dtype=selection_dtype,
        )
    )


def tensors_of(layer: Layer, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs whose logits are around 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    e, d = layer.shape.experts, layer.shape.width
    tensors = {
        "x": normal(tokens, d, dtype=layer.shape.tokens_dtype),
        "router_weight": normal(e, d, dtype=layer.shape.routing_dtype) / d**0.5,
    }
    if layer.shape.weights_dtype is not None:
        tensors["router_bias"] = normal(e, dtype=layer.shape.weights_dtype)
    if layer.shape.selection_dtype is not None:
        tensors["selection_bias"] = normal(e, dtype=layer.shape.selection_dtype) / 3
    return tensors


def run(
    layer: Layer, step: Step, tensors: dict[str, Tensor], **earlier: Tensor
) -> tuple[Tensor, Tensor]:
    """Expert ids and weights ``[T, K]``."""
    tokens = len(next(iter((earlier | tensors).values())))
    buffers = run_step(step, layer, tokens, tensors, **earlier)
    shape = (tokens, layer.shape.top_k)
    return buffers["expert_ids"].view(shape), buffers["expert_weights"].view(shape)


def check(layer: Layer, path: str, tensors: dict[str, Tensor]) -> None:
    step = router_step_with(layer, ON, config_of(path, layer.expert_places))
    ids, weights = run(layer, step, tensors)
    a = tensors["x"], tensors["router_weight"], tensors.get("router_bias")
    expected_ids, expected = reference.router(*a, layer.shape.router)
    assert_matches(weights, expected, {torch.float32}, "weights")
    # A score close to the previous or next one may swap places with it.
    scores = reference.router(*a, RouterOptions(layer.shape.experts, "topk_softmax"))[1].log()
    near = (scores.diff(dim=-1).abs() < 1e-4)[:, : layer.shape.top_k]
    apart = torch.ones_like(expected_ids, dtype=torch.bool)
    apart[:, : near.shape[1]] &= ~near
    apart[:, 1:] &= ~near[:, : layer.shape.top_k - 1]
    assert (apart.sum() > 0.9 * apart.numel()) | (layer.shape.experts > 100)
    assert torch.equal(ids[apart], expected_ids.int()[apart])
    assert all(len(set(row)) == layer.shape.top_k for row in ids.tolist())


@st.composite
def problems(draw: st.DrawFn) -> tuple[Layer, dict[str, Tensor]]:
    experts = draw(st.sampled_from([1, 3, 8, 60, 128]))
    layer = layer_of(
        experts,
        draw(st.sampled_from([8, 24, 96, 104])),
        draw(st.integers(1, min(experts, 32))),
        (
            draw(st.sampled_from(FLOATS)),
            draw(st.sampled_from(FLOATS)),
            draw(st.sampled_from([*FLOATS, None])),
        ),
        scoring=draw(st.sampled_from(SCORINGS)),
        renormalize=draw(st.booleans()),
        routed_scaling=draw(st.sampled_from([1.0, 2.5])),
    )
    tokens = draw(st.sampled_from([1, 2, 17]))
    return layer, tensors_of(layer, tokens, draw(st.integers(0, 2**16)))


@st.composite
def choices(draw: st.DrawFn) -> tuple[Layer, dict[str, Tensor]]:
    """Problems with a selection bias, groups or both."""
    experts = draw(st.sampled_from([1, 4, 6, 15, 20, 60, 256]))
    top_k = draw(st.integers(1, min(experts, 8)))
    layer = layer_of(
        experts,
        draw(st.sampled_from([24, 96])),
        top_k,
        (draw(st.sampled_from(FLOATS)), torch.float32, draw(st.sampled_from([*FLOATS, None]))),
        selection_dtype=draw(st.sampled_from([*FLOATS, None])),
        scoring=draw(st.sampled_from(SCORINGS)),
        renormalize=draw(st.booleans()),
        **draw(groups(experts, top_k)),
    )
    tokens = draw(st.sampled_from([1, 2, 17]))
    return layer, tensors_of(layer, tokens, draw(st.integers(0, 2**16)))


@bounded
@given(choices(), st.sampled_from(PATHS))
def test_random_choices(problem, path):
    layer, tensors = problem
    step = router_step_with(layer, ON, config_of(path, layer.expert_places))
    ids, weights = run(layer, step, tensors)
    expected_ids, expected = reference.router(
        tensors["x"],
        tensors["router_weight"],
        tensors.get("router_bias"),
        layer.shape.router,
        tensors.get("selection_bias"),
    )
    assert torch.equal(ids, expected_ids.int())
    assert_matches(weights, expected, {torch.float32}, "weights")


@bounded
@given(problems(), st.sampled_from(PATHS))
@pytest.mark.every
def test_random_problems(problem, path):
    layer, tensors = problem
    check(layer, path, tensors)


@pytest.mark.pairwise
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ROUTER_FORMS)
def test_every_form(form, path):
    layer = layer_of(6, 24, 3, **form)
    check(layer, path, tensors_of(layer, 5))


@pytest.mark.pairwise
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("selection_dtype", [torch.float32, None])
@pytest.mark.parametrize("form", ROUNDING_FORMS)
def test_every_rounding(form, selection_dtype, scoring, dtype, path):
    layer = layer_of(20, 40, 3, (dtype,) * 3, selection_dtype, scoring=scoring, **form)
    tensors = tensors_of(layer, 33)
    tensors |= in_steps(tensors)
    ids, weights = run(
        layer, router_step_with(layer, ON, config_of(path, layer.expert_places)), tensors
    )
    given = tensors["x"], tensors["router_weight"], tensors["router_bias"]
    router, bias = layer.shape.router, tensors.get("selection_bias")
    expected_ids, expected = reference.router(*given, router, bias)
    assert torch.equal(ids, expected_ids.int())
    rounds_weights = "routing_weights_dtype" in form
    assert torch.equal(weights, weights.to(dtype).float()) == rounds_weights
    assert_matches(weights, expected, {dtype if rounds_weights else torch.float32}, "weights")


@pytest.mark.pairwise
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("x", "weight"), list(product(FLOATS, FLOATS)))
def test_every_pair_of_dtypes(x, weight, path):
    for bias in (*FLOATS, None):
        layer = layer_of(8, 40, 2, (x, weight, bias))
        check(layer, path, tensors_of(layer, 3))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("top_k", [1, 32])
def test_as_many_experts_as_there_may_be(top_k, path):
    layer = layer_of(1024, 16, top_k, (torch.bfloat16, torch.bfloat16, None))
    check(layer, path, tensors_of(layer, 2))


@pytest.mark.parametrize("path", PATHS)
def test_no_expert_beyond_the_last_is_chosen(path):
    # Each has a logit below 0, which is the value of a padded expert.
    layer = layer_of(9, 8, 9, scoring="topk_softmax")
    tensors = tensors_of(layer, 4)
    tensors["router_bias"] -= 1000
    ids, _ = run(layer, router_step_with(layer, ON, config_of(path, layer.expert_places)), tensors)
    assert torch.equal(ids.sort().values, torch.arange(9).expand(4, 9).int())


def test_products_are_not_rounded_to_tf32():
    # Only the 12th bit of the product tells the experts apart.
    x = torch.zeros(1, 16)
    x[0, 0] = 1 + 2**-12
    weight = torch.zeros(2, 16)
    weight[:, 0] = torch.tensor([1.0, 1 + 2**-12])
    layer = layer_of(2, 16, 1, (torch.float32, torch.float32, None))
    for path in PATHS:
        step = router_step_with(layer, ON, config_of(path, 2))
        ids, _ = run(layer, step, {"x": x, "router_weight": weight})
        assert ids.item() == 1
        assert all(spec.constants.get("UPCAST", True) for spec in step.launches)


def logits_of(tensors: dict[str, Tensor], *, upcast: bool) -> Tensor:
    """Logits ``[T, E]`` of bfloat16 tokens and a float32 weight, which is split or not."""
    (experts, width), dtypes = tensors["router_weight"].shape, (torch.bfloat16, torch.float32, None)
    layer = layer_of(experts, width, 1, dtypes)
    step = router_step_with(layer, ON, config_of("tiles", experts))
    spec = step.launches[0]
    assert not spec.constants["UPCAST"]
    spec = replace(spec, arguments={**spec.arguments, "UPCAST": Constant(upcast)})
    tokens = len(tensors["x"])
    buffers = run_step(Step(step.buffers[:1], (spec,)), layer, tokens, tensors)
    return buffers["router_logits"].view(tokens, experts)


@bounded
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_a_split_weight_keeps_every_bit(values):
    # Beyond, the nearest bfloat16 is infinite.
    column = torch.tensor(values).clamp(-(2.0**128 - 2.0**120), 2.0**128 - 2.0**120)
    weight = torch.zeros(len(column), 16)
    weight[:, 0] = column
    x = torch.zeros(3, 16, dtype=torch.bfloat16)
    x[:, 0] = torch.tensor([1, -1, 0.5])
    logits = logits_of({"x": x, "router_weight": weight}, upcast=False)
    assert torch.equal(logits, torch.stack([column, -column, 0.5 * column]))


@pytest.mark.parametrize("exponents", [0, 30, 100])
def test_a_split_weight_gives_no_larger_errors_than_float32(exponents):
    generator = torch.Generator().manual_seed(exponents)

    def wide(rows: int) -> Tensor:
        size = (rows, 1024)
        scale = torch.randint(-exponents // 2, exponents // 2 + 1, size, generator=generator)
        return torch.randn(size, generator=generator).ldexp(scale)

    tensors = {"x": wide(32).bfloat16(), "router_weight": wide(64)}
    x, weight = (each.double() for each in tensors.values())
    exact, magnitude = x @ weight.mT, x.abs() @ weight.abs().mT
    split, upcast = (
        (logits_of(tensors, upcast=upcast) - exact).abs() / magnitude for upcast in (False, True)
    )
    # The worst of 2048 is a matter of luck; without the lowest terms it is 10 times as large.
    assert split.max() <= 1.5 * upcast.max()
    assert split.square().mean() <= upcast.square().mean()


@pytest.mark.parametrize(("low", "high"), [(1.0, 1 + 2**-23), (0.0, 2**-149), (-(2**-149), 0.0)])
def test_the_last_bit_of_a_float32_weight_decides(low, high):
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, 0] = 1
    weight = torch.zeros(2, 16)
    weight[:, 0] = torch.tensor([low, high])
    layer = layer_of(2, 16, 1, (torch.bfloat16, torch.float32, None), scoring="sigmoid")
    for path in PATHS:
        step = router_step_with(layer, ON, config_of(path, 2))
        ids, _ = run(layer, step, {"x": x, "router_weight": weight})
        assert ids.item() == 1, path


def test_infinity_and_nan_pass_through_a_split_weight():
    values = torch.tensor([1.0, -2.0, 1e-3, 1e-40, 3.3e38, INF, -INF, NAN, 0.0])
    pairs = torch.tensor(list(product(values, values)))
    x, weight = torch.zeros(len(pairs), 16, dtype=torch.bfloat16), torch.zeros(len(pairs), 16)
    x[:, :2], weight[:, :2] = pairs.bfloat16(), pairs.flip(0)
    tensors = {"x": x, "router_weight": weight}
    split, upcast = (logits_of(tensors, upcast=each) for each in (False, True))
    # Subnormal results are multiples of 2**-149.
    torch.testing.assert_close(split, upcast, rtol=1e-6, atol=2.0**-147, equal_nan=True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_nan_stays_in_its_row(scoring, path):
    layer = layer_of(5, 16, 3, scoring=scoring)
    tensors = tensors_of(layer, 17)
    step = router_step_with(layer, ON, config_of(path, layer.expert_places))
    whole_ids, whole_weights = run(layer, step, tensors)
    tensors["x"][6, 3] = NAN
    ids, weights = run(layer, step, tensors)
    assert ids[6].tolist() == [0, 1, 2]
    assert weights[6].isnan().all()
    others = torch.arange(17) != 6
    assert torch.equal(ids[others], whole_ids[others])
    assert torch.equal(weights[others], whole_weights[others])


def selected(
    logits: Tensor, top_k: int, selection_bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The ids and weights that a split router's second kernel computes from logits ``[T, E]``."""
    biased = selection_bias is not None
    dtype = torch.float32 if biased else None
    layer = layer_of(logits.shape[1], 8, top_k, selection_dtype=dtype, **options)
    tensors = {"selection_bias": selection_bias} if biased else {}
    split = router_step_with(layer, ON, config_of("tiles", layer.expert_places))
    step = Step(split.buffers[1:], split.launches[1:])
    return run(layer, step, tensors, router_logits=logits.contiguous())


def sorted_by_torch(logits: Tensor, top_k: int, scoring: str) -> tuple[Tensor, Tensor]:
    """Ids and weights from a stable sort in float32, not renormalised."""
    scores = logits.softmax(-1) if scoring == "softmax" else logits
    weights, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    weights = weights[:, :top_k]
    of_chosen = {"sigmoid": torch.sigmoid, "topk_softmax": lambda chosen: chosen.softmax(-1)}
    return ids[:, :top_k].int(), of_chosen.get(scoring, torch.clone)(weights)


@pytest.mark.parametrize("scoring", SCORINGS)
@bounded
@given(data=st.data())
def test_ties_and_extreme_logits(scoring, data):
    values = (0.0, -0.0, 1.0, -1.0, 2.0, 1e-3, 40.0, 50.0, 3e38, -3e38, INF, -INF, NAN)
    experts = data.draw(st.integers(1, 20))
    row = st.lists(st.sampled_from(values), min_size=experts, max_size=experts)
    logits = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=3)))
    top_k = data.draw(st.integers(1, experts))
    ids, weights = selected(logits, top_k, scoring=scoring, renormalize=False)
    expected_ids, expected = sorted_by_torch(logits, top_k, scoring)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, equal_nan=True)


@bounded
@given(data=st.data())
def test_ties_among_groups(data):
    experts = data.draw(st.sampled_from([4, 6, 12, 15, 20]))
    top_k = data.draw(st.integers(1, experts))
    options = data.draw(groups(experts, top_k))
    values = (0.0, -0.0, 1.0, -1.0, 2.0)
    row, bias_row = (
        st.lists(st.sampled_from(each), min_size=experts, max_size=experts)
        for each in (values, (*values, -INF))
    )
    logits = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=3)))
    bias = torch.tensor(data.draw(bias_row))
    biased = data.draw(st.booleans())
    ids, weights = selected(
        logits, top_k, bias if biased else None, scoring="topk_softmax", **options
    )
    expected_ids, expected = route(
        logits,
        torch.eye(experts),
        None,
        RouterOptions(top_k, "topk_softmax", **options),
        bias if biased else None,
    )
    assert torch.equal(ids, expected_ids.int())
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("form", GROUP_FORMS)
def test_pruned_experts_are_chosen_in_their_groups(form):
    logits = torch.randn(33, 6, generator=torch.Generator().manual_seed(0))
    bias = torch.tensor([0.5, -INF, 0, -INF, -0.5, -INF])
    ids, weights = selected(logits, 3, bias, **form)
    expected_ids, expected = reference.router(
        logits, torch.eye(6), None, RouterOptions(3, **form), bias
    )
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected.float())


@pytest.mark.parametrize("group_scoring", GROUP_SCORINGS[1:])
def test_a_group_with_nan_is_the_greatest(group_scoring):
    logits = torch.tensor([[9.0, 9.0, 9.0, 0.0, NAN, 0.0]])
    options = {"group_scoring": group_scoring, "n_group": 2, "topk_group": 1}
    ids, weights = selected(logits, 2, scoring="topk_softmax", **options)
    assert ids.tolist() == [[4, 3]]
    assert weights.isnan().all()


def test_every_nan_is_greatest():
    bits = torch.tensor([[0x7F800000, -0x400000, 0x3F800000, 0x7F800001, -1, 0x7FFFFFFF]])
    ids, weights = selected(bits.int().view(torch.float32), 6, scoring="topk_softmax")
    assert ids.tolist() == [[1, 3, 4, 5, 0, 2]]
    assert weights.isnan().all()


@pytest.mark.parametrize("experts", [1, 2, 60, 1024])
def test_equal_logits_choose_the_lower_experts(experts):
    top_k = min(experts, 32)
    ids, weights = selected(torch.full((3, experts), -INF), top_k, scoring="topk_softmax")
    assert torch.equal(ids, torch.arange(top_k).expand(3, top_k).int())
    assert weights.isnan().all()
    ids, weights = selected(torch.full((3, experts), 0.7), top_k)
    assert torch.equal(ids, torch.arange(top_k).expand(3, top_k).int())
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / top_k))


def test_scores_that_all_underflow_are_not_divided_by_zero():
    _, weights = selected(torch.full((1, 4), -INF), 2, scoring="sigmoid", renormalize=True)
    assert weights.tolist() == [[0, 0]]


def test_a_layer_without_router_is_refused():
    layer = Layer(LayerShape(4, 8, 8, 2, torch.float32, plain_format(torch.float32)))
    with pytest.raises(ValueError, match="no router"):
        router_step(layer, ON, 1, 1)


HALF = (torch.bfloat16, torch.bfloat16, None)
MIXED = (torch.bfloat16, torch.float32, None)


@pytest.mark.parametrize(
    ("experts", "width", "dtypes", "tokens", "path"),
    [
        # 64 KiB of router weight: one program reads it quickly enough.
        (8, 4096, HALF, (1, 2), "fused"),
        (8, 4096, MIXED, (1, 2), "vectors"),
        (128, 2048, HALF, (1, 4), "vectors"),
        # Sixteen programs would each read 512 KiB.
        (128, 2048, HALF, (5, 256), "tiles"),
        (128, 2048, HALF, (1025, MAX_TOKENS), "fused"),
        (256, 7168, HALF, (1, 4), "vectors"),
        (256, 7168, HALF, (1, 16), "tiles"),
        (256, 7168, HALF, (17, MAX_TOKENS), "tiles"),
        # Too many keys for a program's registers.
        (1024, 8, HALF, (17, MAX_TOKENS), "tiles"),
    ],
)
def test_path(experts, width, dtypes, tokens, path):
    layer = layer_of(experts, width, 2, dtypes)
    assert router_config(layer, architecture(90), *tokens).path == path


@pytest.mark.parametrize("on", ARCHITECTURES.values(), ids=lambda each: each.name)
def test_every_configuration_fits(on):
    spans = [(1, 1), (1, 16), (17, 300), (1024, 4095), (5000, MAX_TOKENS), (1, MAX_TOKENS)]
    sizes = product([1, 8, 60, 128, 256, 257, 1024], [8, 96, 4096, 16384], [HALF, MIXED])
    for (experts, width, dtypes), span in product(sizes, spans):
        layer = layer_of(experts, width, 1, dtypes)
        config = router_config(layer, on, *span)
        x, weight = config.block_t * config.block_d, config.block_e * config.block_d
        stage = x * layer.shape.tokens_dtype.itemsize + weight * layer.shape.routing_dtype.itemsize
        # Products take the three terms of a float32 weight from shared memory.
        terms = 6 * weight if dtypes == MIXED and config.block_t > 1 else 0
        assert config.num_stages * stage + terms <= on.shared_memory
        assert config.block_d & (config.block_d - 1) == 0
        assert config.path != "fused" or config.block_e >= experts
        if config.block_t > 1:
            assert min(config.block_t, config.block_e, config.block_d) >= 16
            assert config.block_t * config.block_e <= 32 * 32 * config.num_warps
        else:
            assert weight <= 32 * 32 * config.num_warps
        for spec in router_step(layer, on, *span).launches:
            assert spec.dependent_launch == spec.constants["PDL"] == on.has_dependent_launch


@pytest.mark.parametrize(
    ("on", "x", "weight", "upcast"),
    [
        ("sm_80", torch.bfloat16, torch.bfloat16, False),
        ("sm_80", torch.float16, torch.float16, False),
        ("sm_80", torch.bfloat16, torch.float32, False),
        ("sm_80", torch.float16, torch.bfloat16, True),
        ("sm_80", torch.float16, torch.float32, True),
        ("sm_80", torch.float32, torch.bfloat16, True),
        ("sm_80", torch.float32, torch.float32, True),
        ("sm_75", torch.float16, torch.float16, True),
        ("sm_75", torch.bfloat16, torch.float32, True),
    ],
)
def test_only_exact_products_of_16_bits_take_tensor_cores(on, x, weight, upcast):
    layer = layer_of(8, 64, 2, (x, weight, None))
    (spec,) = router_step(layer, architecture(on), 17, 64).launches
    assert spec.constants["UPCAST"] == upcast
