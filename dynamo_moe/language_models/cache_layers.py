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
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from custom_ops import write_to_cache
from dynamo_moe.tracing.token_blocks import TokenBlocks


class Windowed:
    """Keys and values of the last ``sliding_window - 1`` tokens.

    Attributes:
        keeps_all: Whether it still keeps all tokens, to show which tensors have their length.
    """

    keeps_all = True
    keys: Any
    values: Any
    is_initialized: bool
    cumulative_length: Any
    sliding_window: int
    lazy_initialization: Any

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


class Window(Windowed, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Keys and values alone."""


# transformers' two bases differ in what their attributes are.
class WindowAndStates(  # type: ignore[no-untyped-call, misc, override]
    Windowed, LinearAttentionAndSlidingWindowAttentionLayer
):
    """Keys and values beside states of convolutions or linear attention."""


class WindowAndBlocks(TokenBlocks, Window):
    """The last keys, which are values too, beside blocks of tokens compressed to one key each."""

    def __init__(self, layer: Any) -> None:
        """Takes the sizes of transformers' layer."""
        Window.__init__(self, layer.sliding_window)  # type: ignore[no-untyped-call]
        TokenBlocks.__init__(self, layer.compress_rate, overlap=hasattr(layer, "overlap_kv"))

    @property
    def values(self) -> Any:
        """The keys."""
        return self.keys

    @values.setter
    def values(self, values: Any) -> None:
        """Keeps nothing: what the base sets are the keys."""


class WithRoom:
    """Keys and values of up to ``length`` tokens, in tensors that are as long from the beginning.

    Attributes:
        length: L.
    """

    length: int
    keys: Any
    values: Any
    is_initialized: bool
    _past_length: Any = 0
    _positions: Tensor | None = None

    def begin_at(self, past_length: Tensor, positions: Tensor) -> None:
        """Takes P, the tokens that it holds: ``[1]`` int64, and the same for each row, ``[B]``."""
        self._past_length, self._positions = past_length, positions

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes new tokens behind those before, and returns all that there is room for."""
        self.keys = self._with(self.keys, key_states)
        self.values = self._with(self.values, value_states)
        self.is_initialized = True
        return self.keys, self.values

    def _with(self, cache: Tensor | None, new: Tensor) -> Tensor:
        if cache is None:
            cache = new.new_zeros(*new.shape[:-2], self.length, new.shape[-1])
        positions = self._positions
        if positions is None:
            positions = torch.zeros(len(new), dtype=torch.int64, device=new.device)
        return write_to_cache(cache, new, positions)

    def get_seq_length(self) -> Any:
        """Returns P, as a tensor: a trace has no number for it."""
        return self._past_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many keys the new tokens get, and the position of the first."""
        return self.length, 0


class Buffer(WithRoom, DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values alone."""


# transformers' two bases differ in what their attributes are.
class BufferAndStates(  # type: ignore[no-untyped-call, misc, override]
    WithRoom, LinearAttentionAndFullAttentionLayer
):
    """Keys and values beside states of convolutions or linear attention."""


class IndexedBuffer(WithRoom, DynamicIndexedLayer):  # type: ignore[no-untyped-call]
    """Keys and values beside the keys of an indexer, which finds the tokens that attention sees.

    They are kept as those of one head, ``[B, 1, L, C]``: TensorRT writes into four dimensions.
    """

    indexer_keys: Any

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Writes the keys of new tokens, and returns all that there is room for."""
        self.indexer_keys = self._with(self.indexer_keys, indexer_key_states.unsqueeze(1))
        self.is_indexer_initialized = True
        keys: Tensor = self.indexer_keys.squeeze(1)
        return keys


class BlockIndexedBuffer(WithRoom, DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values beside keys by which blocks of tokens are selected (MiniMax-M3)."""

    idx_keys: Any = None

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Writes the keys of new tokens, and returns all that there is room for."""
        self.idx_keys = self._with(self.idx_keys, idx_k)
        keys: Tensor = self.idx_keys
        return keys


def windowed(layer: Any) -> Any:
    """Returns a layer that keeps a window instead of transformers' that does; else the layer."""
    if type(layer) is DynamicSlidingWindowLayer:
        return Window(layer.sliding_window)
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return WindowAndStates(layer.sliding_window, layer.number_of_states)
    return WindowAndBlocks(layer) if hasattr(layer, "compress_rate") else layer


def unbounded(layer: Any) -> Any:
    """Returns a layer that keeps all tokens: the mask hides what a sliding window does not see."""
    if type(layer) is DynamicSlidingWindowLayer:
        return DynamicLayer()  # type: ignore[no-untyped-call]
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return LinearAttentionAndFullAttentionLayer(layer.number_of_states)
    return WindowAndBlocks(layer) if hasattr(layer, "compress_rate") else layer


def buffered(layer: Any, length: int) -> Any:
    """Returns a layer that has room for so many tokens.

    Raises:
        ValueError: If the layer keeps something else than keys, values, and states of convolutions
            or linear attention.
    """
    kind = type(layer).__name__
    layer = unbounded(layer)
    if type(layer) in (LinearAttentionLayer, DummyLayer):
        return layer  # Its tensors have one size anyway.
    buffer: WithRoom
    if type(layer) is DynamicLayer:
        buffer = Buffer()  # type: ignore[no-untyped-call]
    elif hasattr(layer, "update_index"):
        buffer = BlockIndexedBuffer()  # type: ignore[no-untyped-call]
    elif type(layer) is DynamicIndexedLayer:
        buffer = IndexedBuffer()  # type: ignore[no-untyped-call]
    elif type(layer) is LinearAttentionAndFullAttentionLayer:
        buffer = BufferAndStates(layer.number_of_states)
    else:
        raise ValueError(
            "a cache of a fixed length has keys, values and states of linear attention, but layers "
            f"of the kind {kind} keep something else: leave out cache_length"
        )
    buffer.length = length
    return buffer
