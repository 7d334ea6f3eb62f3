"""The configurations that the tuner tries, by sizes alone, the most promising first.

Legend: T tokens, D model width, H hidden width, E experts, K = top_k.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import fields
from itertools import filterfalse, product, zip_longest
from operator import attrgetter
from typing import Any, TypeVar

from benchmarks.gpu.goals import expected_active
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.configs import (
    FewConfig,
    GemmConfig,
    MlpConfig,
    estimated_registers,
)
from custom_ops.kernels.layer import Layer, power_of_2

T = TypeVar("T")

_BLOCKS_M = (16, 32, 64, 128, 256)
# With more float32 accumulators per thread, registers spill.
_ACCUMULATORS = 160
# What a kernel needs besides its stages: barriers, and the tile that it stores.
_OTHER_SHARED = 4096
_MLP_WIDTH = 192
_FEW_TOKENS = 64


def choices(form: Callable[..., T], **tried: Iterable[object]) -> Iterator[T]:
    """Yields a dataclass with every combination of the values that are tried for its fields.

    A flag that is not named is tried both ways; another field that is not named has its default.
    """
    every: Any = form
    values = [
        tried.get(each.name, (False, True) if each.type == "bool" else (each.default,))
        for each in fields(every)
    ]
    return (form(*chosen) for chosen in product(*values))


def spread(ordered: Iterable[T], *keys: Callable[[T], Hashable]) -> list[T]:
    """Returns the same in an order in which neighbours differ by the first key, then the next.

    Where a key is the same, what came first still does.
    """
    if not keys:
        return list(ordered)
    groups: dict[Hashable, list[T]] = {}
    for each in ordered:
        groups.setdefault(keys[0](each), []).append(each)
    parts = [spread(group, *keys[1:]) for group in groups.values()]
    return [each for row in zip_longest(*parts) for each in row if each is not None]


def blocks_m(layer: Layer, tokens: int) -> tuple[int, ...]:
    """Returns the heights of tiles worth trying: near the mean number of rows of an expert."""
    active = expected_active(layer.shape.experts, layer.shape.top_k, tokens)
    rows = tokens * layer.shape.top_k / active
    found = [block for block in _BLOCKS_M if rows / 4 < block <= max(16, 2 * rows)]
    return tuple(found) or _BLOCKS_M[-1:]


def shared_bytes(layer: Layer, config: GemmConfig, gates: int) -> int:
    """Returns about how much shared memory the pipeline of a product takes."""
    stage = (config.block_m + gates * config.block_n) * config.block_k
    return config.num_stages * stage * layer.shape.weight_format.operand_dtype.itemsize


def fits(layer: Layer, architecture: Architecture, config: GemmConfig, gates: int) -> bool:
    """Whether a tile fits into shared memory and registers, by estimate."""
    accumulators = gates * config.block_m * config.block_n / (32 * config.num_warps)
    shared = shared_bytes(layer, config, gates) + _OTHER_SHARED
    return shared <= architecture.shared_memory and accumulators <= _ACCUMULATORS


def blocks_per_sm(layer: Layer, architecture: Architecture, config: GemmConfig, gates: int) -> int:
    """Returns how many blocks a multiprocessor runs at once, by estimate; at least 1."""
    return max(
        1,
        architecture.blocks_per_multiprocessor(
            config.num_warps,
            estimated_registers(config, gates),
            shared_bytes(layer, config, gates) + _OTHER_SHARED,
        ),
    )


def gemm_candidates(
    layer: Layer, architecture: Architecture, block_m: int, columns: int, depth: int, gates: int
) -> tuple[GemmConfig, ...]:
    """Returns tiles, ``block_m`` rows high, of a grouped product with an inner dimension ``depth``.

    There are 2 gates where a tile holds the gate's and the up half's columns, else 1. Of the first
    few every other is neither persistent nor swapped; they differ in blocks per multiprocessor, in
    width and in stages.
    """

    def blocks(config: GemmConfig) -> int:
        return min(3, blocks_per_sm(layer, architecture, config, gates))

    def varied(config: GemmConfig) -> bool:
        return config.persistent or config.swapped

    def badness(config: GemmConfig) -> tuple[float, ...]:
        """Few loads for an operation, by the copy engine, and some 64 to 192 KiB in flight."""
        shared = blocks(config) * shared_bytes(layer, config, gates) / 1024
        away = max(0.0, 64 - shared) + max(0.0, shared - 192)
        loads = 1 / config.block_m + 1 / (gates * config.block_n)
        slow = architecture.has_tensor_maps and not config.tensor_maps
        return (slow, away, round(loads, 3), -config.block_k)

    block_n, stages = attrgetter("block_n"), attrgetter("num_stages")
    tried = choices(
        GemmConfig,
        block_m=(block_m,),
        block_n=(32, 64, 128, 256),
        block_k=(32, 64, 128, 256),
        num_warps=(4, 8),
        num_stages=(2, 3, 4, 5, 6),
        group_m=(8, 1, 32),
        tensor_maps=(True, False) if architecture.has_tensor_maps else (False,),
        # Higher tiles have rows enough without.
        swapped=(False, True) if architecture.has_async_products and block_m < 64 else (False,),
    )
    found = [
        config
        for config in tried
        if _is_distinct(layer, config, columns, depth, gates)
        and fits(layer, architecture, config, gates)
    ]
    found.sort(key=badness)
    plain = spread(filterfalse(varied, found), blocks, block_n, stages)
    others = spread(filter(varied, found), attrgetter("swapped"), blocks, stages, block_n)
    tiles = spread([*plain, *others], varied)
    # Other groupings of the same tiles come last.
    return tuple(sorted(tiles, key=lambda config: config.group_m != 8))


def _is_distinct(layer: Layer, config: GemmConfig, columns: int, depth: int, gates: int) -> bool:
    """Whether a tile is sensible, and no other does the same work."""
    row_bytes = config.block_k * layer.shape.weight_format.operand_dtype.itemsize
    area = config.block_m * config.block_n * gates
    steps = -(-depth // config.block_k)
    halves = gates == 2 and not layer.shape.options.interleaved
    return (
        64 <= row_bytes <= 256
        # A tensor map loads rows of 128 bytes, the widest swizzle, or several of them.
        and (row_bytes >= 128 if config.tensor_maps else depth % config.block_k == 0)
        and config.block_n <= max(32, power_of_2(columns))
        and (area >= 64 * 128 if config.num_warps == 8 else area <= 128 * 128)
        # Fewer columns are no left operand of those products either.
        and (not config.swapped or gates * config.block_n >= 64)
        # The compiler joins two halves in registers, and leaves a left operand there.
        and not (config.swapped and config.tensor_maps and halves)
        # What else may help is tried by itself.
        and not (config.swapped and config.persistent)
        # A pipeline is no deeper than its loop is long.
        and config.num_stages <= max(2, steps)
        # Grouping matters where there are several columns of high tiles.
        and (config.group_m == 8 or (config.block_m >= 64 and config.block_n < columns))
    )


def few_candidates(layer: Layer, tokens: int) -> tuple[FewConfig, ...]:
    """Returns blocks of the vector products; none for many tokens."""
    if tokens > _FEW_TOKENS:
        return ()
    per_warp = 512 // layer.shape.weight_format.operand_dtype.itemsize
    deepest = power_of_2(max(layer.shape.width, layer.shape.hidden))
    found = (
        config
        for config in choices(
            FewConfig,
            block_n=(8, 4, 16, 2, 32),
            block_k=sorted(
                {min(deepest, size) for size in (per_warp // 2, per_warp, 2 * per_warp)}
            ),
            num_warps=(4, 2, 8),
            num_stages=(2, 4, 1),
        )
        # Each thread holds a block's part in registers, and loads at least 16 bytes.
        if 4 <= config.block_n * config.block_k / (32 * config.num_warps) <= 128
    )
    return tuple(spread(found, *map(attrgetter, ("block_n", "num_stages", "num_warps"))))


def mlp_candidates(layer: Layer, architecture: Architecture, block_m: int) -> tuple[MlpConfig, ...]:
    """Returns tiles of the kernel that keeps the hidden rows on chip; none for wide layers."""
    if layer.shape.width > _MLP_WIDTH or block_m > 128:
        return ()
    itemsize, gates = (
        layer.shape.weight_format.operand_dtype.itemsize,
        layer.shape.options.rows_per_hidden,
    )

    def fits_on_chip(config: MlpConfig) -> bool:
        stage = (gates + 1) * config.block_n * layer.shape.width * itemsize
        rows = block_m * (layer.shape.width + config.block_n) * itemsize
        shared = config.num_stages * stage + rows
        columns = layer.shape.width + gates * config.block_n
        accumulators = block_m * columns / (32 * config.num_warps)
        return (
            shared <= architecture.shared_memory - _OTHER_SHARED and accumulators <= _ACCUMULATORS
        )

    tried = choices(
        MlpConfig,
        block_m=(block_m,),
        block_n=(64, 32, 128, 16),
        num_warps=(4, 8),
        num_stages=(2, 3, 1, 4),
    )
    return tuple(spread(filter(fits_on_chip, tried), *map(attrgetter, ("block_n", "num_stages"))))
