"""Cache layers that keep no more than a sliding window sees, at every length alike.

transformers' own decide by the number of tokens whether the window is full, and a trace would fix
that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


class Window(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Keys and values of the last ``sliding_window - 1`` tokens.

    Attributes:
        keeps_all: Whether it still keeps all tokens, to show which tensors have their length.
    """

    keeps_all = True
    keys: Any
    values: Any

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keeps the last of the tokens so far, and returns those that the new ones may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        length: Any = keys.shape[-2]
        first = 0 if self.keeps_all else torch.sym_max(length - (self.sliding_window - 1), 0)
        self.keys, self.values = keys[:, :, first:], values[:, :, first:]
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many keys the new tokens get, and the position of the first."""
        kept = self.keys.shape[-2] if self.is_initialized else 0
        return kept + query_length, self.cumulative_length - kept


class WindowAndStates(LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[no-untyped-call]
    """The same beside states of convolutions or linear attention."""

    keeps_all = True
    update = Window.update
    get_mask_sizes = Window.get_mask_sizes


def windowed(layer: Any) -> Any:
    """Returns a layer that keeps a window instead of transformers' that does; else the layer."""
    if type(layer) is DynamicSlidingWindowLayer:
        return Window(layer.sliding_window)
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return WindowAndStates(layer.sliding_window, layer.number_of_states)
    return layer
