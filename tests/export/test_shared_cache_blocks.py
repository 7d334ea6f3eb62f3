"""Blocks with a layer of a cache each are traced once for all, unless one does something else."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from cached_models import CALLS, LAYERS, Attention, Compared, of_kind

pytest_plugins = ("shared_exports",)


def test_blocks_with_layers_of_a_cache_are_shared(compared: Compared) -> None:
    assert of_kind(compared, Attention) == 1


class ByName(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return cache.update(key_states=keys, value_states=values, layer_idx=self.layer_idx)


class WithOptions(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        options = {"sin": keys}
        return cache.update(keys, values, self.layer_idx, options)


class Twice(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        cache.update(keys, values, self.layer_idx)
        return cache.update(values, keys, self.layer_idx)


class AsksForNone(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        if cache is not None and isinstance(cache, Cache):
            return cache.update(keys, values, self.layer_idx)
        return keys, values


class AsksForEncoder(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        if isinstance(cache, EncoderDecoderCache):
            return keys, values
        return cache.update(keys, values, self.layer_idx)


class ChangesResult(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys, values = cache.update(keys, values, self.layer_idx)
        return keys + 1, values


class InPlace(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys, values = cache.update(keys, values, self.layer_idx)
        keys.mul_(2)
        return keys, values


@pytest.mark.parametrize(
    "kind", [ByName, WithOptions, Twice, AsksForNone, AsksForEncoder, ChangesResult, InPlace]
)
def test_plain_updates(compared: Compared, kind: type[Attention]) -> None:
    assert of_kind(compared, kind) == 1


class Compares(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys = keys * 2 if self.layer_idx == 3 else keys
        return cache.update(keys, values, self.layer_idx)


class Parity(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys = keys * 2 if self.layer_idx % 2 else keys
        return cache.update(keys, values, self.layer_idx)


class Scales(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return cache.update(keys * self.layer_idx, values, self.layer_idx)


class Key(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        factor = {3: 2.0}.get(self.layer_idx, 1.0)
        return cache.update(keys * factor, values, self.layer_idx)


class Formats(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys = keys * 2 if f"{self.layer_idx}" == "3" else keys
        return cache.update(keys, values, self.layer_idx)


class Casts(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return cache.update(keys, values, int(self.layer_idx))


class Ranges(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        for _ in range(self.layer_idx):
            keys = keys * 2
        return cache.update(keys, values, self.layer_idx)


class Indexes(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        factor = [1.0, 1.0, 1.0, 2.0, 1.0][self.layer_idx]
        return cache.update(keys * factor, values, self.layer_idx)


class IsAnInstance(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys = keys * 2 if isinstance(self.layer_idx, int) else keys
        return cache.update(keys, values, self.layer_idx)


class AsksForType(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys = keys * 2 if type(self.layer_idx) is int else keys
        return cache.update(keys, values, self.layer_idx)


class IsTrue(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys = keys * 2 if self.layer_idx else keys
        return cache.update(keys, values, self.layer_idx)


class IsNotNone(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys = keys * 2 if self.layer_idx is not None else keys
        return cache.update(keys, values, self.layer_idx)


class KeepsNumber(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        number = self.layer_idx
        return cache.update(keys, values, number)


class KeepsMethod(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        update = cache.update
        return update(keys, values, self.layer_idx)


class AsksMethod(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys = keys * 2 if hasattr(cache.update, "__self__") else keys
        return cache.update(keys, values, self.layer_idx)


class GetsAttribute(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return cache.update(keys, values, getattr(self, "layer" + "_idx"))


class Real(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return cache.update(keys, values, self.layer_idx.real)


class Property(Attention):
    """Finds another number than the one that it was given."""

    def number(self) -> int:
        return LAYERS - 1 - self.__dict__["layer_idx"]  # type: ignore[no-any-return]

    def take(self, number: int) -> None:
        self.__dict__["layer_idx"] = number

    layer_idx = property(number, take)  # type: ignore[assignment]


class Twofold(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return cache.update(keys, values, self.layer_idx, self.layer_idx)


class Condition(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return cache.update(keys, values, self.layer_idx or 0)


class Starred(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return cache.update(*(keys, values, self.layer_idx))


class Inner(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return cache.update(keys, self.scaled(values), self.layer_idx)

    def scaled(self, values: Tensor) -> Tensor:
        return values * (1 + (self.layer_idx == 3))


class Constant(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return cache.update(keys, values, 2)


class Next(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return cache.update(keys, values, (self.layer_idx + 1) % 5)


class TwoLayers(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        cache.update(keys, values, self.layer_idx)
        return cache.update(keys, values, self.other_idx)

    @property
    def other_idx(self) -> int:
        return 4 - self.layer_idx


class TwoNumbers(Attention):
    def __init__(self, layer_idx: int) -> None:
        super().__init__(layer_idx)
        self.other_idx = 4 - layer_idx

    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        cache.update(keys, values, self.layer_idx)
        return cache.update(keys, values, self.other_idx)


class Skips(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        if self.layer_idx == 3:
            return keys, values
        return cache.update(keys, values, self.layer_idx)


class ReadsLayers(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys = keys + cache.layers[0].keys.sum()
        return cache.update(keys, values, self.layer_idx)


class ReadsOwnLayer(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        cache.update(keys, values, self.layer_idx)
        return cache.layers[self.layer_idx].keys, values


class Length(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return cache.update(keys * len(cache), values, self.layer_idx)


class IsFilled(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return cache.update(keys, values, self.layer_idx) if cache else (keys, values)


class Iterates(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        first = next(iter(cache))[0]
        return cache.update(keys + first.sum(), values, self.layer_idx)


class SequenceLength(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys = keys * cache.get_seq_length(self.layer_idx)
        return cache.update(keys, values, self.layer_idx)


class HasAttribute(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys = keys if hasattr(cache, "is_updated") else keys * 2
        return cache.update(keys, values, self.layer_idx)


class Shows(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys = keys * len(str(cache))
        return cache.update(keys, values, self.layer_idx)


class KeepsCache(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        self.cache = cache
        return cache.update(keys, values, self.layer_idx)


class WritesCache(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        cache.extra = 1
        return cache.update(keys, values, self.layer_idx)


class Appends(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        CALLS.append(cache)
        return cache.update(keys, values, self.layer_idx)


class ReturnsPart(Attention):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        keys, _ = self.update(self.linear(x), x * 2, cache)
        return keys[:, -3:]


class CatchesRefusal(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        try:
            keys = keys * (1 + (self.layer_idx == 3))
        except Exception:
            keys = keys * 3
        return cache.update(keys, values, self.layer_idx)


class CatchesUpdate(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        try:
            cache.update(keys, values, self.layer_idx + 1)
        except Exception:
            keys = keys * 3
        return cache.update(keys, values, self.layer_idx)


class Alone(nn.Module):
    """A module with nothing but the number."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, keys: Tensor, cache: Any) -> Tensor:
        cache.update(keys, keys, self.layer_idx)
        return keys


class InAModule(Attention):
    def __init__(self, layer_idx: int) -> None:
        super().__init__(layer_idx)
        self.alone = Alone(layer_idx)

    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return self.alone(keys, cache), values


@pytest.mark.parametrize(
    "kind",
    [
        Compares, Parity, Scales, Key, Formats, Casts, Ranges, Indexes, IsAnInstance, AsksForType,
        IsTrue, IsNotNone, KeepsNumber, KeepsMethod, AsksMethod, GetsAttribute, Real, Condition,
        Property, Twofold, Starred, Inner, Constant, Next, TwoLayers, TwoNumbers, Skips,
        ReadsLayers, ReadsOwnLayer, Length, IsFilled, Iterates, SequenceLength, HasAttribute, Shows,
        KeepsCache, WritesCache, Appends, ReturnsPart, CatchesRefusal, CatchesUpdate, InAModule,
    ],
)  # fmt: skip
def test_blocks_that_do_something_else(compared: Compared, kind: type[Attention]) -> None:
    assert of_kind(compared, kind) == 0


def test_update_that_is_replaced(compared: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Cache.update

    def update(self: Any, keys: Tensor, values: Tensor, layer_idx: int) -> Any:
        return original(self, keys * (1 + (layer_idx == 3)), values, layer_idx)

    monkeypatch.setattr(Cache, "update", update)
    assert of_kind(compared, Attention) == 0


def test_update_of_layers_that_is_replaced(
    compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = DynamicLayer.update

    def update(self: Any, keys: Tensor, values: Tensor, *args: Any) -> Any:
        CALLS.append(1)
        return original(self, keys * (1 + (len(CALLS) % 5 == 4)), values, *args)

    monkeypatch.setattr(DynamicLayer, "update", update)
    assert of_kind(compared, Attention) == 0
