"""The tuner's choices, with made-up times."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from benchmarks.gpu import cells, tune_kernels
from benchmarks.gpu.candidates import (
    blocks_m,
    blocks_per_sm,
    choices,
    few_candidates,
    fits,
    gemm_candidates,
    mlp_candidates,
    shared_bytes,
    spread,
)
from benchmarks.gpu.layers import SHAPES
from benchmarks.gpu.selection import (
    Part,
    boundary,
    choose_ranges,
    neighbours,
    parts_of,
    promising,
)
from benchmarks.gpu.speed import Device
from benchmarks.gpu.timing import Results, Times
from benchmarks.gpu.tune_kernels import (
    PRODUCTS,
    Tuner,
    candidates,
    interleaved,
    plan_config,
    tune,
    write,
)
from custom_ops.kernels.architectures import ARCHITECTURES, architecture
from custom_ops.kernels.configs import (
    FewConfig,
    GemmConfig,
    MlpConfig,
    RangeConfig,
    default_ranges,
    read_ranges,
    shape_key,
)
from custom_ops.kernels.plan import plan_with
from custom_ops.kernels.spec import MAX_TOKENS

BF16 = torch.bfloat16
CONDITIONS = {"hardware": "a GPU", "versions": {"triton": "3.6.0"}, "date": "today"}
ON = architecture("sm_90")
QWEN = SHAPES["qwen3"].layer(BF16)
SWIN = SHAPES["swin1"].layer(BF16)


def gemm(block_m: int, block_n: int = 64) -> RangeConfig:
    tile = GemmConfig(block_m, block_n, 64, 4, 3)
    return RangeConfig(MAX_TOKENS, "gemm", tile, tile)


A, B, C = gemm(16), gemm(32), gemm(64)


def summary(ranges: tuple[RangeConfig, ...]) -> list[tuple[int, int]]:
    return [(each.last_tokens, each.up.block_m) for each in ranges]


# --- Ranges ---


def test_a_range_ends_between_what_was_measured():
    times = {1: {A: 1.0, B: 2.0}, 4: {A: 1.0, B: 2.0}, 64: {A: 3.0, B: 2.0}, 256: {B: 2.0}}
    assert summary(choose_ranges(times)) == [(16, 16), (MAX_TOKENS, 32)]


def test_one_configuration_within_the_tolerance_serves_all():
    times = {1: {A: 1.0, B: 1.015}, 64: {A: 5.0, B: 2.0}, 256: {A: 9.0, B: 2.0}}
    assert summary(choose_ranges(times)) == [(MAX_TOKENS, 32)]
    assert summary(choose_ranges(times, tolerance=0.01)) == [(8, 16), (MAX_TOKENS, 32)]


def test_of_those_that_serve_the_fastest_on_average_is_taken():
    times = {1: {A: 1.00, B: 1.01, C: 1.02}, 2: {A: 1.02, B: 1.01, C: 1.0}, 4: {B: 1.0, C: 1.019}}
    assert summary(choose_ranges(times)) == [(MAX_TOKENS, 32)]


@pytest.mark.parametrize("times", [{}, {1: {A: 1.0}, 2: {}}])
def test_nothing_to_choose_from_is_an_error(times):
    with pytest.raises(ValueError, match="needs a configuration that ran"):
        choose_ranges(times)


measured = st.dictionaries(
    st.integers(1, 2**15),
    st.dictionaries(st.sampled_from([A, B, C]), st.floats(1, 2), min_size=1),
    min_size=1,
    max_size=8,
)


@given(times=measured)
def test_every_number_of_tokens_gets_a_fast_configuration(times):
    ranges = choose_ranges(times)
    lasts = [each.last_tokens for each in ranges]
    assert lasts == sorted(set(lasts))
    assert lasts[-1] == MAX_TOKENS
    for tokens, each in times.items():
        config = plan_config(ranges, tokens)
        assert each[config] <= 1.02 * min(each.values()) * (1 + 1e-12)


@given(below=st.integers(1, 2**20), more=st.integers(1, 2**20))
def test_a_boundary_is_between(below, more):
    assert below <= boundary(below, below + more) < below + more


# --- Parts ---


def test_the_fastest_parts_of_a_group_are_paired():
    few = [FewConfig(n, 128, 4) for n in (4, 8, 16)]
    tile = {(m, n): GemmConfig(m, n, 64, 4, 3) for m in (16, 32) for n in (64, 128)}
    mlp = MlpConfig(16, 32, 4, 2)
    times = {
        **{Part("few", "up", each): float(i) for i, each in enumerate(few)},
        **{Part("few", "down", each): 10.0 - i for i, each in enumerate(few)},
        **{Part("gemm", "up", each): float(each.block_n) for each in tile.values()},
        **{Part("gemm", "down", each): 500.0 - each.block_n for each in tile.values()},
        Part("mlp", "up", mlp): 1.0,
    }
    found = promising(times, 1)
    assert found == [
        RangeConfig(MAX_TOKENS, "few", few[0], few[2]),
        RangeConfig(MAX_TOKENS, "gemm", tile[16, 64], tile[16, 128]),
        RangeConfig(MAX_TOKENS, "gemm", tile[32, 64], tile[32, 128]),
        RangeConfig(MAX_TOKENS, "mlp", mlp),
    ]
    assert len(promising(times, 2)) == 2 + 2 + 2 + 1


def test_a_product_that_never_ran_leaves_no_pair():
    assert promising({Part("gemm", "up", A.up): 1.0}, 3) == []


def test_neighbours_are_tried_too():
    times = {1: {A: 1.0, C: 2.0}, 2: {B: 1.0}, 4: {B: 2.0, A: 3.0}, 8: {C: 1.0}}
    assert neighbours(times, 1) == {1: {B}, 2: {A, C}, 4: {C}, 8: {B}}


# --- Candidates ---


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gpt-oss", "swin1", "swin4"])
@pytest.mark.parametrize("device", [75, 80, 89, 90, 120])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_candidates_can_be_planned(name, device, tokens):
    layer, on = SHAPES[name].layer(BF16), ARCHITECTURES[device]
    found = list(candidates(layer, on, tokens, 6))
    assert found
    for config in found:
        launches = plan_with(layer, on, (config,)).at(tokens).launches
        products = [PRODUCTS.get(spec.name) for spec in launches]
        assert products.count("up") == 1
        assert products.count("down") == (config.down is not None)


@given(
    layer=st.sampled_from([QWEN, SWIN, SHAPES["mixtral"].layer(torch.float16)]),
    device=st.sampled_from([80, 89, 90]),
    block_m=st.sampled_from([16, 32, 64, 128]),
)
def test_tiles_fit(layer, device, block_m):
    on, gates = ARCHITECTURES[device], layer.shape.options.rows_per_hidden
    found = gemm_candidates(layer, on, block_m, layer.shape.hidden, layer.shape.width, gates)
    assert found
    assert len(set(found)) == len(found)
    for config in found:
        assert fits(layer, on, config, gates)
        assert shared_bytes(layer, config, gates) < on.shared_memory
        assert on.has_tensor_maps or not config.tensor_maps


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "swin4"])
@pytest.mark.parametrize("block_m", [16, 64, 128])
def test_the_first_tiles_differ(name, block_m):
    layer = SHAPES[name].layer(BF16)
    gates = layer.shape.options.rows_per_hidden
    first = gemm_candidates(layer, ON, block_m, layer.shape.hidden, layer.shape.width, gates)[:24]
    assert len({blocks_per_sm(layer, ON, config, gates) for config in first}) >= 3
    assert len({config.block_n for config in first}) >= 3
    assert len({config.num_stages for config in first}) >= 3
    assert {config.block_k for config in first if config.tensor_maps} >= {64, 128}
    assert {config.group_m for config in first} == {8}


@pytest.mark.parametrize(
    ("device", "block_m", "tried"),
    [(90, 16, {True, False}), (90, 64, {False}), (89, 16, {False})],
)
def test_operands_are_swapped_where_that_brings_other_products(device, block_m, tried):
    found = gemm_candidates(
        QWEN, ARCHITECTURES[device], block_m, QWEN.shape.hidden, QWEN.shape.width, gates=2
    )
    assert {config.swapped for config in found[:8]} == tried
    assert all(config.block_n >= 32 for config in found if config.swapped)


@pytest.mark.parametrize(("device", "block_m"), [(90, 16), (90, 64), (80, 64)])
def test_half_of_the_first_tiles_are_plain(device, block_m):
    sizes = QWEN.shape.width, QWEN.shape.hidden, 1
    first = gemm_candidates(QWEN, ARCHITECTURES[device], block_m, *sizes)[:8]
    plain = [not (config.persistent or config.swapped) for config in first]
    assert plain == [True, False] * 4
    assert sum(config.persistent for config in first) >= 2
    assert not any(config.persistent and config.swapped for config in first)


def test_tiles_that_do_the_same_work_are_left_out():
    """One step of the loop, one tile of columns: neither stages nor grouping make a difference."""
    shape = replace(SHAPES["swin1"], hidden=32, width=64)
    found = gemm_candidates(shape.layer(BF16), ON, 64, columns=32, depth=64, gates=1)
    assert found
    for config in found:
        assert config.block_n == 32
        assert config.num_stages == 2
        assert config.group_m == 8


def test_the_first_vector_products_differ():
    first = few_candidates(QWEN, 1)[:24]
    assert len(set(first)) == 24
    assert {config.block_n for config in first} == {2, 4, 8, 16, 32}
    assert {config.num_stages for config in first} == {1, 2, 4}
    assert len({config.num_warps for config in first}) >= 2


@dataclass(frozen=True)
class Form:
    size: int
    depth: int = 4
    flag: bool = False


def test_choices_of_a_dataclass():
    assert list(choices(Form, size=(1, 2))) == [
        *(Form(1), Form(1, flag=True), Form(2), Form(2, flag=True))
    ]
    assert list(choices(Form, size=(1,), depth=(2, 3), flag=(True,))) == [
        *(Form(1, 2, True), Form(1, 3, True))
    ]


def test_spreading():
    pairs = [(1, "a"), (1, "b"), (1, "c"), (2, "a"), (2, "d"), (3, "a")]
    assert spread(pairs, lambda pair: pair[0]) == [
        *((1, "a"), (2, "a"), (3, "a"), (1, "b"), (2, "d"), (1, "c"))
    ]
    assert spread(pairs) == pairs


def test_few_tokens_alone_take_vector_products():
    assert few_candidates(QWEN, 1)
    assert not few_candidates(QWEN, 1000)
    assert mlp_candidates(SWIN, ON, 64)
    assert not mlp_candidates(QWEN, ON, 64)


@given(tokens=st.integers(1, 2**17), name=st.sampled_from(sorted(SHAPES)))
def test_heights_of_tiles(tokens, name):
    found = blocks_m(SHAPES[name].layer(BF16), tokens)
    assert 1 <= len(found) <= 3


# --- The tuner ---


def part_time(config: object, tokens: int) -> float:
    """A made-up optimum: tiles 64 wide, 16 high for few tokens and 64 high for many."""
    time = 10 + abs(math.log2(config.block_n / 64)) + 0.1 * abs(config.num_warps - 4)
    height = 16 if tokens < 100 else 64
    return time + abs(math.log2(getattr(config, "block_m", 256) / height))


class FakeTimer:
    """Returns times by what the tuner's calls go by and by what a launch consists of."""

    method = "made up"

    tokens = 0

    def __call__(self, calls, *, cold=True, samples=None) -> Results:
        results = Results()
        for name, call in calls.items():
            if isinstance(call, partial):
                (spec,) = call.args[0].ranges[0].launches
                constants = spec.constants
                config = GemmConfig(
                    constants.get("BLOCK_M", 256), constants["BLOCK_N"], 64, spec.num_warps, 2
                )
                us = part_time(config, self.tokens)
            elif name in ("default", "tuned"):
                us = 30.0 if name == "default" else 20.0
            else:
                us = sum(part_time(p.config, self.tokens) for p in parts_of(name))
            results.times[name] = Times(us, us, 1)
        return results


@pytest.fixture
def timer(monkeypatch):
    timer = FakeTimer()
    monkeypatch.setattr(cells, "launch", lambda *_: None)
    return timer


def tuner_with(timer: FakeTimer, **more) -> Tuner:
    def tensors(tokens: int):
        timer.tokens = tokens
        return {"x": torch.empty(tokens, 1)}

    return Tuner(QWEN, ON, timer, tensors, **more)


@pytest.mark.every
def test_the_planted_optimum_is_found(timer):
    ranges = tune(tuner_with(timer), [1, 16, 64, 1024, 4096], limit=10**6)
    assert [(each.path, each.up.block_m, each.down.block_n) for each in ranges] == [
        ("gemm", 16, 64),
        ("gemm", 64, 64),
    ]
    assert ranges[0].last_tokens == boundary(64, 1024)
    assert ranges[-1].last_tokens == MAX_TOKENS


def test_what_does_not_run_is_passed_over(timer, monkeypatch):
    def no_wide_tiles(planned, *_):
        for spec in planned.ranges[0].launches:
            if spec.constants.get("BLOCK_N") == 64 and spec.name == "expert_up_kernel":
                raise RuntimeError("out of resources")

    monkeypatch.setattr(cells, "launch", no_wide_tiles)
    tuner = tuner_with(timer)
    ranges = tune(tuner, [1024], limit=10**6)
    assert ranges[0].up.block_n in (32, 128)
    assert ranges[0].down.block_n == 64
    assert tuner.failed
    assert all(part.product == "up" for part in tuner.failed)


def test_after_the_deadline_the_default_is_left(timer):
    ranges = tune(tuner_with(timer, deadline=0.0), [16, 1024], limit=4)
    default = default_ranges(QWEN, ON)
    for tokens in (16, 1024):
        assert plan_config(ranges, tokens) in [plan_config(default, other) for other in (16, 1024)]


def test_a_layer_that_gets_no_faster_is_not_written(timer, tmp_path, monkeypatch):
    monkeypatch.setattr(tune_kernels, "parameters_of", lambda *_: None)
    tensors_for = tuner_with(timer).tensors_for
    monkeypatch.setattr(tune_kernels, "call_tensors", lambda _, tokens: tensors_for(tokens))
    monkeypatch.setattr(Device, "conditions", lambda _: CONDITIONS)
    given = Namespace(dtype=BF16, tokens=[16], limit=4)
    arguments = (SHAPES["qwen3"], Device("cpu", ON, timer), given)
    tune_kernels.tune_shape(*arguments, tmp_path / "sm.json", 100.0)
    assert shape_key(QWEN) in json.loads((tmp_path / "sm.json").read_text())["shapes"]
    monkeypatch.setattr(
        Tuner, "compare", lambda _, tokens, plans, samples=0: dict.fromkeys(plans, 1.0)
    )
    tune_kernels.tune_shape(*arguments, tmp_path / "sm.json", 100.0)
    assert json.loads((tmp_path / "sm.json").read_text())["shapes"] == {}


def test_a_table_is_written_as_it_is_found(timer):
    saved = []
    tune(tuner_with(timer), [1, 16, 1024], limit=4, save=lambda times: saved.append(list(times)))
    assert saved == [[1], [1, 1024], [1, 1024, 16]]


def test_few_and_many_tokens_take_turns():
    tokens = [2**power for power in range(15)]
    order = interleaved(tokens)
    assert sorted(order) == tokens
    assert interleaved([]) == []
    assert interleaved([3, 5]) == [3, 5]
    assert order[:4] == [1, 256, 16, 4096]


def test_tables_are_added_to(tmp_path):
    path = tmp_path / "tuned" / "sm_90.json"
    write(path, QWEN, (replace(A, last_tokens=16), B), CONDITIONS)
    write(path, SWIN, (C,), CONDITIONS)
    write(path, QWEN, (B,), CONDITIONS | {"date": "later"})
    data = json.loads(path.read_text())
    assert data["date"] == "later"
    assert {key: read_ranges(each) for key, each in data["shapes"].items()} == {
        shape_key(QWEN): (B,),
        shape_key(SWIN): (C,),
    }
