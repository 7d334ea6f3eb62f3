"""Where tokens go: recorded from trained models, or drawn.

Legend: L layers, T tokens, E experts, K = top_k.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.layers import Shape, random_routing

#: Experts that tokens choose, ``[L, T, K]``, best first.
Ids = NDArray[np.integer[Any]]
#: The shapes that are simulated, and the MoE layers of their models.
SIMULATED = {"mixtral": 32, "qwen3": 48, "deepseek": 58, "gpt-oss": 24}
#: What `benchmarks.residency.record` wrote.
ROUTING = Path(__file__).with_name("routing.npz")
RECORDED = "recorded"
KINDS = (RECORDED, "zipf", "uniform")


def trace(kind: str, shape: Shape, tokens: int) -> Ids:
    """Returns one of :data:`KINDS` for a shape; drawn ones have one layer.

    Raises:
        ValueError: If the shape was not recorded.
    """
    if kind != RECORDED:
        ids, _ = random_routing(kind, tokens, shape.experts, shape.top_k)
        drawn: Ids = ids.numpy()[None]
        return drawn
    with np.load(ROUTING) as found:
        if shape.name not in found:
            raise ValueError(f"{ROUTING.name} has no routing of {shape.name!r}")
        recorded: Ids = found[shape.name][:, :tokens]
        return recorded


def notes() -> dict[str, Any]:
    """What the recorded models learnt, and when."""
    with np.load(ROUTING) as found:
        read: dict[str, Any] = json.loads(str(found["notes"]))
        return read


def steps(ids_TK: Ids, tokens: int) -> Iterator[list[int]]:
    """Yields the active experts of each step of so many tokens, those of the most tokens first."""
    whole = len(ids_TK) // tokens * tokens
    for step in ids_TK[:whole].reshape(-1, tokens * ids_TK.shape[1]):
        yield [expert for expert, _ in Counter(step.tolist()).most_common()]


def repeated(ids_LTK: Ids) -> float:
    """Returns the share of a token's experts that the token before it chose too."""
    same = ids_LTK[:, 1:, :, None] == ids_LTK[:, :-1, None, :]
    return float(same.any(-1).mean())
