"""Layers whose experts do not all fit on the device: their calls, launch by launch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.launch import launch
from custom_ops.kernels.launch_waves import Enqueued, call_memory, enqueued
from custom_ops.kernels.plan import plan
from custom_ops.kernels.spec import ForwardPlan
from kernel_runs import call_tensors, layer_of
from moe_cases import Case

#: Chooses what runs next among the places of launches whose dependencies have run.
Choice = Callable[[Sequence[int]], int]


def plan_in_waves(case: Case, resident: int, device: str = "sm_90") -> ForwardPlan:
    """The plan of a case's layer with so many slots."""
    return plan(replace(layer_of(case), resident_experts=resident), architecture(device))


def new_state(planned: ForwardPlan) -> Tensor:
    """A state with an empty cache, whose slots hold NaN."""
    state = torch.full((planned.state_size + 256,), 0xFF, dtype=torch.uint8)
    state = state[-state.data_ptr() % 256 :][: planned.state_size]
    state[: planned.tables_size] = 0
    return state


def memory_of(planned: ForwardPlan, case: Case, state: Tensor) -> dict[str, Tensor]:
    """What a call's kernels take; results and workspace hold NaN."""
    tensors = call_tensors(case)
    size = planned.workspace_size(tensors["x"].shape[0])
    workspace = torch.full((size + 256,), 0xFF, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 256 :][:size]
    return dict(call_memory(planned, tensors, state, workspace))


def run_resident(case: Case, device: str = "sm_90") -> Tensor:
    """The result of the plan of the same layer whose experts are all on the device."""
    tensors = call_tensors(case)
    launch(plan(layer_of(case), architecture(device)), tensors)
    return tensors["y"]


def calls_of(planned: ForwardPlan, case: Case) -> tuple[Enqueued, ...]:
    """The launches of a call."""
    return enqueued(planned, case.arguments["x"].shape[0])


def run_waves(
    planned: ForwardPlan, case: Case, state: Tensor, choice: Choice = min, only: str = ""
) -> dict[str, Tensor]:
    """Runs a call's launches, or those of kernels whose names match a pattern, in a chosen order.

    The order respects those of both streams and what the launches wait for.
    """
    memory = memory_of(planned, case, state)
    calls = calls_of(planned, case)
    for place in order(calls, choice):
        if re.search(only, calls[place].spec.name):
            calls[place].start(memory)
    return memory


def order(calls: Sequence[Enqueued], choice: Choice) -> Iterable[int]:
    """Yields the places of launches in an order that two streams and their events permit."""
    streams = {side: [i for i, c in enumerate(calls) if c.side == side] for side in (False, True)}
    done: set[int] = set()
    while any(streams.values()):
        heads = [queue[0] for queue in streams.values() if queue]
        ready = [head for head in heads if done.issuperset(calls[head].after)]
        chosen = choice(ready)
        streams[calls[chosen].side].pop(0)
        done.add(chosen)
        yield chosen
