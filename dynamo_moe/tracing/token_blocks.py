"""Attention over blocks of tokens that are compressed to one key each, as DeepSeek-V4's.

A block is compressed when its last token is there, so how many a call completes depends on how many
tokens it has and how many were waiting. The model asks whether there are any, and a trace has one
answer for all lengths: in a trace there are always one or two more, of the tokens that no block has
yet and zeros behind them. As they end after the last token, the model itself hides from every token
what they are compressed to, as it hides from the tokens of a prompt the blocks that end after them.

Legend: B batch, S new tokens, W tokens in a block, C width of a key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.private.pytorch import FakeTensor


class TokenBlocks:
    """What the compressors of a layer keep between calls, by the methods of transformers' cache.

    Each dictionary has the key ``compressor``, and ``indexer`` if the layer has one.

    Attributes:
        compress_rate: W.
        overlap: Whether a block is compressed with the one before it.
        buffer_kv: What tokens behind the last full block will be compressed from, and
        buffer_gate: how much of each, ``[B, fewer than W, C]``; ``2 C`` where blocks overlap.
        compressed_kv: What full blocks were compressed to, ``[B, blocks, C]``.
        overlap_kv: The last full block's part in the next one, and
        overlap_gate: how much of each, ``[B, W, C]``.
    """

    def __init__(self, compress_rate: int, *, overlap: bool) -> None:
        """Begins without tokens."""
        self.compress_rate = compress_rate
        self.overlap = overlap
        self.buffer_kv: dict[str, Tensor] = {}
        self.buffer_gate: dict[str, Tensor] = {}
        self.compressed_kv: dict[str, Tensor] = {}
        self.overlap_kv: dict[str, Tensor] = {}
        self.overlap_gate: dict[str, Tensor] = {}
        self._completed: dict[str, Any] = {}

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """Takes new tokens, and returns full blocks of all that wait, and the first one's place."""
        rate = self.compress_rate
        if name not in self.buffer_kv:
            self._begin(name, kv, gate)
        kv = torch.cat([self.buffer_kv[name], kv], dim=1)
        gate = torch.cat([self.buffer_gate[name], gate], dim=1)
        completed: Any = kv.shape[1] // rate
        self._completed[name] = completed
        self.buffer_kv[name] = kv[:, completed * rate :]
        self.buffer_gate[name] = gate[:, completed * rate :]
        # The model asks whether there is a block, or whether there are two that overlap. A trace is
        # compared with runs without values, which run the same operators.
        without_values = kv.is_meta or isinstance(kv, FakeTensor)
        more = 1 + self.overlap if without_values else 0
        end = (completed + more) * rate
        first = self.compressed_kv[name].shape[1] * rate
        return _of_length(kv, end), _of_length(gate, end), first

    def _begin(self, name: str, kv: Tensor, gate: Tensor) -> None:
        batch, width = kv.shape[0], kv.shape[-1] // (1 + self.overlap)
        self.buffer_kv[name], self.buffer_gate[name] = kv[:, :0], gate[:, :0]
        self.compressed_kv[name] = kv.new_zeros(batch, 0, width)
        if self.overlap:
            self.overlap_kv[name] = kv.new_zeros(batch, self.compress_rate, width)
            # Biases of places, in float32, are added to what it is compared with.
            dtype = torch.promote_types(gate.dtype, torch.float32)
            self.overlap_gate[name] = gate.new_zeros(batch, self.compress_rate, width, dtype=dtype)

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """Keeps the last full block's part in the next, and returns that of the block before.

        Before the first block there is none, which a weight of zero says.
        """
        kv, gate = self.overlap_kv[name], self.overlap_gate[name]
        self.overlap_kv[name] = self._last(name, kv, chunk_kv[..., :head_dim])
        self.overlap_gate[name] = self._last(name, gate, chunk_gate[..., :head_dim])
        is_first = torch.full((), self.compressed_kv[name].shape[1], device=kv.device) == 0
        return kv, gate.masked_fill(is_first, float("-inf"))

    def _last(self, name: str, before: Tensor, chunk: Tensor) -> Tensor:
        last = self._completed[name]
        return torch.cat([before.unsqueeze(1), chunk], dim=1)[:, last : last + 1].squeeze(1)

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Keeps what full blocks were compressed to, and returns that of all blocks."""
        before = self.compressed_kv[name]
        compressed = torch.cat([before, compressed], dim=1)
        self.compressed_kv[name] = compressed[:, : before.shape[1] + self._completed[name]]
        return compressed


def _of_length(tokens: Tensor, length: Any) -> Tensor:
    """Returns the first tokens, or all and zeros, so that a trace has this very length."""
    batch, given, width = tokens.shape
    if isinstance(length, int) and length <= given:
        return tokens[:, :length]
    return torch.cat([tokens, tokens.new_zeros(batch, length - given, width)], dim=1)


def _with_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the forward of a compressor without a cache blocks of its own, in a trace."""

    @wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        q_residual: Tensor,
        position_ids: Tensor,
        cache: Any,
        layer_idx: int,
    ) -> Any:
        if cache is None and isinstance(hidden_states.shape[1], torch.SymInt):
            blocks = TokenBlocks(self.compress_rate, overlap=hasattr(self, "indexer"))
            cache = SimpleNamespace(layers={layer_idx: blocks})
        return original(self, hidden_states, q_residual, position_ids, cache, layer_idx)

    return forward


def _of_several_positions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets the forward of a compressor hide blocks from one token as from several.

    From a single token the model hides none, since none ends after it, and a trace of several
    tokens would not be right for one. With the last position twice, there are always several.
    """

    @wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        q_residual: Tensor,
        position_ids: Tensor,
        cache: Any,
        layer_idx: int,
    ) -> Any:
        positions = torch.cat([position_ids, position_ids[:, -1:]], dim=1)
        blocks, bias = original(self, hidden_states, q_residual, positions, cache, layer_idx)
        return blocks, None if bias is None else bias[:, :, :-1]

    return _with_blocks(forward)


COMPRESSORS: dict[str, Callable[..., Any]] = {
    "DeepseekV4CSACompressor": _with_blocks,
    "DeepseekV4HCACompressor": _of_several_positions,
}
"""By the name of a class of transformers, what is made of its forward while a model is traced."""
