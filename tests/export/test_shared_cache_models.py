"""Models whose blocks have a cache: what they may do with it for their blocks to be traced once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

import dynamo_moe
from cached_models import LAYERS, WIDTH, Attention, Compared, Model, example, filled, made

pytest_plugins = ("shared_exports",)


def of_model(compared: Compared, kind: type[Model]) -> int:
    return compared(functools.partial(made, kind), example(), dynamic_shapes=None)


def test_file_computes_what_the_model_does(tmp_path: Path, shared: Compared) -> None:
    model = made()
    assert shared(model, example(), dynamic_shapes=None) == 1
    dynamo_moe.verify(tmp_path / "model.onnx", model, [example()])


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
