"""Layers of which the device holds only some experts: the cache, the waves, and their order."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu.kernel_code import disassemble
from custom_ops import ExpertOptions
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.launch_waves import enqueued, launch_in_waves
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan
from custom_ops.kernels.spec import ForwardPlan, StatePointer, TensorMap, TensorPointer
from custom_ops.layer_shape import LayerShape
from custom_ops.offload import ExpertCache
from custom_ops.weight_formats import plain_format
from kernel_runs import call_tensors, in_out
from moe_cases import Case, make_case
from random_layers import bounded, cases
from trt_plugin.compiling.tasks import Compiled, task_for
from trt_plugin.compiling.workers import compile_tasks
from wave_runs import Choice, calls_of, memory_of, new_state, plan_in_waves, run_resident, run_waves

EXPERTS, TOP_K = 6, 2
# Both products in one kernel, and each in its own.
WIDTHS = [pytest.param(16, id="mlp"), pytest.param(136, id="gemm")]


# What places experts and copies them, without the products.
DECISIONS = "sort|count|place|residency|copy"


def case_of(tokens: int, width: int = 136, seed: int = 0, **options: object) -> Case:
    settings = {"hidden": 8, "experts": EXPERTS, "top_k": TOP_K, "dtype": torch.bfloat16}
    return make_case("experts", (tokens,), width=width, seed=seed, **settings | options)


def with_ids(case: Case, ids: list[list[int]]) -> Case:
    return case.changed(expert_ids=torch.tensor(ids).reshape(-1, TOP_K))


# --- Numbers ---


@pytest.mark.parametrize("resident", [1, TOP_K, EXPERTS - 1, EXPERTS])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.first(4)
def test_the_same_bits_as_with_all_experts_resident(width, resident):
    first = case_of(1, width, activation="silu", gated=True)
    weights = {name: first.arguments[name] for name in ("w1", "b1", "w2", "b2")}
    planned = plan_in_waves(first, resident)
    state = new_state(planned)
    for tokens in (0, 1, 2, 9, 300):
        case = case_of(tokens, width, seed=tokens, activation="silu", gated=True)
        tensors = call_tensors(case.changed(**weights))
        launch_in_waves(planned, tensors, state)
        assert torch.equal(tensors["y"], run_resident(case.changed(**weights))), tokens


@pytest.mark.slow
@settings(bounded, max_examples=8)
@given(case=cases(), data=st.data())
@pytest.mark.every
def test_random_layers(case, data):
    resident = data.draw(st.integers(1, case.arguments["w1"].shape[0]))
    transposed = data.draw(st.sets(st.sampled_from(["w1", "w2"])))
    device = data.draw(st.sampled_from(["sm_75", "sm_80", "sm_90", "sm_100"]))
    case = in_out(case, *transposed)
    if case.op == "experts" and case.arguments["expert_ids"].numel():
        case.arguments["expert_ids"].view(-1)[0] = -1
    planned = plan_in_waves(case, resident, device)
    tensors = call_tensors(case)
    launch_in_waves(planned, tensors, new_state(planned))
    assert torch.equal(tensors["y"], run_resident(case, device))


def test_tensor_maps_are_of_the_slots():
    planned = plan_in_waves(case_of(1, dtype=torch.float16), 3)
    maps = [a for k in planned.kernels() for a in k.parameters.values() if isinstance(a, TensorMap)]
    assert {(each.tensor, each.shape[0]) for each in maps} == {("w1_slots", 3), ("w2_slots", 3)}


# --- The cache ---

ROUTINGS = st.lists(
    st.lists(
        st.lists(st.integers(-1, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K),
        min_size=1,
        max_size=5,
    ),
    min_size=1,
    max_size=6,
)


def check_routings(routings: list[list[list[int]]], resident: int) -> None:
    """Compares the tables and slots with the model's after each call."""
    cache = ExpertCache(EXPERTS, resident)
    base = case_of(1, 16, hidden=8)
    planned = plan_in_waves(base, resident)
    state = new_state(planned)
    for ids in routings:
        case = with_ids(
            base.changed(
                x=torch.randn(len(ids), 16).bfloat16(), expert_weights=torch.ones(len(ids), TOP_K)
            ),
            ids,
        )
        step = cache.step(expert for slots in ids for expert in slots if expert >= 0)
        memory = run_waves(planned, case, state, only=DECISIONS)
        tables = {name: each.tolist() for name, each in memory.items() if each.ndim == 1}
        placed = [
            (expert, wave, slot)
            for wave, each in enumerate(step.waves)
            for expert, slot in each.places.items()
        ]
        for expert, wave, slot in placed:
            assert tables["wave_of_expert"][expert] == wave
            assert tables["place_of_expert"][expert] == slot
        assert tables["wave_of_expert"].count(-1) == EXPERTS - len(placed)
        line = [-1] * len(step.hits) + list(step.misses)
        assert tables["copy_expert"] == line + [-1] * (EXPERTS - len(line))
        assert tables["expert_of_slot"] == [
            0 if expert is None else expert + 1 for expert in cache.expert_of_slot
        ]
        held = {e: s + 1 for s, e in enumerate(cache.expert_of_slot) if e is not None}
        assert tables["slot_of_expert"] == [held.get(expert, 0) for expert in range(EXPERTS)]
        assert tables["last_use"] == cache.last_use
        for name in ("w1", "w2"):
            slots = memory[f"{name}_slots"].view(resident, -1)
            source = case.arguments[name].reshape(EXPERTS, -1)
            for slot, expert in enumerate(cache.expert_of_slot):
                assert expert is None or torch.equal(slots[slot], source[expert])


@settings(bounded, max_examples=10)
@given(routings=ROUTINGS, resident=st.integers(1, EXPERTS))
def test_a_sequence_of_routings(routings, resident):
    check_routings(routings, resident)


@pytest.mark.parametrize("resident", [1, 2, 3, 5])
def test_a_cycle_that_always_misses_the_oldest(resident):
    cycle = [[[expert % EXPERTS, (expert + 1) % EXPERTS]] for expert in range(0, 3 * EXPERTS, 2)]
    check_routings(cycle, resident)


def test_more_experts_than_slots_in_every_call():
    every = [[0, 1], [2, 3], [4, 5]]
    check_routings([every, every, [[5, 0]], every], 4)


@pytest.mark.parametrize(("experts", "resident"), [(257, 1), (130, 128), (33, 32)])
def test_many_experts(experts, resident):
    case = case_of(200, 16, experts=experts)
    planned = plan_in_waves(case, resident)
    cache, state = ExpertCache(experts, resident), new_state(planned)
    for seed in range(2):
        ids = torch.randint(experts, (200, TOP_K), generator=torch.Generator().manual_seed(seed))
        step = cache.step(ids.flatten().tolist())
        memory = run_waves(planned, case.changed(expert_ids=ids), state, only=DECISIONS)
        places = memory["place_of_expert"].tolist()
        assert all(places[e] == slot for wave in step.waves for e, slot in wave.places.items())
        held = [expert - 1 if expert else None for expert in memory["expert_of_slot"].tolist()]
        assert held == cache.expert_of_slot
        # Wave by wave, the tiles are those of its experts.
        starts, tile_expert = memory["wave_tiles"].tolist(), memory["tile_expert"].tolist()
        for wave, each in enumerate(step.waves):
            assert {*tile_expert[starts[wave] : starts[wave + 1]]} == {*each.places}
        assert {*starts[len(step.waves) :]} == {sum(expert >= 0 for expert in tile_expert)}


def test_the_model_of_the_cache_refuses_what_is_out_of_range():
    for resident in (0, 5):
        message = rf"resident must be in 1\.\.4, the experts; got {resident}"
        with pytest.raises(ValueError, match=message):
            ExpertCache(4, resident)
    with pytest.raises(ValueError, match=r"experts must be in 0\.\.3, got \[1, 4\]"):
        ExpertCache(4, 2).step([4, 1])


# --- Two streams ---


@settings(bounded, max_examples=4)
@given(tokens=st.sampled_from([1, 3]), width=st.sampled_from([16, 136]), data=st.data())
def test_any_order_that_the_events_permit_gives_the_same(tokens, width, data):
    case = case_of(tokens, width)
    planned = plan_in_waves(case, 1)
    choices = [*(prefer(planned, case, side) for side in (False, True)), None]
    choice = data.draw(st.sampled_from(choices))
    state = new_state(planned)
    for _ in range(2):
        ran = run_waves(
            planned, case, state, choice or (lambda ready: data.draw(st.sampled_from(ready)))
        )
        assert torch.equal(ran["y"], run_resident(case))


def without(planned: ForwardPlan, tokens: int, index: int) -> ForwardPlan:
    """The plan with one launch of a wave waiting for nothing."""
    span = planned.at(tokens)
    wave = list(span.wave)
    wave[index] = replace(wave[index], after=())
    ranges = [replace(each, wave=tuple(wave)) if each is span else each for each in planned.ranges]
    return replace(planned, ranges=tuple(ranges))


def prefer(planned: ForwardPlan, case: Case, side: bool) -> Choice:
    """Runs one stream as far as it can get before the other."""
    calls = calls_of(planned, case)
    return lambda ready: max(ready, key=lambda place: calls[place].side == side)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.first(2)
def test_each_wait_is_necessary(tokens, width):
    case = case_of(tokens, width)
    expected = run_resident(case)
    planned = plan_in_waves(case, 1)
    first = [prefer(planned, case, side) for side in (False, True)]
    waits = [index for index, each in enumerate(planned.at(tokens).wave) if each.after]
    assert all(len(planned.at(tokens).wave[index].after) == 1 for index in waits)
    for index in waits:
        broken = without(planned, tokens, index)
        assert not all(
            torch.equal(run_waves(broken, case, new_state(broken), choice)["y"], expected)
            for choice in first
        )


def test_the_second_stream_begins_behind_the_tables():
    calls = enqueued(plan_in_waves(case_of(1), 1), 1)
    (first, *_) = (each for each in calls if each.side)
    (table,) = first.after
    assert calls[table].spec.name == "residency_kernel"
    # And the epilogue comes after all of it.
    last = max(place for place, each in enumerate(calls) if each.side)
    assert calls[-1].after == (last,)
    assert calls[-1].spec.name == "combine_kernel"


def test_the_launcher_uses_two_streams_and_events(monkeypatch):
    class Stream(SimpleNamespace):
        def wait_event(self, event):
            waits.append(event)

        def record_event(self):
            return len(launched) - 1

        def wait_stream(self, stream):
            joined.append(stream)

    launched: list[tuple[bool, bool, tuple[int, ...]]] = []
    waits: list[int] = []
    joined: list[Stream] = []
    main, side = Stream(), Stream()
    current = [main]

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    case = case_of(9)
    planned = plan_in_waves(case, 2)
    calls = calls_of(planned, case)

    def start(call):
        def started(memory):
            launched.append((call.side, current[-1] is side, (*waits,)))
            waits.clear()

        return replace(call, start=started)

    replaced = tuple(map(start, calls))
    monkeypatch.setattr("custom_ops.kernels.launch_waves.enqueued", lambda *_: replaced)
    state = new_state(planned)
    launch_in_waves(planned, call_tensors(case), state, side)
    assert launched == [(call.side, call.side, call.after) for call in calls]
    assert not joined

    def fail(memory):
        raise RuntimeError("no launch")

    replaced = (*replaced[:-1], replace(replaced[-1], start=fail))
    with pytest.raises(RuntimeError, match="no launch"):
        launch_in_waves(planned, call_tensors(case), state, side)
    assert joined == [side]


# --- Failures ---


def test_a_state_that_is_too_small_is_refused():
    case = case_of(3)
    planned = plan_in_waves(case, 2)
    state = new_state(planned)
    message = f"state takes {planned.state_size} bytes, got {planned.state_size - 1}"
    with pytest.raises(ValueError, match=message):
        launch_in_waves(planned, call_tensors(case), state[:-1])


@pytest.mark.parametrize("tokens", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.first(1)
def test_a_call_that_failed_anywhere_is_forgotten_with_the_tables(tokens):
    case = case_of(tokens)
    expected = run_resident(case)
    planned = plan_in_waves(case, 4)
    calls = calls_of(planned, case)

    def after_failing(place: int, forgotten: int) -> torch.Tensor:
        state = new_state(planned)
        memory = memory_of(planned, case, state)
        for call in calls[:place]:
            call.start(memory)
        state[:forgotten] = 0
        return run_waves(planned, case, state)["y"]

    for place in range(len(calls)):
        assert torch.equal(after_failing(place, planned.tables_size), expected)
    # The tables say what the slots hold before they hold it.
    (tables,) = (i for i, call in enumerate(calls) if call.spec.name == "residency_kernel")
    assert not torch.equal(after_failing(tables + 1, 0), expected)


# --- Plans ---


def layer_with(resident: int | None) -> Layer:
    return Layer(
        LayerShape(
            8,
            64,
            32,
            2,
            torch.float32,
            plain_format(torch.float16),
            ExpertOptions(gated=True, activation="silu"),
        ),
        resident_experts=resident,
    )


def test_the_state():
    planned = plan(layer_with(3), architecture("sm_90"))
    assert planned.state_offsets() == {
        "slot_of_expert": 0, "expert_of_slot": 256, "last_use": 512, "clock": 768,
        "w1_slots": 1024, "w2_slots": 1024 + 3 * 64 * 64 * 2, "": 1024 + 3 * 3 * 64 * 32 * 2,
    }  # fmt: skip
    assert planned.tables_size == 1024
    assert planned.state_size == planned.state_offsets()[""]


def test_a_resident_layer_has_neither_state_nor_waves():
    planned = plan(layer_with(None), architecture("sm_90"))
    assert (planned.state, planned.state_size, planned.tables_size) == ((), 0, 0)
    assert not any(each.wave or each.epilogue for each in planned.ranges)
    assert all(each.waves.evaluate({}) == 0 for each in planned.ranges)


def test_no_kernel_of_two_streams_starts_early():
    kernels = [*plan(layer_with(3), architecture("sm_90")).kernels()]
    assert not any(each.dependent_launch or each.constants.get("PDL") for each in kernels)
    resident = plan(layer_with(None), architecture("sm_90")).kernels()
    assert all(each.dependent_launch for each in resident)


def test_only_copies_read_host_memory():
    for kernel in plan(layer_with(3), architecture("sm_90")).kernels():
        pointers = [a for a in kernel.parameters.values() if isinstance(a, TensorPointer)]
        reads = {each.tensor for each in pointers} & {"w1", "w2"}
        assert bool(reads) == (kernel.name == "copy_experts_kernel")
        writes = [a for a in kernel.parameters.values() if isinstance(a, StatePointer)]
        assert reads or kernel.name != "residency_kernel" or len(writes) == 4


@pytest.mark.parametrize("resident", [0, 9, -1])
def test_numbers_of_slots_that_there_cannot_be(resident):
    with pytest.raises(ValueError, match=rf"resident_experts must be in 1\.\.8.*; got {resident}"):
        layer_with(resident)


# --- Code ---


@pytest.mark.slow
@pytest.mark.every
def test_copies_are_wide_and_nothing_spills():
    on = architecture("sm_90")
    layer = Layer(
        LayerShape(
            128,
            2048,
            768,
            8,
            torch.bfloat16,
            plain_format(torch.bfloat16),
            ExpertOptions("silu", gated=True),
        ),
        resident_experts=32,
    )
    few, *_, many = plan(layer, on).ranges
    kernels = {each.name: each for each in (*many.kernels(), *few.kernels())}
    names = {"residency_kernel", "copy_experts_kernel", "few_down_kernel", "expert_up_kernel"}
    tasks = [task_for(kernels[name], on) for name in names]
    compiled: dict[str, Compiled] = {}
    compile_tasks(tasks, 1, lambda task, result: compiled.update({task.function: result}))
    assert {name: each.info.local_memory for name, each in compiled.items()} == dict.fromkeys(
        names, 0
    )
    code = disassemble(compiled["copy_experts_kernel"].cubin)
    # 16 KiB under way in each program of 128 threads.
    assert len(re.findall(r"LDG\.E\S*\.128", code)) == 8
    assert len(re.findall(r"STG\.E\S*\.128", code)) == 8
