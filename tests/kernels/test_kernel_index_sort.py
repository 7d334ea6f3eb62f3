"""The index sort, as one program and as two kernels, against its torch reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from custom_ops import RouterOptions
from custom_ops.kernels.architectures import ARCHITECTURES
from custom_ops.kernels.arguments import max_tiles
from custom_ops.kernels.expressions import Expression
from custom_ops.kernels.index_sort import SortedSlots, index_sort_reference, index_sort_step
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import MAX_TOKENS, Step
from custom_ops.layer_shape import LayerShape
from custom_ops.weight_formats import plain_format
from interpreter import ON, POISON, run_step
from layer_changes import changed

bounded = settings(derandomize=True, deadline=None, max_examples=40, database=None)

ONE_PROGRAM, TWO_KERNELS = ["sort_kernel"], ["count_kernel", "place_kernel"]
POISONED = int.from_bytes([POISON] * 4, "little", signed=True)


def layer_of(experts: int, top_k: int, dtype: torch.dtype = torch.int64) -> Layer:
    return Layer(
        LayerShape(
            experts, 8, 8, top_k, torch.float32, plain_format(torch.float32), routing_dtype=dtype
        )
    )


def step_of(layer: Layer, block_m: int, last_tokens: int) -> Step:
    return index_sort_step(layer, ON, block_m, last_tokens)


def names(step: Step) -> list[str]:
    return [spec.name for spec in step.launches]


def check(
    ids_TK: Tensor, experts: int, block_m: int, last_tokens: int, programs: int | None = None
) -> SortedSlots:
    """Runs the sort, compares the result with the reference, and returns it.

    With a number of programs, its kernels run with this many.
    """
    tokens, top_k = ids_TK.shape
    layer = layer_of(experts, top_k, ids_TK.dtype)
    step = step_of(layer, block_m, last_tokens)
    if programs is not None:
        grid = (Expression.of(programs), *step.launches[0].grid[1:])
        step = Step(step.buffers, tuple(replace(spec, grid=grid) for spec in step.launches))
    buffers = run_step(step, layer, tokens, {"expert_ids": ids_TK})
    sorted_slots = SortedSlots(*(buffers[name] for name in SortedSlots._fields))
    expected = index_sort_reference(ids_TK.flatten(), experts, block_m)
    for name, right in expected._asdict().items():
        written = getattr(sorted_slots, name)
        assert torch.equal(written[: len(right)], right), name
        # Rows that belong to no slot.
        assert (written[len(right) :] == POISONED).all(), name
    return sorted_slots


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Some tokens' ids: random, partly of no expert, all of one expert, or all of none."""
    experts = draw(st.sampled_from([1, 3, 8, 32, 33, 128, 1024]))
    top_k = draw(st.sampled_from([1, 2, 3, 8, 32]))
    tokens = draw(st.sampled_from([1, 2, 17, 40, 97]))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    ids = torch.randint(0, experts, (tokens, top_k), generator=generator)
    kind = draw(st.sampled_from(["random", "holes", "one", "none"]))
    if kind == "holes":
        outside = [-1, -(2**31), experts, 2**31 - 1]
        if dtype == torch.int64:
            outside += [2**32, -(2**63), 2**63 - 1]
        holes = torch.randint(0, 2, ids.shape, generator=generator).bool()
        choice = torch.randint(0, len(outside), ids.shape, generator=generator)
        ids = torch.where(holes, torch.tensor(outside)[choice], ids)
    elif kind != "random":
        ids = torch.full_like(ids, experts // 2 if kind == "one" else -1)
    return {
        "ids_TK": ids.to(dtype),
        "experts": experts,
        "block_m": draw(st.sampled_from([16, 32, 64, 128])),
    }


@pytest.mark.slow
@bounded
@given(problems())
def test_two_kernels(problem):
    check(**problem, last_tokens=MAX_TOKENS)


@bounded
@given(problems())
def test_one_program(problem):
    tokens, top_k = problem["ids_TK"].shape
    fitting = problem["ids_TK"][: 512 // top_k]
    check(**problem | {"ids_TK": fitting}, last_tokens=min(tokens, 512 // top_k))


@pytest.mark.parametrize("experts", [pytest.param(200, marks=pytest.mark.every), 1000])
def test_programs_that_take_several_blocks(experts):
    # More blocks than programs, and programs without slots.
    ids = torch.randint(-1, experts, (10_001, 2), generator=torch.Generator().manual_seed(0))
    check(ids, experts, 64, MAX_TOKENS)


@pytest.mark.parametrize("experts", [1, 8, 32, 33])
@pytest.mark.parametrize("programs", [1, 3])
def test_blocks_follow_one_another_within_a_program(experts, programs):
    ids = torch.randint(-1, experts, (2500, 2), generator=torch.Generator().manual_seed(0))
    check(ids, experts, 64, MAX_TOKENS, programs)


@pytest.mark.parametrize("expert", [0, 3, 4, 7])
def test_counts_of_a_whole_block_do_not_reach_the_neighbours(expert):
    # The 1024 slots of a block are all of one expert, beside which others count theirs.
    ids = torch.full((2048, 1), expert)
    ids[1024:] = torch.arange(1024)[:, None] % 8
    check(ids, 8, 128, MAX_TOKENS)


def test_few_experts_take_one_block_for_each_program():
    # The first stage of a Swin transformer at 224x224 and batch 64.
    step = step_of(layer_of(8, 2), 128, MAX_TOKENS)
    slots = 64 * 56 * 56 * 2
    programs = step.launches[0].grid[0].evaluate({"T": slots // 2, "K": 2, "E": 8})
    assert programs * step.launches[0].constants["BLOCK_N"] >= slots


def test_an_expert_of_more_tiles_than_programs():
    # A single program of the two-kernel version writes every tile.
    check(torch.ones(64, 1, dtype=torch.int64), 3, 16, MAX_TOKENS)


def test_ids_of_the_router_are_read_from_the_workspace():
    router = RouterOptions(2)
    layer = changed(layer_of(5, 2), router=router, routing_dtype=torch.float32)
    ids = torch.tensor([[4, 0], [0, 3], [4, 4]], dtype=torch.int32)
    buffers = run_step(step_of(layer, 16, 8), layer, 3, {}, expert_ids=ids)
    assert buffers["slot_of_row"].tolist() == [1, 2, 3, 0, 4, 5]
    assert buffers["row_of_slot"].tolist() == [3, 0, 1, 2, 4, 5]
    assert buffers["row_starts"].tolist() == [0, 2, 2, 2, 3, 6]
    assert buffers["tile_expert"].tolist() == [0, 3, 4, -1, -1]
    assert buffers["tile_row"].tolist() == [0, 2, 3, -1, -1]


def test_the_table_has_as_many_tiles_as_the_worst_case_takes():
    for experts, slots, block_m in product(range(1, 4), range(1, 9), range(1, 5)):
        worst = max(
            sum(-(-count // block_m) for count in counts)
            for counts in product(range(slots + 1), repeat=experts)
            if sum(counts) <= slots
        )
        bound = max_tiles(block_m).evaluate({"T": slots, "K": 1, "E": experts})
        assert bound == worst, (experts, slots, block_m)


@pytest.mark.parametrize(
    ("experts", "top_k", "last_tokens", "expected"),
    [
        (8, 2, 1, ONE_PROGRAM),
        (8, 2, 256, ONE_PROGRAM),
        (8, 2, 257, TWO_KERNELS),
        (1024, 32, 16, ONE_PROGRAM),
        (1024, 32, MAX_TOKENS, TWO_KERNELS),
    ],
)
def test_how_many_kernels(experts, top_k, last_tokens, expected):
    assert names(step_of(layer_of(experts, top_k), 64, last_tokens)) == expected


@pytest.mark.parametrize("experts", [1, 8, 128, 256, 1024])
def test_each_program_reads_counts_of_bounded_size(experts):
    step = step_of(layer_of(experts, 8), 128, MAX_TOKENS)
    counts = next(each for each in step.buffers if each.name == "slot_counts")
    for tokens in (1, 1000, 10**6, MAX_TOKENS):
        sizes = {"T": tokens, "K": 8, "E": experts}
        programs = step.launches[0].grid[0].evaluate(sizes)
        assert 1 <= programs <= 512
        assert programs == step.launches[1].grid[0].evaluate(sizes)
        assert counts.count.evaluate(sizes) == programs * experts <= 32 * 1024


@pytest.mark.parametrize("on", ARCHITECTURES.values(), ids=lambda each: each.name)
def test_dependent_launch_where_the_architecture_has_it(on):
    for last in (1, MAX_TOKENS):
        for spec in index_sort_step(layer_of(8, 2), on, 64, last).launches:
            assert spec.dependent_launch == spec.constants["PDL"] == on.has_dependent_launch
