"""How fast a layer could be, how fast it should be, and whether it is.

The floor is the time that no implementation can beat on a device: the bytes over its bandwidth or
the operations over its rate, whichever takes longer. Goals hold for bfloat16, uniform routing and a
cold L2 cache, and were set for one H200.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.common.report import digits
from benchmarks.gpu.layers import Shape

# A smaller intermediate stays in the L2 cache, so it is not charged.
_CACHED_BYTES = 30e6


@dataclass(frozen=True)
class Rates:
    """What the device does at best: bytes read and written, and operations, per second."""

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class Floor:
    """Shortest times in microseconds."""

    fused: float  # the whole layer as one kernel, in which every tensor touches memory once
    router: float  # the logits
    up: float  # the first product
    down: float  # the second product
    combine: float  # the sum over a token's choices
    memory_bound: bool  # whether bytes rather than operations bound `fused`

    @property
    def split(self) -> float:
        """The stages one after another."""
        return self.router + self.up + self.down + self.combine


def expected_active(experts: int, top_k: int, tokens: int) -> float:
    """Returns how many experts get a token on average, with uniform routing."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def floor(
    shape: Shape,
    tokens: int,
    active: float,
    rates: Rates,
    *,
    itemsize: int = 2,
    router: bool = True,
) -> Floor:
    """Returns the shortest times if ``active`` experts get a token, with or without the router."""
    D, H, F = shape.width, shape.hidden, shape.rows
    slots = tokens * shape.top_k
    biases = int(shape.biases)

    def time(elements: float, operations: float) -> float:
        moved, computed = elements * itemsize / rates.bandwidth, operations / rates.flops
        return 1e6 * max(moved, computed)

    def beyond_cache(elements: float) -> float:
        return elements if elements * itemsize > _CACHED_BYTES else 0.0

    x = y = tokens * D
    hidden, rows = beyond_cache(slots * H), beyond_cache(slots * D)
    w1, w2 = active * F * (D + biases), active * D * (H + biases)
    router_weight = shape.experts * D if router else 0
    route_flops = 2 * tokens * D * shape.experts if router else 0
    up_flops, down_flops = 2 * slots * D * F, 2 * slots * D * H
    elements, flops = x + y + w1 + w2 + router_weight, up_flops + down_flops + route_flops
    return Floor(
        fused=time(elements, flops),
        router=time(router_weight + x, route_flops) if router else 0.0,
        up=time(w1 + beyond_cache(x) + hidden, up_flops),
        down=time(w2 + hidden + rows, down_flops),
        combine=time(rows + y, 0),
        memory_bound=elements * itemsize / rates.bandwidth > flops / rates.flops,
    )


@dataclass(frozen=True)
class Verdict:
    """Whether a measurement meets its goal."""

    goal: str
    limit: float  # the most microseconds that meet it
    met: bool
    possible: bool  # whether the floor is within the limit

    def __str__(self) -> str:
        word = "met" if self.met else "missed"
        return f"{word}{'' if self.possible else ', below the floor'} (<= {digits(self.limit)})"


def _goal(shape: Shape, count: int, floor: Floor) -> tuple[str, float] | None:
    """Returns a cell's goal in words and in microseconds; the count is of tokens, or of images."""
    if shape.is_vision:
        images = {
            1: ("Swin, batch 1: 15 us", 15.0),
            64: ("Swin, batch 64: 60 % of the floor", floor.split / 0.6),
        }
        return images.get(count)
    if count == 1:
        return "one token: floor + 8 us", floor.split + 8
    if count >= 16 and floor.memory_bound:
        return "memory-bound, T >= 16: 92 % of the floor", floor.split / 0.92
    if shape.name in ("mixtral", "gpt-oss") and count >= 4096:
        return "Mixtral and gpt-oss, T >= 4096: 80 % of the floor", floor.split / 0.8
    if shape.name == "qwen3" and count == 16384:
        return "Qwen3, T = 16384: 70 % of the floor", floor.split / 0.7
    return None


#: A peer's time over ours, as the geometric mean over all cells.
PEER_GOALS = {"grouped_mm": 1.5, "fused_moe": 1.2}


def judge(shape: Shape, count: int, floor: Floor, microseconds: float) -> Verdict | None:
    """Returns whether a cell's time meets its goal; None where it has none."""
    goal = _goal(shape, count, floor)
    if goal is None:
        return None
    title, limit = goal
    return Verdict(title, limit, microseconds <= limit, floor.split <= limit)


def geometric_mean(ratios: Iterable[float]) -> float:
    """Returns the geometric mean, NaN where there are no ratios."""
    values = list(ratios)
    return statistics.geometric_mean(values) if values else math.nan
