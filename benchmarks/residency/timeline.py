"""How long a step takes, from what it computes and copies, on two streams as the launcher has them.

A wave is four launches: the copy of the first weights, the first product, the copy of the second
weights, the second product. Copies are on a stream of their own. A product waits for its wave's
copy; a copy waits for the product that reads the slots before it, which is the last wave's.

Only bytes count: of copies over the bus, of products' weights over the device's memory, which
decoding packed weights may not keep up with. Every
launch, also one with nothing to do, adds :data:`LAUNCH`. Left out are the router, whatever stands
between MoE layers, and that copies and products share the device's memory.

Legend: D model width, H hidden width, F = H, or 2H when gated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.layers import Shape
from custom_ops.weight_formats import WeightFormat, plain_format

#: Seconds from one launch's end to the next one's start; an assumption.
LAUNCH = 2e-6
BF16 = plain_format(torch.bfloat16)


@dataclass(frozen=True)
class Link:
    """How the device reads the host's memory; bytes per second."""

    name: str
    device: str
    host: float  # what a kernel reads of pinned host memory, measured by others
    memory: float  # of the device's memory, from its data sheet
    source: str  # of `host`


# NVIDIA's nvbandwidth has kernels that copy, as ours do; its test is host_to_device_memcpy_sm.
LINKS = (
    Link("PCIe 4 x16", "A100 SXM 40GB", 25.1e9, 1.555e12, "NVIDIA/nvbandwidth issue 42"),
    Link("PCIe 5 x16", "H100 SXM", 35.2e9, 3.35e12, "NVIDIA/nvbandwidth issue 24"),
    Link("NVLink-C2C", "GH200 96GB", 342e9, 4.0e12, "NVIDIA/nvbandwidth issue 23"),
)


def weight_bytes(shape: Shape, stored: WeightFormat) -> tuple[int, int]:
    """Returns the bytes of an expert's weights ``[F, D]`` and ``[D, H]``, with their scales."""
    first = stored.expert_bytes(shape.rows, shape.width)
    return first, stored.expert_bytes(shape.width, shape.hidden)


def waves(active: int, copied: int, resident: int) -> Iterator[tuple[int, int]]:
    """Yields how many experts each wave computes, and how many of them it copies first.

    Those on the device are in the first wave, which they may fill.
    """
    first = min(copied, resident - (active - copied))
    yield active - copied + first, first
    for place in range(first, copied, resident):
        count = min(resident, copied - place)
        yield count, count


def step_seconds(
    shape: Shape,
    link: Link,
    *,
    tokens: int,
    active: int,
    copied: int,
    resident: int,
    stored: WeightFormat = BF16,
) -> float:
    """Returns how long one layer takes for ``tokens``, of which ``copied`` experts are copied."""
    launched = -(-min(shape.experts, tokens * shape.top_k) // resident)
    sizes = weight_bytes(shape, stored)
    stream = side = 0.0
    ended = [0.0, 0.0]  # the last wave's products
    done = 0
    for computes, copies in waves(active, copied, resident):
        done += 1
        for product, size in enumerate(sizes):
            side = max(side, ended[product]) + LAUNCH + copies * size / link.host
            stream = max(stream, side) + LAUNCH + computes * size / link.memory
            ended[product] = stream
    return stream + 2 * LAUNCH * (launched - done)


def resident_seconds(shape: Shape, link: Link, active: float, stored: WeightFormat = BF16) -> float:
    """Returns how long a layer takes whose experts are all on the device."""
    return 2 * LAUNCH + active * sum(weight_bytes(shape, stored)) / link.memory


def slot_bytes(shape: Shape, stored: WeightFormat = BF16) -> int:
    """Bytes of the device's memory that one slot of one layer takes."""
    return sum(weight_bytes(shape, stored))
