"""Which experts stay on the device from step to step, and so how many each step copies.

A step is a call of one layer: some experts are active, and a layer has R slots. Where more than R
are active, those on the device come first, and the others follow in waves of at most R.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from heapq import nsmallest
from itertools import islice
from typing import Protocol

from custom_ops.offload import ExpertCache

#: The active experts of a layer, step by step, the most wanted first.
Steps = Sequence[Sequence[int]]


class Policy(Protocol):
    """A layer's slots."""

    def step(self, active: Sequence[int]) -> int:
        """Returns how many of a step's active experts are copied."""


class NoCache:
    """Every active expert is copied, as if a step forgot all before it."""

    def step(self, active: Sequence[int]) -> int:
        """Returns how many of a step's active experts are copied."""
        return len(active)


class LeastRecentlyUsed:
    """What the kernels do."""

    def __init__(self, experts: int, resident: int) -> None:
        self._cache = ExpertCache(experts, resident)

    def step(self, active: Sequence[int]) -> int:
        """Returns how many of a step's active experts are copied."""
        return len(self._cache.step(active).misses)


class LeastFrequentlyUsed:
    """The expert with the fewest steps since the beginning makes room, of equals the lowest."""

    def __init__(self, experts: int, resident: int) -> None:
        self._steps = [0] * experts
        self._slots = resident
        self._resident: set[int] = set()

    def step(self, active: Sequence[int]) -> int:
        """Returns how many of a step's active experts are copied."""
        for expert in active:
            self._steps[expert] += 1
        hits = self._resident.intersection(active)
        misses = iter(sorted(set(active) - self._resident))
        wave = hits.union(islice(misses, self._slots - len(hits)))
        while wave:
            self._load(wave)
            wave = set(islice(misses, self._slots))
        return len(active) - len(hits)

    def _load(self, wave: Collection[int]) -> None:
        others = self._resident.difference(wave)
        room = self._slots - len(wave)
        gone = nsmallest(len(others) - room, others, key=lambda e: (self._steps[e], e))
        self._resident = self._resident.union(wave).difference(gone)


class Belady:
    """Keeps those whose next use is nearest, which takes knowing the future.

    No policy copies less that copies only in a step what the step needs, in no more waves than it
    needs. Where the active experts fit the slots this is Belady's algorithm for sets. Where they do
    not, it is a bound: which of them the last wave leaves is free here.
    """

    def __init__(self, steps: Steps, resident: int) -> None:
        self._slots = resident
        self._resident: set[int] = set()
        self._uses: dict[int, deque[int]] = {}
        for place, active in enumerate(steps):
            for expert in active:
                self._uses.setdefault(expert, deque()).append(place)

    def step(self, active: Sequence[int]) -> int:
        """Returns how many of a step's active experts are copied; steps come as announced."""
        copied = len(set(active) - self._resident)
        for expert in active:
            self._uses[expert].popleft()
        # An expert that is not active takes a slot in each wave; the active ones take the others.
        waves = max(1, -(-len(active) // self._slots))
        room = self._slots - -(-len(active) // waves)
        others = nsmallest(room, self._resident.difference(active), key=self._next_use)
        left = {*active, *others}
        self._resident = set(nsmallest(self._slots, left, key=self._next_use))
        return copied

    def _next_use(self, expert: int) -> float:
        uses = self._uses[expert]
        return uses[0] if uses else math.inf


class Hinted:
    """Copies the last step's experts, as far as they fit, before a step; then the least recent go.

    While the layers before compute, the bus would be free for that.
    """

    def __init__(self, experts: int, resident: int) -> None:
        self._cache = ExpertCache(experts, resident)
        self._slots = resident
        self._last: Sequence[int] = ()
        self.ahead = 0  # experts copied before their steps, so far

    def step(self, active: Sequence[int]) -> int:
        """Returns how many of a step's active experts are copied after all."""
        self.ahead += len(self._cache.step(self._last[: self._slots]).misses)
        self._last = active
        return len(self._cache.step(active).misses)


NONE, LRU, LFU, BELADY, HINTED = "none", "LRU", "LFU", "Belady", "LRU, hinted"
#: Makes a policy for steps, a number of experts and one of slots.
POLICIES: dict[str, Callable[[Steps, int, int], Policy]] = {
    NONE: lambda steps, experts, resident: NoCache(),
    LRU: lambda steps, experts, resident: LeastRecentlyUsed(experts, resident),
    LFU: lambda steps, experts, resident: LeastFrequentlyUsed(experts, resident),
    BELADY: lambda steps, experts, resident: Belady(steps, resident),
    HINTED: lambda steps, experts, resident: Hinted(experts, resident),
}
