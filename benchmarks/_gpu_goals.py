"""What the kernels should reach, as data, and whether they do.

Goals hold for bfloat16, uniform routing and a cold L2 cache, and were set for one H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks._gpu_floor import Floor
from benchmarks._gpu_shapes import Shape

__all__ = ["GOALS", "PEER_GOALS", "Goal", "Verdict", "geometric_mean", "judge"]


@dataclass(frozen=True)
class Goal:
    """A bound on one cell's time.

    Attributes:
        title: What it asks for.
        applies: To which shape, count (tokens, or images) and floor.
        kind: ``share``: of the split floor, at least; ``above``: microseconds above the split
            floor, at most; ``below``: microseconds, at most.
        value: The bound.
    """

    title: str
    applies: Callable[[Shape, int, Floor], bool]
    kind: Literal["share", "above", "below"]
    value: float

    def limit(self, floor: Floor) -> float:
        """Returns the most microseconds that meet it."""
        if self.kind == "share":
            return floor.split / self.value
        return floor.split + self.value if self.kind == "above" else self.value


@dataclass(frozen=True)
class Verdict:
    """A goal and one measurement.

    Attributes:
        goal: Its title.
        limit: The most microseconds that meet it.
        met: Whether they were.
        possible: Whether the floor is below the limit.
    """

    goal: str
    limit: float
    met: bool
    possible: bool


def _language(shape: Shape) -> bool:
    return not shape.is_vision


GOALS = (
    Goal("one token: floor + 8 us", lambda s, n, _: _language(s) and n == 1, "above", 8.0),
    Goal(
        "memory-bound, T >= 16: 92 % of the floor",
        lambda s, n, f: _language(s) and n >= 16 and f.memory_bound,
        "share",
        0.92,
    ),
    Goal(
        "Mixtral and gpt-oss, T >= 4096: 80 % of the floor",
        lambda s, n, _: s.name in ("mixtral", "gpt-oss") and n >= 4096,
        "share",
        0.80,
    ),
    Goal(
        "Qwen3, T = 16384: 70 % of the floor",
        lambda s, n, _: s.name == "qwen3" and n == 16384,
        "share",
        0.70,
    ),
    Goal("Swin, batch 1: 15 us", lambda s, n, _: s.is_vision and n == 1, "below", 15.0),
    Goal(
        "Swin, batch 64: 60 % of the floor", lambda s, n, _: s.is_vision and n == 64, "share", 0.6
    ),
)

#: Times of another version over ours, geometric mean over all cells.
PEER_GOALS = {"grouped_mm": 1.5, "fused_moe": 1.2}


def judge(shape: Shape, count: int, floor: Floor, microseconds: float) -> Verdict | None:
    """Returns the verdict of the first goal that applies to a cell; None if there is none."""
    for goal in GOALS:
        if goal.applies(shape, count, floor):
            limit = goal.limit(floor)
            return Verdict(goal.title, limit, microseconds <= limit, floor.split <= limit)
    return None


def geometric_mean(ratios: Iterable[float]) -> float:
    """Returns the geometric mean; NaN of nothing."""
    logs: Sequence[float] = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
