"""Blocks with a layer of a cache each are traced once for all; files are those of whole traces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

import dynamo_moe

pytest_plugins = ("shared_exports",)

WIDTH, LAYERS = 8, 5
CALLS: list[Any] = []


class Attention(nn.Module):
    """Adds what its layer of the cache holds, which it puts its input into."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        keys, values = self.update(self.linear(x), x * 2, cache)
        return x + keys.sum(-2, keepdim=True) * values.mean(-2, keepdim=True)

    def update(self, keys: Tensor, values: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        return cache.update(keys, values, self.layer_idx)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block like those of transformers."""

    def __init__(self, kind: type[Attention], layer_idx: int) -> None:
        super().__init__()
        self.attention = kind(layer_idx)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, cache: Any = None, extra: Tensor | None = None) -> Any:
        x = self.attention(self.norm(x), cache)
        return x if extra is None else x + extra[:, :1]


class Model(nn.Module):
    """Blocks with a cache that is made of a list of keys and values, as in language models."""

    def __init__(self, kind: type[Attention] = Attention, layers: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind, number) for number in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Any:
        cache = self.made(past)
        x = self.before(x, cache)
        for number, block in enumerate(self.blocks):
            x = self.call(block, x, cache, number)
        x = self.after(x, cache)
        return self.head(x), self.results(cache)

    def made(self, past: list[tuple[Tensor, Tensor]]) -> Any:
        cache = DynamicCache()
        cache.layers = [filled(*layer) for layer in past]
        return cache

    def before(self, x: Tensor, cache: Any) -> Tensor:
        return x

    def call(self, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
        return block(x, cache=cache)

    def after(self, x: Tensor, cache: Any) -> Tensor:
        return x

    def results(self, cache: Any) -> Any:
        return [(layer.keys, layer.values) for layer in cache.layers]


def filled(keys: Tensor, values: Tensor) -> Any:
    layer = DynamicLayer()  # type: ignore[no-untyped-call]
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def made(kind: type[nn.Module] = Model, *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(*args).eval()


def example(layers: int = LAYERS) -> tuple[Any, ...]:
    past = [(torch.rand(2, 4, WIDTH), torch.rand(2, 4, WIDTH)) for _ in range(layers)]
    return torch.rand(2, 3, WIDTH), past


Compared = Callable[..., int]


def of_kind(compared: Compared, kind: type[Attention]) -> int:
    CALLS.clear()
    return compared(functools.partial(made, Model, kind), example(), dynamic_shapes=None)


def of_model(compared: Compared, kind: type[Model]) -> int:
    return compared(functools.partial(made, kind), example(), dynamic_shapes=None)


def test_blocks_with_layers_of_a_cache_are_shared(compared: Compared) -> None:
    assert of_kind(compared, Attention) == 1


def test_file_computes_what_the_model_does(tmp_path: Path, shared: Compared) -> None:
    model = made()
    assert shared(model, example(), dynamic_shapes=None) == 1
    dynamo_moe.verify(tmp_path / "model.onnx", model, [example()])


# --- Blocks ---


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


# --- Models ---


class Permuted(Model):
    """Blocks use the layers in the reverse order."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.attention.layer_idx = LAYERS - 1 - number


class ReversedResults(Model):
    def results(self, cache: Any) -> Any:
        return super().results(cache)[::-1]


class ResultsFirst(Model):
    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Any:
        return super().forward(x, past)[::-1]


class Alternating(Model):
    def __init__(self) -> None:
        super().__init__(layers=9)
        for number, block in enumerate(self.blocks):
            if number % 2:
                block.norm = nn.Identity()  # type: ignore[assignment]


class TwoRuns(Model):
    def __init__(self) -> None:
        super().__init__(layers=10)
        for block in self.blocks[5:]:
            block.norm = nn.Identity()  # type: ignore[assignment, union-attr]


class OtherFirst(Model):
    """The first block has another form, and the run begins at the second layer of the cache."""

    def __init__(self) -> None:
        super().__init__(layers=6)
        self.blocks[0].norm = nn.Identity()


class MoreLayers(Model):
    """The cache has a layer that no block uses."""

    def made(self, past: Any) -> Any:
        cache = super().made(past)
        cache.layers.append(filled(past[0][0] * 2, past[0][1] * 3))
        return cache


class WithoutTensors(Model):
    """Layers that hold nothing at first."""

    def made(self, past: Any) -> Any:
        cache = DynamicCache()
        cache.layers = [DynamicLayer() for _ in past]
        return cache


class ReadsBefore(Model):
    def before(self, x: Tensor, cache: Any) -> Tensor:
        return x + cache.layers[1].keys.sum() + cache.layers[4].values.sum()


@pytest.mark.parametrize(
    ("kind", "layers", "runs"),
    [
        (Permuted, 5, 1), (ReversedResults, 5, 1), (ResultsFirst, 5, 1), (Alternating, 9, 1),
        (TwoRuns, 10, 2), (OtherFirst, 6, 1), (MoreLayers, 5, 1), (ReadsBefore, 5, 1),
        (WithoutTensors, 5, 1),
    ],
)  # fmt: skip
def test_models_that_are_shared(
    compared: Compared, kind: type[Model], layers: int, runs: int
) -> None:
    make = functools.partial(made, kind)
    assert compared(make, example(layers), dynamic_shapes=None) == runs


class OneWithout(Model):
    def call(self, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
        return block(x, cache=Plain() if number == 3 else cache)


class Plain:
    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> Any:
        return keys, values


class LastBlockWithout(Model):
    def call(self, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
        return block(x, cache=cache) if number < 4 else block(x, cache=Plain())


class WritesBetween(Model):
    def call(self, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
        if number == 3:
            cache.layers[4].keys = cache.layers[4].keys * 2
        return super().call(block, x, cache, number)


class WritesBetweenInPlace(Model):
    def call(self, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
        if number == 4:
            cache.layers[3].keys.mul_(2)
        return super().call(block, x, cache, number)


class AddsAttribute(Model):
    def call(self, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
        if number == 3:
            cache.layers[3].note = 1
        return super().call(block, x, cache, number)


class AddsToCache(Model):
    def call(self, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
        cache.calls = number // 4
        return super().call(block, x, cache, number)


class OtherCache(Model):
    def call(self, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
        if number == 4:
            other = DynamicCache()
            other.layers = list(cache.layers)
            cache = other
        return super().call(block, x, cache, number)


class ReadsAfter(Model):
    layer = 3

    def after(self, x: Tensor, cache: Any) -> Tensor:
        return x + cache.layers[self.layer].keys.sum()


class ReadsTracedAfter(ReadsAfter):
    layer = 1


class OneLayerTwice(Model):
    def made(self, past: Any) -> Any:
        cache = super().made(past)
        cache.layers[4] = cache.layers[3]
        return cache


class OneTensorForTwo(Model):
    def made(self, past: Any) -> Any:
        return super().made([*past[:4], past[3]])


class KeysAreValues(Model):
    def made(self, past: Any) -> Any:
        return super().made([(keys, keys) for keys, _ in past])


class Computed(Model):
    def made(self, past: Any) -> Any:
        return super().made([*past[:4], (past[4][0] * 2, past[4][1])])


class AllComputed(Model):
    def made(self, past: Any) -> Any:
        return super().made([(keys * 2, values) for keys, values in past])


class OfOneTensor(Model):
    def made(self, past: Any) -> Any:
        whole = past[0][0].repeat(1, 10, 1)
        parts = whole.split(4, 1)
        return super().made([*zip(parts[::2], parts[1::2], strict=True)])


class SameNumber(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[4].attention.layer_idx = 3  # type: ignore[union-attr]


class SomeResults(Model):
    def results(self, cache: Any) -> Any:
        return super().results(cache)[:3]


class LastResult(Model):
    def results(self, cache: Any) -> Any:
        return super().results(cache)[-1]


class ResultTwice(Model):
    def results(self, cache: Any) -> Any:
        return super().results(cache) + super().results(cache)[3:4]


class ScaledResult(Model):
    def results(self, cache: Any) -> Any:
        *others, (keys, values) = super().results(cache)
        return [*others, (keys * 2, values)]


class NoResults(Model):
    def results(self, cache: Any) -> Any:
        return ()


class ChangesResults(Model):
    def results(self, cache: Any) -> Any:
        for layer in cache.layers[3:]:
            layer.keys.mul_(2)
        return super().results(cache)


class Counted(Model):
    """Whose layers know their number."""

    def made(self, past: Any) -> Any:
        cache = super().made(past)
        for number, layer in enumerate(cache.layers):
            layer.number = number
        return cache


class OwnUpdate(Model):
    def made(self, past: Any) -> Any:
        cache = super().made(past)

        def update(keys: Tensor, values: Tensor, layer_idx: int) -> Any:
            return DynamicCache.update(cache, keys * (1 + (layer_idx == 3)), values, layer_idx)

        cache.update = update
        return cache


class OwnKind(Model):
    class Layers(DynamicCache):
        def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any) -> Any:
            return super().update(keys * (1 + (layer_idx == 3)), values, layer_idx, *args)

    def made(self, past: Any) -> Any:
        cache = self.Layers()
        cache.layers = super().made(past).layers
        return cache


class OwnLayer(Model):
    class Layer(DynamicLayer):
        def update(self, keys: Tensor, values: Tensor, *args: Any, **kw: Any) -> Any:
            return super().update(keys * 2, values, *args, **kw)

    def made(self, past: Any) -> Any:
        cache = super().made(past)
        cache.layers[4].__class__ = self.Layer
        return cache


class Fresh(Model):
    def made(self, past: Any) -> Any:
        return DynamicCache()


class OfPair(Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        return cache.self_attention_cache.update(keys, values, self.layer_idx)


class InAPair(Model):
    def __init__(self) -> None:
        super().__init__(OfPair)

    def made(self, past: Any) -> Any:
        return EncoderDecoderCache(super().made(past), DynamicCache())

    def results(self, cache: Any) -> Any:
        return super().results(cache.self_attention_cache)


@pytest.mark.parametrize(
    "kind",
    [
        OneWithout, LastBlockWithout, WritesBetween, WritesBetweenInPlace, AddsAttribute,
        AddsToCache, OtherCache, ReadsAfter, ReadsTracedAfter, OneLayerTwice, OneTensorForTwo,
        KeysAreValues, Computed, AllComputed, OfOneTensor, SameNumber, SomeResults, LastResult,
        ResultTwice, ScaledResult, NoResults, ChangesResults, Counted, OwnUpdate, OwnKind, OwnLayer,
        Fresh, InAPair,
    ],
)  # fmt: skip
def test_models_that_do_something_else(compared: Compared, kind: type[Model]) -> None:
    assert of_model(compared, kind) == 0


@pytest.mark.parametrize("layer", range(LAYERS))
def test_tensor_of_one_layer_is_given_to_all(compared: Compared, layer: int) -> None:
    class Gives(Model):
        def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Any:
            cache = self.made(past)
            for block in self.blocks:
                x = block(x, cache=cache, extra=past[layer][0])
            return self.head(x), self.results(cache)

    of_model(compared, Gives)


def test_layers_of_different_sizes(compared: Compared) -> None:
    given = example()
    given[1][4] = (torch.rand(2, 6, WIDTH), torch.rand(2, 6, WIDTH))
    assert compared(made, given, dynamic_shapes=None) == 0


def test_layers_of_different_types(compared: Compared) -> None:
    given = example()
    given[1][4] = (torch.rand(2, 4, WIDTH).half(), torch.rand(2, 4, WIDTH))
    assert compared(made, given, dynamic_shapes=None) == 0


def test_empty_layers(compared: Compared) -> None:
    given = torch.rand(2, 3, WIDTH), [(torch.rand(2, 0, WIDTH), torch.rand(2, 0, WIDTH))] * LAYERS
    assert compared(made, given, dynamic_shapes=None) == 1


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
