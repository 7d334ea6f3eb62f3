"""Kernels that compile fast; each exercises something an ahead-of-time compiler must handle."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from custom_ops import RouterOptions
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.expressions import D, Expression, T, cdiv
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import (
    Argument,
    Buffer,
    Constant,
    ForwardPlan,
    KernelSpec,
    Scalar,
    TensorMap,
    TensorPointer,
    TokenRange,
    WorkspacePointer,
)
from custom_ops.layer_shape import LayerShape
from custom_ops.weight_formats import plain_format

LAYER = Layer(
    LayerShape(
        *(4, 64, 128, 2),
        tokens_dtype=torch.float16,
        weight_format=plain_format(torch.float16),
        router=RouterOptions(2),
        routing_dtype=torch.float16,
        weights_dtype=None,
    )
)


@triton.jit(do_not_specialize=["tokens"])
def scale_kernel(x_ptr, y_ptr, bias_ptr, tokens, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x_ptr + at, mask=at < tokens).to(tl.float32) * FACTOR
    if bias_ptr is not None:
        y += 1
    tl.store(y_ptr + at, y, mask=at < tokens)


@triton.jit
def map_kernel(w1, y_ptr, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    tile = w1.load([expert, 0, 0]).reshape(BLOCK, BLOCK)
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at[:, None] * BLOCK + at[None, :], tile)


@triton.jit
def wrong_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 1, "this never compiles")
    tl.store(x_ptr, 0)


@triton.jit
def scratch_kernel(w1_ptr, y_ptr, BLOCK: tl.constexpr):
    made = tl.make_tensor_descriptor(w1_ptr, [64, 64], [64, 1], [BLOCK, BLOCK])
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at[:, None] * BLOCK + at[None, :], made.load([0, 0]))


def spec(function: Any, grid: Expression | int = 1, **arguments: Argument) -> KernelSpec:
    one = Expression.of(1)
    return KernelSpec(function, arguments, (Expression.of(grid), one, one))


def scale(factor: float, *, biased: bool = False) -> KernelSpec:
    return spec(
        scale_kernel,
        cdiv(T * D, 64),
        x_ptr=TensorPointer("x", torch.float16),
        y_ptr=WorkspacePointer("scaled", torch.float32),
        bias_ptr=TensorPointer("b1", torch.float16) if biased else Constant(None),
        tokens=Scalar(T * D),
        FACTOR=Constant(factor),
        BLOCK=Constant(64),
    )


def tiles() -> KernelSpec:
    """Loads ``[1, 32, 32]`` of w1 ``[4, 128, 64]``."""
    return spec(
        map_kernel,
        w1=TensorMap("w1", torch.float16, (4, 128, 64), (8192, 64, 1), (1, 32, 32)),
        y_ptr=TensorPointer("y", torch.float16),
        BLOCK=Constant(32),
    )


def on_x(function: Any, block: int) -> KernelSpec:
    return spec(function, x_ptr=TensorPointer("x", torch.float16), BLOCK=Constant(block))


def toy_plan(*launches: KernelSpec, device: str = "sm_80") -> ForwardPlan:
    """Two ranges: the first with one of the launches, the second with all."""
    buffers = (
        Buffer("counts", torch.int32, T + 1),
        Buffer("scaled", torch.float32, T * D),
    )
    return ForwardPlan(
        LAYER,
        architecture(device),
        (TokenRange(1, 16, buffers, launches[:1]), TokenRange(17, 1000, buffers, launches)),
    )
