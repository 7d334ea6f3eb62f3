"""How long each launch of a plan takes by itself.

The sum is not the layer's time: alone, a launch neither finds its inputs in the cache where the one
before left them, nor starts while that one ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks._gpu_floor import Floor
from benchmarks._gpu_timing import Timer
from custom_ops.kernels.launch import launch
from custom_ops.kernels.spec import ForwardPlan

__all__ = ["LaunchTime", "break_down", "only", "stage_of"]

# Which stages of the floor a kernel's work is.
_STAGES: Mapping[str, tuple[str, ...]] = {
    "route_kernel": ("router",),
    "router_logits_kernel": ("router",),
    "few_up_kernel": ("up",),
    "expert_up_kernel": ("up",),
    "few_down_kernel": ("down", "combine"),
    "expert_down_kernel": ("down",),
    "expert_mlp_kernel": ("up", "down"),
    "combine_kernel": ("combine",),
}


@dataclass(frozen=True)
class LaunchTime:
    """One launch.

    Attributes:
        kernel: Its name.
        programs: Of its grid.
        cold: Microseconds with a cold L2 cache.
        warm: Microseconds with a warm one.
        floor: Of the stages that it computes, 0 if it computes none.
    """

    kernel: str
    programs: int
    cold: float
    warm: float
    floor: float


def stage_of(kernel: str) -> tuple[str, ...]:
    """Returns which stages of the floor a kernel computes; none for norm and sort."""
    return _STAGES.get(kernel, ())


def only(plan: ForwardPlan, tokens: int, index: int) -> ForwardPlan:
    """Returns a plan that makes one launch of the given plan, on the same workspace."""
    span = plan.at(tokens)
    alone = replace(span, first=1, launches=(span.launches[index],))
    return replace(plan, ranges=(alone,))


def break_down(
    plan: ForwardPlan, tensors: Mapping[str, Tensor], timer: Timer, floor: Floor
) -> list[LaunchTime]:
    """Times every launch by itself, on what the launches before it have left.

    Args:
        plan: The layer's plan.
        tensors: The call's, with y.
        timer: What to time with.
        floor: Of the layer for this number of tokens.
    """
    tokens = len(tensors["x"])
    size = plan.workspace_size(tokens)
    workspace = torch.empty(size, dtype=torch.uint8, device=tensors["x"].device)
    launch(plan, tensors, workspace)
    found = []
    for index, spec in enumerate(plan.at(tokens).launches):
        alone = only(plan, tokens, index)

        def call(alone: ForwardPlan = alone) -> None:
            launch(alone, tensors, workspace)

        cold = timer({spec.name: call}).times[spec.name]
        warm = timer({spec.name: call}, cold=False).times[spec.name]
        sizes = {**plan.layer.sizes, "T": tokens}
        programs = 1
        for axis in spec.grid:
            programs *= axis.evaluate(sizes)
        shortest = sum(getattr(floor, stage) for stage in stage_of(spec.name))
        found.append(LaunchTime(spec.name, programs, cold.median, warm.median, shortest))
    return found
