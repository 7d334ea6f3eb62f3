"""Root mean square normalisation, in float32.

Its torch reference is :func:`custom_ops.reference.rms_norm`.

Legend: T tokens, D model width.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from custom_ops.kernels.expressions import Expression, T, cdiv
from custom_ops.kernels.spec import Constant, KernelSpec, Scalar, TensorPointer

# Elements that a program holds at a time; a row of more is read twice.
_MAX_BLOCK = 8192
_ELEMENTS_PER_THREAD = 16


@triton.jit(do_not_specialize=["tokens"])
def rms_norm_kernel(
    x_ptr,  # [T, D]
    weight_ptr,  # [D]
    y_ptr,  # [T, D]
    tokens,
    D: tl.constexpr,
    EPS: tl.constexpr,
    WEIGHT_PLUS_ONE: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Computes ``y[t] = x[t] * rsqrt(mean(x[t]²) + eps) * weight`` of BLOCK_T tokens."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = t.to(tl.int64)[:, None] * D
    inside_t = (t < tokens)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    squares = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        inside = inside_t & (start + d < D)
        x = tl.load(x_ptr + row + start + d, mask=inside, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=1) / D + EPS)[:, None]
    for start in tl.range(0, D, BLOCK_D):
        inside = inside_t & (start + d < D)
        x = tl.load(x_ptr + row + start + d, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + start + d, mask=start + d < D, other=0.0).to(tl.float32)
        if WEIGHT_PLUS_ONE:
            weight += 1.0
        y = x * scale
        if ROUND_BEFORE_WEIGHT:
            y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
        y *= weight
        tl.store(y_ptr + row + start + d, y.to(y_ptr.dtype.element_ty), mask=inside)


@lru_cache(maxsize=256)
def rms_norm_spec(
    width: int,
    tokens_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    eps: float,
    *,
    weight_plus_one: bool,
    round_before_weight: bool,
) -> KernelSpec:
    """Returns the launch of ``torch.ops.moe.rms_norm`` for at least one token of ``width``.

    x and y have ``tokens_dtype``; the dtypes are float32, float16 or bfloat16.
    """
    block_d = min(_MAX_BLOCK, max(16, triton.next_power_of_2(width)))
    block_t = max(1, 1024 // block_d)
    threads = block_t * block_d // _ELEMENTS_PER_THREAD
    return KernelSpec(
        rms_norm_kernel,
        {
            "x_ptr": TensorPointer("x", tokens_dtype),
            "weight_ptr": TensorPointer("weight", weight_dtype),
            "y_ptr": TensorPointer("y", tokens_dtype),
            "tokens": Scalar(T),
            "D": Constant(width),
            "EPS": Constant(eps),
            "WEIGHT_PLUS_ONE": Constant(weight_plus_one),
            "ROUND_BEFORE_WEIGHT": Constant(round_before_weight),
            "BLOCK_T": Constant(block_t),
            "BLOCK_D": Constant(block_d),
        },
        grid=(cdiv(T, block_t), Expression.of(1), Expression.of(1)),
        num_warps=min(16, max(2, threads // 32)),
    )
