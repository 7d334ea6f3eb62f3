"""Experts in PyTorch: sort token slots by expert, then one matrix product per active expert.

It is the CPU's implementation, and everywhere the backward pass and float64.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k,
N = T*K slots (slot n is choice n % K of token n // K), R rows of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from custom_ops.activations import activate, activate_backward
from custom_ops.dtypes import accumulation_dtype
from custom_ops.expert_weights import ExpertWeights, PackedExperts
from custom_ops.options import ExpertOptions, RouterOptions
from custom_ops.packed_weights import PackedMatrices
from custom_ops.routing import route

# Bounds the [block*K, D] buffer of rows; wide enough that 128 experts with top-8 still see 256
# rows each per product.
_TOKENS_PER_BLOCK = 4096


def forward(
    x_TD: Tensor,
    routing: Mapping[str, Any],
    parameters: ExpertWeights | PackedExperts,
    options: ExpertOptions,
    router: RouterOptions | None = None,
) -> Tensor:
    """Computes ``torch.ops.moe.dropless``, or ``torch.ops.moe.experts`` without a router.

    Args:
        x_TD: Tokens ``[T, D]``.
        routing: The operator's ``router_weight``, ``router_bias`` and ``selection_bias``, or
            ``expert_ids [T, K]`` and ``expert_weights [T, K]``.
        parameters: The experts' parameters.
        options: The experts' options.
        router: The router's options.

    Returns:
        ``[T, D]`` in x's dtype.
    """
    if router is not None:
        return forward_routed(x_TD, routing, parameters, options, router)[0]
    ids_TK, weights_TK = routing["expert_ids"], routing["expert_weights"]
    _check_ids(ids_TK, parameters.w1.shape[0])
    y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    for start in range(0, x_TD.shape[0], _TOKENS_PER_BLOCK):
        block = slice(start, start + _TOKENS_PER_BLOCK)
        y_TD[block] = _forward_block(
            x_TD[block], ids_TK[block], weights_TK[block], parameters, options
        )
    return y_TD


def forward_routed(
    x_TD: Tensor,
    routing: Mapping[str, Any],
    parameters: ExpertWeights | PackedExperts,
    options: ExpertOptions,
    router: RouterOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes ``torch.ops.moe.dropless``, and the routing for its backward pass.

    Returns:
        y as :func:`forward`; the router's choice ``expert_ids [T, K]`` int32 and ``expert_weights
        [T, K]`` in float32, or float64 where ``x_TD`` is float64.
    """
    ids_TK, weights_TK = route(
        x_TD, routing["router_weight"], routing["router_bias"], router, routing["selection_bias"]
    )
    ids_TK = ids_TK.int()
    chosen = {"expert_ids": ids_TK, "expert_weights": weights_TK}
    return forward(x_TD, chosen, parameters, options), ids_TK, weights_TK


def _forward_block(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    parameters: ExpertWeights | PackedExperts,
    options: ExpertOptions,
) -> Tensor:
    w1_EFD, b1_EF, w2_EDH, b2_ED = parameters
    dtype = accumulation_dtype(x_TD, w1_EFD)
    top_k = ids_TK.shape[1]
    order_N, rows_by_expert = _sort_slots(ids_TK, w1_EFD.shape[0])
    weights_N1 = weights_TK.reshape(-1, 1).to(dtype).index_select(0, order_N)

    # Holds each expert's input rows until its results take their place.
    rows_ND = x_TD.index_select(0, order_N // top_k)
    if options.weight_on_input:
        rows_ND = rows_ND.to(dtype) * weights_N1
        weights_N1 = torch.ones_like(weights_N1)
    rows_ND = rows_ND.to(w1_EFD.dtype).to(dtype)
    if options.pre_norm == "rms":
        # Rows are as wide as the sums here, so scaling them scales the product, and is less work.
        rows_ND *= _rms_scale(x_TD, dtype, options).index_select(0, order_N // top_k)
    unused = order_N.shape[0]
    for expert, rows in rows_by_expert:
        unused = min(unused, rows.start)
        rows_RD = rows_ND[rows]
        h_RH = activate(_linear(rows_RD, w1_EFD, b1_EF, expert), options)
        if w2_EDH.dtype != dtype:
            h_RH = h_RH.to(w2_EDH.dtype).to(dtype)
        y_RD = _linear(h_RH, w2_EDH, b2_ED, expert)
        torch.mul(y_RD, weights_N1[rows], out=rows_RD)
    rows_ND[:unused] = 0  # Slots of no expert sort first.

    # Slot order, which Tensor.sum does not promise.
    rows_N = torch.arange(len(order_N), device=order_N.device)
    row_of_slot_N = torch.empty_like(order_N).index_copy_(0, order_N, rows_N)
    first_T, *later = row_of_slot_N.view_as(ids_TK).unbind(dim=1)
    y_TD = rows_ND.index_select(0, first_T)
    for row_T in later:
        y_TD += rows_ND.index_select(0, row_T)
    if options.residual:
        y_TD += x_TD
    return y_TD


def experts_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    parameters: ExpertWeights | PackedExperts,
    options: ExpertOptions,
    *,
    train_parameters: bool,
) -> tuple[Tensor, ...]:
    """Gradients of the forward for ``dy_TD``, recomputing each expert's hidden rows.

    Returns:
        Those of x, the routing weights, w1, b1, w2 and b2, in their dtypes; the parameters' have
        their strides, and are empty without ``train_parameters``, where there is no bias and where
        weights are packed.
    """
    w1_EFD, b1_EF, w2_EDH, b2_ED = parameters
    dtype = accumulation_dtype(x_TD, w1_EFD)
    top_k = ids_TK.shape[1]
    weights_N = weights_TK.reshape(-1).to(dtype)
    dx_TD = _residual_gradient(dy_TD, dtype, options)
    rms = options.pre_norm == "rms"
    if rms:
        scale_T1 = _rms_scale(x_TD, dtype, options)
        inner_T1 = torch.zeros_like(scale_T1)
    dweights_N = torch.zeros_like(weights_N)
    gradients = tuple(
        torch.zeros_like(p) if train_parameters and isinstance(p, Tensor) else w1_EFD.new_empty(0)
        for p in parameters
    )
    order_N, rows_by_expert = _sort_slots(ids_TK, w1_EFD.shape[0])
    for expert, rows in rows_by_expert:
        slots_R = order_N[rows]
        tokens_R = slots_R // top_k
        weight_R1 = weights_N.index_select(0, slots_R).unsqueeze(1)
        dy_RD = dy_TD.index_select(0, tokens_R).to(dtype)
        token_RD = x_TD.index_select(0, tokens_R).to(dtype)
        weighted_RD = token_RD * weight_R1 if options.weight_on_input else token_RD
        x_RD = weighted_RD.to(w1_EFD.dtype).to(dtype)
        if rms:
            scale_R1 = scale_T1.index_select(0, tokens_R)
            x_RD = x_RD * scale_R1
        z_RF = _linear(x_RD, w1_EFD, b1_EF, expert)
        h_RH = activate(z_RF, options).to(w2_EDH.dtype).to(dtype)

        if options.weight_on_input:
            dout_RD = dy_RD
        else:
            y_RD = _linear(h_RH, w2_EDH, b2_ED, expert)
            dweights_N.index_copy_(0, slots_R, (dy_RD * y_RD).sum(dim=1))
            dout_RD = dy_RD * weight_R1
        dz_RF = activate_backward(dout_RD @ w2_EDH[expert].to(dtype), z_RF, options)
        din_RD = dz_RF @ w1_EFD[expert].to(dtype)
        if rms:
            inner_T1.index_add_(0, tokens_R, (din_RD * x_RD).sum(dim=1, keepdim=True))
            din_RD = din_RD * scale_R1
        if options.weight_on_input:
            dweights_N.index_copy_(0, slots_R, (din_RD * token_RD).sum(dim=1))
            din_RD = din_RD * weight_R1
        dx_TD.index_add_(0, tokens_R, din_RD)

        if train_parameters:
            _store_gradients(gradients, expert, dz_RF, x_RD, dout_RD, h_RH)
    if rms:
        dx_TD -= x_TD * (inner_T1 * scale_T1.square() / x_TD.shape[1])
    dweights_TK = dweights_N.view_as(ids_TK).to(weights_TK.dtype)
    return dx_TD.to(x_TD.dtype), dweights_TK, *gradients


def _store_gradients(
    gradients: tuple[Tensor, ...],
    expert: int,
    dz_RF: Tensor,
    x_RD: Tensor,
    dout_RD: Tensor,
    h_RH: Tensor,
) -> None:
    """Stores an expert's gradients in those of all experts; an empty one is of no parameter."""
    dw1_EFD, db1_EF, dw2_EDH, db2_ED = gradients
    if dw1_EFD.numel():
        dw1_EFD[expert] = dz_RF.mT @ x_RD
        dw2_EDH[expert] = dout_RD.mT @ h_RH
    if db1_EF.numel():
        db1_EF[expert] = dz_RF.sum(dim=0)
    if db2_ED.numel():
        db2_ED[expert] = dout_RD.sum(dim=0)


def parameter_gradients_fake(
    parameters: ExpertWeights | PackedExperts, *, needed: bool
) -> list[Tensor]:
    """Returns gradients as :func:`experts_backward` gives them, without values."""
    return [
        torch.empty_like(p) if needed and isinstance(p, Tensor) else parameters.w1.new_empty(0)
        for p in parameters
    ]


def _check_ids(ids_TK: Tensor, experts: int) -> None:
    if ids_TK.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids_TK))
    if low < -1 or high >= experts:
        worst = low if low < -1 else high
        raise ValueError(
            f"expert_ids must be in 0..{experts - 1}, or -1 for no expert; got {worst}"
        )


def _sort_slots(ids_TK: Tensor, experts: int) -> tuple[Tensor, list[tuple[int, slice]]]:
    """Returns the slots ``[N]`` sorted by expert, and each active expert's part of them.

    The sort is stable; slots of no expert (-1) come first and belong to no part.
    """
    ids_N = ids_TK.reshape(-1)
    start, *counts = torch.bincount(ids_N + 1, minlength=experts + 1).tolist()
    parts = []
    for expert, count in enumerate(counts):
        if count:
            parts.append((expert, slice(start, start + count)))
            start += count
    return torch.argsort(ids_N, stable=True), parts


def _residual_gradient(dy_TD: Tensor, dtype: torch.dtype, options: ExpertOptions) -> Tensor:
    """Returns the residual's gradient of x, ``[T, D]``: contiguous, and the caller's to add to."""
    if options.residual:
        return dy_TD.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return dy_TD.new_zeros(dy_TD.shape, dtype=dtype)


def _rms_scale(x_TD: Tensor, dtype: torch.dtype, options: ExpertOptions) -> Tensor:
    """Returns ``[T, 1]``, the reciprocal of each token's root mean square."""
    return torch.rsqrt(x_TD.to(dtype).square().mean(dim=1, keepdim=True) + options.norm_eps)


def _linear(
    in_RI: Tensor, w_EOI: Tensor | PackedMatrices, b_EO: Tensor | None, expert: int
) -> Tensor:
    weight_OI = w_EOI[expert].to(in_RI.dtype)
    # oneDNN's product reads a bias without its stride.
    bias_O = None if b_EO is None else b_EO[expert].to(in_RI.dtype).contiguous()
    is_large = weight_OI.numel() >= _ONEDNN_WEIGHTS
    if _ONEDNN_LINEAR is not None and is_large and in_RI.dtype == torch.float32 and in_RI.is_cpu:
        result: Tensor = _ONEDNN_LINEAR(in_RI, weight_OI, bias_O, "none", [], "")
        return result
    return torch.nn.functional.linear(in_RI, weight_OI, bias_O)


def _find_onednn_linear() -> Callable[..., Tensor] | None:
    """Returns the product that torch.compile's CPU backend uses, where this torch has it.

    With 2 to 8 rows an expert it takes 0.5 to 0.75 of the time of ``torch.mm``, whose library
    packs the weights first (one AVX-512 core, 2048 x 1536, torch 2.13). With at most 512 x 512 it
    is no faster, and small products take four times as long: a call costs 17 us, and 0.3 ms for
    each new number of rows. It is not public API.
    """
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


_ONEDNN_LINEAR = _find_onednn_linear()
# How many weights an expert's matrix has at least, for oneDNN's product.
_ONEDNN_WEIGHTS = 2**19
