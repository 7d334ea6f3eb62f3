"""The experts for few tokens: no sort, a vector product per slot.

The slots' expert ids serve as the tile table. Reading the weights takes all the time, so each
program streams rows of one expert's matrix past one vector. The second kernel sums a token's
choices in slot order and writes y. Their torch reference is :func:`custom_ops.reference.experts`.
"""

from __future__ import annotations

from dataclasses import asdict

import triton
import triton.language as tl

from custom_ops.kernels.activation import activate
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.arguments import first_product, kernel_of, sum_of_results
from custom_ops.kernels.configs import FewConfig
from custom_ops.kernels.device import wait_for_previous
from custom_ops.kernels.expressions import D, H, K, T, cdiv
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import Buffer, Step


@triton.jit
def few_up_kernel(
    x_ptr,  # [T, D]
    expert_ids_ptr,  # [T, K], -1 for no expert
    expert_weights_ptr,  # [T, K], or None
    row_scale_ptr,  # [T], float32, or None where there is no norm
    w1_ptr,  # [E, F, D]
    b1_ptr,  # [E, F] or None
    hidden_ptr,  # [T, K, H], of the experts' dtype
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``hidden[slot] = act(scale[token] * w1[expert] @ x[token] + b1[expert])``."""
    dtype = hidden_ptr.dtype.element_ty
    F: tl.constexpr = 2 * H if GATED else H
    UNIT: tl.constexpr = 2 if INTERLEAVED else 1
    UP: tl.constexpr = 1 if INTERLEAVED else H
    slot = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    wait_for_previous(PDL)
    expert = tl.load(expert_ids_ptr + slot).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    row = expert * F + n % H * UNIT
    w1_ptrs = w1_ptr + row[:, None] * D + k[None, :]
    x_ptrs = x_ptr + slot // K * D + k
    if WEIGHT_ON_INPUT:
        weight = tl.load(expert_weights_ptr + slot).to(tl.float32)

    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, D, BLOCK_K):
        inside = start + k < D
        x = tl.load(x_ptrs + start, mask=inside, other=0.0)
        if WEIGHT_ON_INPUT:
            x = x.to(tl.float32) * weight
        x = x.to(dtype).to(tl.float32)[None, :]
        gate += tl.load(w1_ptrs + start, mask=inside[None, :], other=0.0).to(tl.float32) * x
        if GATED:
            w1_up = tl.load(w1_ptrs + UP * D + start, mask=inside[None, :], other=0.0)
            up += w1_up.to(tl.float32) * x
    z = tl.sum(gate, axis=1)
    u = tl.sum(up, axis=1)
    if row_scale_ptr is not None:
        scale = tl.load(row_scale_ptr + slot // K)
        z *= scale
        u *= scale
    if b1_ptr is not None:
        z += tl.load(b1_ptr + row).to(tl.float32)
        if GATED:
            u += tl.load(b1_ptr + row + UP).to(tl.float32)
    h = activate(z, u, GATED, ACTIVATION, ALPHA, LIMIT, dtype)
    tl.store(hidden_ptr + slot * H + n, h, mask=n < H)


@triton.jit
def few_down_kernel(
    hidden_ptr,  # [T, K, H]
    expert_ids_ptr,  # [T, K]
    expert_weights_ptr,  # [T, K], or None where the weights are on the input
    w2_ptr,  # [E, D, H]
    b2_ptr,  # [E, D] or None
    x_ptr,  # [T, D], or None where the result is the sum alone
    y_ptr,  # [T, D]
    E: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``y[t] = x[t] + sum_k weight[t, k] * (w2[expert] @ hidden[t, k] + b2[expert])``."""
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    wait_for_previous(PDL)
    y = tl.zeros((BLOCK_N,), tl.float32)
    for slot in tl.range(token * K, token * K + K):
        expert = tl.load(expert_ids_ptr + slot).to(tl.int64)
        if (expert >= 0) & (expert < E):
            row = expert * D + n % D
            w2_ptrs = w2_ptr + row[:, None] * H + k[None, :]
            total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
            for start in tl.range(0, H, BLOCK_K):
                inside = start + k < H
                h = tl.load(hidden_ptr + slot * H + start + k, mask=inside, other=0.0)
                w = tl.load(w2_ptrs + start, mask=inside[None, :], other=0.0)
                total += w.to(tl.float32) * h.to(tl.float32)[None, :]
            term = tl.sum(total, axis=1)
            if b2_ptr is not None:
                term += tl.load(b2_ptr + row).to(tl.float32)
            if expert_weights_ptr is not None:
                term *= tl.load(expert_weights_ptr + slot).to(tl.float32)
            y += term
    if x_ptr is not None:
        y += tl.load(x_ptr + token * D + n, mask=n < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * D + n, y.to(y_ptr.dtype.element_ty), mask=n < D)


def few_step(layer: Layer, architecture: Architecture, up: FewConfig, down: FewConfig) -> Step:
    """Both products: x and the routing to y."""
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
        **sum_of_results(layer),
    )
    return Step((Buffer("hidden", layer.experts_dtype, T * K * H),), (first, second))
