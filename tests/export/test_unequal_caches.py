"""Blocks with a cache that look equal and are not: files are right all the same.

Whether blocks are shared is not asserted: see test_unequal_blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cached_models
from block_stacks import WIDTH, factor
from shared_exports import Checked

pytest_plugins = ("shared_exports",)

Update = Callable[[Any, Tensor, Tensor, Any], Any]


def _updates(keys: Tensor, values: Tensor, cache: Any, number: int) -> Any:
    return cache.update(keys, values, number)


class AddsToCache(cached_models.Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        cache.count = getattr(cache, "count", 0) + 1
        return super().update(keys * factor(cache.count), values, cache)


class CatchesUpdate(cached_models.Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        try:
            cache.update(keys, values, self.layer_idx + 1)
        except Exception:
            keys = keys * 3
        return super().update(keys, values, cache)


class TwoLayers(cached_models.Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        cache.update(keys, values, self.layer_idx)
        return cache.update(keys, values, cached_models.LAYERS - 1 - self.layer_idx)


class ChangesKeys(cached_models.Attention):
    def update(self, keys: Tensor, values: Tensor, cache: Any) -> Any:
        keys, values = super().update(keys, values, cache)
        return keys.mul_(2), values


UPDATES: dict[str, Update] = {
    "as it is": lambda own, keys, values, cache: _updates(keys, values, cache, own.layer_idx),
    "by number": lambda own, keys, values, cache: _updates(
        keys * (1 + (own.layer_idx == 3)), values, cache, own.layer_idx
    ),
    "one layer for all": lambda own, keys, values, cache: _updates(keys, values, cache, 2),
    "reversed": lambda own, keys, values, cache: _updates(
        keys, values, cache, cached_models.LAYERS - 1 - own.layer_idx
    ),
    "one without": lambda own, keys, values, cache: (
        (keys, values) if own.layer_idx == 3 else _updates(keys, values, cache, own.layer_idx)
    ),
    "first layer is read": lambda own, keys, values, cache: _updates(
        keys + cache.layers[0].keys.sum(), values, cache, own.layer_idx
    ),
    "last layer is read": lambda own, keys, values, cache: _updates(
        keys + cache.layers[4].keys.sum(), values, cache, own.layer_idx
    ),
}


def _with_update(update: Update) -> type[cached_models.Attention]:
    return type("Updates", (cached_models.Attention,), {"update": update})


@pytest.mark.parametrize(
    "kind",
    [*map(_with_update, UPDATES.values()), AddsToCache, CatchesUpdate, TwoLayers, ChangesKeys],
    ids=[*UPDATES, "count", "error", "two layers", "keys in place"],
)
def test_blocks_with_a_cache(checked: Checked, kind: type[cached_models.Attention]) -> None:
    checked(
        lambda: cached_models.made(cached_models.Model, kind),
        cached_models.example(),
        dynamic_shapes=None,
    )


def _model(**methods: Callable[..., Any]) -> type[cached_models.Model]:
    return type("Model", (cached_models.Model,), methods)


def _filled(change: Callable[[list[Any]], Any]) -> type[cached_models.Model]:
    """Returns a model whose cache is made of what becomes of the past."""
    return _model(made=lambda own, past: cached_models.Model.made(own, change(past)))


def _given_back(change: Callable[[list[Any]], Any]) -> type[cached_models.Model]:
    return _model(results=lambda own, cache: change(cached_models.Model.results(own, cache)))


def _scaled(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys * 2, values


def _writes_between(own: Any, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
    if number == 3:
        cache.layers[4].keys = cache.layers[4].keys * 2
    return block(x, cache=cache)


def _writes_in_place(own: Any, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
    if number == 4:
        cache.layers[3].keys.mul_(2)
    return block(x, cache=cache)


def _gives_the_second(own: Any, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
    return block(x, cache=cache, extra=cache.layers[1].keys)


def _gives_the_fourth(own: Any, block: nn.Module, x: Tensor, cache: Any, number: int) -> Any:
    return block(x, cache=cache, extra=cache.layers[3].keys)


CACHES: dict[str, type[cached_models.Model]] = {
    "one for two": _filled(lambda past: [*past[:4], past[3]]),
    "one is computed": _filled(lambda past: [*past[:4], _scaled(*past[4])]),
    "new": _model(made=lambda own, past: cached_models.DynamicCache()),
    "layer is read": _model(after=lambda own, x, cache: x + cache.layers[3].keys.sum()),
    "layer is changed": _model(call=_writes_between),
    "layer is changed in place": _model(call=_writes_in_place),
    "second layer for all": _model(call=_gives_the_second),
    "fourth layer for all": _model(call=_gives_the_fourth),
    "some results": _given_back(lambda results: results[:3]),
    "result twice": _given_back(lambda results: [*results, results[3]]),
    "one result is scaled": _given_back(lambda results: [*results[:4], _scaled(*results[4])]),
    "all results are scaled": _given_back(lambda results: [_scaled(*layer) for layer in results]),
}


@pytest.mark.parametrize("name", CACHES)
def test_models_with_a_cache(checked: Checked, name: str) -> None:
    checked(lambda: cached_models.made(CACHES[name]), cached_models.example(), dynamic_shapes=None)


@pytest.mark.parametrize(
    "layer",
    [
        (torch.rand(2, 6, WIDTH), torch.rand(2, 6, WIDTH)),
        (torch.rand(2, 4, WIDTH).double(), torch.rand(2, 4, WIDTH)),
        (torch.rand(2, 0, WIDTH), torch.rand(2, 0, WIDTH)),
    ],
)
def test_layers_of_a_cache_that_differ(checked: Checked, layer: Any) -> None:
    x, past = cached_models.example()
    checked(cached_models.made, (x, [*past[:4], layer]), dynamic_shapes=None)
