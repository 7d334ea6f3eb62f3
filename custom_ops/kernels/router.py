"""The router: tokens to expert ids and weights.

Its torch reference is :func:`custom_ops.routing.route`. One kernel does it all where a program can
well read the whole router weight; otherwise one computes the logits and another selects.

Legend: T tokens, D model width, E experts, K = top_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.expressions import E, Expression, K, T, cdiv
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import (
    Argument,
    Buffer,
    Constant,
    KernelSpec,
    Scalar,
    Step,
    TensorPointer,
    WorkspacePointer,
)
from custom_ops.options import RouterOptions
from custom_ops.routing import RENORMALIZE_EPS

__all__ = [
    "RouterConfig",
    "route_kernel",
    "router_config",
    "router_logits_kernel",
    "router_step",
    "router_step_with",
    "select_kernel",
]


@triton.jit
def _tile_logits(
    x_ptr,  # [T, D]
    router_weight_ptr,  # [E, D]
    router_bias_ptr,  # [E] or None
    token,  # [BLOCK_T], each below T
    expert,  # [BLOCK_E], each below E
    D: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Returns float32 logits ``[BLOCK_T, BLOCK_E]`` by matrix products.

    16-bit operands have exact products, summed in float32. Others are upcast, and never rounded to
    TF32: that would change which experts a token gets.
    """
    d = tl.arange(0, BLOCK_D)
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * D + d[None, :]
    w_ptrs = router_weight_ptr + expert[None, :] * D + d[:, None]
    whole: tl.constexpr = D % BLOCK_D == 0
    logits = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        if whole:
            x = tl.load(x_ptrs + start)
            w = tl.load(w_ptrs + start)
        else:
            inside = start + d < D
            x = tl.load(x_ptrs + start, mask=inside[None, :], other=0.0)
            w = tl.load(w_ptrs + start, mask=inside[:, None], other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        logits = tl.dot(x, w, logits, input_precision="ieee")
    if router_bias_ptr is not None:
        logits += tl.load(router_bias_ptr + expert).to(tl.float32)[None, :]
    return logits


@triton.jit
def _select(
    logits,  # [BLOCK_T, BLOCK_E], float32
    expert_ids_ptr,  # [T, K], int32
    expert_weights_ptr,  # [T, K], float32
    token,  # [BLOCK_T]
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    SCALING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Scores the experts, writes each token's K best and their weights."""
    expert = tl.arange(0, BLOCK_E)[None, :]
    exists = expert < E
    if SCORING == "softmax":
        logits = tl.where(exists, logits, float("-inf"))
        # A NaN logit makes the sum NaN, and with it the whole row.
        score = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        score = score / tl.sum(score, axis=1)[:, None]
    elif SCORING == "sigmoid":
        score = tl.sigmoid(logits)
    else:
        tl.static_assert(SCORING == "topk_softmax")
        score = logits

    # A distinct 64-bit key for each expert: in the high half the score as an integer of the same
    # order, with one zero and one NaN, the greatest; in the low half the lower expert first.
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (BLOCK_E - 1 - expert)
    # Below every key, -inf's included.
    lowest = tl.full((BLOCK_T, BLOCK_E), -(2**63), tl.int64)
    key = tl.where(exists, key, lowest)
    choice = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros((BLOCK_T, BLOCK_K), tl.int64)
    for k in tl.range(0, K):
        best = tl.max(key, axis=1)[:, None]
        chosen = tl.where(choice == k, best, chosen)
        key = tl.where(key == best, lowest, key)

    ordered = (chosen >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    weight = bits.to(tl.float32, bitcast=True)
    if SCORING == "topk_softmax":
        weight = tl.where(choice < K, weight, float("-inf"))
        weight = tl.exp(weight - tl.max(weight, axis=1)[:, None])
        weight = weight / tl.sum(weight, axis=1)[:, None]
    elif RENORMALIZE:
        weight = tl.where(choice < K, weight, 0.0)
        weight = weight / (tl.sum(weight, axis=1)[:, None] + EPS)
    slot = token.to(tl.int64)[:, None] * K + choice
    stored = (token < tokens)[:, None] & (choice < K)
    chosen_expert = BLOCK_E - 1 - chosen.to(tl.int32)
    tl.store(expert_ids_ptr + slot, chosen_expert, mask=stored)
    tl.store(expert_weights_ptr + slot, weight * SCALING, mask=stored)


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    x_ptr,  # [T, D]
    router_weight_ptr,  # [E, D]
    router_bias_ptr,  # [E] or None
    expert_ids_ptr,  # [T, K], int32
    expert_weights_ptr,  # [T, K], float32
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    SCALING: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Routes BLOCK_T tokens; BLOCK_E is at least E."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    # What lies beyond the last token or expert reads that one's row and is not stored.
    logits = _tile_logits(
        x_ptr,
        router_weight_ptr,
        router_bias_ptr,
        tl.minimum(token, tokens - 1),
        tl.minimum(tl.arange(0, BLOCK_E), E - 1),
        D,
        UPCAST,
        BLOCK_T,
        BLOCK_E,
        BLOCK_D,
    )
    _select(
        logits,
        expert_ids_ptr,
        expert_weights_ptr,
        token,
        tokens,
        E,
        K,
        SCORING,
        RENORMALIZE,
        EPS,
        SCALING,
        BLOCK_T,
        BLOCK_E,
        BLOCK_K,
    )


@triton.jit(do_not_specialize=["tokens"])
def router_logits_kernel(
    x_ptr,  # [T, D]
    router_weight_ptr,  # [E, D]
    router_bias_ptr,  # [E] or None
    logits_ptr,  # [T, E], float32
    tokens,
    E: tl.constexpr,
    D: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes a tile of the logits; with BLOCK_T = 1 by vector products."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.minimum(expert, E - 1)
    if BLOCK_T == 1:
        token = tl.program_id(0).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        x_ptrs = x_ptr + token * D + d
        w_ptrs = router_weight_ptr + row[:, None] * D + d[None, :]
        products = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
        for start in tl.range(0, D, BLOCK_D):
            inside = start + d < D
            x = tl.load(x_ptrs + start, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(w_ptrs + start, mask=inside[None, :], other=0.0).to(tl.float32)
            products += x[None, :] * w
        logits = tl.sum(products, axis=1)
        if router_bias_ptr is not None:
            logits += tl.load(router_bias_ptr + row).to(tl.float32)
        tl.store(logits_ptr + token * E + expert, logits, mask=expert < E)
    else:
        token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
        logits = _tile_logits(
            x_ptr,
            router_weight_ptr,
            router_bias_ptr,
            tl.minimum(token, tokens - 1),
            row,
            D,
            UPCAST,
            BLOCK_T,
            BLOCK_E,
            BLOCK_D,
        )
        ptrs = logits_ptr + token.to(tl.int64)[:, None] * E + expert[None, :]
        tl.store(ptrs, logits, mask=(token < tokens)[:, None] & (expert < E)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def select_kernel(
    logits_ptr,  # [T, E], float32
    expert_ids_ptr,  # [T, K], int32
    expert_weights_ptr,  # [T, K], float32
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    SCALING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores and selects for BLOCK_T tokens; BLOCK_E is at least E."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)[None, :]
    ptrs = logits_ptr + token.to(tl.int64)[:, None] * E + expert
    logits = tl.load(ptrs, mask=(token < tokens)[:, None] & (expert < E), other=0.0)
    _select(
        logits,
        expert_ids_ptr,
        expert_weights_ptr,
        token,
        tokens,
        E,
        K,
        SCORING,
        RENORMALIZE,
        EPS,
        SCALING,
        BLOCK_T,
        BLOCK_E,
        BLOCK_K,
    )


@dataclass(frozen=True)
class RouterConfig:
    """The path through the router and the tile of its logits.

    Attributes:
        path: ``fused``: one kernel; ``tiles``: logits by matrix products, then the selection;
            ``vectors``: logits by vector products, a token at a time, then the selection.
        block_t: Tokens.
        block_e: Experts; at least E where fused.
        block_d: Depth of one pipeline stage.
        num_warps: Warps of a program.
        num_stages: Depth of the pipeline.
    """

    path: Literal["fused", "tiles", "vectors"]
    block_t: int
    block_e: int
    block_d: int
    num_warps: int
    num_stages: int


# One program reads some 100 kB/us (estimated): it does so with a weight of the first size at any
# number of tokens, of the second where the experts take far longer anyway.
_ALONE_BYTES = 64 * 1024
_FUSED_BYTES = 1024 * 1024
_FEW_TOKENS = 16
# Vector products read the weight once per token, from L2; beyond this, tiles of 16 tokens win.
_VECTOR_BYTES = 16 * 1024 * 1024
_STAGE_BYTES = 24 * 1024
# 64-bit keys of a thread, above which registers spill.
_KEYS = 32


def router_config(
    layer: Layer, architecture: Architecture, first_tokens: int, last_tokens: int
) -> RouterConfig:
    """Chooses from sizes alone; nothing here was measured on a GPU.

    Args:
        layer: A layer with a router.
        architecture: Where it runs.
        first_tokens: Fewest tokens that it is launched for.
        last_tokens: Most tokens.
    """
    experts = max(16, _power_of_2(layer.experts))
    weight_bytes = layer.experts * layer.width * layer.routing_dtype.itemsize
    few = last_tokens <= _FEW_TOKENS
    if experts <= 256 and weight_bytes <= (_ALONE_BYTES if few else _FUSED_BYTES):
        block_t = 16 if first_tokens < 1024 else 32 if first_tokens < 4096 else 64
        block_t = min(block_t, 8 * 32 * _KEYS // experts)
        return _tiled(layer, architecture, "fused", block_t, experts)
    if few and last_tokens * weight_bytes <= _VECTOR_BYTES:
        # A warp reads 512 contiguous bytes of an expert's row.
        block_d = min(_power_of_2(layer.width), 512 // layer.routing_dtype.itemsize)
        return RouterConfig("vectors", 1, 4, block_d, num_warps=4, num_stages=2)
    if first_tokens < 64:
        return _tiled(layer, architecture, "tiles", 16, min(experts, 16 if few else 32))
    block_t = 32 if first_tokens < 1024 else 64
    return _tiled(layer, architecture, "tiles", block_t, min(experts, 64))


def _tiled(
    layer: Layer,
    architecture: Architecture,
    path: Literal["fused", "tiles"],
    block_t: int,
    block_e: int,
) -> RouterConfig:
    itemsize = max(layer.tokens_dtype.itemsize, layer.routing_dtype.itemsize)
    depth_bytes = (block_t + block_e) * itemsize
    # 128 contiguous bytes of a row, unless that makes the stages too big.
    block_d = min(128 // itemsize, _power_of_2(layer.width), _STAGE_BYTES // depth_bytes)
    block_d = max(16, 1 << (block_d.bit_length() - 1))
    stages = architecture.shared_memory // 2 // (depth_bytes * block_d)
    num_warps = 8 if block_t * block_e > 4 * 32 * _KEYS else 4
    return RouterConfig(path, block_t, block_e, block_d, num_warps, max(1, min(3, stages)))


def router_step(
    layer: Layer, architecture: Architecture, first_tokens: int, last_tokens: int
) -> Step:
    """The first stage: x to the buffers ``expert_ids`` (int32) and ``expert_weights`` (float32).

    Args:
        layer: A layer with a router.
        architecture: Where it runs.
        first_tokens: Fewest tokens that it is launched for.
        last_tokens: Most tokens.

    Raises:
        ValueError: If the layer has no router.
    """
    config = router_config(layer, architecture, first_tokens, last_tokens)
    return router_step_with(layer, architecture, config)


def router_step_with(layer: Layer, architecture: Architecture, config: RouterConfig) -> Step:
    """The same with a given configuration."""
    if layer.router is None:
        raise ValueError("the layer has no router")
    chosen = (
        Buffer("expert_ids", torch.int32, T * K),
        Buffer("expert_weights", torch.float32, T * K),
    )
    if config.path == "fused":
        return Step(chosen, (_route(layer, layer.router, architecture, config),))
    return Step(
        (Buffer("router_logits", torch.float32, T * E), *chosen),
        (_logits(layer, architecture, config), _selection(layer, layer.router, architecture)),
    )


def _route(
    layer: Layer, router: RouterOptions, architecture: Architecture, config: RouterConfig
) -> KernelSpec:
    return KernelSpec(
        route_kernel,
        {
            **_inputs(layer),
            **_CHOSEN,
            "tokens": Scalar(T),
            "E": Constant(layer.experts),
            "K": Constant(layer.top_k),
            "D": Constant(layer.width),
            **_scoring(router),
            "UPCAST": Constant(_upcast(layer, architecture)),
            "BLOCK_T": Constant(config.block_t),
            "BLOCK_E": Constant(config.block_e),
            "BLOCK_D": Constant(config.block_d),
            "BLOCK_K": Constant(_power_of_2(layer.top_k)),
            "PDL": Constant(architecture.has_dependent_launch),
        },
        grid=(cdiv(T, config.block_t), Expression.of(1), Expression.of(1)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        dependent_launch=architecture.has_dependent_launch,
    )


def _logits(layer: Layer, architecture: Architecture, config: RouterConfig) -> KernelSpec:
    return KernelSpec(
        router_logits_kernel,
        {
            **_inputs(layer),
            "logits_ptr": WorkspacePointer("router_logits", torch.float32),
            "tokens": Scalar(T),
            "E": Constant(layer.experts),
            "D": Constant(layer.width),
            "UPCAST": Constant(_upcast(layer, architecture)),
            "BLOCK_T": Constant(config.block_t),
            "BLOCK_E": Constant(config.block_e),
            "BLOCK_D": Constant(config.block_d),
            "PDL": Constant(architecture.has_dependent_launch),
        },
        grid=(cdiv(T, config.block_t), cdiv(E, config.block_e), Expression.of(1)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        dependent_launch=architecture.has_dependent_launch,
    )


def _selection(layer: Layer, router: RouterOptions, architecture: Architecture) -> KernelSpec:
    experts = _power_of_2(layer.experts)
    block_t = max(1, 1024 // experts)
    return KernelSpec(
        select_kernel,
        {
            "logits_ptr": WorkspacePointer("router_logits", torch.float32),
            **_CHOSEN,
            "tokens": Scalar(T),
            "E": Constant(layer.experts),
            "K": Constant(layer.top_k),
            **_scoring(router),
            "BLOCK_T": Constant(block_t),
            "BLOCK_E": Constant(experts),
            "BLOCK_K": Constant(_power_of_2(layer.top_k)),
            "PDL": Constant(architecture.has_dependent_launch),
        },
        grid=(cdiv(T, block_t), Expression.of(1), Expression.of(1)),
        num_warps=4,
        dependent_launch=architecture.has_dependent_launch,
    )


_CHOSEN: dict[str, Argument] = {
    "expert_ids_ptr": WorkspacePointer("expert_ids", torch.int32),
    "expert_weights_ptr": WorkspacePointer("expert_weights", torch.float32),
}


def _inputs(layer: Layer) -> dict[str, Argument]:
    bias = layer.weights_dtype
    return {
        "x_ptr": TensorPointer("x", layer.tokens_dtype),
        "router_weight_ptr": TensorPointer("router_weight", layer.routing_dtype),
        "router_bias_ptr": Constant(None) if bias is None else TensorPointer("router_bias", bias),
    }


def _scoring(router: RouterOptions) -> dict[str, Argument]:
    return {
        "SCORING": Constant(router.scoring),
        "RENORMALIZE": Constant(router.renormalize),
        "EPS": Constant(RENORMALIZE_EPS),
        "SCALING": Constant(router.routed_scaling),
    }


def _upcast(layer: Layer, architecture: Architecture) -> bool:
    dtype = layer.tokens_dtype
    on_tensor_cores = dtype == torch.float16 or architecture.has_bfloat16
    return dtype != layer.routing_dtype or dtype.itemsize != 2 or not on_tensor_cores


def _power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
