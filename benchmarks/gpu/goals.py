"""How fast a layer could be, how fast it should be, and whether it is.

The floor is the time that no implementation can beat on a device: the bytes over its bandwidth or
the operations over its rate, whichever takes longer. Goals hold for bfloat16, uniform routing and a
cold L2 cache, and were set for one H200.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
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
    """Shortest times in microseconds.

    Attributes:
        fused: The whole layer as one kernel, in which every tensor touches memory once.
        router: The logits.
        up: The first product.
        down: The second product.
        combine: The sum over a token's choices.
        memory_bound: Whether bytes rather than operations bound ``fused``.
    """

    fused: float
    router: float
    up: float
    down: float
    combine: float
    memory_bound: bool

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
    """Returns the shortest times for a number of tokens.

    Args:
        shape: The layer.
        tokens: T.
        active: Experts that get a token.
        rates: What the device does at best.
        itemsize: Bytes of an element.
        router: Whether the layer routes by itself.
    """
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
class Goal:
    """A bound on the time of those cells to which it applies.

    Attributes:
        title: The goal in words.
        applies: Whether a shape, count (tokens, or images) and floor have this goal.
        limit: The most microseconds that meet it, for a floor.
    """

    title: str
    applies: Callable[[Shape, int, Floor], bool]
    limit: Callable[[Floor], float]


@dataclass(frozen=True)
class Verdict:
    """Whether a measurement meets its goal.

    Attributes:
        goal: The goal's title.
        limit: The most microseconds that meet it.
        met: Whether the measurement was within the limit.
        possible: Whether the floor is.
    """

    goal: str
    limit: float
    met: bool
    possible: bool

    def __str__(self) -> str:
        word = "met" if self.met else "missed"
        return f"{word}{'' if self.possible else ', below the floor'} (<= {digits(self.limit)})"


# The first that applies to a cell counts.
GOALS = (
    Goal(
        "one token: floor + 8 us",
        lambda s, n, _: not s.is_vision and n == 1,
        lambda floor: floor.split + 8,
    ),
    Goal(
        "memory-bound, T >= 16: 92 % of the floor",
        lambda s, n, f: not s.is_vision and n >= 16 and f.memory_bound,
        lambda floor: floor.split / 0.92,
    ),
    Goal(
        "Mixtral and gpt-oss, T >= 4096: 80 % of the floor",
        lambda s, n, _: s.name in ("mixtral", "gpt-oss") and n >= 4096,
        lambda floor: floor.split / 0.8,
    ),
    Goal(
        "Qwen3, T = 16384: 70 % of the floor",
        lambda s, n, _: s.name == "qwen3" and n == 16384,
        lambda floor: floor.split / 0.7,
    ),
    Goal("Swin, batch 1: 15 us", lambda s, n, _: s.is_vision and n == 1, lambda _: 15.0),
    Goal(
        "Swin, batch 64: 60 % of the floor",
        lambda s, n, _: s.is_vision and n == 64,
        lambda floor: floor.split / 0.6,
    ),
)

#: A peer's time over ours, as the geometric mean over all cells.
PEER_GOALS = {"grouped_mm": 1.5, "fused_moe": 1.2}


def judge(shape: Shape, count: int, floor: Floor, microseconds: float) -> Verdict | None:
    """Returns whether a cell's time meets its goal; None where it has none."""
    for goal in GOALS:
        if goal.applies(shape, count, floor):
            limit = goal.limit(floor)
            return Verdict(goal.title, limit, microseconds <= limit, floor.split <= limit)
    return None


def geometric_mean(ratios: Iterable[float]) -> float:
    """Returns the geometric mean, NaN where there are no ratios."""
    values = list(ratios)
    return statistics.geometric_mean(values) if values else math.nan
