"""The experts' two products over tiles of sorted rows.

A tile is up to BLOCK_M rows of one expert, from the table of :mod:`custom_ops.kernels.index_sort`.
The first product gathers its rows from the tokens, so that they are never copied, and ends in bias
and activation; the second ends in its bias. Their torch reference is
:func:`custom_ops.reference.experts`.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k,
N = T*K slots, of which R have an expert and so a row.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

import triton
import triton.language as tl

from custom_ops.kernels.activation import activate
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.arguments import first_product, kernel_of, max_tiles
from custom_ops.kernels.configs import GemmConfig, estimated_registers
from custom_ops.kernels.device import converted, load_block, wait_for_previous
from custom_ops.kernels.expressions import D, E, H, K, T, cdiv, minimum
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import Argument, Buffer, KernelSpec, Step
from custom_ops.kernels.weights import (
    halves,
    load_weights,
    place_of,
    split_gates,
    tile_columns,
    weights_of,
)


@triton.jit
def _number_of_tiles(row_starts_ptr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns how many tiles of the table are used; they come first."""
    expert = tl.arange(0, BLOCK_E)
    start = tl.load(row_starts_ptr + expert, mask=expert < E, other=0)
    end = tl.load(row_starts_ptr + expert + 1, mask=expert < E, other=0)
    return tl.sum(tl.cdiv(end - start, BLOCK_M))


@triton.jit
def _tile_at(index, num_m, NUM_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Returns the M tile and the N tile at an index.

    GROUP_M M tiles with the same N tile are neighbours: they are mostly of one expert, whose
    weights then come from L2.
    """
    first_m = index // (GROUP_M * NUM_N) * GROUP_M
    group = tl.minimum(num_m - first_m, GROUP_M)
    within = index % (GROUP_M * NUM_N)
    return first_m + within % group, within // group


@triton.jit
def tiles_of_wave(wave_tiles_ptr, wave, tile_expert_ptr, tile_row_ptr):
    """Returns how many tiles a wave has, and the tile table from its first on."""
    first = tl.load(wave_tiles_ptr + wave)
    tiles = tl.load(wave_tiles_ptr + wave + 1) - first
    return tiles, tile_expert_ptr + first, tile_row_ptr + first


@triton.jit
def _schedule(
    row_starts_ptr,
    tile_expert_ptr,
    wave_tiles,  # tiles of the wave, or None where there are no waves
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NUM_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    """Returns the number of M tiles, and how many tiles a program computes."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    if PERSISTENT:
        if wave_tiles is None:
            num_m = _number_of_tiles(row_starts_ptr, E, BLOCK_E, BLOCK_M)
        else:
            num_m = wave_tiles
        rounds = tl.cdiv(num_m * NUM_N - program, programs)
    else:
        num_m = programs // NUM_N
        tile, _ = _tile_at(program, num_m, NUM_N, GROUP_M)
        if wave_tiles is None:
            rounds = (tl.load(tile_expert_ptr + tile) >= 0).to(tl.int32)
        else:
            rounds = (tile < wave_tiles).to(tl.int32)
    return num_m, rounds


@triton.jit
def _rows_of(tile, row_starts_ptr, tile_expert_ptr, tile_row_ptr, BLOCK_M: tl.constexpr):
    """Returns the expert of an M tile, its rows, and which of them the expert has."""
    expert = tl.load(tile_expert_ptr + tile)
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)
    return expert, row, row < tl.load(row_starts_ptr + expert + 1)


@triton.jit
def _store_block(ptr, block, row, first, in_expert, N: tl.constexpr):
    n = first + tl.arange(0, block.shape[1])
    ptrs = ptr + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(ptrs, block.to(ptr.dtype.element_ty), mask=in_expert[:, None] & (n < N)[None, :])


@triton.jit
def _store_tile(ptr, tile, row, first, in_expert, N: tl.constexpr):
    """Stores a tile's columns from ``first`` on to the rows of ``[R, N]`` that the expert has.

    A wide tile goes in two halves: on their way to contiguous rows they pass through shared memory,
    which beside a next tile's stages has no room for the whole if two programs are to fit.
    """
    HALF: tl.constexpr = tile.shape[1] // 2
    if HALF >= 64:
        left, right = halves(tile)
        _store_block(ptr, left, row, first, in_expert, N)
        _store_block(ptr, right, row, first + HALF, in_expert, N)
    else:
        _store_block(ptr, tile, row, first, in_expert, N)


@triton.jit
def _accumulator(ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAPPED: tl.constexpr):
    if SWAPPED:
        zeros = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        zeros = tl.zeros((ROWS, COLUMNS), tl.float32)
    return zeros


@triton.jit
def _add_product(rows, w, sums, SWAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Returns ``sums + rows @ w``, or its transpose if SWAPPED, as ``sums`` is then."""
    if SWAPPED:
        sums = tl.dot(w.T, rows.T, sums, input_precision=PRECISION)
    else:
        sums = tl.dot(rows, w, sums, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=["wave"])
def expert_up_kernel(
    x_ptr,  # [T, D]
    w1,  # [E, F, D], or [E, D, F] if W1_TRANSPOSED: a pointer, or a tensor map
    w1_scales_ptr,  # and the next two: of packed weights, else None
    w1_zero_points_ptr,
    w1_global_scales_ptr,
    b1_ptr,  # [E, F] or None
    expert_weights_ptr,  # [T, K]
    row_scale_ptr,  # [T], float32, or None where there is no norm
    slot_of_row_ptr,  # [R]
    row_starts_ptr,  # [E + 1]
    tile_expert_ptr,  # [tiles]
    tile_row_ptr,  # [tiles]
    wave_tiles_ptr,  # [waves + 1], or None where all experts are resident
    place_of_expert_ptr,  # [E], or None
    hidden_ptr,  # [R, H], of the experts' dtype
    wave,
    E: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    W1_TRANSPOSED: tl.constexpr,
    ENCODING: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    ONE_ZERO_POINT: tl.constexpr,
    TENSOR_MAPS: tl.constexpr,
    PRECISION: tl.constexpr,
    PERSISTENT: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``hidden = act(scale[token] * x[token] @ w1[expert].T + b1[expert])`` by tiles."""
    dtype = hidden_ptr.dtype.element_ty
    GATES: tl.constexpr = 2 if GATED else 1
    F: tl.constexpr = GATES * H
    COLUMNS: tl.constexpr = GATES * BLOCK_N
    NUM_N: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    wait_for_previous(PDL)
    wave_tiles = None
    if wave_tiles_ptr is not None:
        wave_tiles, tile_expert_ptr, tile_row_ptr = tiles_of_wave(
            wave_tiles_ptr, wave, tile_expert_ptr, tile_row_ptr
        )
    num_m, rounds = _schedule(
        row_starts_ptr, tile_expert_ptr, wave_tiles, E, BLOCK_E, BLOCK_M, NUM_N, GROUP_M, PERSISTENT
    )
    stored = program
    for turn in tl.range(0, rounds, flatten=PERSISTENT):
        tile, n_tile = _tile_at(program + turn * programs, num_m, NUM_N, GROUP_M)
        expert, row, in_expert = _rows_of(
            tile, row_starts_ptr, tile_expert_ptr, tile_row_ptr, BLOCK_M
        )
        place = place_of(expert, place_of_expert_ptr)
        # Rows beyond the expert's compute on slot 0's token and are not stored.
        slot = tl.load(slot_of_row_ptr + row, mask=in_expert, other=0)
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + (slot // K).to(tl.int64)[:, None] * D + k[None, :]
        if WEIGHT_ON_INPUT:
            weight = tl.load(expert_weights_ptr + slot).to(tl.float32)
        first = n_tile * BLOCK_N

        z = _accumulator(BLOCK_M, COLUMNS, SWAPPED)
        for start in tl.range(0, D, BLOCK_K):
            whole: tl.constexpr = D % BLOCK_K == 0
            x = load_block(x_ptrs + start, (start + k < D)[None, :], whole)
            if WEIGHT_ON_INPUT:
                x = x.to(tl.float32) * weight[:, None]
            w = load_weights(
                w1,
                place,
                first,
                start,
                F,
                D,
                COLUMNS,
                BLOCK_K,
                whole,
                GATED,
                INTERLEAVED,
                W1_TRANSPOSED,
                TENSOR_MAPS,
                w1_scales_ptr,
                w1_zero_points_ptr,
                w1_global_scales_ptr,
                dtype,
                ENCODING,
                SCALE_N,
                SCALE_K,
                ONE_ZERO_POINT,
            )
            z = _add_product(converted(x, dtype), w, z, SWAPPED, PRECISION)
        z = z.T if SWAPPED else z

        if PERSISTENT:
            # Found again by a count of its own: the loop's head is then a tile ahead, and what it
            # found for this tile would stay in registers all the while.
            tile, n_tile = _tile_at(stored, num_m, NUM_N, GROUP_M)
            stored += programs
            expert, row, in_expert = _rows_of(
                tile, row_starts_ptr, tile_expert_ptr, tile_row_ptr, BLOCK_M
            )
            first = n_tile * BLOCK_N
        if row_scale_ptr is not None:
            z *= tl.load(row_scale_ptr + slot // K)[:, None]
        if b1_ptr is not None:
            column = tile_columns(first, F, COLUMNS, GATED, INTERLEAVED)
            z += tl.load(b1_ptr + expert.to(tl.int64) * F + column).to(tl.float32)[None, :]
        gate, up = split_gates(z, GATED, INTERLEAVED)
        h = activate(gate, up, GATED, ACTIVATION, ALPHA, LIMIT, dtype)
        _store_tile(hidden_ptr, h, row, first, in_expert, H)


@triton.jit(do_not_specialize=["wave"])
def expert_down_kernel(
    hidden_ptr,  # [R, H]
    w2,  # [E, D, H], or [E, H, D] if W2_TRANSPOSED: a pointer, or a tensor map
    w2_scales_ptr,  # and the next two: of packed weights, else None
    w2_zero_points_ptr,
    w2_global_scales_ptr,
    b2_ptr,  # [E, D] or None
    row_starts_ptr,  # [E + 1]
    tile_expert_ptr,  # [tiles]
    tile_row_ptr,  # [tiles]
    wave_tiles_ptr,  # [waves + 1], or None where all experts are resident
    place_of_expert_ptr,  # [E], or None
    rows_ptr,  # [R, D]
    wave,
    E: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W2_TRANSPOSED: tl.constexpr,
    ENCODING: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    ONE_ZERO_POINT: tl.constexpr,
    TENSOR_MAPS: tl.constexpr,
    PRECISION: tl.constexpr,
    PERSISTENT: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``rows = hidden @ w2[expert].T + b2[expert]`` by tiles."""
    NUM_N: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    wait_for_previous(PDL)
    wave_tiles = None
    if wave_tiles_ptr is not None:
        wave_tiles, tile_expert_ptr, tile_row_ptr = tiles_of_wave(
            wave_tiles_ptr, wave, tile_expert_ptr, tile_row_ptr
        )
    num_m, rounds = _schedule(
        row_starts_ptr, tile_expert_ptr, wave_tiles, E, BLOCK_E, BLOCK_M, NUM_N, GROUP_M, PERSISTENT
    )
    stored = program
    for turn in tl.range(0, rounds, flatten=PERSISTENT):
        tile, n_tile = _tile_at(program + turn * programs, num_m, NUM_N, GROUP_M)
        expert, row, in_expert = _rows_of(
            tile, row_starts_ptr, tile_expert_ptr, tile_row_ptr, BLOCK_M
        )
        place = place_of(expert, place_of_expert_ptr)
        k = tl.arange(0, BLOCK_K)
        # Rows beyond the expert's compute on row 0 and are not stored.
        h_row = tl.where(in_expert, row, 0).to(tl.int64)
        h_ptrs = hidden_ptr + h_row[:, None] * H + k[None, :]
        first = n_tile * BLOCK_N

        y = _accumulator(BLOCK_M, BLOCK_N, SWAPPED)
        for start in tl.range(0, H, BLOCK_K):
            whole: tl.constexpr = H % BLOCK_K == 0
            h = load_block(h_ptrs + start, (start + k < H)[None, :], whole)
            w = load_weights(
                w2,
                place,
                first,
                start,
                D,
                H,
                BLOCK_N,
                BLOCK_K,
                whole,
                GATED=False,
                INTERLEAVED=False,
                TRANSPOSED=W2_TRANSPOSED,
                TENSOR_MAP=TENSOR_MAPS,
                scales_ptr=w2_scales_ptr,
                zero_points_ptr=w2_zero_points_ptr,
                global_scales_ptr=w2_global_scales_ptr,
                dtype=hidden_ptr.dtype.element_ty,
                ENCODING=ENCODING,
                SCALE_N=SCALE_N,
                SCALE_K=SCALE_K,
                ONE_ZERO_POINT=ONE_ZERO_POINT,
            )
            y = _add_product(h, w, y, SWAPPED, PRECISION)
        y = y.T if SWAPPED else y

        if PERSISTENT:
            # Found again by a count of its own: the loop's head is then a tile ahead, and what it
            # found for this tile would stay in registers all the while.
            tile, n_tile = _tile_at(stored, num_m, NUM_N, GROUP_M)
            stored += programs
            expert, row, in_expert = _rows_of(
                tile, row_starts_ptr, tile_expert_ptr, tile_row_ptr, BLOCK_M
            )
            first = n_tile * BLOCK_N
        if b2_ptr is not None:
            column = tile_columns(first, D, BLOCK_N, GATED=False, INTERLEAVED=False)
            y += tl.load(b2_ptr + expert.to(tl.int64) * D + column).to(tl.float32)[None, :]
        _store_tile(rows_ptr, y, row, first, in_expert, D)


def expert_up_step(layer: Layer, architecture: Architecture, config: GemmConfig) -> Step:
    """The first product: sorted slots to the buffer ``hidden``."""
    spec = _product(expert_up_kernel, layer, architecture, config, "w1", **first_product(layer))
    return Step((Buffer("hidden", layer.shape.weight_format.operand_dtype, T * K * H),), (spec,))


def expert_down_step(layer: Layer, architecture: Architecture, config: GemmConfig) -> Step:
    """The second product: ``hidden`` to the buffer ``rows``, unweighted, in the tokens' dtype."""
    spec = _product(expert_down_kernel, layer, architecture, config, "w2")
    return Step((Buffer("rows", layer.shape.tokens_dtype, T * K * D),), (spec,))


def _product(
    kernel: Any,
    layer: Layer,
    architecture: Architecture,
    config: GemmConfig,
    weights: Literal["w1", "w2"],
    **kernel_arguments: Argument,
) -> KernelSpec:
    columns, gates = (H, layer.shape.options.rows_per_hidden) if weights == "w1" else (D, 1)
    tiles = max_tiles(config.block_m, layer.resident_experts or E)
    programs = tiles * cdiv(columns, config.block_n)
    if config.persistent:
        itemsize = layer.shape.weight_format.operand_dtype.itemsize
        at_once = _programs_at_once(architecture, config, gates, itemsize)
        programs = minimum(programs, architecture.multiprocessors * at_once)
    kernel_arguments[weights] = weights_of(
        layer, weights, config.block_n, config.block_k, tensor_maps=config.tensor_maps
    )
    return kernel_of(
        kernel,
        layer,
        architecture,
        (programs,),
        asdict(config),
        BLOCK_E=triton.next_power_of_2(layer.shape.experts),
        **kernel_arguments,
    )


def _programs_at_once(
    architecture: Architecture, config: GemmConfig, gates: int, itemsize: int
) -> int:
    """Returns how many programs a multiprocessor holds, by estimate."""
    stages = config.num_stages * (config.block_m + gates * config.block_n) * config.block_k
    stored = config.block_m * min(config.block_n, 64)
    return max(
        1,
        architecture.blocks_per_multiprocessor(
            config.num_warps, estimated_registers(config, gates), (stages + stored) * itemsize
        ),
    )
