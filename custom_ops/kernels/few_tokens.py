"""The experts for few tokens: no sort, a vector product per slot.

The slots' expert ids serve as the tile table. Reading the weights takes all the time, so each
program streams tiles of them past vectors, with several stages of tiles under way. A tile keeps its
products apart; they are added along the vector once, at the end. The second kernel takes all slots
of a token at once, sums their results in slot order and writes y. Their torch reference is
:func:`custom_ops.reference.experts`.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
import triton
import triton.language as tl

from custom_ops.kernels.activation import activate
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.arguments import first_product, kernel_of, sum_of_results
from custom_ops.kernels.combine import combine_step
from custom_ops.kernels.configs import FewConfig
from custom_ops.kernels.device import converted, wait_for_previous
from custom_ops.kernels.expressions import D, H, K, T, cdiv
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import Buffer, Constant, Step, WorkspacePointer
from custom_ops.kernels.weights import (
    packed_products,
    per_element,
    place_of,
    sums_of_row,
    weights_at,
    weights_places,
)

# The rows that the products of a wave write, and their sum reads.
_FLOAT32_ROWS = WorkspacePointer("rows", torch.float32)


@triton.jit(do_not_specialize=["wave"])
def few_up_kernel(
    x_ptr,  # [T, D]
    expert_ids_ptr,  # [T, K], -1 for no expert
    expert_weights_ptr,  # [T, K], or None
    row_scale_ptr,  # [T], float32, or None where there is no norm
    w1_ptr,  # [E, F, D], or [E, D, F] if W1_TRANSPOSED
    w1_scales_ptr,  # and the next two: of packed weights, else None
    w1_zero_points_ptr,
    w1_global_scales_ptr,
    b1_ptr,  # [E, F] or None
    wave_of_expert_ptr,  # [E], or None where all experts are resident
    place_of_expert_ptr,  # [E], or None
    hidden_ptr,  # [T, K, H], of the experts' dtype
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``hidden[slot] = act(scale[token] * w1[expert] @ x[token] + b1[expert])``."""
    dtype = hidden_ptr.dtype.element_ty
    F: tl.constexpr = 2 * H if GATED else H
    K_AXIS: tl.constexpr = 0 if W1_TRANSPOSED else 1
    # Gate and up rows are one block.
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    slot = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_N
    wait_for_previous(PDL)
    expert = tl.load(expert_ids_ptr + slot).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    if wave_of_expert_ptr is not None and tl.load(wave_of_expert_ptr + expert) != wave:
        return
    place = place_of(expert, place_of_expert_ptr).to(tl.int64)
    r = tl.arange(0, ROWS)
    if INTERLEAVED:
        row = 2 * first + r
        has_row = row < F
    else:
        unit = first + r % BLOCK_N
        row = r // BLOCK_N * H + unit
        has_row = unit < H
    n = tl.expand_dims(row.to(tl.int64), K_AXIS)
    in_n = tl.expand_dims(has_row, K_AXIS)
    k = tl.expand_dims(tl.arange(0, BLOCK_K), 1 - K_AXIS)
    x_ptrs = x_ptr + slot // K * D + k
    if WEIGHT_ON_INPUT:
        weight = tl.load(expert_weights_ptr + slot).to(tl.float32)

    if ENCODING == "plain":
        products = tl.zeros((BLOCK_K, ROWS) if W1_TRANSPOSED else (ROWS, BLOCK_K), tl.float32)
    else:
        products = tl.zeros((ROWS, sums_of_row(ENCODING, SCALE_K, D, BLOCK_K)), tl.float32)
    for start in tl.range(0, D, BLOCK_K, num_stages=NUM_STAGES):
        if ENCODING == "plain":
            x = tl.load(x_ptrs + start, mask=start + k < D, other=0.0)
            if WEIGHT_ON_INPUT:
                x = x.to(tl.float32) * weight
            w = weights_at(w1_ptr, place, n, start, in_n, None, F, D, BLOCK_K, W1_TRANSPOSED)
            products += w * converted(x, dtype).to(tl.float32)
        else:
            products += packed_products(
                w1_ptr,
                w1_scales_ptr,
                w1_zero_points_ptr,
                x_ptr + slot // K * D,
                weight if WEIGHT_ON_INPUT else None,
                place,
                n,
                start,
                in_n,
                True,
                dtype,
                F,
                D,
                BLOCK_K,
                ENCODING,
                SCALE_N,
                SCALE_K,
                ONE_ZERO_POINT,
            )
    z = tl.sum(products, axis=K_AXIS)
    if w1_global_scales_ptr is not None:
        z *= tl.load(w1_global_scales_ptr + place * F + row, mask=has_row, other=0.0)
    if row_scale_ptr is not None:
        z *= tl.load(row_scale_ptr + slot // K)
    if b1_ptr is not None:
        z += tl.load(b1_ptr + expert * F + row, mask=has_row, other=0.0).to(tl.float32)
    if not GATED:
        gate, up = z, z
    elif INTERLEAVED:
        gate, up = z.reshape(BLOCK_N, 2).split()
    else:
        gate, up = z.reshape(2, BLOCK_N).trans().split()
    h = activate(gate, up, GATED, ACTIVATION, ALPHA, LIMIT, dtype)
    unit = first + tl.arange(0, BLOCK_N)
    tl.store(hidden_ptr + slot * H + unit, h, mask=unit < H)


@triton.jit(do_not_specialize=["wave"])
def few_down_kernel(
    hidden_ptr,  # [T, K, H]
    expert_ids_ptr,  # [T, K]
    expert_weights_ptr,  # [T, K], or None where the weights are on the input
    w2_ptr,  # [E, D, H], or [E, H, D] if W2_TRANSPOSED
    w2_scales_ptr,  # and the next two: of packed weights, else None
    w2_zero_points_ptr,
    w2_global_scales_ptr,
    b2_ptr,  # [E, D] or None
    x_ptr,  # [T, D], or None where the result is the sum alone
    y_ptr,  # [T, D], or None where only some of the experts are resident
    wave_of_expert_ptr,  # [E], or None where all experts are resident
    place_of_expert_ptr,  # [E], or None
    rows_ptr,  # [T, K, D], float32, or None
    wave,
    E: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    W2_TRANSPOSED: tl.constexpr,
    ENCODING: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    ONE_ZERO_POINT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``y[t] = x[t] + sum_k weight[t, k] * (w2[expert] @ hidden[t, k] + b2[expert])``.

    Where only some of the experts are resident, it computes the terms of a wave's experts.
    """
    SLOTS: tl.constexpr = triton.next_power_of_2(K)
    # A thread has several places of a tile's first axis. Of plain weights these are slots, whose
    # results it adds up by itself; of packed ones rows, for which it converts a vector once.
    SLOT_AXIS: tl.constexpr = 0 if ENCODING == "plain" else 1
    K_AXIS: tl.constexpr = 1 if W2_TRANSPOSED else 2
    ROW: tl.constexpr = H // per_element(ENCODING)  # Elements of a row's weights.
    token = tl.program_id(1)
    d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.expand_dims(d.to(tl.int64), (SLOT_AXIS, K_AXIS))
    k = tl.expand_dims(tl.arange(0, BLOCK_K), (0, 3 - K_AXIS))
    s = tl.expand_dims(tl.arange(0, SLOTS), (1 - SLOT_AXIS, 2))
    slot = token * K + s
    if PDL:
        # The first weights come to L2 while the first kernel ends. The ids are older than it, since
        # it let this kernel start after its own wait for them, but nothing says that they are
        # visible before this kernel's wait. They are hints here: whatever is in range reads
        # weights, which no kernel writes, and nothing that is read is used. Volatile loads stay.
        hint = tl.load(expert_ids_ptr + slot, mask=s < K, other=-1, volatile=True).to(tl.int64)
        in_first = (hint >= 0) & (hint < E) & (n < D) & (k < ROW)
        ptrs = weights_places(w2_ptr, hint, n, k.to(tl.int64), D, ROW, W2_TRANSPOSED)
        tl.load(ptrs, mask=in_first, volatile=True)
    wait_for_previous(PDL)
    expert = tl.load(expert_ids_ptr + slot, mask=s < K, other=-1).to(tl.int64)
    has_expert = (expert >= 0) & (expert < E)
    place = expert
    if place_of_expert_ptr is not None:
        has_expert &= tl.load(wave_of_expert_ptr + expert, mask=has_expert, other=-1) == wave
        if tl.sum(has_expert.to(tl.int32)) == 0:
            return
        place = tl.load(place_of_expert_ptr + expert, mask=has_expert, other=0).to(tl.int64)

    # All slots at once, since one expert's rows alone are too little to have in flight.
    if ENCODING != "plain":
        SUMS: tl.constexpr = sums_of_row(ENCODING, SCALE_K, H, BLOCK_K)
        products = tl.zeros((BLOCK_N, SLOTS, SUMS), tl.float32)
        k = tl.expand_dims(tl.arange(0, SUMS), (0, 1))
    elif W2_TRANSPOSED:
        products = tl.zeros((SLOTS, BLOCK_K, BLOCK_N), tl.float32)
    else:
        products = tl.zeros((SLOTS, BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, H, BLOCK_K, num_stages=NUM_STAGES):
        if ENCODING == "plain":
            inside = has_expert & (start + k < H)
            h = tl.load(hidden_ptr + slot * H + start + k, mask=inside, other=0.0).to(tl.float32)
            w = weights_at(w2_ptr, place, n, start, n < D, has_expert, D, H, BLOCK_K, W2_TRANSPOSED)
            products += w * h
        else:
            products += packed_products(
                w2_ptr,
                w2_scales_ptr,
                w2_zero_points_ptr,
                hidden_ptr + slot * H,
                None,
                place,
                n,
                start,
                has_expert & (n < D),
                has_expert,
                hidden_ptr.dtype.element_ty,
                D,
                H,
                BLOCK_K,
                ENCODING,
                SCALE_N,
                SCALE_K,
                ONE_ZERO_POINT,
            )
    if w2_global_scales_ptr is not None:
        products *= tl.load(
            w2_global_scales_ptr + place * D + n, mask=has_expert & (n < D), other=0.0
        )
    if b2_ptr is not None:
        bias = tl.load(b2_ptr + expert * D + n, mask=has_expert & (n < D), other=0.0)
        products += tl.where(k == 0, bias.to(tl.float32), 0.0)
    if expert_weights_ptr is not None:
        weight = tl.load(expert_weights_ptr + slot, mask=has_expert, other=0.0)
        products *= weight.to(tl.float32)
    results = tl.sum(products, axis=K_AXIS)
    results = results.trans() if SLOT_AXIS == 1 else results  # [SLOTS, BLOCK_N]
    if rows_ptr is not None:
        has_row = has_expert.reshape(SLOTS, 1) & (d < D)[None, :]
        tl.store(rows_ptr + slot.reshape(SLOTS, 1) * D + d[None, :], results, mask=has_row)
    else:
        y = tl.zeros((BLOCK_N,), tl.float32)
        for i in tl.static_range(K):
            is_slot = tl.arange(0, SLOTS)[:, None] == i
            y += tl.sum(tl.where(is_slot, results, 0.0), axis=0)
        if x_ptr is not None:
            y += tl.load(x_ptr + token * D + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(y_ptr + token * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)


def few_step(layer: Layer, architecture: Architecture, up: FewConfig, down: FewConfig) -> Step:
    """Both products: x and the routing to y, or to the buffer ``rows`` (float32) where in waves."""
    buffers = [Buffer("hidden", layer.shape.weight_format.operand_dtype, T * K * H)]
    absent = Constant(None)
    results = {**sum_of_results(layer), "rows_ptr": absent}
    if layer.resident_experts is not None:
        buffers.append(Buffer("rows", torch.float32, T * K * D))
        results |= {"y_ptr": absent, "x_ptr": absent, "rows_ptr": _FLOAT32_ROWS}
    first = kernel_of(
        few_up_kernel,
        layer,
        architecture,
        (cdiv(H, up.block_n), T * K),
        asdict(up),
        **first_product(layer),
    )
    second = kernel_of(
        few_down_kernel,
        layer,
        architecture,
        (cdiv(D, down.block_n), T),
        asdict(down),
        **results,
    )
    return Step(tuple(buffers), (first, second))


def few_sum_step(layer: Layer, architecture: Architecture) -> Step:
    """The sum of weighted results where they are computed in waves: ``rows`` to y."""
    return combine_step(
        layer, architecture, rows_ptr=_FLOAT32_ROWS, expert_weights_ptr=Constant(None)
    )
