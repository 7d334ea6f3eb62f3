"""How fast a layer could be: the bytes and operations that no implementation avoids.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks._gpu_shapes import Shape

__all__ = ["STAGES", "Floor", "Rates", "expected_active", "floor"]

STAGES = ("router", "up", "down", "combine")
# A smaller intermediate stays in the L2 cache, so it is not charged.
_CACHED_BYTES = 30e6


@dataclass(frozen=True)
class Rates:
    """What the device does at best.

    Attributes:
        bandwidth: Bytes per second, read and written.
        flops: Operations per second of a large matrix product.
    """

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class Floor:
    """Shortest times in microseconds.

    Attributes:
        fused: Of the whole layer, were it one kernel: every tensor touches memory once.
        router: Of the logits.
        up: Of the first product.
        down: Of the second.
        combine: Of the sum over a token's choices.
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
        """Of the stages one after another."""
        return self.router + self.up + self.down + self.combine


def expected_active(experts: int, top_k: int, tokens: int) -> float:
    """Returns how many experts get a token on average, with uniform routing.

    Example:
        >>> round(expected_active(128, 8, 16), 1)
        82.4
    """
    return experts * (1 - (1 - top_k / experts) ** tokens)


def floor(
    shape: Shape,
    tokens: int,
    active: float,
    rates: Rates,
    *,
    itemsize: int = 2,
    slots: int | None = None,
    router: bool = True,
) -> Floor:
    """Returns the shortest times for a number of tokens.

    Args:
        shape: The layer.
        tokens: T.
        active: Experts that get a token.
        rates: What the device does at best.
        itemsize: Bytes of an element.
        slots: Token slots with an expert; default ``T*K``.
        router: Whether the layer routes by itself.
    """
    D, H, F = shape.width, shape.hidden, shape.rows
    slots = tokens * shape.top_k if slots is None else slots
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
