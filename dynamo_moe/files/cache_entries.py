"""What a file's metadata says of its cache, so that a generic loop can run it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

KEY = "dynamo_moe.cache"
"""Metadata key: what is kept between tokens, as a list of :class:`CacheEntry` in JSON."""


MASK = "attention_mask"
"""The input that says which tokens are padding, of those in the cache and of the new ones."""

PAST_LENGTH = "past_sequence_length"
"""The input, ``[1]`` int64, with the number of tokens in a cache that has room for more."""

Update = Literal["appended", "written", "replaced"]
"""What a call does with a tensor of the cache."""

SEQUENCE, PAST, TOTAL = "sequence", "past", "total_sequence"
"""Names of sizes: new tokens, those in the cache, and both, each with an entry in the mask."""


_BLOCKS = "blocks_of_"


def blocks_of(tokens: int) -> str:
    """Returns the name of a size: the full blocks of so many tokens in the cache."""
    return f"{_BLOCKS}{tokens}"


def rest_of(tokens: int) -> str:
    """Returns the name of a size: the tokens behind the last full block of so many."""
    return f"rest_of_{tokens}"


@dataclass(frozen=True)
class CacheEntry:
    """A tensor that a call gets and leaves for the next one.

    One that is ``written`` has room for all tokens to come, on the axis before the last. Input and
    output can be one buffer. It begins with zeros: numbers that an earlier text has left do no
    harm, but NaN and infinity would, as they are multiplied by 0. The file's input
    :data:`PAST_LENGTH` says where the new tokens begin.

    Attributes:
        input: The name of the file's input.
        output: The name of the output that is the next call's input.
        role: What it holds, such as ``key``, ``value``, ``conv_state`` or ``recurrent_state``.
        shape: The input's sizes. Symbolic ones are ``batch``; ``past``, the number of tokens so
            far; such as ``last_127``, 127 of them at most; and such as ``blocks_of_4`` and
            ``rest_of_4``, full blocks of 4 tokens, and the tokens behind the last.
        dtype: Its dtype, such as ``float32``.
        initial: The first call's input: ``empty``, of no tokens, or ``zeros``.
        update: Whether new tokens, or new blocks of them, are ``appended`` to it, or new tokens
            ``written`` into it, or all of it is ``replaced``, which may change its length.
        window: The most tokens that it keeps; None: all, if tokens are appended.
    """

    input: str
    output: str
    role: str
    shape: tuple[int | str, ...]
    dtype: str
    initial: Literal["empty", "zeros"]
    update: Update
    window: int | None = None

    @property
    def is_of_blocks(self) -> bool:
        """Whether it holds what blocks of tokens were compressed to, padding among them."""
        return any(isinstance(size, str) and size.startswith(_BLOCKS) for size in self.shape)

    @property
    def room(self) -> int | None:
        """The most tokens that can be written into it; None: none are."""
        return int(self.shape[-2]) if self.update == "written" else None


def dumps(entries: Iterable[CacheEntry]) -> str:
    """Returns the metadata of a cache."""
    return json.dumps([vars(entry) for entry in entries])


def loads(text: str) -> list[CacheEntry]:
    """Returns what :func:`dumps` wrote."""
    return [CacheEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in json.loads(text)]
