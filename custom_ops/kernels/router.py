"""The router: tokens to expert ids and weights.

Its torch reference is :func:`custom_ops.routing.route`. One kernel does it all where a program can
well read the whole router weight; otherwise one computes the logits and another selects.

Legend: T tokens, D model width, E experts, K = top_k.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
import triton
import triton.language as tl

from custom_ops.dtypes import dtype_name
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.arguments import kernel_of
from custom_ops.kernels.configs import RouterConfig, needs_upcast, router_config
from custom_ops.kernels.device import load_block, wait_for_previous
from custom_ops.kernels.expressions import E, K, T, cdiv
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import (
    Argument,
    Buffer,
    Constant,
    Step,
    TensorPointer,
    WorkspacePointer,
)
from custom_ops.routing import RENORMALIZE_EPS


@triton.jit
def _split(w, SCALE: tl.constexpr):
    """Splits float32 into bfloat16 terms: ``w == high + (middle + low / SCALE) / SCALE``, exactly.

    The lower terms are scaled up so that they keep all bits of a subnormal number. Where ``high``
    is infinite or NaN, the others mean nothing; it is infinite from 2**128 - 2**119 on.
    """
    high = w.to(tl.bfloat16)
    rest = (w - high.to(tl.float32)) * SCALE
    middle = rest.to(tl.bfloat16)
    low = ((rest - middle.to(tl.float32)) * SCALE).to(tl.bfloat16)
    return high, middle, low


@triton.jit
def _tile_logits(
    x_ptr,  # [T, D]
    router_weight_ptr,  # [E, D]
    token,  # [BLOCK_T], each below T
    expert,  # [BLOCK_E], each below E
    D: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Returns float32 logits ``[BLOCK_T, BLOCK_E]`` by matrix products.

    16-bit operands have exact products, summed in float32; a float32 weight for bfloat16 tokens is
    split into three such. Others are upcast, and never rounded to TF32: that would change which
    experts a token gets.
    """
    # The rest that a bfloat16 leaves of a float32 is this much smaller, at least. A power of two.
    SCALE: tl.constexpr = 256.0
    d = tl.arange(0, BLOCK_D)
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * D + d[None, :]
    w_ptrs = router_weight_ptr + expert[None, :] * D + d[:, None]
    whole: tl.constexpr = D % BLOCK_D == 0
    split: tl.constexpr = not UPCAST and router_weight_ptr.dtype.element_ty == tl.float32
    logits = tl.zeros((token.shape[0], expert.shape[0]), tl.float32)
    middle_logits = tl.zeros_like(logits)
    low_logits = tl.zeros_like(logits)
    for start in tl.range(0, D, BLOCK_D):
        inside = start + d < D
        x = load_block(x_ptrs + start, inside[None, :], whole)
        w = load_block(w_ptrs + start, inside[:, None], whole)
        if split:
            w, middle, low = _split(w, SCALE)
            middle_logits = tl.dot(x, middle, middle_logits)
            low_logits = tl.dot(x, low, low_logits)
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        logits = tl.dot(x, w, logits, input_precision="ieee")
    if split:
        finite = tl.abs(logits) < float("inf")
        rest = (middle_logits + low_logits / SCALE) / SCALE
        logits = tl.where(finite, logits + rest, logits)
    return logits


@triton.jit
def _vector_logits(
    x_ptr,  # [T, D]
    router_weight_ptr,  # [E, D]
    token,
    expert,  # [BLOCK_E], each below E
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Returns one token's float32 logits ``[1, BLOCK_E]`` by vector products."""
    d = tl.arange(0, BLOCK_D)[None, :]
    x_ptrs = x_ptr + token.to(tl.int64) * D + d
    w_ptrs = router_weight_ptr + expert[:, None] * D + d
    whole: tl.constexpr = D % BLOCK_D == 0
    products = tl.zeros((expert.shape[0], BLOCK_D), tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=NUM_STAGES):
        inside = start + d < D
        x = load_block(x_ptrs + start, inside, whole)
        w = load_block(w_ptrs + start, inside, whole)
        products += x.to(tl.float32) * w.to(tl.float32)
    return tl.sum(products, axis=1)[None, :]


@triton.jit
def _rounded(number, DTYPE: tl.constexpr):
    """Returns a float32 rounded to the dtype of that name."""
    if DTYPE == "float16":
        number = number.to(tl.float16).to(tl.float32)
    elif DTYPE == "bfloat16":
        number = number.to(tl.bfloat16).to(tl.float32)
    else:
        tl.static_assert(DTYPE == "float32")
    return number


@triton.jit
def _logits(
    x_ptr,  # [T, D]
    router_weight_ptr,  # [E, D]
    router_bias_ptr,  # [E] or None
    token,  # [BLOCK_T], each below T
    expert,  # [BLOCK_E], each below E
    D: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Returns float32 logits ``[BLOCK_T, BLOCK_E]``; with BLOCK_T = 1 by vector products."""
    if token.shape[0] == 1:
        logits = _vector_logits(
            x_ptr, router_weight_ptr, tl.max(token, axis=0), expert, D, BLOCK_D, NUM_STAGES
        )
    else:
        logits = _tile_logits(x_ptr, router_weight_ptr, token, expert, D, UPCAST, BLOCK_D)
    if router_bias_ptr is not None:
        logits += tl.load(router_bias_ptr + expert).to(tl.float32)[None, :]
    return _rounded(logits, LOGITS_DTYPE)


@triton.jit
def _expert_at(position, E: tl.constexpr, N_GROUP: tl.constexpr, BLOCK_E: tl.constexpr):
    """Returns which expert is at a position of BLOCK_E, and whether one is.

    So that groups are rows of a power of two, each begins at a position of its own.
    """
    BLOCK_G: tl.constexpr = triton.next_power_of_2(N_GROUP)
    group = position // (BLOCK_E // BLOCK_G)
    member = position % (BLOCK_E // BLOCK_G)
    exists = (group < N_GROUP) & (member < E // N_GROUP)
    return group * (E // N_GROUP) + member, exists


@triton.jit
def _key(score, position, POSITIONS: tl.constexpr):
    """Returns distinct 64-bit integers in the order of the scores, the lower position first.

    In the high half is the score as an integer of the same order, with one zero and one NaN, the
    greatest; in the low half is the position from behind.
    """
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (POSITIONS - 1 - position)


@triton.jit
def _score_of(key):
    """Returns the score in a key."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _within_best_groups(
    key,  # [BLOCK_T, BLOCK_E]
    LOWEST: tl.constexpr,
    GROUP_SCORING: tl.constexpr,
    N_GROUP: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
):
    """Returns the keys, those outside a token's best groups lowered to LOWEST."""
    BLOCK_T: tl.constexpr = key.shape[0]
    BLOCK_G: tl.constexpr = triton.next_power_of_2(N_GROUP)
    key = tl.reshape(key, (BLOCK_T, BLOCK_G, key.shape[1] // BLOCK_G))
    best = tl.max(key, axis=2)
    score = _score_of(best)
    if GROUP_SCORING == "top2_sum":
        others = tl.where(key == best[:, :, None], LOWEST, key)
        score += _score_of(tl.max(others, axis=2))
    else:
        tl.static_assert(GROUP_SCORING == "max")
    group = tl.arange(0, BLOCK_G)[None, :]
    group_key = tl.where(group < N_GROUP, _key(score, group, BLOCK_G), LOWEST)
    chosen = tl.zeros((BLOCK_T, BLOCK_G), tl.int1)
    for _ in tl.range(0, TOPK_GROUP):
        first = group_key == tl.max(group_key, axis=1)[:, None]
        chosen |= first
        group_key = tl.where(first, LOWEST, group_key)
    key = tl.where(chosen[:, :, None], key, LOWEST)
    return tl.reshape(key, (BLOCK_T, key.shape[1] * key.shape[2]))


@triton.jit
def _select(
    logits,  # [BLOCK_T, BLOCK_E], float32
    selection_bias_ptr,  # [E] or None
    expert_ids_ptr,  # [T, K], int32
    expert_weights_ptr,  # [T, K], float32
    token,  # [BLOCK_T]
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUP_SCORING: tl.constexpr,
    N_GROUP: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    ROUTING_WEIGHTS_DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Scores the experts, writes each token's K best and their weights."""
    BLOCK_T: tl.constexpr = logits.shape[0]
    BLOCK_E: tl.constexpr = logits.shape[1]
    # Below every key, -inf's included.
    LOWEST: tl.constexpr = -(2**63)
    PLAIN: tl.constexpr = selection_bias_ptr is None and GROUP_SCORING == "none"
    position = tl.arange(0, BLOCK_E)[None, :]
    expert, exists = _expert_at(position, E, N_GROUP, BLOCK_E)
    if SCORING == "softmax":
        logits = tl.where(exists, logits, float("-inf"))
        # A NaN logit makes the sum NaN, and with it the whole row.
        score = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        score = score / tl.sum(score, axis=1)[:, None]
    elif SCORING == "sigmoid" and not PLAIN:
        score = tl.sigmoid(logits)
    else:
        # By the logits: in float32 the sigmoid of any beyond 17 is one.
        tl.static_assert(SCORING == "sigmoid" or SCORING == "topk_softmax")
        score = logits

    ranked = score
    if selection_bias_ptr is not None:
        ranked += tl.load(selection_bias_ptr + expert, mask=exists, other=0.0).to(tl.float32)
    key = tl.where(exists, _key(ranked, position, BLOCK_E), LOWEST)
    if GROUP_SCORING != "none":
        key = _within_best_groups(key, LOWEST, GROUP_SCORING, N_GROUP, TOPK_GROUP)
    choice = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros((BLOCK_T, BLOCK_K), tl.int64)
    for k in tl.range(0, K):
        best = tl.max(key, axis=1)[:, None]
        chosen = tl.where(choice == k, best, chosen)
        key = tl.where(key == best, LOWEST, key)

    position = BLOCK_E - 1 - chosen.to(tl.int32)
    if selection_bias_ptr is None:
        weight = _score_of(chosen)
    else:
        weight = tl.gather(score, position, axis=1)
    if SCORING == "sigmoid" and PLAIN:
        weight = tl.sigmoid(weight)
    if SCORING == "topk_softmax":
        weight = tl.where(choice < K, weight, float("-inf"))
        weight = tl.exp(weight - tl.max(weight, axis=1)[:, None])
        weight = weight / tl.sum(weight, axis=1)[:, None]
    elif RENORMALIZE:
        weight = tl.where(choice < K, weight, 0.0)
        weight = weight / (tl.sum(weight, axis=1)[:, None] + EPS)
    slot = token.to(tl.int64)[:, None] * K + choice
    stored = (token < tokens)[:, None] & (choice < K)
    chosen_expert, _ = _expert_at(position, E, N_GROUP, BLOCK_E)
    tl.store(expert_ids_ptr + slot, chosen_expert, mask=stored)
    weight = _rounded(weight * SCALING, ROUTING_WEIGHTS_DTYPE)
    tl.store(expert_weights_ptr + slot, weight, mask=stored)


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    x_ptr,  # [T, D]
    router_weight_ptr,  # [E, D]
    router_bias_ptr,  # [E] or None
    selection_bias_ptr,  # [E] or None
    expert_ids_ptr,  # [T, K], int32
    expert_weights_ptr,  # [T, K], float32
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUP_SCORING: tl.constexpr,
    N_GROUP: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    ROUTING_WEIGHTS_DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
    EPS: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Routes BLOCK_T tokens; BLOCK_E is at least the layer's expert_places."""
    wait_for_previous(PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    # Tokens and experts beyond the last one read its row and are not stored.
    read = tl.minimum(token, tokens - 1)
    expert, _ = _expert_at(tl.arange(0, BLOCK_E), E, N_GROUP, BLOCK_E)
    expert = tl.minimum(expert, E - 1)
    logits = _logits(
        x_ptr, router_weight_ptr, router_bias_ptr, read, expert,
        D, LOGITS_DTYPE, UPCAST, BLOCK_D, NUM_STAGES,
    )  # fmt: skip
    _select(
        logits, selection_bias_ptr, expert_ids_ptr, expert_weights_ptr, token, tokens,
        E, K, SCORING, RENORMALIZE, GROUP_SCORING, N_GROUP, TOPK_GROUP, ROUTING_WEIGHTS_DTYPE,
        SCALING, EPS, BLOCK_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def router_logits_kernel(
    x_ptr,  # [T, D]
    router_weight_ptr,  # [E, D]
    router_bias_ptr,  # [E] or None
    logits_ptr,  # [T, E], float32
    tokens,
    E: tl.constexpr,
    D: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes a tile of the logits."""
    wait_for_previous(PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    read = tl.minimum(token, tokens - 1)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.minimum(expert, E - 1)
    logits = _logits(
        x_ptr, router_weight_ptr, router_bias_ptr, read, row,
        D, LOGITS_DTYPE, UPCAST, BLOCK_D, NUM_STAGES,
    )  # fmt: skip
    ptrs = logits_ptr + token.to(tl.int64)[:, None] * E + expert[None, :]
    tl.store(ptrs, logits, mask=(token < tokens)[:, None] & (expert < E)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def select_kernel(
    logits_ptr,  # [T, E], float32
    selection_bias_ptr,  # [E] or None
    expert_ids_ptr,  # [T, K], int32
    expert_weights_ptr,  # [T, K], float32
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUP_SCORING: tl.constexpr,
    N_GROUP: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    ROUTING_WEIGHTS_DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores and selects for BLOCK_T tokens; BLOCK_E is at least the layer's expert_places."""
    wait_for_previous(PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert, exists = _expert_at(tl.arange(0, BLOCK_E)[None, :], E, N_GROUP, BLOCK_E)
    ptrs = logits_ptr + token.to(tl.int64)[:, None] * E + expert
    logits = tl.load(ptrs, mask=(token < tokens)[:, None] & exists, other=0.0)
    _select(
        logits, selection_bias_ptr, expert_ids_ptr, expert_weights_ptr, token, tokens,
        E, K, SCORING, RENORMALIZE, GROUP_SCORING, N_GROUP, TOPK_GROUP, ROUTING_WEIGHTS_DTYPE,
        SCALING, EPS, BLOCK_K,
    )  # fmt: skip


def router_step(
    layer: Layer, architecture: Architecture, first_tokens: int, last_tokens: int
) -> Step:
    """The first stage: x to the buffers ``expert_ids`` (int32) and ``expert_weights`` (float32).

    Raises:
        ValueError: If the layer has no router.
    """
    config = router_config(layer, architecture, first_tokens, last_tokens)
    return router_step_with(layer, architecture, config)


def router_step_with(layer: Layer, architecture: Architecture, config: RouterConfig) -> Step:
    """The same with a given configuration."""
    if layer.shape.router is None:
        raise ValueError("the layer has no router")
    bias, selection_bias = layer.shape.weights_dtype, layer.shape.selection_dtype
    router, tokens = layer.shape.router, dtype_name(layer.shape.tokens_dtype)
    product: dict[str, Argument] = {
        "router_weight_ptr": TensorPointer("router_weight", layer.shape.routing_dtype),
        "router_bias_ptr": TensorPointer("router_bias", bias) if bias else Constant(None),
        "LOGITS_DTYPE": Constant(tokens if router.logits_dtype == "tokens" else "float32"),
        "UPCAST": Constant(needs_upcast(layer, architecture)),
    }
    selection: dict[str, Argument] = {
        "selection_bias_ptr": (
            TensorPointer("selection_bias", selection_bias) if selection_bias else Constant(None)
        ),
        "ROUTING_WEIGHTS_DTYPE": Constant(
            tokens if router.routing_weights_dtype == "tokens" else "float32"
        ),
        "SCALING": Constant(router.routed_scaling),
        "EPS": Constant(RENORMALIZE_EPS),
        "BLOCK_K": Constant(triton.next_power_of_2(layer.shape.top_k)),
    }
    chosen = (
        Buffer("expert_ids", torch.int32, T * K),
        Buffer("expert_weights", torch.float32, T * K),
    )
    programs = cdiv(T, config.block_t), cdiv(E, config.block_e)
    if config.path == "fused":
        arguments = {**product, **selection}
        fused = kernel_of(
            route_kernel, layer, architecture, programs[:1], asdict(config), **arguments
        )
        return Step(chosen, (fused,))
    logits: dict[str, Argument] = {"logits_ptr": WorkspacePointer("router_logits", torch.float32)}
    product_arguments, selection_arguments = {**product, **logits}, {**selection, **logits}
    experts = layer.expert_places
    # Eight keys for each thread of four warps.
    block_t = max(1, 1024 // experts)
    select = {"block_t": block_t, "block_e": experts, "num_warps": 4}
    return Step(
        (Buffer("router_logits", torch.float32, T * E), *chosen),
        (
            kernel_of(
                router_logits_kernel,
                layer,
                architecture,
                programs,
                asdict(config),
                **product_arguments,
            ),
            kernel_of(
                select_kernel,
                layer,
                architecture,
                (cdiv(T, block_t),),
                select,
                **selection_arguments,
            ),
        ),
    )
