"""Single layers: their sizes, and random parameters.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class LayerCase:
    """A layer and a number of tokens.

    Its experts have exact GELU and biases as in Swin-MoE, or a gated SiLU without biases as in
    Qwen3-30B-A3B.
    """

    name: str
    tokens: int
    width: int
    hidden: int
    experts: int
    top_k: int
    gated: bool = False

    @property
    def rows(self) -> int:
        """F."""
        return 2 * self.hidden if self.gated else self.hidden

    @property
    def activation(self) -> str:
        """The experts' activation."""
        return "silu" if self.gated else "gelu"

    def parameters(self) -> dict[str, Tensor]:
        """Returns random float32 parameters."""
        sizes = self.experts, self.width, self.hidden, self.rows
        return random_parameters(*sizes, biases=not self.gated)


def random_parameters(
    experts: int,
    width: int,
    hidden: int,
    rows: int,
    *,
    biases: bool,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Returns parameters scaled so that logits, hidden rows and results are near 1."""
    import torch

    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1) -> Tensor:
        values = torch.randn(size, generator=generator, dtype=dtype, device=device)
        return values.mul_(scale)

    found = {
        "router_weight": normal(experts, width, scale=width**-0.5),
        "w1": normal(experts, rows, width, scale=width**-0.5),
        "w2": normal(experts, width, hidden, scale=hidden**-0.5),
    }
    if biases:
        found["router_bias"] = normal(experts, scale=0.1)
        found |= {"b1": normal(experts, rows), "b2": normal(experts, width)}
    return found
