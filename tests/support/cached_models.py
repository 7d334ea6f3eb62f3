"""Models whose blocks have a layer of a cache each, as in language models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

WIDTH, LAYERS = 8, 5


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
