"""The experts' weights: where a tile of them lies in memory, and how it is loaded.

All kernels read weights through here, by :func:`load_weights` for products of matrices and
:func:`weights_at` for those of vectors.

Legend: E experts, N rows of an expert's matrix and so columns of the product, K its depth. A tile
of a gated w1 holds gate and up of the same hidden units, side by side if their rows alternate in
w1, else in two halves.
"""

from __future__ import annotations

from math import prod
from typing import Literal

import triton
import triton.language as tl

from custom_ops.kernels.arguments import weights_pointer
from custom_ops.kernels.device import load_block
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import Argument, TensorMap, TensorPointer


@triton.jit
def place_of(expert, place_of_expert_ptr):
    """Returns where an expert's weights lie among those on the device: all of them, or slots."""
    if place_of_expert_ptr is None:
        place = expert
    else:
        place = tl.load(place_of_expert_ptr + expert)
    return place


@triton.jit
def tile_columns(
    first,  # hidden unit, or column where there are no gates
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Returns which rows of a matrix are the columns of a tile; beyond the last, any others."""
    n = tl.arange(0, BLOCK)
    if INTERLEAVED:
        columns = (2 * first + n) % N
    elif GATED:
        HALF: tl.constexpr = BLOCK // 2
        columns = n // HALF * (N // 2) + (first + n % HALF) % (N // 2)
        # Widths are multiples of 8; Triton sees no more than single columns behind the remainder.
        columns = tl.max_contiguous(tl.multiple_of(columns, 8), 8)
    else:
        columns = (first + n) % N
    return columns


@triton.jit
def load_weights(
    w,  # [E, N, K], or [E, K, N] if TRANSPOSED: a pointer, or a tensor map; or slots of experts
    expert,  # or its place
    first,
    start,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TENSOR_MAP: tl.constexpr,
):
    """Returns ``w[expert].T`` at depth ``start`` and :func:`tile_columns`, BLOCK_K by BLOCK.

    It holds zeros beyond the depth, which is not checked for if WHOLE.
    """
    if TENSOR_MAP:
        if GATED and not INTERLEAVED:
            if TRANSPOSED:
                tile = w.load([expert, start, 0, first]).reshape(BLOCK_K, BLOCK)
            else:
                tile = w.load([expert, 0, first, start]).reshape(BLOCK, BLOCK_K).T
        else:
            column = 2 * first if INTERLEAVED else first
            if TRANSPOSED:
                tile = w.load([expert, start, column]).reshape(BLOCK_K, BLOCK)
            else:
                tile = w.load([expert, column, start]).reshape(BLOCK, BLOCK_K).T
    else:
        n = tile_columns(first, N, BLOCK, GATED, INTERLEAVED)
        k = tl.arange(0, BLOCK_K)
        expert = expert.to(tl.int64)
        if TRANSPOSED:
            ptrs = w + (expert * K + start) * N + (k.to(tl.int64)[:, None] * N + n[None, :])
        else:
            ptrs = w + (expert * N + n)[None, :] * K + k[:, None] + start
        tile = load_block(ptrs, (k + start < K)[:, None], WHOLE)
    return tile


@triton.jit
def weights_at(
    w_ptr,  # [E, N, K], or [E, K, N] if TRANSPOSED; or slots of experts
    expert,  # or its place
    n,
    k,
    inside,
    N: tl.constexpr,
    K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    VOLATILE: tl.constexpr = False,
):
    """Returns ``w[expert, n, k]`` as float32, with zeros outside.

    ``expert``, ``n`` and ``k`` are int64 and broadcast to the tile.
    """
    if TRANSPOSED:
        ptrs = w_ptr + (expert * (N * K) + n) + k * N
    else:
        ptrs = w_ptr + (expert * (N * K) + n * K) + k
    return tl.load(ptrs, mask=inside, other=0.0, volatile=VOLATILE).to(tl.float32)


@triton.jit
def halves(z):
    """Returns the left and the right half of a block's columns."""
    return z.reshape(z.shape[0], 2, z.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def split_gates(z, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Returns gate and up of a product's tile, or the tile twice where there are no gates."""
    if INTERLEAVED:
        gate, up = z.reshape(z.shape[0], z.shape[1] // 2, 2).split()
    elif GATED:
        gate, up = halves(z)
    else:
        gate, up = z, z
    return gate, up


def weights_of(
    layer: Layer, tensor: Literal["w1", "w2"], block_n: int, block_k: int, *, tensor_maps: bool
) -> Argument:
    """Returns w1 or w2 as :func:`load_weights` takes it: a pointer, or a tensor map.

    Args:
        layer: The layer.
        tensor: Which weights.
        block_n: Hidden units of a tile of w1, columns of the product for w2.
        block_k: Depth of a tile.
        tensor_maps: Whether it is a tensor map.
    """
    pointer = weights_pointer(layer, tensor)
    if not tensor_maps:
        return pointer
    shape = layer.shape
    columns, depth = shape.matrices[tensor]
    gates = shape.options.rows_per_hidden if tensor == "w1" else 1
    transposed, units = shape.is_transposed(tensor), columns // gates
    halves = gates == 2 and not shape.options.interleaved
    rows = (2, units) if halves else (gates * units,)
    box = (2, block_n) if halves else (gates * block_n,)
    experts = layer.resident_experts or shape.experts
    sizes = (experts, depth, *rows) if transposed else (experts, *rows, depth)
    return TensorMap(
        pointer.tensor if isinstance(pointer, TensorPointer) else pointer.buffer,
        shape.weight_format.values_dtype,
        shape=sizes,
        strides=tuple(prod(sizes[axis + 1 :]) for axis in range(len(sizes))),
        box=(1, block_k, *box) if transposed else (1, *box, block_k),
    )
