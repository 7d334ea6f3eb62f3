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

import triton
import triton.language as tl

from custom_ops.kernels.activation import activate
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.arguments import first_product, kernel_of, max_tiles
from custom_ops.kernels.configs import GemmConfig
from custom_ops.kernels.device import load_block, wait_for_previous
from custom_ops.kernels.expressions import D, H, K, T, cdiv
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import Argument, Buffer, Step, TensorMap, TensorPointer


@triton.jit
def _tile_of_program(NUM_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Returns which M tile and N tile a program computes.

    GROUP_M M tiles with the same N tile are neighbours: they are mostly of one expert, whose
    weights then come from L2.
    """
    pid = tl.program_id(0)
    num_m = tl.num_programs(0) // NUM_N
    first_m = pid // (GROUP_M * NUM_N) * GROUP_M
    group = tl.minimum(num_m - first_m, GROUP_M)
    within = pid % (GROUP_M * NUM_N)
    return first_m + within % group, within // group


@triton.jit
def expert_up_kernel(
    x_ptr,  # [T, D]
    w1,  # [E, F, D]: a pointer, or a tensor map
    b1_ptr,  # [E, F] or None
    expert_weights_ptr,  # [T, K]
    row_scale_ptr,  # [T], float32, or None where there is no norm
    slot_of_row_ptr,  # [R]
    row_starts_ptr,  # [E + 1]
    tile_expert_ptr,  # [tiles]
    tile_row_ptr,  # [tiles]
    hidden_ptr,  # [R, H], of the experts' dtype
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    TENSOR_MAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``hidden = act(scale[token] * x[token] @ w1[expert].T + b1[expert])`` by tiles."""
    dtype = hidden_ptr.dtype.element_ty
    F: tl.constexpr = 2 * H if GATED else H
    # Rows of w1 from one hidden unit to the next, and from its gate row to its up row.
    UNIT: tl.constexpr = 2 if INTERLEAVED else 1
    UP: tl.constexpr = 1 if INTERLEAVED else H
    tile, n_tile = _tile_of_program(tl.cdiv(H, BLOCK_N), GROUP_M)
    wait_for_previous(PDL)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)
    in_expert = row < tl.load(row_starts_ptr + expert + 1)
    # Rows beyond the expert's compute on slot 0's token and are not stored.
    slot = tl.load(slot_of_row_ptr + row, mask=in_expert, other=0)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (slot // K).to(tl.int64)[:, None] * D + k[None, :]
    if WEIGHT_ON_INPUT:
        weight = tl.load(expert_weights_ptr + slot).to(tl.float32)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if not TENSOR_MAP:
        unit = expert.to(tl.int64) * F + n % H * UNIT
        w1_ptrs = w1 + unit[None, :] * D + k[:, None]

    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, D, BLOCK_K):
        whole: tl.constexpr = D % BLOCK_K == 0
        inside = start + k < D
        x = load_block(x_ptrs + start, inside[None, :], whole)
        if WEIGHT_ON_INPUT:
            x = x.to(tl.float32) * weight[:, None]
        x = x.to(dtype)
        if TENSOR_MAP:
            first = n_tile * BLOCK_N
            w = w1.load([expert, first, start]).reshape(BLOCK_N, BLOCK_K).T
        else:
            w = load_block(w1_ptrs + start, inside[:, None], whole)
        gate = tl.dot(x, w, gate, input_precision=PRECISION)
        if GATED:
            if TENSOR_MAP:
                if INTERLEAVED:
                    v = w1.load([expert, first, D + start]).reshape(BLOCK_N, BLOCK_K).T
                else:
                    v = w1.load([expert, H + first, start]).reshape(BLOCK_N, BLOCK_K).T
            else:
                v = load_block(w1_ptrs + UP * D + start, inside[:, None], whole)
            up = tl.dot(x, v, up, input_precision=PRECISION)

    if row_scale_ptr is not None:
        scale = tl.load(row_scale_ptr + slot // K)[:, None]
        gate *= scale
        if GATED:
            up *= scale
    if b1_ptr is not None:
        b1_ptrs = b1_ptr + expert.to(tl.int64) * F + n % H * UNIT
        gate += tl.load(b1_ptrs).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(b1_ptrs + UP).to(tl.float32)[None, :]
    h = activate(gate, up, GATED, ACTIVATION, ALPHA, LIMIT, dtype)
    h_ptrs = hidden_ptr + row.to(tl.int64)[:, None] * H + n[None, :]
    tl.store(h_ptrs, h, mask=in_expert[:, None] & (n < H)[None, :])


@triton.jit
def expert_down_kernel(
    hidden_ptr,  # [R, H]
    w2,  # [E, D, H]: a pointer, or a tensor map
    b2_ptr,  # [E, D] or None
    row_starts_ptr,  # [E + 1]
    tile_expert_ptr,  # [tiles]
    tile_row_ptr,  # [tiles]
    rows_ptr,  # [R, D]
    D: tl.constexpr,
    H: tl.constexpr,
    TENSOR_MAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``rows = hidden @ w2[expert].T + b2[expert]``, tile by tile."""
    tile, n_tile = _tile_of_program(tl.cdiv(D, BLOCK_N), GROUP_M)
    wait_for_previous(PDL)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    first_row = tl.load(tile_row_ptr + tile)
    row = first_row + tl.arange(0, BLOCK_M)
    in_expert = row < tl.load(row_starts_ptr + expert + 1)
    k = tl.arange(0, BLOCK_K)
    # Rows beyond the expert's compute on its first row and are not stored.
    h_row = tl.where(in_expert, row, first_row).to(tl.int64)
    h_ptrs = hidden_ptr + h_row[:, None] * H + k[None, :]
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if not TENSOR_MAP:
        w2_ptrs = w2 + (expert.to(tl.int64) * D + n % D)[None, :] * H + k[:, None]

    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, H, BLOCK_K):
        whole: tl.constexpr = H % BLOCK_K == 0
        inside = start + k < H
        h = load_block(h_ptrs + start, inside[None, :], whole)
        if TENSOR_MAP:
            w = w2.load([expert, n_tile * BLOCK_N, start]).reshape(BLOCK_N, BLOCK_K).T
        else:
            w = load_block(w2_ptrs + start, inside[:, None], whole)
        y = tl.dot(h, w, y, input_precision=PRECISION)

    if b2_ptr is not None:
        y += tl.load(b2_ptr + expert.to(tl.int64) * D + n % D).to(tl.float32)[None, :]
    y_ptrs = rows_ptr + row.to(tl.int64)[:, None] * D + n[None, :]
    y = y.to(rows_ptr.dtype.element_ty)
    tl.store(y_ptrs, y, mask=in_expert[:, None] & (n < D)[None, :])


def expert_up_step(layer: Layer, architecture: Architecture, config: GemmConfig) -> Step:
    """The first product: sorted slots to the buffer ``hidden``."""
    # One row per hidden unit where gate and up rows alternate. A gate tile that passes the end of
    # its rows then reads up rows, which x, masked, multiplies by zero: only if those hold no number
    # does that show, and then the unit has none anyway.
    unit = 2 if layer.options.interleaved else 1
    spec = kernel_of(
        expert_up_kernel,
        layer,
        architecture,
        (max_tiles(config.block_m) * cdiv(H, config.block_n),),
        asdict(config),
        w1=_weight(layer, config, "w1", layer.rows // unit, unit * layer.width),
        TENSOR_MAP=config.tensor_maps,
        **first_product(layer),
    )
    return Step((Buffer("hidden", layer.experts_dtype, T * K * H),), (spec,))


def expert_down_step(layer: Layer, architecture: Architecture, config: GemmConfig) -> Step:
    """The second product: ``hidden`` to the buffer ``rows``, unweighted, in the tokens' dtype."""
    spec = kernel_of(
        expert_down_kernel,
        layer,
        architecture,
        (max_tiles(config.block_m) * cdiv(D, config.block_n),),
        asdict(config),
        w2=_weight(layer, config, "w2", layer.width, layer.hidden),
        TENSOR_MAP=config.tensor_maps,
    )
    return Step((Buffer("rows", layer.tokens_dtype, T * K * D),), (spec,))


def _weight(layer: Layer, config: GemmConfig, tensor: str, rows: int, width: int) -> Argument:
    """Returns a pointer to w1 or w2, or a tensor map that views it as ``[E, rows, width]``."""
    if not config.tensor_maps:
        return TensorPointer(tensor, layer.experts_dtype)
    return TensorMap(
        tensor,
        layer.experts_dtype,
        shape=(layer.experts, rows, width),
        strides=(rows * width, width, 1),
        box=(1, config.block_n, config.block_k),
    )
