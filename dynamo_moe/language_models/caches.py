"""What a model of transformers keeps between tokens, found by its structure.

A model runs twice without values, on two batch sizes and lengths. All tensors that its cache then
holds are what it keeps, and a dimension is the batch or the past by how it differs between the two.
The same cache with other tensors in their places is what a further call gets.

Legend: B batch, S new tokens, P tokens in the cache.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dynamo_moe.evaluation import evaluating
from dynamo_moe.files.cache_entries import PAST, CacheEntry, Update, blocks_of, rest_of
from dynamo_moe.model_graph import ExportError, naming_unconverted
from dynamo_moe.private import tracer
from dynamo_moe.private.pytorch import without_values
from dynamo_moe.restoring import state_kept
from dynamo_moe.tracing import failures
from dynamo_moe.tracing.dynamic_shapes import BATCH
from dynamo_moe.tracing.token_blocks import TokenBlocks
from dynamo_moe.weights import placeholders

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

Place = tuple[Any, ...]
"""Attributes of a cache and its layers, and keys of their lists and dictionaries, to follow."""
Past = Sequence[Sequence[Tensor]]
"""A tensor for each that a cache keeps, by layer."""

# B and S of the runs without values. Each dimension of one is smaller than that of the other.
_RUNS = ((2, 3), (3, 5))
# What the second run has more room for; no other dimension differs by as much.
_MORE_ROOM = 7
# Attributes whose zeros are what a model computes with where nothing is before.
_STATES = frozenset({"conv_states", "recurrent_states", "linear_cache"})
_READ = 4  # The tokens that an encoder reads.
_SMALLEST_BLOCK = 3  # Two tokens of an example wait for one to be full.
# Of what TokenBlocks keeps, the numbers that depend on the tokens so far.
_OF_BLOCKS = {"compressed_kv": blocks_of, "buffer_kv": rest_of, "buffer_gate": rest_of}


@dataclass(frozen=True)
class KeptTensor:
    """A tensor of a cache.

    Attributes:
        layer: The number of its layer.
        role: What it holds, after its attribute: ``key``, ``value``, ``conv_state``, …
        shape: Its sizes, of which :data:`BATCH`, :data:`PAST` and that of a window are symbols.
        dtype: Its dtype.
        place: Where it is in the cache.
        window: The most tokens that it keeps; None: all, if it keeps tokens.
        block: How many tokens are compressed to one, if it keeps those or the rest; else None.
        is_written: Whether it has room for tokens to come, which are written into it.
    """

    layer: int
    role: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    place: Place
    window: int | None = None
    block: int | None = None
    is_written: bool = False

    @property
    def name(self) -> str:
        """Its name behind ``past_key_values.`` and ``present.``."""
        return f"{self.layer}.{self.role}"

    @property
    def holds_tokens(self) -> bool:
        """Whether tokens have places in it; otherwise each call replaces it."""
        return self.update != "replaced"

    @property
    def update(self) -> Update:
        """What a call does with it."""
        if self.is_written:
            return "written"
        grows = PAST in self.shape or self.window is not None
        if self.block is not None:
            grows = blocks_of(self.block) in self.shape
        return "appended" if grows else "replaced"

    def sizes(self, batch: int, past: int) -> list[int]:
        """Returns its shape for a batch and a number of tokens."""
        tokens = past if self.window is None else min(past, self.window)
        known = {BATCH: batch}
        if self.block is not None:
            known |= {blocks_of(self.block): past // self.block}
            known |= {rest_of(self.block): past % self.block}
        return [known.get(size, tokens) if isinstance(size, str) else size for size in self.shape]

    def within(self, window: int) -> KeptTensor:
        """Returns the same of the last tokens alone."""
        symbol = f"last_{window}"
        shape = tuple(symbol if size == PAST else size for size in self.shape)
        return replace(self, shape=shape, window=window)

    def entry(self) -> CacheEntry:
        """Returns what a file's metadata says of it."""
        return CacheEntry(
            input=f"past_key_values.{self.name}",
            output=f"present.{self.name}",
            role=self.role,
            shape=self.shape,
            dtype=str(self.dtype).removeprefix("torch."),
            initial="empty" if any(isinstance(size, str) for size in self.shape[1:]) else "zeros",
            update=self.update,
            window=self.window,
        )


class ModelCache:
    """The cache of a model, or of its decoder, as its own code makes and updates it.

    Attributes:
        length: The tokens that it has room for; None: it grows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        bounded_windows: bool = False,
        cache_length: int | None = None,
    ) -> None:
        """Runs a model without values to see what it keeps.

        Args:
            model: The model.
            bounded_windows: Whether layers with a sliding window keep that alone, and not all
                tokens behind a mask.
            cache_length: The tokens that it has room for, from the beginning; None: it grows.

        Raises:
            ExportError: If the model does not run.
            ValueError: If it has no cache, or keeps something that a file cannot: tensors whose
                length is no number of tokens, or that may begin with other numbers than zeros.
        """
        self.length = length = cache_length
        # Of two lengths, too, so that tensors show which dimension it is.
        rooms = (None, None) if length is None else (length, length + _MORE_ROOM)
        changes = [_change(bounded_windows=bounded_windows, length=room) for room in rooms]
        first, second = _after_runs(model, changes)
        self._template = first
        tensors, others = _values(first, Tensor), _values(second, Tensor)
        counts = Counter(place[:3] for place in tensors)
        self.tensors = sorted(
            (
                _kept(
                    model,
                    place,
                    (tensor, others[place]),
                    rooms,
                    _block_of(first, place),
                    is_only=counts[place[:3]] == 1,
                )
                for place, tensor in tensors.items()
            ),
            key=lambda kept: kept.layer,
        )
        if bounded_windows:
            self.tensors = [_bounded(kept, first.layers) for kept in self.tensors]
        if length is not None and any(PAST in kept.shape for kept in self.tensors):
            raise ValueError(
                f"cache_length needs transformers' own cache, but "
                f"{type(model).__name__} has a {type(first).__name__}"
            )
        numbers, others = _values(first, int), _values(second, int)
        lengths = tuple(length for _, length in _RUNS)
        self._lengths = [place for place in numbers if (numbers[place], others[place]) == lengths]

    @property
    def layers(self) -> list[list[KeptTensor]]:
        """The tensors of each layer that keeps some."""
        return [list(kept) for _, kept in groupby(self.tensors, lambda kept: kept.layer)]

    @property
    def example_length(self) -> int:
        """P of an example: with two full blocks or more of each kind, and two tokens behind them.

        A trace takes sizes of 0 and 1 for fixed ones.
        """
        blocks = self.blocks
        return next(p for p in count(4) if all(p // n > 1 and p % n > 1 for n in blocks))

    @property
    def blocks(self) -> list[int]:
        """How many tokens it compresses to one, for each such number."""
        return sorted({kept.block for kept in self.tensors if kept.block is not None})

    @property
    def is_plain(self) -> bool:
        """Whether it keeps keys and values of attention alone."""
        return all(
            kept.role in ("key", "value") and (PAST in kept.shape or kept.is_written)
            for kept in self.tensors
        )

    def length_of(self, past: Past, by_mask: Any) -> Any:
        """Returns P by the tensors that hold tokens; by the mask, if none holds all or blocks.

        Raises:
            ValueError: If they are not as many as the model keeps, or differ in B or P.
        """
        tensors = [tensor for layer in past for tensor in layer]
        if len(tensors) != len(self.tensors):
            raise ValueError(
                f"past_key_values must hold {len(self.tensors)} tensors, got {len(tensors)}"
            )
        sizes = _sizes(self.tensors, tensors)
        lengths = {n: sizes[blocks_of(n)] * n + sizes[rest_of(n)] for n in self.blocks}
        length = sizes.get(PAST, next(iter(lengths.values()), by_mask))
        if not isinstance(length, torch.SymInt):  # A trace's are of one text.
            for number, other in lengths.items():
                if other != length:
                    raise ValueError(
                        f"past_key_values must be of one text: blocks of {number} are of {other} "
                        f"tokens, others of {length}"
                    )
        return length

    def filled(self, past: Past, length: Any) -> Cache:
        """Returns a cache that holds these tensors, which the model may change in place.

        Args:
            past: The tensors.
            length: P; ``[1]`` int64 where the cache has a fixed length.

        Raises:
            ValueError: If a window of them does not fit P.
        """
        tensors = [tensor for layer in past for tensor in layer]
        self._check_windows(tensors, length)
        cache = _copied(self._template)
        for kept, tensor in zip(self.tensors, tensors, strict=True):
            _put(cache, kept.place, tensor if kept.holds_tokens else tensor.clone())
        for place in self._lengths:
            _put(cache, place, length)
        if self.length is not None:
            from dynamo_moe.language_models.cache_layers import WithRoom

            positions = length.expand(tensors[0].shape[0])  # One node for all layers.
            for layer in cache.layers:
                if isinstance(layer, WithRoom):
                    layer.begin_at(length, positions)
        return _with_a_length(cache)

    def _check_windows(self, tensors: Sequence[Tensor], length: int) -> None:
        """Checks that layers of a window hold the last of all tokens; a trace has no numbers."""
        for kept, tensor in zip(self.tensors, tensors, strict=True):
            if kept.window is None or isinstance(length, torch.SymInt):
                continue
            expected = kept.sizes(tensor.shape[0], length)
            if list(tensor.shape) != expected:
                raise ValueError(
                    f"past_key_values.{kept.name} must be {expected} after {length} tokens, "
                    f"got {list(tensor.shape)}"
                )

    def held(self, cache: Cache) -> list[tuple[Tensor, ...]]:
        """Returns what a cache holds now, by layer."""
        return [tuple(_get(cache, kept.place) for kept in layer) for layer in self.layers]

    def random(self, batch: int, past: int, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        """Returns random tensors of P tokens, by layer."""
        return self._drawn(
            lambda kept: torch.randn(kept.sizes(batch, past), generator=generator).to(kept.dtype)
        )

    def empty(self, batch: int) -> list[tuple[Tensor, ...]]:
        """Returns the tensors of a cache without tokens, by layer."""
        return self._drawn(lambda kept: _zeros(kept.sizes(batch, 0), kept.dtype))

    def _drawn(self, draw: Callable[[KeptTensor], Tensor]) -> list[tuple[Tensor, ...]]:
        return [tuple(draw(kept) for kept in layer) for layer in self.layers]


def _zeros(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns zeros that take memory once they are written."""
    if 0 in sizes:
        return torch.zeros(*sizes, dtype=dtype)
    content = np.zeros(math.prod(sizes) * dtype.itemsize, np.uint8)
    return torch.from_numpy(content).view(dtype).view(*sizes)


def _sizes(kept: Sequence[KeptTensor], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Returns B, P and so on, which must be those of all tensors: a trace has one symbol each."""
    known: dict[str, Any] = {}
    for each, tensor in zip(kept, tensors, strict=True):
        for symbol, size in zip(each.shape, tensor.shape, strict=True):
            if isinstance(symbol, str) and known.setdefault(symbol, size) != size:
                raise ValueError(f"past_key_values differ in their {symbol}, {each.name} at first")
    return known


# --- The cache of a run ---


def _after_runs(model: PreTrainedModel, changes: Sequence[Callable[[Any], Any]]) -> list[Cache]:
    """Returns the caches, with changed layers, that two prompts without values leave."""
    from transformers import DynamicCache

    owner: Any = model
    decoder = owner.get_decoder() if model.config.is_encoder_decoder else model
    caches = []
    with state_kept(model), placeholders.placeholders(model), evaluating(model), torch.no_grad():
        own, _ = _run(model, _RUNS[0])
        for sizes, change in zip(_RUNS, changes, strict=True):
            if type(own) is DynamicCache:
                cache: Cache = DynamicCache(config=getattr(decoder, "config", model.config))
                cache.layers = [change(layer) for layer in cache.layers]
                _run(model, sizes, cache)
            else:
                cache = own if sizes == _RUNS[0] else _run(model, sizes)[0]
            caches.append(cache)
    return caches


def cross_attention(model: PreTrainedModel) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Returns what a decoder keeps of its encoder, and how wide the encoder's states are.

    Keys and values of each layer are ``[B, G, T, C]``, without values.

    Raises:
        ExportError: If the model does not run.
        ValueError: If it has no cache.
    """
    widths: list[int] = []
    owner: Any = model
    hook = owner.get_encoder().register_forward_hook(
        lambda _, __, outputs: widths.append(outputs[0].shape[-1])
    )
    try:
        with (
            state_kept(model),
            placeholders.placeholders(model),
            evaluating(model),
            torch.no_grad(),
        ):
            _, encoded = _run(model, _RUNS[0])
    finally:
        hook.remove()
    layers: list[Any] = [] if encoded is None else encoded.layers
    return [(layer.keys, layer.values) for layer in layers if layer.keys is not None], widths[0]


def cache_argument(forward: Callable[..., Any]) -> str:
    """Returns what a model calls its cache: ``cache`` from transformers 5.24 on."""
    takes_cache = "cache" in inspect.signature(forward).parameters
    return "cache" if takes_cache else "past_key_values"


class _CopiesAreClones(TorchFunctionMode):
    """Lets models copy tensors without values, which PyTorch cannot: Inkling2-Loop, its cache."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


def _run(
    model: PreTrainedModel, sizes: tuple[int, int], given: Cache | None = None
) -> tuple[Cache, Cache | None]:
    """Returns what a model keeps of its own tokens, and what its decoder keeps of its encoder's."""
    from transformers import DynamicCache, EncoderDecoderCache

    name = cache_argument(model.forward)
    with naming_unconverted(model):
        try:
            with tracer.failures_unsaid(), without_values(), _CopiesAreClones():
                ids = torch.zeros(sizes, dtype=torch.int64)
                arguments: dict[str, Any] = {
                    "input_ids": ids,
                    "attention_mask": torch.ones_like(ids),
                }
                if model.config.is_encoder_decoder:
                    read = torch.zeros(sizes[0], _READ, dtype=torch.int64)
                    owner: Any = model
                    encoded_text = owner.get_encoder()(read, attention_mask=torch.ones_like(read))
                    arguments = {f"decoder_{key}": value for key, value in arguments.items()}
                    arguments |= {"encoder_outputs": encoded_text}
                    if given is not None:
                        given = EncoderDecoderCache(given, DynamicCache())
                if given is not None:
                    arguments[name] = given
                outputs = model(**arguments, use_cache=True)
        except Exception as error:  # The model's own code runs.
            raise ExportError(failures.explain(error)) from error
    cache: Any = getattr(outputs, name, None)
    encoded: Cache | None = None
    if isinstance(cache, EncoderDecoderCache):
        cache, encoded = cache.self_attention_cache, cache.cross_attention_cache
    if cache is None or not hasattr(cache, "layers"):
        raise ValueError(
            f"{type(model).__name__} gives no cache of transformers, {name} is {cache!r}: use task "
            "text-generation"
        )
    return cache, encoded


def _change(*, bounded_windows: bool, length: int | None) -> Callable[[Any], Any]:
    """Returns a function from layers of a cache to those in their places."""
    from dynamo_moe.language_models import cache_layers

    if length is not None:
        return functools.partial(cache_layers.buffered, length=length)
    return cache_layers.windowed if bounded_windows else cache_layers.unbounded


def _bounded(kept: KeptTensor, layers: Sequence[Any]) -> KeptTensor:
    """Returns what a layer keeps that keeps no more than its window from now on."""
    layer = layers[kept.layer]
    if PAST not in kept.shape or not hasattr(layer, "keeps_all"):
        return kept
    layer.keeps_all = False
    return kept.within(layer.sliding_window - 1)


def _with_a_length(cache: Cache) -> Cache:
    """Lets layers without tokens have the length of one that has some.

    A cache asks its first layer for it, which in MiniMax's may be one of linear attention.
    """
    holding = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    if holding:
        cache.layers = [
            holding[0] if getattr(layer, "is_initialized", None) is False else layer
            for layer in cache.layers
        ]
    return cache


def _kept(
    model: PreTrainedModel,
    place: Place,
    tensors: tuple[Tensor, Tensor],
    rooms: tuple[int | None, int | None],
    block: int | None,
    *,
    is_only: bool,
) -> KeptTensor:
    """Returns what is known of a tensor by what two runs have left of it.

    Only the name of a layer's one of several of a kind has its key.
    """
    layer, attribute = (place[1], place[2]) if place[0] == "layers" else (place[1], place[0])
    symbols = dict(zip(zip(*_RUNS, strict=True), (BATCH, PAST), strict=True))
    sizes = list(zip(*(tensor.shape for tensor in tensors), strict=True))
    shape = tuple(symbols.get(pair, pair[0]) for pair in sizes)
    is_written = rooms in sizes
    reason = ""
    if BATCH not in shape:
        reason = "which has no batch"
    elif tensors[0].dtype != tensors[1].dtype:
        reason = "whose dtype depends on the length"
    elif block is not None:
        number = _OF_BLOCKS.get(attribute)
        shape = (BATCH, block if number is None else number(block), *shape[2:])
        reason = f"in blocks of fewer than {_SMALLEST_BLOCK}" if block < _SMALLEST_BLOCK else ""
    elif any(pair[0] != pair[1] and pair not in {rooms, *symbols} for pair in sizes):
        reason = "whose length is not the number of tokens"
    elif PAST not in shape and not is_written and attribute not in _STATES:
        reason = "which may begin with other numbers than zeros"
    if reason:
        raise ValueError(
            f"layer {layer} of {type(model).__name__} keeps {attribute} between tokens, {reason}: "
            "use task text-generation"
        )
    role = attribute.removesuffix("s") + ("" if is_only else f".{place[3]}")
    return KeptTensor(
        layer, role, shape, tensors[0].dtype, place, block=block, is_written=is_written
    )


def _block_of(cache: Cache, place: Place) -> int | None:
    """Returns how many tokens a block has, if a tensor is of blocks that are compressed."""
    layer = _get(cache, place[:2]) if place[0] == "layers" else None
    if isinstance(layer, TokenBlocks) and place[2] != "keys":
        return layer.compress_rate
    return None


# --- Places ---


def _values(cache: Cache, kind: type) -> dict[Place, Any]:
    """Returns the tensors or numbers of a cache and its layers by their places."""
    values: dict[Place, Any] = {}
    owners: list[tuple[Place, Any]] = [((), cache)]
    owners += [(("layers", number), layer) for number, layer in enumerate(cache.layers)]
    for before, owner in owners:
        for name, value in vars(owner).items():
            if name.startswith("_"):
                continue  # A constant of the class's own.
            items = _items(value) if isinstance(value, (list, dict)) else [((), value)]
            values |= {
                (*before, name, *key): item
                for key, item in items
                if isinstance(item, kind) and not isinstance(item, bool)
            }
    return values


def _items(values: list[Any] | dict[Any, Any]) -> list[tuple[Place, Any]]:
    items = values.items() if isinstance(values, dict) else enumerate(values)
    return [((key,), item) for key, item in items]


def _copied(cache: Cache) -> Cache:
    """Returns a cache whose places can be filled without a change of this one."""
    copied: Cache = _with_own_collections(cache)
    copied.layers = [_with_own_collections(layer) for layer in cache.layers]
    for layer in copied.layers:
        if hasattr(layer, "recurrent_states"):
            _replace_states(layer)
    return copied


def _replace_states(layer: Any) -> None:
    """Lets a layer replace its states.

    It would write into them, and a trace of writing into what other tensors share memory with takes
    a hundred times as long to translate.
    """

    def update_conv_state(conv_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        before = layer.conv_states[state_idx]
        states = torch.cat([before, conv_states], dim=-1)
        layer.conv_states[state_idx] = states[..., -before.shape[-1] :]
        return states

    def update_recurrent_state(recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        dtype = layer.recurrent_states[state_idx].dtype
        layer.recurrent_states[state_idx] = recurrent_states.to(dtype)
        return recurrent_states

    layer.update_conv_state = update_conv_state
    layer.update_recurrent_state = update_recurrent_state


def _with_own_collections(owner: Any) -> Any:
    owner = copy.copy(owner)
    for name, value in vars(owner).items():
        if isinstance(value, (list, dict)):
            setattr(owner, name, copy.copy(value))
    return owner


def _get(owner: Any, place: Place) -> Any:
    for key in place:
        owner = owner[key] if isinstance(owner, (list, dict)) else getattr(owner, key)
    return owner


def _put(cache: Cache, place: Place, value: Any) -> None:
    owner = _get(cache, place[:-1])
    if isinstance(owner, (list, dict)):
        owner[place[-1]] = value
    else:
        setattr(owner, place[-1], value)
