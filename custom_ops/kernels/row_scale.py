"""The norm ahead of the experts: one factor for each token, which the first product's rows take.

Its torch reference is the scale in :func:`custom_ops.reference.experts`.

Legend: T tokens, D model width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.arguments import kernel_of
from custom_ops.kernels.device import wait_for_previous
from custom_ops.kernels.expressions import T, cdiv
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import Buffer, Step

# A thread takes 16 elements, a program of one token 4096 at a time.
_NUM_WARPS = 8
_ELEMENTS = 4096


@triton.jit(do_not_specialize=["tokens"])
def row_scale_kernel(
    x_ptr,  # [T, D]
    row_scale_ptr,  # [T], float32
    tokens,
    D: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``row_scale[t] = 1 / sqrt(mean(x[t] ** 2) + EPS)``."""
    wait_for_previous(PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    # Tokens beyond the last one read its row and are not stored.
    row = tl.minimum(token, tokens - 1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    x_ptrs = x_ptr + row[:, None] * D + d[None, :]
    squares = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        x = tl.load(x_ptrs + start, mask=(start + d < D)[None, :], other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=1) / D + EPS)
    tl.store(row_scale_ptr + token, scale, mask=token < tokens)


def row_scale_step(layer: Layer, architecture: Architecture) -> Step:
    """The norm: x to the buffer ``row_scale`` (float32), one pass over x."""
    block_d = min(_ELEMENTS, triton.next_power_of_2(layer.shape.width))
    block_t = _ELEMENTS // block_d
    spec = kernel_of(
        row_scale_kernel,
        layer,
        architecture,
        (cdiv(T, block_t),),
        {"block_t": block_t, "block_d": block_d, "num_warps": _NUM_WARPS},
        EPS=layer.shape.options.norm_eps,
    )
    return Step((Buffer("row_scale", torch.float32, T),), (spec,))
