"""The gradients of a layer's experts over sorted rows, without float atomics.

The values between the forward pass's products are computed again. Each expert's parameters get
their gradient from its rows in the order of the tokens; each token sums its rows in slot order, by
:mod:`custom_ops.kernels.combine`. Their torch reference is
:func:`custom_ops._grouped.experts_backward`.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k,
N = T*K slots, of which R have an expert and so a row. ``u`` is the first product with the norm's
scale, ``z = factor * u + b1`` the activation's input; the factor is the routing weight where
that is on the input, else 1.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
import triton
import triton.language as tl

from custom_ops.kernels.activation import activate
from custom_ops.kernels.activation_gradient import activate_gradient
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.arguments import first_product, kernel_of, max_tiles, sum_of_results
from custom_ops.kernels.configs import TileConfig
from custom_ops.kernels.device import converted, load_block, wait_for_previous
from custom_ops.kernels.expressions import D, E, H, K, T, cdiv
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
from custom_ops.kernels.weights import load_weights, split_gates

_ABSENT = Constant(None)


@triton.jit(do_not_specialize=["tokens"])
def hidden_gradient_kernel(
    x_ptr,  # [T, D]
    dy_ptr,  # [T, D]
    w1_ptr,  # [E, F, D]
    b1_ptr,  # [E, F] or None
    w2_ptr,  # [E, D, H]
    expert_weights_ptr,  # [T, K]
    row_scale_ptr,  # [T], float32, or None where there is no norm
    slot_of_row_ptr,  # [R]
    row_starts_ptr,  # [E + 1]
    tile_expert_ptr,  # [tiles]
    tile_row_ptr,  # [tiles]
    hidden_ptr,  # [R, H], of the experts' dtype, or None where parameters have no gradient
    dz_ptr,  # [R, F], of the experts' dtype
    weight_parts_ptr,  # [H tiles, N], float32, by row
    norm_parts_ptr,  # [H tiles, N], float32, by row, or None where there is no norm
    tokens,
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
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``hidden`` again, ``dz``, and slots' gradients, to be summed over tiles of units."""
    dtype = dz_ptr.dtype.element_ty
    F: tl.constexpr = 2 * H if GATED else H
    # Rows that alternate are read together, for loads of whole lines. Others have an accumulator
    # each: with one for both, 140 registers instead of 122 leave no room for a second program.
    COLUMNS: tl.constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N
    APART: tl.constexpr = GATED and not INTERLEAVED
    WHOLE: tl.constexpr = D % BLOCK_K == 0
    tile = tl.program_id(0)
    n_tile = tl.program_id(1)
    wait_for_previous(PDL)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)
    in_expert = row < tl.load(row_starts_ptr + expert + 1)
    # Rows beyond the expert's compute on slot 0's token and are not stored.
    slot = tl.load(slot_of_row_ptr + row, mask=in_expert, other=0)
    token = (slot // K).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    first = n_tile * BLOCK_N

    x_ptrs = x_ptr + token[:, None] * D + k[None, :]
    gate_u = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    up_u = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    for start in tl.range(0, D, BLOCK_K):
        x = converted(load_block(x_ptrs + start, (start + k < D)[None, :], WHOLE), dtype)
        w = load_weights(
            w1_ptr,
            expert,
            first,
            start,
            F,
            D,
            COLUMNS,
            BLOCK_K,
            WHOLE,
            GATED=INTERLEAVED,
            INTERLEAVED=INTERLEAVED,
            TRANSPOSED=W1_TRANSPOSED,
            TENSOR_MAP=False,
        )
        gate_u = tl.dot(x, w, gate_u, input_precision=PRECISION)
        if APART:
            w = load_weights(
                w1_ptr,
                expert,
                H + first,
                start,
                F,
                D,
                COLUMNS,
                BLOCK_K,
                WHOLE,
                GATED=False,
                INTERLEAVED=False,
                TRANSPOSED=W1_TRANSPOSED,
                TENSOR_MAP=False,
            )
            up_u = tl.dot(x, w, up_u, input_precision=PRECISION)
    if INTERLEAVED:
        gate_u, up_u = split_gates(gate_u, GATED, INTERLEAVED)

    dy_ptrs = dy_ptr + token[:, None] * D + k[None, :]
    dh = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, D, BLOCK_K):
        dy = converted(load_block(dy_ptrs + start, (start + k < D)[None, :], WHOLE), dtype)
        w = load_weights(
            w2_ptr,
            expert,
            first,
            start,
            H,
            D,
            BLOCK_N,
            BLOCK_K,
            WHOLE,
            GATED=False,
            INTERLEAVED=False,
            # w2 is [E, D, H]: this product's depth comes first unless the flag is set.
            TRANSPOSED=not W2_TRANSPOSED,
            TENSOR_MAP=False,
        )
        dh = tl.dot(dy, w, dh, input_precision=PRECISION)

    weight = tl.load(expert_weights_ptr + slot).to(tl.float32)[:, None]
    if row_scale_ptr is not None:
        scale = tl.load(row_scale_ptr + token)[:, None]
        gate_u *= scale
        up_u *= scale
    gate = gate_u
    up = up_u
    if WEIGHT_ON_INPUT:
        gate *= weight
        up *= weight
    n = first + tl.arange(0, BLOCK_N)
    if b1_ptr is not None:
        # From one hidden unit to the next, and from its gate to its up.
        UNIT: tl.constexpr = 2 if INTERLEAVED else 1
        UP: tl.constexpr = 1 if INTERLEAVED else H
        b1_ptrs = b1_ptr + expert.to(tl.int64) * F + n % H * UNIT
        gate += tl.load(b1_ptrs).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(b1_ptrs + UP).to(tl.float32)[None, :]

    stored = in_expert[:, None] & (n < H)[None, :]
    part = n_tile.to(tl.int64) * (tokens * K) + row
    if hidden_ptr is not None or not WEIGHT_ON_INPUT:
        h = activate(gate, up, GATED, ACTIVATION, ALPHA, LIMIT, dtype)
        if hidden_ptr is not None:
            h_ptrs = hidden_ptr + row.to(tl.int64)[:, None] * H + n[None, :]
            tl.store(h_ptrs, h, mask=stored)
        if not WEIGHT_ON_INPUT:
            sums = tl.sum(tl.where(stored, dh * h.to(tl.float32), 0.0), axis=1)
            tl.store(weight_parts_ptr + part, sums, mask=in_expert)
            dh *= weight
    dgate, dup = activate_gradient(dh, gate, up, GATED, ACTIVATION, ALPHA, LIMIT)
    dz_ptrs = dz_ptr + row.to(tl.int64)[:, None] * F
    if INTERLEAVED:
        f = 2 * first + tl.arange(0, 2 * BLOCK_N)
        dz = tl.interleave(dgate.to(dtype), dup.to(dtype))
        tl.store(dz_ptrs + f[None, :], dz, mask=in_expert[:, None] & (f < F)[None, :])
    else:
        tl.store(dz_ptrs + n[None, :], dgate.to(dtype), mask=stored)
        if GATED:
            tl.store(dz_ptrs + H + n[None, :], dup.to(dtype), mask=stored)
    if WEIGHT_ON_INPUT or row_scale_ptr is not None:
        products = dgate * gate_u
        if GATED:
            products += dup * up_u
        sums = tl.sum(tl.where(stored, products, 0.0), axis=1)
        if WEIGHT_ON_INPUT:
            tl.store(weight_parts_ptr + part, sums, mask=in_expert)
            sums *= tl.reshape(weight, (BLOCK_M,))
        if row_scale_ptr is not None:
            tl.store(norm_parts_ptr + part, sums, mask=in_expert)


@triton.jit(do_not_specialize=["tokens"])
def slot_gradient_kernel(
    dy_ptr,  # [T, D]
    b2_ptr,  # [E, D], or None where it has no share in the weights' gradient
    expert_ids_ptr,  # [T, K]
    row_scale_ptr,  # [T], float32, or None where there is no norm
    row_of_slot_ptr,  # [T, K], -1 where a slot has no expert
    weight_parts_ptr,  # [PARTS, N], by row
    norm_parts_ptr,  # [PARTS, N], by row, or None where there is no norm
    dweights_ptr,  # [T, K]
    norm_factor_ptr,  # [R], float32, or None where there is no norm
    tokens,
    D: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums each slot's parts to the gradient of its weight and the factor of the norm's share."""
    slot = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_previous(PDL)
    slots = tokens * K
    row = tl.load(row_of_slot_ptr + slot, mask=slot < slots, other=-1)
    has_row = row >= 0
    token = (slot // K).to(tl.int64)
    dweight = tl.zeros((BLOCK_N,), tl.float32)
    parts_ptrs = weight_parts_ptr + row
    for _ in tl.range(0, PARTS):
        dweight += tl.load(parts_ptrs, mask=has_row, other=0.0)
        parts_ptrs += slots
    if b2_ptr is not None:
        expert = tl.load(expert_ids_ptr + slot, mask=has_row, other=0).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        products = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for start in tl.range(0, D, BLOCK_D):
            inside = has_row[:, None] & (start + d < D)[None, :]
            dy_ptrs = dy_ptr + token[:, None] * D + (start + d)[None, :]
            b2_ptrs = b2_ptr + expert[:, None] * D + (start + d)[None, :]
            dy = tl.load(dy_ptrs, mask=inside, other=0.0).to(tl.float32)
            products += dy * tl.load(b2_ptrs, mask=inside, other=0.0).to(tl.float32)
        dweight += tl.sum(products, axis=1)
    tl.store(dweights_ptr + slot, dweight.to(dweights_ptr.dtype.element_ty), mask=slot < slots)
    if row_scale_ptr is not None:
        inner = tl.zeros((BLOCK_N,), tl.float32)
        parts_ptrs = norm_parts_ptr + row
        for _ in tl.range(0, PARTS):
            inner += tl.load(parts_ptrs, mask=has_row, other=0.0)
            parts_ptrs += slots
        scale = tl.load(row_scale_ptr + token, mask=has_row, other=0.0)
        tl.store(norm_factor_ptr + row, inner * scale * scale / D, mask=has_row)


@triton.jit
def input_gradient_kernel(
    x_ptr,  # [T, D]
    w1_ptr,  # [E, F, D]
    expert_weights_ptr,  # [T, K], or None where the weights are on the results
    row_scale_ptr,  # [T], float32, or None where there is no norm
    norm_factor_ptr,  # [R], float32, or None where there is no norm
    slot_of_row_ptr,  # [R]
    row_starts_ptr,  # [E + 1]
    tile_expert_ptr,  # [tiles]
    tile_row_ptr,  # [tiles]
    dz_ptr,  # [R, F]
    rows_ptr,  # [R, D], of the tokens' dtype
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    W1_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``rows = factor * scale[token] * dz @ w1[expert] - norm_factor * x[token]``."""
    F: tl.constexpr = 2 * H if GATED else H
    WHOLE: tl.constexpr = F % BLOCK_K == 0
    tile = tl.program_id(0)
    wait_for_previous(PDL)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    first_row = tl.load(tile_row_ptr + tile)
    row = first_row + tl.arange(0, BLOCK_M)
    in_expert = row < tl.load(row_starts_ptr + expert + 1)
    # Rows beyond the expert's compute on its first row and are not stored.
    row = tl.where(in_expert, row, first_row).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    first = tl.program_id(1) * BLOCK_N
    dz_ptrs = dz_ptr + row[:, None] * F + k[None, :]
    dx = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, F, BLOCK_K):
        dz = load_block(dz_ptrs + start, (start + k < F)[None, :], WHOLE)
        w = load_weights(
            w1_ptr,
            expert,
            first,
            start,
            D,
            F,
            BLOCK_N,
            BLOCK_K,
            WHOLE,
            GATED=False,
            INTERLEAVED=False,
            # w1 is [E, F, D]: this product's depth comes first unless the flag is set.
            TRANSPOSED=not W1_TRANSPOSED,
            TENSOR_MAP=False,
        )
        dx = tl.dot(dz, w, dx, input_precision=PRECISION)

    slot = tl.load(slot_of_row_ptr + row)
    token = (slot // K).to(tl.int64)
    n = first + tl.arange(0, BLOCK_N)
    stored = in_expert[:, None] & (n < D)[None, :]
    if expert_weights_ptr is not None:
        dx *= tl.load(expert_weights_ptr + slot).to(tl.float32)[:, None]
    if row_scale_ptr is not None:
        dx *= tl.load(row_scale_ptr + token)[:, None]
        x = tl.load(x_ptr + token[:, None] * D + n[None, :], mask=stored, other=0.0)
        dx -= x.to(tl.float32) * tl.load(norm_factor_ptr + row)[:, None]
    ptrs = rows_ptr + row[:, None] * D + n[None, :]
    tl.store(ptrs, dx.to(rows_ptr.dtype.element_ty), mask=stored)


@triton.jit
def weight_gradient_kernel(
    values_ptr,  # [R, V], of the experts' dtype: dz or hidden
    tokens_ptr,  # [T, D]: x or dy
    expert_weights_ptr,  # [T, K], or None where the tokens are not weighted
    row_scale_ptr,  # [T], float32, or None where they are not normalised
    slot_of_row_ptr,  # [R]
    row_starts_ptr,  # [E + 1]
    dw_ptr,  # [E, V, D], or [E, D, V] where TRANSPOSED
    V: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``dw[expert] = values.T @ (factor * tokens)`` over the expert's rows in order."""
    dtype = dw_ptr.dtype.element_ty
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.program_id(2)
    wait_for_previous(PDL)
    end = tl.load(row_starts_ptr + expert + 1)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(tl.load(row_starts_ptr + expert), end, BLOCK_K):
        row = start + tl.arange(0, BLOCK_K)
        in_expert = row < end
        # What stands in for rows beyond the expert's is zero all through: slot 0 may hold a NaN.
        slot = tl.load(slot_of_row_ptr + row, mask=in_expert, other=0)
        token = (slot // K).to(tl.int64)
        values_ptrs = values_ptr + row.to(tl.int64)[None, :] * V + m[:, None]
        values = tl.load(values_ptrs, mask=in_expert[None, :] & (m < V)[:, None], other=0.0)
        tokens_ptrs = tokens_ptr + token[:, None] * D + n[None, :]
        read = tl.load(tokens_ptrs, mask=in_expert[:, None] & (n < D)[None, :], other=0.0)
        if expert_weights_ptr is not None:
            weight = tl.load(expert_weights_ptr + slot, mask=in_expert, other=0.0)
            read = read.to(tl.float32) * weight.to(tl.float32)[:, None]
        if row_scale_ptr is not None:
            scale = tl.load(row_scale_ptr + token, mask=in_expert, other=0.0)
            read = read.to(tl.float32) * scale[:, None]
        dw = tl.dot(values, converted(read, dtype), dw, input_precision=PRECISION)

    V_STRIDE: tl.constexpr = 1 if TRANSPOSED else D
    D_STRIDE: tl.constexpr = V if TRANSPOSED else 1
    ptrs = dw_ptr + expert.to(tl.int64) * V * D + m[:, None] * V_STRIDE + n[None, :] * D_STRIDE
    tl.store(ptrs, dw.to(dtype), mask=(m < V)[:, None] & (n < D)[None, :])


@triton.jit
def bias_gradient_kernel(
    values_ptr,  # [R, V], or by token where TOKENS: [T, V]
    expert_weights_ptr,  # [T, K], or None where the values are not weighted
    slot_of_row_ptr,  # [R]
    row_starts_ptr,  # [E + 1]
    db_ptr,  # [E, V]
    V: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``db[expert]``, the weighted sum of values over the expert's rows in order."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.program_id(1)
    wait_for_previous(PDL)
    end = tl.load(row_starts_ptr + expert + 1)
    sums = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in tl.range(tl.load(row_starts_ptr + expert), end, BLOCK_K):
        row = start + tl.arange(0, BLOCK_K)
        in_expert = row < end
        slot = tl.load(slot_of_row_ptr + row, mask=in_expert, other=0)
        at = (slot // K if TOKENS else row).to(tl.int64)
        ptrs = values_ptr + at[:, None] * V + n[None, :]
        values = tl.load(ptrs, mask=in_expert[:, None] & (n < V)[None, :], other=0.0)
        values = values.to(tl.float32)
        if expert_weights_ptr is not None:
            weight = tl.load(expert_weights_ptr + slot, mask=in_expert, other=0.0)
            values *= weight.to(tl.float32)[:, None]
        sums += values
    db = tl.sum(sums, axis=0).to(db_ptr.dtype.element_ty)
    tl.store(db_ptr + expert.to(tl.int64) * V + n, db, mask=n < V)


def hidden_gradient_step(
    layer: Layer, architecture: Architecture, config: TileConfig, *, train_parameters: bool
) -> Step:
    """The way through the hidden rows: x and dy to the buffers ``dz`` and ``hidden``.

    With it come the parts of the slots' gradients, one for each tile of hidden units.
    """
    parts = cdiv(H, config.block_n)
    slots = parts * (T * K)
    spec = kernel_of(
        hidden_gradient_kernel,
        layer,
        architecture,
        (max_tiles(config.block_m), parts),
        asdict(config),
        dy_ptr=_tokens(layer, "dy"),
        **_parts(layer),
        **({} if train_parameters else {"hidden_ptr": _ABSENT}),
        dz_ptr=_dz(layer),
    )
    buffers = [Buffer("dz", layer.shape.weight_format.operand_dtype, T * K * layer.shape.rows)]
    if train_parameters:
        buffers.append(Buffer("hidden", layer.shape.weight_format.operand_dtype, T * K * H))
    buffers.append(Buffer("weight_parts", torch.float32, slots))
    if layer.shape.options.pre_norm != "none":
        buffers.append(Buffer("norm_parts", torch.float32, slots))
    return Step(tuple(buffers), (spec,))


def slot_gradient_step(layer: Layer, architecture: Architecture, config: TileConfig) -> Step:
    """The slots: the parts to dweights and the buffer ``norm_factor``."""
    has_bias = layer.shape.b2 and not layer.shape.options.weight_on_input
    block_d = min(64, triton.next_power_of_2(layer.shape.width))
    launch = {"block_n": 1024 // block_d, "block_d": block_d, "num_warps": 4}
    spec = kernel_of(
        slot_gradient_kernel,
        layer,
        architecture,
        (cdiv(T * K, launch["block_n"]),),
        launch,
        dy_ptr=_tokens(layer, "dy"),
        **({} if has_bias else {"b2_ptr": _ABSENT}),
        **_parts(layer),
        dweights_ptr=TensorPointer("dweights", layer.shape.weights_dtype or torch.float32),
        norm_factor_ptr=_norm_factor(layer),
        PARTS=cdiv(layer.shape.hidden, config.block_n).evaluate({}),
    )
    has_norm = layer.shape.options.pre_norm != "none"
    buffers = (Buffer("norm_factor", torch.float32, T * K),) if has_norm else ()
    return Step(buffers, (spec,))


def input_gradient_step(layer: Layer, architecture: Architecture, config: TileConfig) -> Step:
    """The first product's way back: ``dz`` to the buffer ``rows``, in the tokens' dtype."""
    spec = kernel_of(
        input_gradient_kernel,
        layer,
        architecture,
        (max_tiles(config.block_m), cdiv(D, config.block_n)),
        asdict(config),
        **first_product(layer),
        norm_factor_ptr=_norm_factor(layer),
        dz_ptr=_dz(layer),
    )
    return Step((Buffer("rows", layer.shape.tokens_dtype, T * K * D),), (spec,))


def weight_gradients_step(layer: Layer, architecture: Architecture, config: TileConfig) -> Step:
    """The experts' parameters: dw1 and dw2, and db1 and db2 where there are biases."""
    on_input = first_product(layer)["expert_weights_ptr"]
    on_result = sum_of_results(layer)["expert_weights_ptr"]
    hidden = WorkspacePointer("hidden", layer.shape.weight_format.operand_dtype)

    def product(width: int, transposed: bool, **arguments: Argument) -> KernelSpec:
        grid = (cdiv(width, config.block_m), cdiv(D, config.block_n), E)
        return kernel_of(
            weight_gradient_kernel,
            layer,
            architecture,
            grid,
            asdict(config),
            V=width,
            TRANSPOSED=transposed,
            **arguments,
        )

    def column_sums(width: int, **arguments: Argument | bool) -> KernelSpec:
        block_n = min(64, triton.next_power_of_2(width))
        launch = {"block_n": block_n, "block_k": 2048 // block_n, "num_warps": 4}
        grid = (cdiv(width, block_n), E)
        return kernel_of(
            bias_gradient_kernel, layer, architecture, grid, launch, V=width, **arguments
        )

    def gradient(name: str) -> Argument:
        return TensorPointer(name, layer.shape.weight_format.operand_dtype)

    launches = [
        product(
            layer.shape.rows,
            layer.shape.layout.w1_transposed,
            values_ptr=_dz(layer),
            tokens_ptr=_tokens(layer, "x"),
            expert_weights_ptr=on_input,
            dw_ptr=gradient("dw1"),
        ),
        # dw2 is [E, D, H]: what the kernel calls transposed is how w2 lies without the flag.
        product(
            layer.shape.hidden,
            not layer.shape.layout.w2_transposed,
            values_ptr=hidden,
            tokens_ptr=_tokens(layer, "dy"),
            expert_weights_ptr=on_result,
            row_scale_ptr=_ABSENT,
            dw_ptr=gradient("dw2"),
        ),
    ]
    if layer.shape.b1:
        launches.append(
            column_sums(
                layer.shape.rows,
                values_ptr=_dz(layer),
                expert_weights_ptr=_ABSENT,
                TOKENS=False,
                db_ptr=gradient("db1"),
            )
        )
    if layer.shape.b2:
        launches.append(
            column_sums(
                layer.shape.width,
                values_ptr=_tokens(layer, "dy"),
                expert_weights_ptr=on_result,
                TOKENS=True,
                db_ptr=gradient("db2"),
            )
        )
    return Step((), tuple(launches))


def _tokens(layer: Layer, name: str) -> Argument:
    return TensorPointer(name, layer.shape.tokens_dtype)


def _dz(layer: Layer) -> Argument:
    return WorkspacePointer("dz", layer.shape.weight_format.operand_dtype)


def _parts(layer: Layer) -> dict[str, Argument]:
    return {
        "weight_parts_ptr": WorkspacePointer("weight_parts", torch.float32),
        "norm_parts_ptr": _of_norm(layer, "norm_parts"),
    }


def _norm_factor(layer: Layer) -> Argument:
    return _of_norm(layer, "norm_factor")


def _of_norm(layer: Layer, buffer: str) -> Argument:
    has_norm = layer.shape.options.pre_norm != "none"
    return WorkspacePointer(buffer, torch.float32) if has_norm else _ABSENT
