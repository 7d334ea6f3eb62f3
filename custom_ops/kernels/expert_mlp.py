"""Both products of an expert in one kernel, for small model widths.

A tile's hidden units are computed, activated and multiplied away block by block: they never leave
the chip. Written out, they would be most of the memory traffic where D is small. Its torch
reference is :func:`custom_ops.reference.experts`.

The width is split into a power of two and a remainder, such as 96 = 64 + 32: blocks are powers of
two, and padding 96 to 128 would waste a third of both products.

Legend: as in :mod:`custom_ops.kernels.grouped_gemm`.
"""

from __future__ import annotations

from dataclasses import asdict

import triton
import triton.language as tl

from custom_ops.kernels.activation import activate
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.arguments import first_product, kernel_of, max_tiles
from custom_ops.kernels.configs import MlpConfig
from custom_ops.kernels.device import converted, load_block, wait_for_previous
from custom_ops.kernels.expressions import D, E, K, T
from custom_ops.kernels.grouped_gemm import tiles_of_wave
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import Buffer, Step
from custom_ops.kernels.weights import load_weights, place_of, split_gates, tile_columns


@triton.jit
def _load_x(ptrs, d, weight, D: tl.constexpr, WHOLE: tl.constexpr, WEIGHTED: tl.constexpr, dtype):
    x = load_block(ptrs + d[None, :], (d < D)[None, :], WHOLE)
    if WEIGHTED:
        x = x.to(tl.float32) * weight[:, None]
    return converted(x, dtype)


@triton.jit
def _first_product(
    x_a,  # [BLOCK_M, BLOCK_A], the first columns of x
    x_b,  # [BLOCK_M, BLOCK_B], the others; None where the width has no rest
    w1_ptr,
    place,  # of the expert's weights
    unit,  # the first hidden unit
    D: tl.constexpr,
    F: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    W1_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns ``x @ w1[place].T`` for the gates of a block of hidden units."""
    A: tl.constexpr = x_a.shape[1]
    w = load_weights(
        w1_ptr,
        place,
        unit,
        0,
        F,
        D,
        COLUMNS,
        A,
        A <= D,
        GATED,
        INTERLEAVED,
        W1_TRANSPOSED,
        TENSOR_MAP=False,
    )
    z = tl.dot(x_a, w, input_precision=PRECISION)
    if x_b is not None:
        B: tl.constexpr = x_b.shape[1]
        w = load_weights(
            w1_ptr,
            place,
            unit,
            A,
            F,
            D,
            COLUMNS,
            B,
            A + B <= D,
            GATED,
            INTERLEAVED,
            W1_TRANSPOSED,
            TENSOR_MAP=False,
        )
        z = tl.dot(x_b, w, z, input_precision=PRECISION)
    return z


@triton.jit
def _second_product(
    h,  # [BLOCK_M, BLOCK_N]
    w2_ptr,
    place,
    unit,
    y,
    first,  # the first column
    D: tl.constexpr,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    W2_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns ``y + h @ w2[place].T``; columns of y beyond the width hold nothing of use."""
    w = load_weights(
        w2_ptr,
        place,
        first,
        unit,
        D,
        H,
        y.shape[1],
        BLOCK_N,
        H % BLOCK_N == 0,
        GATED=False,
        INTERLEAVED=False,
        TRANSPOSED=W2_TRANSPOSED,
        TENSOR_MAP=False,
    )
    return tl.dot(h, w, y, input_precision=PRECISION)


@triton.jit
def _store(y_ptrs, b2_ptr, expert, y, d, in_expert, D: tl.constexpr):
    """Stores the columns ``d`` of y, with their bias."""
    if b2_ptr is not None:
        y += tl.load(b2_ptr + expert.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)[
            None, :
        ]
    out = y_ptrs.dtype.element_ty
    tl.store(y_ptrs + d[None, :], y.to(out), mask=in_expert[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["wave"])
def expert_mlp_kernel(
    x_ptr,  # [T, D]
    w1_ptr,  # [E, F, D], or [E, D, F] if W1_TRANSPOSED
    b1_ptr,  # [E, F] or None
    w2_ptr,  # [E, D, H], or [E, H, D] if W2_TRANSPOSED
    b2_ptr,  # [E, D] or None
    expert_weights_ptr,  # [T, K] or None
    row_scale_ptr,  # [T], float32, or None where there is no norm
    slot_of_row_ptr,  # [R]
    row_starts_ptr,  # [E + 1]
    tile_expert_ptr,  # [tiles]
    tile_row_ptr,  # [tiles]
    wave_tiles_ptr,  # [waves + 1], or None where all experts are resident
    place_of_expert_ptr,  # [E], or None
    rows_ptr,  # [R, D]
    wave,
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
    W2_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes a tile's ``rows = act(scale[token] * x[token] @ w1.T + b1) @ w2.T + b2``.

    BLOCK_B is 0 where the width has no rest.
    """
    dtype: tl.constexpr = w1_ptr.dtype.element_ty
    GATES: tl.constexpr = 2 if GATED else 1
    F: tl.constexpr = GATES * H
    COLUMNS: tl.constexpr = GATES * BLOCK_N
    tile = tl.program_id(0)
    wait_for_previous(PDL)
    if wave_tiles_ptr is not None:
        tiles, tile_expert_ptr, tile_row_ptr = tiles_of_wave(
            wave_tiles_ptr, wave, tile_expert_ptr, tile_row_ptr
        )
        if tile >= tiles:
            return
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    place = place_of(expert, place_of_expert_ptr)
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)
    in_expert = row < tl.load(row_starts_ptr + expert + 1)
    # Rows beyond the expert's compute on slot 0's token and are not stored.
    slot = tl.load(slot_of_row_ptr + row, mask=in_expert, other=0)
    weight = 1.0
    if WEIGHT_ON_INPUT:
        weight = tl.load(expert_weights_ptr + slot).to(tl.float32)
    scale = None
    if row_scale_ptr is not None:
        scale = tl.load(row_scale_ptr + slot // K)[:, None]
    a = tl.arange(0, BLOCK_A)
    x_b = None
    x_ptrs = x_ptr + (slot // K).to(tl.int64)[:, None] * D
    y_ptrs = rows_ptr + row.to(tl.int64)[:, None] * D

    x_a = _load_x(x_ptrs, a, weight, D, BLOCK_A <= D, WEIGHT_ON_INPUT, dtype)
    y_a = tl.zeros((BLOCK_M, BLOCK_A), tl.float32)
    if BLOCK_B > 0:
        b = BLOCK_A + tl.arange(0, BLOCK_B)
        x_b = _load_x(x_ptrs, b, weight, D, BLOCK_A + BLOCK_B <= D, WEIGHT_ON_INPUT, dtype)
        y_b = tl.zeros((BLOCK_M, BLOCK_B), tl.float32)

    for unit in tl.range(0, H, BLOCK_N):
        z = _first_product(
            x_a,
            x_b,
            w1_ptr,
            place,
            unit,
            D,
            F,
            COLUMNS,
            GATED,
            INTERLEAVED,
            W1_TRANSPOSED,
            PRECISION,
        )
        if scale is not None:
            z *= scale
        if b1_ptr is not None:
            column = tile_columns(unit, F, COLUMNS, GATED, INTERLEAVED)
            z += tl.load(b1_ptr + expert.to(tl.int64) * F + column).to(tl.float32)[None, :]
        gate, up = split_gates(z, GATED, INTERLEAVED)
        h = activate(gate, up, GATED, ACTIVATION, ALPHA, LIMIT, dtype)
        if H % BLOCK_N != 0:
            h = tl.where((unit + tl.arange(0, BLOCK_N) < H)[None, :], h, 0.0)
        y_a = _second_product(
            h, w2_ptr, place, unit, y_a, 0, D, H, BLOCK_N, W2_TRANSPOSED, PRECISION
        )
        if BLOCK_B > 0:
            y_b = _second_product(
                h, w2_ptr, place, unit, y_b, BLOCK_A, D, H, BLOCK_N, W2_TRANSPOSED, PRECISION
            )

    _store(y_ptrs, b2_ptr, expert, y_a, a, in_expert, D)
    if BLOCK_B > 0:
        _store(y_ptrs, b2_ptr, expert, y_b, b, in_expert, D)


def split_width(width: int) -> tuple[int, int]:
    """Returns two block sizes, powers of two from 16 on, that hold a width with little padding.

    The second is 0 where one block is enough.

    Example:
        >>> split_width(96), split_width(192), split_width(128), split_width(56)
        ((64, 32), (128, 64), (128, 0), (64, 0))
    """
    whole = max(16, triton.next_power_of_2(width))
    first = whole // 2
    if first < 16 or width == whole:
        return whole, 0
    rest = max(16, triton.next_power_of_2(width - first))
    return (first, rest) if rest < first else (whole, 0)


def expert_mlp_step(layer: Layer, architecture: Architecture, config: MlpConfig) -> Step:
    """The experts: sorted slots to the buffer ``rows``, unweighted, in the tokens' dtype."""
    layer.check_plain("products in one kernel")
    block_a, block_b = split_width(layer.shape.width)
    spec = kernel_of(
        expert_mlp_kernel,
        layer,
        architecture,
        (max_tiles(config.block_m, layer.resident_experts or E),),
        {**asdict(config), "block_a": block_a, "block_b": block_b},
        **first_product(layer),
    )
    return Step((Buffer("rows", layer.shape.tokens_dtype, T * K * D),), (spec,))
