"""The weighted sum of each token's rows, in float32 and in slot order, and the residual.

Its torch reference is the sum at the end of :func:`custom_ops.reference.experts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.arguments import kernel_of, sum_of_results
from custom_ops.kernels.device import wait_for_previous
from custom_ops.kernels.expressions import D, T, cdiv
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import Argument, Step


@triton.jit(do_not_specialize=["tokens"])
def combine_kernel(
    rows_ptr,  # [R, D]
    row_of_slot_ptr,  # [T, K], -1 where a slot has no expert
    expert_weights_ptr,  # [T, K], or None where the weights are on the input
    x_ptr,  # [T, D], or None where the result is the sum alone
    y_ptr,  # [T, D]
    tokens,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``y[t] = x[t] + sum_k weight[t, k] * rows[row_of_slot[t, k]]``."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    wait_for_previous(PDL)
    inside = t < tokens
    first_slot = t.to(tl.int64) * K
    y = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for k in tl.range(0, K):
        row = tl.load(row_of_slot_ptr + first_slot + k, mask=inside, other=-1)
        has_row = (row >= 0)[:, None] & (d < D)[None, :]
        ptrs = rows_ptr + row.to(tl.int64)[:, None] * D + d[None, :]
        term = tl.load(ptrs, mask=has_row, other=0.0).to(tl.float32)
        if expert_weights_ptr is not None:
            weight = tl.load(expert_weights_ptr + first_slot + k, mask=row >= 0, other=0.0)
            term *= weight.to(tl.float32)[:, None]
        y += term
    if x_ptr is not None:
        x_ptrs = x_ptr + t.to(tl.int64)[:, None] * D + d[None, :]
        x = tl.load(x_ptrs, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        y += x.to(tl.float32)
    y_ptrs = y_ptr + t.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


def combine_step(layer: Layer, architecture: Architecture, **kernel_arguments: Argument) -> Step:
    """The last stage: the buffer ``rows`` to y; ``kernel_arguments`` replace those by name."""
    # A thread of a warp takes 16 bytes at a time; a program 4096 elements of y.
    block_d = min(512, triton.next_power_of_2(layer.shape.width))
    block_t = max(1, 4096 // block_d)
    spec = kernel_of(
        combine_kernel,
        layer,
        architecture,
        (cdiv(T, block_t), cdiv(D, block_d)),
        {"block_t": block_t, "block_d": block_d, "num_warps": 4},
        **sum_of_results(layer) | kernel_arguments,
    )
    return Step((), (spec,))
