"""The configurations that the tuner tries, by sizes alone, the most promising first.

Legend: T tokens, D model width, H hidden width, E experts, K = top_k.
"""

from __future__ import annotations

from itertools import product

from benchmarks.gpu.goals import expected_active
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.configs import FewConfig, GemmConfig, MlpConfig
from custom_ops.kernels.layer import Layer

_BLOCKS_M = (16, 32, 64, 128, 256)
# With more float32 accumulators per thread, registers spill.
_ACCUMULATORS = 160
# What a kernel needs besides its stages: barriers, and the tile that it stores.
_OTHER_SHARED = 4096
_MLP_WIDTH = 192
_FEW_TOKENS = 64


def blocks_m(layer: Layer, tokens: int) -> tuple[int, ...]:
    """Returns the heights of tiles worth trying: near the mean number of rows of an expert."""
    active = expected_active(layer.experts, layer.top_k, tokens)
    rows = tokens * layer.top_k / active
    found = [block for block in _BLOCKS_M if rows / 4 < block <= max(16, 2 * rows)]
    return tuple(found) or _BLOCKS_M[-1:]


def shared_bytes(layer: Layer, config: GemmConfig, gates: int) -> int:
    """Returns about how much shared memory the pipeline of a product takes."""
    stage = (config.block_m + gates * config.block_n) * config.block_k
    return config.num_stages * stage * layer.experts_dtype.itemsize


def fits(layer: Layer, architecture: Architecture, config: GemmConfig, gates: int) -> bool:
    """Whether a tile fits into shared memory and registers, by estimate."""
    accumulators = gates * config.block_m * config.block_n / (32 * config.num_warps)
    shared = shared_bytes(layer, config, gates) + _OTHER_SHARED
    return shared <= architecture.shared_memory and accumulators <= _ACCUMULATORS


def gemm_candidates(
    layer: Layer, architecture: Architecture, block_m: int, columns: int, depth: int, gates: int
) -> tuple[GemmConfig, ...]:
    """Returns tiles, ``block_m`` rows high, of a grouped product with an inner dimension ``depth``.

    There are 2 gates where a tile holds the gate's and the up half's columns, else 1.
    """
    found = []
    maps = (True, False) if architecture.has_tensor_maps else (False,)
    widest = max(16, 1 << (columns - 1).bit_length())
    for block_n, block_k, num_warps, num_stages, tensor_maps in product(
        (32, 64, 128, 256), (32, 64, 128, 256), (4, 8), (2, 3, 4, 5, 6), maps
    ):
        row_bytes = block_k * layer.experts_dtype.itemsize
        if not 64 <= row_bytes <= 256 or (tensor_maps and row_bytes != 128):
            continue
        if block_n > widest or (depth % block_k and not tensor_maps):
            continue
        area = block_m * block_n * gates
        if (num_warps == 8 and area < 64 * 128) or (num_warps == 4 and area > 128 * 128):
            continue
        for group_m in (1, 8, 32) if block_m >= 64 else (8,):
            config = GemmConfig(
                block_m, block_n, block_k, num_warps, num_stages, group_m, tensor_maps
            )
            if fits(layer, architecture, config, gates):
                found.append(config)
    return tuple(sorted(found, key=lambda config: _badness(layer, config, gates)))


def _badness(layer: Layer, config: GemmConfig, gates: int) -> tuple[float, ...]:
    """Orders tiles: some 64 to 192 KiB in flight, few loads for an operation, any grouping."""
    shared = shared_bytes(layer, config, gates) / 1024
    away = max(0.0, 64 - shared) + max(0.0, shared - 192)
    loads = 1 / config.block_m + 1 / (gates * config.block_n)
    return (away, config.group_m != 8, round(loads, 3), -config.num_stages)


def few_candidates(layer: Layer, tokens: int) -> tuple[FewConfig, ...]:
    """Returns blocks of the vector products; none for many tokens."""
    if tokens > _FEW_TOKENS:
        return ()
    per_warp = 512 // layer.experts_dtype.itemsize
    return tuple(
        FewConfig(block_n, block_k, num_warps, num_stages)
        for block_n, block_k, num_warps, num_stages in product(
            (2, 4, 8, 16, 32), (per_warp // 2, per_warp, 2 * per_warp), (2, 4, 8), (1, 2, 4)
        )
        # Each thread holds a block's part in registers, and loads at least 16 bytes.
        if 4 <= block_n * block_k / (32 * num_warps) <= 128
    )


def mlp_candidates(layer: Layer, architecture: Architecture, block_m: int) -> tuple[MlpConfig, ...]:
    """Returns tiles of the kernel that keeps the hidden rows on chip; none for wide layers."""
    if layer.width > _MLP_WIDTH or block_m > 128:
        return ()
    itemsize, gates = layer.experts_dtype.itemsize, layer.options.rows_per_hidden
    found = []
    for block_n, num_warps, num_stages in product((16, 32, 64, 128), (4, 8), (1, 2, 3, 4)):
        stage = (gates + 1) * block_n * layer.width * itemsize
        shared = num_stages * stage + block_m * (layer.width + block_n) * itemsize
        accumulators = block_m * (layer.width + gates * block_n) / (32 * num_warps)
        if shared <= architecture.shared_memory - _OTHER_SHARED and accumulators <= _ACCUMULATORS:
            found.append(MlpConfig(block_m, block_n, num_warps, num_stages))
    return tuple(found)
