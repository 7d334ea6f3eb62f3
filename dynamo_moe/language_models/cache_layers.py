"""Cache layers that a trace can follow, in place of transformers' own.

Some keep no more than a sliding window sees, at every length alike: transformers' decide by the
number of tokens whether the window is full, and a trace would fix that. Others have room for all
tokens to come, and write new ones where those before end, without a change in place.

Legend: B batch, L tokens that there is room for, P tokens in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from custom_ops import write_to_cache


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


class Buffer(DynamicLayer):
    """Keys and values of up to ``length`` tokens, in tensors that are as long from the beginning.

    Attributes:
        length: L.
    """

    keys: Any
    values: Any

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length

    def begin_at(self, past_length: Tensor, positions: Tensor) -> None:
        """Takes P, the tokens that it holds: ``[1]`` int64, and the same for each row, ``[B]``."""
        self._past_length, self._positions = past_length, positions

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes room for keys and values like these."""
        self.keys, self.values = (
            x.new_zeros(*x.shape[:-2], self.length, x.shape[-1]) for x in (key_states, value_states)
        )
        nothing = torch.zeros(1, dtype=torch.int64, device=key_states.device)
        self.begin_at(nothing, nothing.expand(key_states.shape[0]))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes new tokens behind those before, and returns all that there is room for."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = write_to_cache(self.keys, key_states, self._positions)
        self.values = write_to_cache(self.values, value_states, self._positions)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        """Returns P, as a tensor: a trace has no number for it."""
        return self._past_length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many keys the new tokens get, and the position of the first."""
        return self.length, 0


def windowed(layer: Any) -> Any:
    """Returns a layer that keeps a window instead of transformers' that does; else the layer."""
    if type(layer) is DynamicSlidingWindowLayer:
        return Window(layer.sliding_window)
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return WindowAndStates(layer.sliding_window, layer.number_of_states)
    return layer


def unbounded(layer: Any) -> Any:
    """Returns a layer that keeps all tokens: the mask hides what a sliding window does not see."""
    if type(layer) is DynamicSlidingWindowLayer:
        return DynamicLayer()  # type: ignore[no-untyped-call]
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return LinearAttentionAndFullAttentionLayer(layer.number_of_states)
    return layer


def buffered(layer: Any, length: int) -> Any:
    """Returns a layer that has room for so many tokens.

    Raises:
        ValueError: If the layer keeps something else than keys and values. Beside them, states of
            linear attention could stay, but transformers takes a mask's last columns for that of
            the new tokens there, and in one of all tokens to come these are elsewhere.
    """
    layer = unbounded(layer)
    if type(layer) is not DynamicLayer:
        raise ValueError(
            "a cache of a fixed length has keys and values alone, but layers of the kind "
            f"{type(layer).__name__} keep something else: leave out cache_length"
        )
    return Buffer(length)
