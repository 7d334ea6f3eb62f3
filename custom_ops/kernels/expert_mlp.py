"""Both products of an expert in one kernel, for small model widths.

A tile's hidden units are computed, activated and multiplied away block by block: they never leave
the chip. Written out, they would be most of the memory traffic where D is small. Its torch
reference is :func:`custom_ops.reference.experts`.

The width is split into a power of two and a remainder, such as 96 = 64 + 32: blocks are powers of
two, and padding 96 to 128 would waste a third of both products.

Legend: as in :mod:`custom_ops.kernels.grouped_gemm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops.kernels.activation import activate, activate_gated
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.arguments import (
    TILE_TABLE,
    bias_pointer,
    expert_constants,
    input_weights,
    max_tiles,
    row_scale_pointer,
    weight_pointer,
)
from custom_ops.kernels.configs import MlpConfig
from custom_ops.kernels.expressions import D, Expression, K, T
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import (
    Argument,
    Buffer,
    Constant,
    KernelSpec,
    Step,
    TensorPointer,
    WorkspacePointer,
)

__all__ = ["expert_mlp_kernel", "expert_mlp_step", "split_width"]


@triton.jit
def _load_part(ptrs, d, D: tl.constexpr, LAST: tl.constexpr):
    """Loads a block whose second axis is ``d``, masked only if the width does not fill it."""
    if LAST <= D:
        block = tl.load(ptrs)
    else:
        block = tl.load(ptrs, mask=(d < D)[None, :], other=0.0)
    return block


@triton.jit
def _load_x(ptrs, d, weight, D: tl.constexpr, LAST: tl.constexpr, WEIGHTED: tl.constexpr, dtype):
    x = _load_part(ptrs, d, D, LAST)
    if WEIGHTED:
        x = x.to(tl.float32) * weight[:, None]
    return x.to(dtype)


@triton.jit
def expert_mlp_kernel(
    x_ptr,  # [T, D]
    w1_ptr,  # [E, F, D]
    b1_ptr,  # [E, F] or None
    w2_ptr,  # [E, D, H]
    b2_ptr,  # [E, D] or None
    expert_weights_ptr,  # [T, K] or None
    row_scale_ptr,  # [T], float32, or None where there is no norm
    slot_of_row_ptr,  # [R]
    row_starts_ptr,  # [E + 1]
    tile_expert_ptr,  # [tiles]
    tile_row_ptr,  # [tiles]
    rows_ptr,  # [R, D]
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
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
    F: tl.constexpr = 2 * H if GATED else H
    UNIT: tl.constexpr = 2 if INTERLEAVED else 1
    UP: tl.constexpr = 1 if INTERLEAVED else H
    LAST: tl.constexpr = BLOCK_A + BLOCK_B
    tile = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)
    in_expert = row < tl.load(row_starts_ptr + expert + 1)
    # Rows beyond the expert's compute on slot 0's token and are not stored.
    slot = tl.load(slot_of_row_ptr + row, mask=in_expert, other=0)
    weight = 1.0
    if WEIGHT_ON_INPUT:
        weight = tl.load(expert_weights_ptr + slot).to(tl.float32)
    if row_scale_ptr is not None:
        scale = tl.load(row_scale_ptr + slot // K)[:, None]
    expert = expert.to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    a = tl.arange(0, BLOCK_A)
    x_ptrs = x_ptr + (slot // K).to(tl.int64)[:, None] * D
    w1_base = w1_ptr + expert * F * D
    w2_base = w2_ptr + expert * D * H
    y_ptrs = rows_ptr + row.to(tl.int64)[:, None] * D

    x_a = _load_x(x_ptrs + a[None, :], a, weight, D, BLOCK_A, WEIGHT_ON_INPUT, dtype)
    y_a = tl.zeros((BLOCK_M, BLOCK_A), tl.float32)
    if BLOCK_B > 0:
        b = BLOCK_A + tl.arange(0, BLOCK_B)
        x_b = _load_x(x_ptrs + b[None, :], b, weight, D, LAST, WEIGHT_ON_INPUT, dtype)
        y_b = tl.zeros((BLOCK_M, BLOCK_B), tl.float32)

    for start in tl.range(0, H, BLOCK_N):
        unit = start + n
        in_hidden = unit < H
        w1_row = unit % H * UNIT
        w1_ptrs = w1_base + w1_row[:, None] * D
        gate = tl.dot(
            x_a, _load_part(w1_ptrs + a[None, :], a, D, BLOCK_A).T, input_precision=PRECISION
        )
        if BLOCK_B > 0:
            gate = tl.dot(
                x_b, _load_part(w1_ptrs + b[None, :], b, D, LAST).T, gate, input_precision=PRECISION
            )
        if row_scale_ptr is not None:
            gate *= scale
        if b1_ptr is not None:
            gate += tl.load(b1_ptr + expert * F + w1_row).to(tl.float32)[None, :]
        if GATED:
            w1_ptrs += UP * D
            up = tl.dot(
                x_a, _load_part(w1_ptrs + a[None, :], a, D, BLOCK_A).T, input_precision=PRECISION
            )
            if BLOCK_B > 0:
                up = tl.dot(
                    x_b,
                    _load_part(w1_ptrs + b[None, :], b, D, LAST).T,
                    up,
                    input_precision=PRECISION,
                )
            if row_scale_ptr is not None:
                up *= scale
            if b1_ptr is not None:
                up += tl.load(b1_ptr + expert * F + w1_row + UP).to(tl.float32)[None, :]
            h = activate_gated(gate, up, ACTIVATION, ALPHA, LIMIT)
        else:
            h = activate(gate, ACTIVATION)
        if H % BLOCK_N != 0:
            h = tl.where(in_hidden[None, :], h, 0.0)
        h = h.to(dtype)
        w2_ptrs = w2_base + a[:, None] * H + unit[None, :]
        w2 = tl.load(w2_ptrs, mask=(a < D)[:, None] & in_hidden[None, :], other=0.0)
        y_a = tl.dot(h, w2.T, y_a, input_precision=PRECISION)
        if BLOCK_B > 0:
            w2_ptrs = w2_base + b[:, None] * H + unit[None, :]
            w2 = tl.load(w2_ptrs, mask=(b < D)[:, None] & in_hidden[None, :], other=0.0)
            y_b = tl.dot(h, w2.T, y_b, input_precision=PRECISION)

    out = rows_ptr.dtype.element_ty
    if b2_ptr is not None:
        y_a += tl.load(b2_ptr + expert * D + a, mask=a < D, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptrs + a[None, :], y_a.to(out), mask=in_expert[:, None] & (a < D)[None, :])
    if BLOCK_B > 0:
        if b2_ptr is not None:
            y_b += tl.load(b2_ptr + expert * D + b, mask=b < D, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptrs + b[None, :], y_b.to(out), mask=in_expert[:, None] & (b < D)[None, :])


def split_width(width: int) -> tuple[int, int]:
    """Returns two block sizes, powers of two from 16 on, that hold a width with little padding.

    The second is 0 where one block is enough.

    Example:
        >>> split_width(96), split_width(192), split_width(128), split_width(56)
        ((64, 32), (128, 64), (128, 0), (64, 0))
    """
    whole = max(16, 1 << (width - 1).bit_length())
    first = whole // 2
    if first < 16 or width == whole:
        return whole, 0
    rest = max(16, 1 << (width - first - 1).bit_length())
    return (first, rest) if rest < first else (whole, 0)


def expert_mlp_step(
    layer: Layer, architecture: Architecture, config: MlpConfig, expert_weights: Argument
) -> Step:
    """The experts: sorted slots to the buffer ``rows``, unweighted, in the tokens' dtype."""
    block_a, block_b = split_width(layer.width)
    spec = KernelSpec(
        expert_mlp_kernel,
        {
            "x_ptr": TensorPointer("x", layer.tokens_dtype),
            "w1_ptr": weight_pointer(layer, "w1"),
            "b1_ptr": bias_pointer(layer, "b1"),
            "w2_ptr": weight_pointer(layer, "w2"),
            "b2_ptr": bias_pointer(layer, "b2"),
            "expert_weights_ptr": input_weights(layer, expert_weights),
            "row_scale_ptr": row_scale_pointer(layer),
            "slot_of_row_ptr": WorkspacePointer("slot_of_row", torch.int32),
            **TILE_TABLE,
            "rows_ptr": WorkspacePointer("rows", layer.tokens_dtype),
            "D": Constant(layer.width),
            "H": Constant(layer.hidden),
            "K": Constant(layer.top_k),
            **expert_constants(expert_mlp_kernel, layer),
            "BLOCK_M": Constant(config.block_m),
            "BLOCK_N": Constant(config.block_n),
            "BLOCK_A": Constant(block_a),
            "BLOCK_B": Constant(block_b),
            "PRECISION": Constant("tf32" if layer.tf32 else "ieee"),
            "PDL": Constant(architecture.has_dependent_launch),
        },
        grid=(max_tiles(config.block_m), Expression.of(1), Expression.of(1)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        dependent_launch=architecture.has_dependent_launch,
    )
    return Step((Buffer("rows", layer.tokens_dtype, T * K * D),), (spec,))
