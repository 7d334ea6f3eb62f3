"""The experts' weights: where a tile of them lies in memory, and how it is loaded.

All kernels read weights through here, by :func:`load_weights` for products of matrices, and for
those of vectors by :func:`weights_at`, or :func:`packed_products` where they are packed. Packed
weights are decoded in registers: an element's code becomes the bits of a float32 by shifts.

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
from custom_ops.kernels.device import converted, load_block
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import Argument, TensorMap, TensorPointer
from custom_ops.packed_weights import ENCODINGS


@triton.constexpr_function
def per_element(encoding):
    """Returns how many columns of a row an element of the weights' tensor holds."""
    return 1 if encoding == "plain" else ENCODINGS[encoding].per_byte


@triton.constexpr_function
def elements_of(encoding):
    """Returns what a code of packed weights is."""
    return ENCODINGS[encoding].elements


@triton.constexpr_function
def _has_integers(elements):
    """Returns whether codes are integers from 0 on, of which a zero point is subtracted."""
    return elements in ("uint4", "int8")


@triton.constexpr_function
def _first_bit(place, elements):
    """Returns where :func:`_code_in` has an integer: where it lies, or below bit 24."""
    bits = 4 if elements == "uint4" else 8
    return place * bits - (8 if place * bits >= 24 else 0)


@triton.constexpr_function
def _x_factor(place, elements):
    """Returns what x is multiplied by for a code of a place."""
    if _has_integers(elements):
        return 2.0 ** (75 - _first_bit(place, elements))
    return {"e2m1": 2.0**63, "e4m3": 2.0**60}[elements]


@triton.constexpr_function
def _sum_factor(elements):
    """Returns what the sum of a word's products is multiplied by."""
    return 2.0**74 if _has_integers(elements) else _x_factor(0, elements)


@triton.constexpr_function
def _scale_elements_of(encoding):
    return ENCODINGS[encoding].scale_elements


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
def _e2m1(code):
    """Returns the float32 of codes 0..15; of a subnormal one as of any other."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126: the biases' distance.


@triton.jit
def _e4m3(code):
    """Returns the float32 of codes 0..255; those of NaN have all bits set but the sign's."""
    bits = ((code & 128) << 24) | ((code & 127) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120.
    return tl.where((code & 127) == 127, float("nan"), value)


@triton.jit
def _e8m0(code):
    """Returns the float32 of codes 0..255: a power of two, or NaN."""
    bits = tl.where(code == 0, 1 << 22, code << 23)  # 2**-127 is subnormal.
    return tl.where(code == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _load_scales(ptrs, mask, ENCODING: tl.constexpr):
    """Returns scales as float32."""
    scales = tl.load(ptrs, mask=mask, other=0)
    ELEMENTS: tl.constexpr = _scale_elements_of(ENCODING)
    if ELEMENTS == "e8m0":
        scales = _e8m0(_unsigned(scales))
    elif ELEMENTS == "e4m3":
        scales = _e4m3(_unsigned(scales))
    return scales.to(tl.float32)


@triton.jit
def _unsigned(code):
    return code.to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _along(tile, SIZE: tl.constexpr, LAST_BUT_ONE: tl.constexpr = False):
    """Returns 0..SIZE - 1 along a tile's last axis, or the LAST_BUT_ONE, and 1 along its others."""
    if len(tile.shape) == 2:
        places = tl.expand_dims(tl.arange(0, SIZE), 1 if LAST_BUT_ONE else 0)
    else:
        places = tl.expand_dims(tl.arange(0, SIZE), (0, 2 if LAST_BUT_ONE else 1))
    return places


@triton.jit
def _by_groups(tile, GROUPS: tl.constexpr):
    """Returns a tile whose last axis is split into groups, which are the last axis but one."""
    DEPTH: tl.constexpr = tile.shape[len(tile.shape) - 1] // GROUPS
    if len(tile.shape) == 2:
        split = tile.reshape(tile.shape[0], GROUPS, DEPTH)
    else:
        split = tile.reshape(tile.shape[0], tile.shape[1], GROUPS, DEPTH)
    return split


@triton.jit
def _joined(tile, SIZE: tl.constexpr):
    """Returns a tile whose last two axes are one of a size."""
    if len(tile.shape) == 3:
        joined = tile.reshape(tile.shape[0], SIZE)
    else:
        joined = tile.reshape(tile.shape[0], tile.shape[1], SIZE)
    return joined


@triton.jit
def _decoded(
    w_ptr,  # [E, N, K / 2], or [E, N, K] if each element has a byte
    scales_ptr,  # [E, ceil(N / SCALE_N), ceil(K / SCALE_K)]
    zero_points_ptr,  # as the scales, or [E] if ONE_ZERO_POINT, or None
    global_scales_ptr,  # [E, N], or None
    expert,
    n,
    start,
    inside,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ENCODING: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    ONE_ZERO_POINT: tl.constexpr,
):
    """Returns ``w[expert, n, start:start + BLOCK_K]`` as float32, with zeros outside.

    ``expert``, ``n`` and ``inside`` broadcast to a tile with a last axis of 1, which the depth is
    along. BLOCK_K and SCALE_K divide one another, unless a row has one scale.
    """
    PER_BYTE: tl.constexpr = per_element(ENCODING)
    ELEMENTS: tl.constexpr = elements_of(ENCODING)
    ROW_BYTES: tl.constexpr = K // PER_BYTE
    SCALES: tl.constexpr = (K + SCALE_K - 1) // SCALE_K
    GROUPS: tl.constexpr = BLOCK_K // SCALE_K if SCALE_K < K and SCALE_K < BLOCK_K else 1
    byte = start // PER_BYTE + _along(n, BLOCK_K // PER_BYTE)
    packed = tl.load(
        w_ptr + (expert * N + n) * ROW_BYTES + byte, mask=inside & (byte < ROW_BYTES), other=0
    )
    codes = packed if ELEMENTS == "int8" else _unsigned(packed)
    if PER_BYTE == 2:
        codes = _joined(tl.join(codes & 15, codes >> 4), BLOCK_K)
    group = start // SCALE_K + _along(n, GROUPS)
    if SCALE_N < N:
        row = expert * ((N + SCALE_N - 1) // SCALE_N) + n // SCALE_N
    else:
        row = expert + n * 0
    has_scale = inside & (group < SCALES)
    scales = _load_scales(scales_ptr + row * SCALES + group, has_scale, ENCODING)
    if global_scales_ptr is not None:
        scales *= tl.load(global_scales_ptr + expert * N + n, mask=inside, other=0.0)
    scales = tl.expand_dims(scales, len(n.shape))
    if ELEMENTS == "uint4":
        # The bits of 2**23 + code: an operation less than a conversion, which is slow besides.
        values = _by_groups((codes | 0x4B000000).to(tl.float32, bitcast=True), GROUPS)
        if zero_points_ptr is None:
            values -= 8388616.0
        else:
            place = expert + n * 0 if ONE_ZERO_POINT else row * SCALES + group
            has_zeros = inside if ONE_ZERO_POINT else has_scale
            zeros = tl.load(zero_points_ptr + place, mask=has_zeros, other=0)
            values -= tl.expand_dims(zeros.to(tl.float32) + 8388608.0, len(n.shape))
    elif ELEMENTS == "e2m1":
        values = _by_groups(_e2m1(codes), GROUPS)
    elif ELEMENTS == "e4m3":
        values = _by_groups(_e4m3(codes), GROUPS)
    else:
        values = _by_groups(codes.to(tl.float32), GROUPS)
    tile = _joined(values * scales, BLOCK_K)
    if ELEMENTS == "uint4" and K % BLOCK_K != 0:  # The others' code 0 is a zero.
        tile = tl.where(start + _along(n, BLOCK_K) < K, tile, 0.0)
    return tile


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
    scales_ptr=None,
    zero_points_ptr=None,
    global_scales_ptr=None,
    dtype: tl.constexpr = None,  # of the operands, where packed
    ENCODING: tl.constexpr = "plain",
    SCALE_N: tl.constexpr = 1,
    SCALE_K: tl.constexpr = 1,
    ONE_ZERO_POINT: tl.constexpr = False,
):
    """Returns ``w[expert].T`` at depth ``start`` and :func:`tile_columns`, BLOCK_K by BLOCK.

    It holds zeros beyond the depth, which is not checked for if WHOLE.
    """
    if ENCODING != "plain":
        n = tile_columns(first, N, BLOCK, GATED, INTERLEAVED).to(tl.int64)[:, None]
        tile = _decoded(
            w,
            scales_ptr,
            zero_points_ptr,
            global_scales_ptr,
            expert.to(tl.int64),
            n,
            start,
            n < N,
            N,
            K,
            BLOCK_K,
            ENCODING,
            SCALE_N,
            SCALE_K,
            ONE_ZERO_POINT,
        )
        tile = tile.to(dtype).T
    elif TENSOR_MAP:
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
    start,
    has_row,
    has_expert,  # or None where there is no question
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Returns ``w[expert, n, start:start + BLOCK_K]`` of plain weights as float32, zeros outside.

    ``expert`` and ``n`` are int64; they and the masks broadcast to a tile whose axis of the depth
    is 1: the last, or the last but one if TRANSPOSED.
    """
    k = start + _along(n, BLOCK_K, TRANSPOSED)
    ptrs = weights_places(w_ptr, expert, n, k.to(tl.int64), N, K, TRANSPOSED)
    # In this order: it is the mask of the vectors first, which costs no registers of its own.
    inside = k < K
    if has_expert is not None:
        inside = has_expert & inside
    tile = tl.load(ptrs, mask=inside & has_row, other=0.0)
    return tile.to(tl.float32)


@triton.constexpr_function
def sums_of_row(encoding, scale_k, k, block_k):
    """Returns how many sums :func:`packed_products` returns for a row.

    Each is of words that a thread has, up to four, and that share a scale.
    """
    per_word = 4 * per_element(encoding)
    words = block_k // per_word
    return max(words // (4 if scale_k >= k else min(scale_k // per_word, 4)), 1)


@triton.jit
def _code_in(word, PLACE: tl.constexpr, ELEMENTS: tl.constexpr):
    """Returns a float32 by a code's place in a word, :func:`packed_products` says of what."""
    if _has_integers(ELEMENTS):
        BITS: tl.constexpr = 4 if ELEMENTS == "uint4" else 8
        FIRST_BIT: tl.constexpr = _first_bit(PLACE, ELEMENTS)
        bits = (word if PLACE * BITS == FIRST_BIT else word >> 8) & ((1 << BITS) - 1 << FIRST_BIT)
    elif ELEMENTS == "e2m1":
        bits = ((word << (28 - 4 * PLACE)) >> 6) & -0x7E400000
    else:
        bits = ((word << (24 - 8 * PLACE)) >> 4) & -0x78100000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def packed_products(
    w_ptr,  # [E, N, K] codes, a row in words of 4 bytes; or slots of experts
    scales_ptr,  # as of _decoded
    zero_points_ptr,
    x_ptr,  # of a vector [K]; a tile broadcasts to experts and rows
    x_weight,  # float32 on x, or None
    expert,  # or its place
    n,
    start,
    inside,  # whether there are such an expert and row
    has_x,
    dtype: tl.constexpr,  # of the operands
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ENCODING: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    ONE_ZERO_POINT: tl.constexpr,
):
    """Returns ``w[expert, n, k] * x[k]`` for BLOCK_K of k, summed up over some words.

    ``expert``, ``n`` and the masks are as of :func:`_decoded`; the tile's last axis has the sums of
    :func:`sums_of_row`. A weight is not rounded to the operands' dtype. A code becomes the bits of
    a float32. Those of an integer stay where they are in the word, if below bit 24: there, at bit
    b, a float32 is the integer times 2**(b - 149). Those of an E2M1 number are shifted to where
    they are the number times 2**-126, of an E4M3 number times 2**-120. x and the sum make up for it
    by a half each. A global scale is left to the sum over a row.
    """
    PER_WORD: tl.constexpr = 4 * per_element(ENCODING)
    ELEMENTS: tl.constexpr = elements_of(ENCODING)
    WORDS: tl.constexpr = K // PER_WORD
    # Elements of x, in a load of 8 bytes.
    X_BITS: tl.constexpr = x_ptr.dtype.scalar.element_ty.primitive_bitwidth
    X_LOAD: tl.constexpr = 64 // X_BITS
    word = start // PER_WORD + _along(n, BLOCK_K // PER_WORD)
    has_word = word < WORDS
    packed = tl.load(
        w_ptr.to(tl.pointer_type(tl.int32)) + (expert * N + n) * WORDS + word,
        mask=inside & has_word,
        other=0,
    )
    if ELEMENTS == "int8":
        packed ^= -0x7F7F7F80  # From a sign to 128 + q, in each byte.
    x_ptrs = x_ptr.to(tl.pointer_type(tl.int64)) + word * (PER_WORD // X_LOAD)
    sums = -0.0  # To add to it costs nothing.
    x_sum = -0.0
    for i in tl.static_range(PER_WORD):
        if i % X_LOAD == 0:
            several = tl.load(x_ptrs + i // X_LOAD, mask=has_x & has_word, other=0)
        one = several >> (X_BITS * (i % X_LOAD))
        if X_BITS == 16:
            x = one.to(tl.int16).to(x_ptr.dtype.scalar.element_ty, bitcast=True)
        else:
            x = one.to(tl.int32).to(x_ptr.dtype.scalar.element_ty, bitcast=True)
        if x_weight is not None:
            x = x.to(tl.float32) * x_weight
        x = converted(x, dtype).to(tl.float32)
        sums += _code_in(packed, i, ELEMENTS) * (x * _x_factor(i, ELEMENTS))
        x_sum += x
    if ELEMENTS == "e4m3":
        # A byte of NaN carries into its highest bit.
        is_nan = ((packed & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80
        sums = tl.where(is_nan != 0, float("nan"), sums)
    SUMS: tl.constexpr = sums_of_row(ENCODING, SCALE_K, K, BLOCK_K)
    sums = tl.sum(_by_groups(sums, SUMS), axis=len(n.shape))
    x_sum = tl.sum(_by_groups(x_sum, SUMS), axis=len(n.shape))
    if SCALE_N < N:
        row = expert * ((N + SCALE_N - 1) // SCALE_N) + n // SCALE_N
    else:
        row = expert + n * 0
    if SCALE_K < K:
        first = start + _along(n, SUMS) * (BLOCK_K // SUMS)
        place = row * ((K + SCALE_K - 1) // SCALE_K) + first // SCALE_K
        has_scale = inside & (first < K)
    else:
        place = row
        has_scale = inside
    scales = _load_scales(scales_ptr + place, has_scale, ENCODING)
    sums *= _sum_factor(ELEMENTS)
    if ELEMENTS == "uint4":
        zeros = 8.0
        if zero_points_ptr is not None:
            if ONE_ZERO_POINT:
                zeros = tl.load(zero_points_ptr + expert + n * 0, mask=inside, other=0)
            else:
                zeros = tl.load(zero_points_ptr + place, mask=has_scale, other=0)
            zeros = zeros.to(tl.float32)
        sums -= zeros * x_sum
    elif ELEMENTS == "int8":
        sums -= 128.0 * x_sum
    return sums * scales


@triton.jit
def weights_places(w_ptr, expert, n, k, N: tl.constexpr, K: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Returns the addresses of ``w[expert, n, k]`` of plain weights; all are int64."""
    if TRANSPOSED:
        ptrs = w_ptr + (expert * (N * K) + n) + k * N
    else:
        ptrs = w_ptr + (expert * (N * K) + n * K) + k
    return ptrs


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
    layer.check_plain("tensor maps")
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
