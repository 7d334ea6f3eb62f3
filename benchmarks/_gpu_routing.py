"""Which experts tokens are sent to: evenly, by Zipf's law, or all to one.

Legend: T tokens, E experts, K choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ROUTINGS", "Routing", "draw"]

Routing = tuple[Tensor, Tensor]

ROUTINGS = ("uniform", "zipf", "one")


def draw(kind: str, tokens: int, experts: int, top_k: int, device: str = "cpu") -> Routing:
    """Returns expert ids ``[T, K]`` int64 and weights ``[T, K]`` float32 that sum to 1.

    Args:
        kind: ``uniform``: K different experts, all as likely; ``zipf``: K different experts, drawn
            one after another with probabilities in proportion to 1, 1/2, 1/3, ..., where the
            order of the experts is random; ``one``: every slot of every token is expert 0's.
        tokens: T.
        experts: E.
        top_k: K.
        device: Where.

    Raises:
        ValueError: If the kind is unknown.
    """
    if kind not in ROUTINGS:
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}; got {kind!r}")
    generator = torch.Generator().manual_seed(1)
    rank = torch.arange(1, experts + 1, dtype=torch.float32)
    log_share = -rank.log() if kind == "zipf" else torch.zeros(experts)
    log_share = log_share[torch.randperm(experts, generator=generator)]
    # The K largest of log p + Gumbel noise are a draw without replacement.
    noise = -torch.empty(tokens, experts).exponential_(generator=generator).log()
    ids = (log_share + noise).topk(top_k, dim=-1).indices
    if kind == "one":
        ids = torch.zeros_like(ids)
    weights = torch.randn(tokens, top_k, generator=generator).softmax(-1)
    return ids.to(device), weights.to(device)
