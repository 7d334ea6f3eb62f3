"""A Triton MoE layer of the usual structure, to compare with.

It was written for this comparison alone, after the structure that inference servers share: slots
are sorted by expert, and each expert's are padded to whole blocks of rows; one grouped product,
called twice, gathers rows through the sorted slots and scatters its results to them; a separate
kernel activates in between; another sums a token's choices. cuBLAS computes the router's logits.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K choices,
N = T*K slots, P = N and every expert's padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.layers import Parameters, Routing, Shape
from benchmarks.gpu.peers import torch_router

Start = Callable[..., object]


@dataclass(frozen=True)
class Config:
    """The block of both products."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


# Such blocks are in servers' tables for this class of GPU.
CONFIGS = (
    Config(16, 64, 128, 1, 4, 4),
    Config(16, 128, 128, 1, 4, 3),
    Config(16, 128, 64, 1, 4, 5),
    Config(32, 128, 64, 1, 4, 4),
    Config(32, 64, 128, 8, 4, 4),
    Config(64, 128, 64, 8, 4, 4),
    Config(64, 256, 64, 8, 8, 4),
    Config(128, 128, 64, 16, 8, 4),
    Config(128, 256, 64, 8, 8, 4),
)
_COLUMNS = 1024
_SLOTS = 256


def candidates(shape: Shape, tokens: int) -> tuple[Config, ...]:
    """Returns the configurations that are worth trying: rows of a block near an expert's."""
    rows = tokens * shape.top_k / shape.experts
    return tuple(
        c for c in CONFIGS if c.block_m <= max(16, 2 * rows) and 8 * c.block_m >= min(rows, 512)
    )


@triton.jit
def fused_choose_kernel(
    logits_ptr,  # [T, E]
    ids_ptr,  # [T, K], int32
    weights_ptr,  # [T, K], float32
    E: tl.constexpr,
    K: tl.constexpr,
    SCORING: tl.constexpr,
    SCALING: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Chooses one token's experts, the best first."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < E
    logit = tl.load(logits_ptr + token * E + expert, mask=inside, other=0.0).to(tl.float32)
    logit = tl.where(inside, logit, float("-inf"))
    if SCORING == "softmax":
        score = tl.exp(logit - tl.max(logit, axis=0))
        score = score / tl.sum(score, axis=0)
    elif SCORING == "sigmoid":
        score = tl.sigmoid(logit)
    else:
        score = logit
    score = tl.where(inside, score, float("-inf"))
    k = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.full((BLOCK_K,), float("-inf"), tl.float32)
    for choice in tl.static_range(K):
        best = tl.argmax(score, axis=0)
        ids = tl.where(k == choice, best, ids)
        weights = tl.where(k == choice, tl.max(score, axis=0), weights)
        score = tl.where(expert == best, float("-inf"), score)
    if SCORING == "topk_softmax":
        weights = tl.exp(weights - tl.max(weights, axis=0))
    weights = tl.where(k < K, weights, 0.0)
    weights = weights / tl.sum(weights, axis=0) * SCALING
    tl.store(ids_ptr + token * K + k, ids, mask=k < K)
    tl.store(weights_ptr + token * K + k, weights, mask=k < K)


@triton.jit(do_not_specialize=["slots"])
def fused_align_kernel(
    ids_ptr,  # [N]
    next_ptr,  # [E], where each expert's slots begin in the padded order
    block_expert_ptr,  # [P / BLOCK_M]
    padded_ptr,  # [1], how many padded slots there are
    slots,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Counts the slots of each expert and lays out its blocks, in one program."""
    expert = tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in tl.range(0, slots, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < slots
        ids = tl.load(ids_ptr + n, mask=inside, other=0).to(tl.int32)
        counts += tl.histogram(ids, BLOCK_E, mask=inside)
    blocks = tl.cdiv(counts, BLOCK_M)
    first = tl.cumsum(blocks, axis=0) - blocks
    tl.store(next_ptr + expert, first * BLOCK_M, mask=expert < E)
    tl.store(padded_ptr, tl.sum(blocks, axis=0) * BLOCK_M)
    for block in tl.range(0, tl.max(blocks, axis=0)):
        tl.store(block_expert_ptr + first + block, expert, mask=block < blocks)


@triton.jit(do_not_specialize=["slots"])
def fused_place_kernel(ids_ptr, next_ptr, sorted_ptr, slots, BLOCK_N: tl.constexpr):
    """Puts each slot at its expert's next place."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < slots
    expert = tl.load(ids_ptr + n, mask=inside, other=0).to(tl.int32)
    place = tl.atomic_add(next_ptr + expert, 1, mask=inside, sem="relaxed")
    tl.store(sorted_ptr + place, n, mask=inside)


@triton.jit(do_not_specialize=["blocks_m", "slots"])
def fused_product_kernel(
    a_ptr,  # [rows, depth]; a slot's row is slot // A_SLOTS
    b_ptr,  # [E, columns, depth], or [E, depth, columns] if TRANSPOSED
    bias_ptr,  # [E, columns] or None
    c_ptr,  # [N, columns]
    weights_ptr,  # [N] or None
    sorted_ptr,  # [P]
    block_expert_ptr,  # [P / BLOCK_M]
    padded_ptr,  # [1]
    blocks_m,
    columns,
    depth,
    slots,
    A_SLOTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Multiplies one block of an expert's slots by a block of its matrix."""
    pid = tl.program_id(0)
    blocks_n = tl.cdiv(columns, BLOCK_N)
    group = pid // (GROUP_M * blocks_n)
    height = tl.minimum(blocks_m - group * GROUP_M, GROUP_M)
    block_m = group * GROUP_M + pid % (GROUP_M * blocks_n) % height
    block_n = pid % (GROUP_M * blocks_n) // height
    if block_m * BLOCK_M >= tl.load(padded_ptr):
        return
    slot = tl.load(sorted_ptr + block_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inside = slot < slots
    expert = tl.load(block_expert_ptr + block_m).to(tl.int64)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + (slot // A_SLOTS)[:, None] * depth + k[None, :]
    b_ptr += expert * columns * depth
    if TRANSPOSED:
        b_ptrs = b_ptr + (n % columns)[None, :] + k[:, None] * columns
        b_step = columns
    else:
        b_ptrs = b_ptr + (n % columns)[None, :] * depth + k[:, None]
        b_step = 1
    c = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, depth, BLOCK_K):
        deep = start + k < depth
        a = tl.load(a_ptrs + start, mask=inside[:, None] & deep[None, :], other=0.0)
        b = tl.load(b_ptrs + start * b_step, mask=deep[:, None], other=0.0)
        c = tl.dot(a, b, c)
    if bias_ptr is not None:
        c += tl.load(bias_ptr + expert * columns + n % columns).to(tl.float32)[None, :]
    if weights_ptr is not None:
        c *= tl.load(weights_ptr + slot, mask=inside, other=0.0)[:, None]
    c_ptrs = c_ptr + slot[:, None] * columns + n[None, :]
    tl.store(c_ptrs, c.to(c_ptr.dtype.element_ty), mask=inside[:, None] & (n < columns)[None, :])


@triton.jit
def fused_activate_kernel(
    z_ptr,  # [N, F]
    h_ptr,  # [N, H]
    H: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Activates a row: GELU, SiLU and gate, or clamped and interleaved as in gpt-oss."""
    slot = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < H
    if ACTIVATION == "gelu":
        z = tl.load(z_ptr + slot * H + n, mask=inside, other=0.0).to(tl.float32)
        h = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "silu":
        z = tl.load(z_ptr + slot * 2 * H + n, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(z_ptr + slot * 2 * H + H + n, mask=inside, other=0.0).to(tl.float32)
        h = z * tl.sigmoid(z) * up
    else:
        tl.static_assert(ACTIVATION == "clamped_swiglu")
        z = tl.load(z_ptr + (slot * H + n) * 2, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(z_ptr + (slot * H + n) * 2 + 1, mask=inside, other=0.0).to(tl.float32)
        z = tl.minimum(z, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        h = z * tl.sigmoid(ALPHA * z) * (up + 1)
    tl.store(h_ptr + slot * H + n, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def fused_sum_kernel(rows_ptr, y_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Sums a token's K rows, which are weighted already."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        y += tl.load(rows_ptr + (token * K + k) * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)


def launch(kernel: Any, grid: tuple[int, ...], **arguments: object) -> None:
    """Runs a kernel."""
    kernel[grid](**arguments)


def fused_router(
    shape: Shape, parameters: Parameters, x_TD: Tensor, start: Start = launch
) -> Routing:
    """The router: a product, then one kernel; PyTorch's operations where groups limit it."""
    if shape.router.limits_groups:
        return torch_router(shape, parameters, x_TD)
    bias = parameters.get("router_bias")
    logits_TE = torch.nn.functional.linear(x_TD, parameters["router_weight"], bias)
    ids_TK = x_TD.new_empty(len(x_TD), shape.top_k, dtype=torch.int32)
    weights_TK = x_TD.new_empty(len(x_TD), shape.top_k, dtype=torch.float32)
    start(
        fused_choose_kernel, (len(x_TD),),
        logits_ptr=logits_TE, ids_ptr=ids_TK, weights_ptr=weights_TK,
        E=shape.experts, K=shape.top_k,
        SCORING=shape.router.scoring, SCALING=shape.router.routed_scaling,
        BLOCK_E=triton.next_power_of_2(shape.experts), BLOCK_K=triton.next_power_of_2(shape.top_k),
        num_warps=1,
    )  # fmt: skip
    return ids_TK, weights_TK


def fused_moe(
    shape: Shape,
    parameters: Parameters,
    x_TD: Tensor,
    routing: Routing,
    config: Config,
    start: Start = launch,
) -> Tensor:
    """The experts."""
    ids, weights = routing
    E, D, H, F, K = shape.experts, shape.width, shape.hidden, shape.rows, shape.top_k
    slots, block_m = ids.numel(), config.block_m
    blocks_m = triton.cdiv(min(slots * block_m, slots + E * (block_m - 1)), block_m)
    ints: Any = {"dtype": torch.int32, "device": x_TD.device}
    next_E, padded = torch.empty(E, **ints), torch.empty(1, **ints)
    block_expert = torch.empty(blocks_m, **ints)
    # The number of slots marks a place that no slot takes.
    sorted_P = torch.full((blocks_m * block_m,), slots, **ints)
    z, h, rows = x_TD.new_empty(slots, F), x_TD.new_empty(slots, H), x_TD.new_empty(slots, D)
    y_TD = torch.empty_like(x_TD)

    def product(a: Tensor, weight: str, bias: str, c: Tensor, a_slots: int) -> None:
        start(
            fused_product_kernel, (blocks_m * triton.cdiv(c.shape[1], config.block_n),),
            a_ptr=a, b_ptr=parameters[weight], bias_ptr=parameters.get(bias), c_ptr=c,
            weights_ptr=weights if c is rows else None, sorted_ptr=sorted_P,
            block_expert_ptr=block_expert, padded_ptr=padded, blocks_m=blocks_m,
            columns=c.shape[1], depth=a.shape[1], slots=slots, A_SLOTS=a_slots,
            TRANSPOSED=shape.transposed,
            BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            GROUP_M=config.group_m, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    start(
        fused_align_kernel, (1,),
        ids_ptr=ids, next_ptr=next_E, block_expert_ptr=block_expert, padded_ptr=padded,
        slots=slots, E=E, BLOCK_M=block_m, BLOCK_E=max(32, triton.next_power_of_2(E)),
        BLOCK_N=4096, num_warps=16,
    )  # fmt: skip
    start(
        fused_place_kernel, (triton.cdiv(slots, _SLOTS),),
        ids_ptr=ids, next_ptr=next_E, sorted_ptr=sorted_P, slots=slots, BLOCK_N=_SLOTS,
    )  # fmt: skip
    product(x_TD, "w1", "b1", z, K)
    block = min(_COLUMNS, triton.next_power_of_2(H))
    options = shape.options
    start(
        fused_activate_kernel, (slots, triton.cdiv(H, block)),
        z_ptr=z, h_ptr=h, H=H, ACTIVATION=options.activation, ALPHA=options.alpha,
        LIMIT=options.limit, BLOCK=block,
    )  # fmt: skip
    product(h, "w2", "b2", rows, 1)
    block = min(_COLUMNS, triton.next_power_of_2(D))
    start(
        fused_sum_kernel, (len(x_TD), triton.cdiv(D, block)),
        rows_ptr=rows, y_ptr=y_TD, D=D, K=K, BLOCK=block,
    )  # fmt: skip
    return y_TD


def compile_for(
    shape: Shape, dtype: torch.dtype, config: Config, start: Start, device: str = "cuda"
) -> None:
    """Compiles all kernels for a layer; ``start``, which compiles one, is called as ``launch``."""

    def empty(*size: int) -> Tensor:
        # Kernels are compiled for a pointer's dtype and alignment; sizes are passed beside it.
        return torch.empty(16, dtype=dtype, device=device).as_strided(size, [0] * len(size))

    E, D, H, F = shape.experts, shape.width, shape.hidden, shape.rows
    parameters = {"router_weight": empty(E, D), "w1": empty(E, F, D), "w2": empty(E, D, H)}
    if shape.biases:
        parameters |= {"router_bias": empty(E), "b1": empty(E, F), "b2": empty(E, D)}
    x_TD = empty(16, D)
    if not shape.router.limits_groups:
        fused_router(shape, parameters, x_TD, start)
    weights = x_TD.new_empty(16, shape.top_k, dtype=torch.float32)
    for ids in (weights.int(), weights.long()):
        routing = ids, weights
        fused_moe(shape, parameters, x_TD, routing, config, start)
