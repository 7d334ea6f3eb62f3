"""The cache of experts on a device, in Python: which expert takes which slot, and when.

:mod:`custom_ops.kernels.residency` decides the same on the device, for layers whose experts do not
all fit there.

Legend: E experts, R slots of one expert each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Wave:
    """A part of a call in which at most R experts are computed.

    Attributes:
        places: The slot of each of its experts.
        copies: Those of them that are copied to their slots, in the order of copying.
    """

    places: dict[int, int]
    copies: tuple[int, ...]


@dataclass(frozen=True)
class Waves:
    """The experts of a call in waves, and the changes of the cache.

    Attributes:
        hits: Experts that had a slot, ascending.
        misses: Experts that had none and are copied, ascending.
        victims: Experts that lost their slots, in that order; the call's own are among them where
            it has more than one wave.
        waves: In order; none where the call has no experts.
    """

    hits: tuple[int, ...]
    misses: tuple[int, ...]
    victims: tuple[int, ...]
    waves: tuple[Wave, ...]


#: Buffers of the device's memory begin at multiples of it.
_ALIGNMENT = 256


def cache_bytes(experts: int, resident: int, tensor_bytes: Iterable[int]) -> int:
    """Returns the bytes that a layer's cache takes on the device: ``4 E + 12 R + 8`` and R slots.

    Each of its buffers is rounded up to 256 bytes: four tables, and one for each tensor.

    Args:
        experts: E.
        resident: R.
        tensor_bytes: One expert's part of each tensor that stores w1 or w2.

    Example:
        >>> cache_bytes(experts=128, resident=32, tensor_bytes=(6 << 20, 3 << 20))
        301991168
    """
    tables = (4 * experts, 4 * resident, 8 * resident, 8)
    buffers = (*tables, *(resident * size for size in tensor_bytes))
    return sum(size + -size % _ALIGNMENT for size in buffers)


class ExpertCache:
    """R slots for E experts, of which those used the longest time ago make room.

    A call's experts stand in a line: first those that have a slot, then the missing ones, each in
    ascending order. Each R of them are a wave. Within a call all uses are equally late, and among
    equals the lowest slot goes first.

    Attributes:
        experts: E.
        resident: R, in ``1..E``.
        expert_of_slot: ``[R]``; the expert in each slot, or None.
        last_use: ``[R]``; the number of the call that last used each slot, from 1 on, or 0.

    Raises:
        ValueError: If R is not in ``1..E``.

    Example:
        >>> cache = ExpertCache(experts=8, resident=2)
        >>> cache.step([5, 3]).misses
        (3, 5)
        >>> step = cache.step([5, 0])
        >>> step.hits, step.misses, step.victims
        ((5,), (0,), (3,))
        >>> [wave.copies for wave in cache.step([0, 1, 2, 5]).waves]
        [(), (1, 2)]
    """

    def __init__(self, experts: int, resident: int) -> None:
        if not 1 <= resident <= experts:
            raise ValueError(f"resident must be in 1..{experts}, the experts; got {resident}")
        self.experts = experts
        self.resident = resident
        self.clear()

    def clear(self) -> None:
        """Empties the cache."""
        self.expert_of_slot: list[int | None] = [None] * self.resident
        self.last_use = [0] * self.resident
        self._calls = 0

    def step(self, active: Iterable[int]) -> Waves:
        """Places a call's experts.

        Args:
            active: The experts that the call's tokens chose; the order and repetitions do not
                matter.

        Raises:
            ValueError: If an expert is not in ``0..E-1``.
        """
        chosen = sorted(set(active))
        if chosen and not 0 <= chosen[0] <= chosen[-1] < self.experts:
            raise ValueError(f"experts must be in 0..{self.experts - 1}, got {chosen}")
        self._calls += 1
        hits = [expert for expert in chosen if expert in self.expert_of_slot]
        misses = [expert for expert in chosen if expert not in self.expert_of_slot]
        line, victims = hits + misses, list[int]()
        waves = [
            self._wave(line[first : first + self.resident], victims)
            for first in range(0, len(line), self.resident)
        ]
        return Waves(tuple(hits), tuple(misses), tuple(victims), tuple(waves))

    def _wave(self, experts: list[int], victims: list[int]) -> Wave:
        slots = {e: self.expert_of_slot.index(e) for e in experts if e in self.expert_of_slot}
        copies = tuple(expert for expert in experts if expert not in slots)
        free = sorted(
            set(range(self.resident)) - set(slots.values()), key=lambda s: (self.last_use[s], s)
        )
        for expert, slot in zip(copies, free, strict=False):
            old = self.expert_of_slot[slot]
            if old is not None:
                victims.append(old)
            self.expert_of_slot[slot] = expert
            slots[expert] = slot
        for slot in slots.values():
            self.last_use[slot] = self._calls
        return Wave(slots, copies)
