"""The simulator of experts that stay on the device, on traces whose results are known."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from benchmarks.gpu.layers import SHAPES
from benchmarks.residency import measure, record, simulate, traces
from benchmarks.residency.policies import BELADY, HINTED, LFU, LRU, NONE, POLICIES, Hinted
from benchmarks.residency.timeline import (
    BF16,
    LAUNCH,
    Link,
    resident_seconds,
    slot_bytes,
    step_seconds,
    waves,
    weight_bytes,
)
from custom_ops.kernels.architectures import architecture
from custom_ops.packed_weights import WHOLE
from custom_ops.weight_formats import packed_format

EXPERTS = 6
STEPS = st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=1, unique=True), max_size=12)
SLOTS = st.integers(1, EXPERTS)


def copied(policy, steps, resident, experts=EXPERTS):
    cache = POLICIES[policy](steps, experts, resident)
    return [cache.step(active) for active in steps]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (NONE, [1, 1, 1, 1, 1, 1, 1]),
        # 0 and 1 take the slots, 2 takes that of 1, 1 that of 0, 0 that of 2, 2 that of 1.
        (LRU, [1, 1, 0, 1, 1, 1, 1]),
        # 0 has two steps, so it stays.
        (LFU, [1, 1, 0, 1, 1, 0, 1]),
        # 2 takes the slot of 0, as 1 comes back sooner; 0 then takes that of 1, which never does.
        (BELADY, [1, 1, 0, 1, 0, 1, 0]),
    ],
)
def test_policies_on_a_trace_by_hand(policy, expected):
    steps = [[0], [1], [0], [2], [1], [0], [2]]
    assert copied(policy, steps, 2) == expected


def test_more_active_experts_than_slots():
    """Each step has two waves; what the last one leaves is a hit of the next step."""
    steps = [[0, 1, 2, 3], [0, 1, 2, 3], [4]]
    assert copied(LRU, steps, 2) == [4, 2, 1]
    assert copied(LFU, steps, 2) == [4, 2, 1]
    assert copied(BELADY, steps, 2) == [4, 2, 1]


@given(STEPS, SLOTS)
def test_no_policy_copies_less_than_belady(steps, resident):
    least = sum(copied(BELADY, steps, resident))
    for policy in (LRU, LFU, NONE):
        assert sum(copied(policy, steps, resident)) >= least


def _least(steps, resident):
    """Tries everything that may stay on the device after each step."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for active in map(frozenset, steps):
        following: dict[frozenset[int], int] = {}
        for cached, cost in best.items():
            total = cost + len(active - cached)
            others = cached - active
            for count in range(min(len(others), resident - len(active)) + 1):
                for kept in combinations(others, count):
                    state = active.union(kept)
                    following[state] = min(total, following.get(state, total))
        best = following
    return min(best.values())


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True), max_size=8),
    st.integers(2, 4),
)
def test_belady_is_the_optimum_where_the_experts_fit(steps, resident):
    assert sum(copied(BELADY, steps, resident)) == _least(steps, resident)


@given(STEPS, SLOTS)
def test_nothing_is_copied_twice_once_all_are_resident(steps, resident):
    different = len({expert for active in steps for expert in active})
    for policy in (LRU, LFU, BELADY, HINTED):
        assert sum(copied(policy, steps, EXPERTS)) == different
        assert all(
            0 <= count <= len(active)
            for count, active in zip(copied(policy, steps, resident), steps, strict=True)
        )


@given(STEPS)
def test_the_hint_changes_nothing_where_a_steps_experts_fit(steps):
    resident = max((len(active) for active in steps), default=1)
    cache = Hinted(EXPERTS, resident)
    assert [cache.step(active) for active in steps] == copied(LRU, steps, resident)
    assert cache.ahead == 0


def test_the_hint_brings_the_most_wanted_experts_back():
    """With one slot the last step leaves its last expert there, the hint the first."""
    steps = [[0, 1], [0, 2], [0, 3]]
    assert copied(LRU, steps, 1) == [2, 2, 2]
    cache = Hinted(EXPERTS, 1)
    assert [cache.step(active) for active in steps] == [2, 1, 1]
    assert cache.ahead == 2


def test_steps_are_active_experts_the_most_wanted_first():
    ids_TK = np.array([[3, 1], [1, 0], [2, 0], [2, 3], [5, 5]])
    assert list(traces.steps(ids_TK, 2)) == [[1, 3, 0], [2, 0, 3]]
    assert list(traces.steps(ids_TK[:2], 1)) == [[3, 1], [1, 0]]


def test_experts_that_the_token_before_chose_too():
    assert traces.repeated(np.array([[[0, 1], [1, 0], [2, 1], [3, 4]]])) == 3 / 6


@pytest.mark.parametrize(
    ("active", "copies", "resident", "expected"),
    [
        (8, 3, 8, [(8, 3)]),
        (8, 8, 4, [(4, 4), (4, 4)]),
        (8, 5, 4, [(4, 1), (4, 4)]),  # three hits and a copy, then four copies
        (8, 4, 4, [(4, 0), (4, 4)]),
        (7, 5, 3, [(3, 1), (3, 3), (1, 1)]),
        (2, 0, 4, [(2, 0)]),
    ],
)
def test_waves(active, copies, resident, expected):
    assert list(waves(active, copies, resident)) == expected


# An expert's weights are 8000 and 4000 bytes: 80 and 40 us over the bus, 8 and 4 us in a product.
SHAPE = replace(SHAPES["tiny"], width=40, hidden=50, experts=4, top_k=2)
LINK = Link("bus", "device", host=1e8, memory=1e9, source="")


def test_one_wave_copies_the_second_weights_beside_the_first_product():
    seconds = step_seconds(SHAPE, LINK, tokens=1, active=2, copied=1, resident=2)
    # Copies one after another, then the second product.
    assert seconds == pytest.approx(LAUNCH + 80e-6 + LAUNCH + 40e-6 + LAUNCH + 8e-6)


def test_hits_alone_wait_for_launches_only():
    seconds = step_seconds(SHAPE, LINK, tokens=1, active=2, copied=0, resident=2)
    assert seconds == pytest.approx(LAUNCH + LAUNCH + 16e-6 + LAUNCH + 8e-6)
    assert resident_seconds(SHAPE, LINK, 2) == pytest.approx(2 * LAUNCH + 24e-6)


def test_packed_experts_take_the_time_of_their_bytes() -> None:
    packed = packed_format("int8", torch.bfloat16, torch.bfloat16, (1, WHOLE))
    first, second = weight_bytes(SHAPE, packed)
    assert first == SHAPE.rows * (SHAPE.width + 2)
    assert second == SHAPE.width * (SHAPE.hidden + 2)
    assert slot_bytes(SHAPE, packed) == first + second
    given = {"tokens": 1, "active": 2, "copied": 0, "resident": 2}
    times = [step_seconds(SHAPE, LINK, stored=stored, **given) for stored in (BF16, packed)]
    # The first product waits for a copy of nothing.
    ratio = (times[1] - 3 * LAUNCH) / (times[0] - 3 * LAUNCH)
    assert ratio == pytest.approx(slot_bytes(SHAPE, packed) / slot_bytes(SHAPE))


def test_a_wave_copies_beside_the_products_of_the_one_before():
    slow = replace(LINK, memory=1e7)  # Products take 800 and 400 us.
    seconds = step_seconds(SHAPE, slow, tokens=1, active=2, copied=2, resident=1)
    first = LAUNCH + 80e-6
    # All further copies are hidden, and the products follow one another.
    assert seconds == pytest.approx(first + 2 * (LAUNCH + 800e-6) + 2 * (LAUNCH + 400e-6))


def test_a_copy_waits_for_the_product_that_reads_its_slots():
    """Were the slots free, the second wave's copies would end before the first wave's products."""
    even = replace(LINK, memory=1e8)
    seconds = step_seconds(SHAPE, even, tokens=1, active=2, copied=2, resident=1)
    up = LAUNCH + 80e-6 + LAUNCH + 80e-6
    copy_w1 = up + LAUNCH + 80e-6
    down = up + LAUNCH + 40e-6
    copy_w2 = max(copy_w1, down) + LAUNCH + 40e-6
    second_up = copy_w1 + LAUNCH + 80e-6
    assert seconds == pytest.approx(max(second_up, copy_w2) + LAUNCH + 40e-6)


def test_empty_waves_cost_their_launches():
    shared = {"tokens": 2, "active": 1, "copied": 0, "resident": 1}  # four waves
    alone = step_seconds(SHAPE, LINK, **(shared | {"tokens": 1}))  # two waves
    assert step_seconds(SHAPE, LINK, **shared) == pytest.approx(alone + 4 * LAUNCH)


def test_experts_that_were_copied_ahead_of_a_step():
    steps = [[0, 1], [0, 2], [0, 3], [4]]
    assert simulate.run(HINTED, [steps, [[0]]], EXPERTS, 1).ahead == 3 / 5
    assert simulate.run(LRU, [steps], EXPERTS, 1).ahead == 0


def test_a_picture_of_no_recorded_case(tmp_path):
    simulate.plot({"cases": []}, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")


def test_slots_that_are_tried():
    assert list(simulate.slots(8)) == [1, 2, 4, 6, 8]
    assert list(simulate.slots(5)) == [1, 2, 4, 5]
    assert list(simulate.slots(1)) == [1]


def _main(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    module.main()


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Routing of a model that is hardly trained, in place of the recorded one."""
    path = tmp_path / "routing.npz"
    monkeypatch.setattr(traces, "SIMULATED", {"mixtral": 32})
    monkeypatch.setattr(record, "SIMULATED", {"mixtral": 32})
    monkeypatch.setattr(traces, "ROUTING", path)
    sizes = ("--steps", 2, "--tokens", 512)
    _main(monkeypatch, record, "--output", path, *sizes)
    return path


@pytest.mark.slow
def test_recording_and_simulating(recorded, tmp_path, monkeypatch, capsys):
    notes = traces.notes()["models"][0]
    assert notes["steps"] == 2
    assert notes["repeated"]["uniform"] == 2 / 8
    # A byte of one of 256 values, before anything is learnt.
    assert notes["bits per byte"]["untrained"] > 7.5
    measured = tmp_path / "measured.json"
    layers = [{"shape": "mixtral", "tokens": 1, "rows": [{"resident": 2, "ms": 100.0}]}]
    measured.write_text(json.dumps({"layers": layers}))
    found, picture = tmp_path / "found.json", tmp_path / "found.png"
    files = ("--json", found, "--plot", picture, "--measured", measured)
    _main(monkeypatch, simulate, "--case", "Mixtral", "--tokens", 512, *files)
    cases = json.loads(found.read_text())["cases"]
    assert [case["name"] for case in cases] == [
        f"Mixtral-8x7B, T={tokens}, {kind}" for tokens in (1, 256) for kind in traces.KINDS
    ]
    for case in cases:
        for row in case["rows"]:
            rates = row["hit rate"]
            assert rates[NONE] == 0 <= rates[LRU] <= rates[BELADY] <= 1
            for times in row["ms"].values():
                assert times[LRU] <= times[NONE]
        assert case["rows"][-1]["resident"] == 8
        if case["routing"] == "uniform":  # The warm-up chooses every expert.
            assert case["rows"][-1]["hit rate"][LRU] == 1
    assert "Mixtral-8x7B, T=1, recorded" in capsys.readouterr().out
    first = picture.read_bytes()
    assert first.startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        _main(monkeypatch, simulate, "--json", found, "--plot", picture, "--redraw")
    assert picture.read_bytes() == first


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would run the kernels instead")
@pytest.mark.slow
@pytest.mark.every
def test_measuring_without_a_gpu(tmp_path, monkeypatch):
    found = tmp_path / "measured.json"
    _main(monkeypatch, measure, "--dry-run", "--steps", 2, "--json", found)
    (layer,) = json.loads(found.read_text())["layers"]
    assert layer["shape"] == "tiny"
    assert [row["resident"] for row in layer["rows"]] == [4, 3, 2, 1]
    assert all(row["same"] for row in layer["rows"])
    # Two experts a token, of which one slot keeps the last.
    assert layer["rows"][-1]["hit rate, simulated"] <= 0.5


def test_a_captured_layer_keeps_the_memory_that_its_graph_uses(monkeypatch):
    made: list[weakref.ref[torch.Tensor]] = []

    def zeros(size, dtype, device):
        memory = torch.empty(size, dtype=dtype)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "Stream", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    monkeypatch.setattr(measure, "launch_in_waves", lambda *_: None)
    device = SimpleNamespace(name="cuda", architecture=architecture("sm_90"))
    shape = SHAPES["tiny"]
    tensors = {"x": torch.empty(1, shape.width), "expert_ids": torch.ones(1, shape.top_k)}
    layer = measure.OffloadedLayer(shape.layer(torch.bfloat16, router=False), device, tensors, 2)
    layer.run(tensors["expert_ids"][None])
    gc.collect()
    assert len(made) == 2
    assert None not in [memory() for memory in made], "state and workspace"


def test_committed_routing_is_of_every_shape():
    for name in traces.SIMULATED:
        shape = SHAPES[name]
        ids_LTK = traces.trace(traces.RECORDED, shape, record.TOKENS)
        assert ids_LTK.shape == (2, record.TOKENS, shape.top_k)
        assert ids_LTK.max() < shape.experts
        # The experts of a token differ.
        assert (np.diff(np.sort(ids_LTK, axis=-1), axis=-1) > 0).all()
    assert traces.ROUTING.stat().st_size < 200_000


def test_a_shape_without_recorded_routing():
    with pytest.raises(ValueError, match=r"routing.npz has no routing of 'tiny'"):
        traces.trace(traces.RECORDED, SHAPES["tiny"], 4)
