"""The oracle: the ops in float64, every expert on every token, one line per formula.

It is what the implementations are tested against, so it stays slow and plain.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from custom_ops.options import ExpertOptions, RouterOptions

__all__ = ["dropless", "experts", "rms_norm", "router", "unpacked"]


def dropless(
    x: Tensor,
    router_weight: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    router_options: RouterOptions,
    expert_options: ExpertOptions,
    router_bias: Tensor | None = None,
    selection_bias: Tensor | None = None,
) -> Tensor:
    """``torch.ops.moe.dropless`` in float64; returns x's shape."""
    ids, weights = router(x, router_weight, router_bias, router_options, selection_bias)
    return experts(x, ids, weights, w1, b1, w2, b2, expert_options)


def router(
    x: Tensor,
    router_weight: Tensor,
    router_bias: Tensor | None,
    options: RouterOptions,
    selection_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Expert ids ``[..., K]`` int64 and weights ``[..., K]`` float64 of every token."""
    logits = x.double() @ router_weight.double().mT
    if router_bias is not None:
        logits = logits + router_bias.double()
    if options.logits_dtype == "tokens":
        logits = _rounded(logits, x.dtype)
    scores = logits
    if options.scoring != "topk_softmax":
        scores = logits.softmax(-1) if options.scoring == "softmax" else logits.sigmoid()
    # By the logits where that is the same: the sigmoids of large ones are all one.
    plain = selection_bias is None and not options.limits_groups
    ranked = logits if options.scoring == "sigmoid" and plain else scores
    if selection_bias is not None:
        ranked = scores + selection_bias.double()
    ids = torch.argsort(ranked, dim=-1, descending=True, stable=True)
    if options.limits_groups:
        groups = ranked.unflatten(-1, (options.n_group, -1))
        best = groups.sort(-1, descending=True).values
        score = best[..., :2].sum(-1) if options.group_scoring == "top2_sum" else best[..., 0]
        rank = torch.argsort(torch.argsort(score, dim=-1, descending=True, stable=True), dim=-1)
        outside = rank.gather(-1, ids // groups.shape[-1]) >= options.topk_group
        ids = ids.gather(-1, torch.argsort(outside.int(), dim=-1, stable=True))
    ids = ids[..., : options.top_k]
    weights = scores.gather(-1, ids)
    if options.scoring == "topk_softmax":
        weights = weights.softmax(-1)
    elif options.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * options.routed_scaling
    return ids, _rounded(weights, x.dtype) if options.routing_weights_dtype == "tokens" else weights


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest number of a dtype, in float64, with the gradient of the number itself."""
    return value.detach().to(dtype).double() + (value - value.detach())


def experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    options: ExpertOptions,
) -> Tensor:
    """``torch.ops.moe.experts`` in float64; returns x's shape."""
    x, w1, w2, weights = x.double(), w1.double(), w2.double(), expert_weights.double()
    result = x if options.residual else torch.zeros_like(x)
    scale = torch.ones_like(x[..., :1])
    if options.pre_norm == "rms":
        scale = 1 / (x.square().mean(-1, keepdim=True) + options.norm_eps).sqrt()
    for expert in range(w1.shape[0]):
        for slot in range(expert_ids.shape[-1]):
            weight = weights[..., slot, None]
            z = scale * ((x * weight if options.weight_on_input else x) @ w1[expert].mT)
            z = z if b1 is None else z + b1[expert].double()
            y = _activate(z, options) @ w2[expert].mT
            y = y if b2 is None else y + b2[expert].double()
            y = y if options.weight_on_input else y * weight
            chosen = expert_ids[..., slot, None] == expert
            result = result + torch.where(chosen, y, 0.0)
    return result


def unpacked(
    weight_format: str,
    values: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    global_scales: Tensor | None = None,
) -> Tensor:
    """The weights ``[E, N, K]`` that packed ones ``[E, N, ...]`` stand for, in float64."""
    if weight_format == "fp8":
        numbers, (rows, columns) = values.view(torch.float8_e4m3fn).double(), values.shape[-2:]
        out = 128 if 1 < scales.shape[-2] < rows else rows // min(scales.shape[-2], rows)
        depth = 128 if scales.shape[-1] > 1 else columns
        if scales.shape[-2] == rows and scales.shape[-1] * 32 == columns:
            depth = 32
        spread = scales.double().repeat_interleave(out, -2).repeat_interleave(depth, -1)
        return numbers * spread[..., :rows, :columns]
    if weight_format == "int8":
        return values.double() * _along_rows(scales.double(), values.shape[-1])
    columns = values.shape[-1] * 2
    codes = torch.stack([values.long() % 16, values.long() // 16 % 16], -1).flatten(-2)
    if weight_format == "int4":
        zeros = torch.full_like(scales, 8) if zero_points is None else zero_points
        zeros = zeros.double().expand(*scales.shape[:-1], -1)
        return (codes - _along_rows(zeros, columns)) * _along_rows(scales.double(), columns)
    magnitudes = codes % 8
    numbers = torch.where(
        magnitudes < 2, magnitudes / 2, (1 + magnitudes % 2 / 2) * 2.0 ** (magnitudes // 2 - 1)
    )
    numbers = torch.where(codes < 8, numbers, -numbers)
    if global_scales is not None:
        powers = scales.view(torch.float8_e4m3fn).double() * global_scales.double()
    else:
        exponents = (scales.long() % 256).double()
        powers = torch.where(exponents == 255, torch.nan, 2.0 ** (exponents - 127))
    return numbers * _along_rows(powers, columns)


def _along_rows(groups: Tensor, columns: int) -> Tensor:
    return groups.repeat_interleave(columns // groups.shape[-1], -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_plus_one: bool = False) -> Tensor:
    """``torch.ops.moe.rms_norm`` in float64, nothing rounded; returns x's shape."""
    x, weight = x.double(), weight.double()
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return normed * (1 + weight if weight_plus_one else weight)


def _activate(z: Tensor, options: ExpertOptions) -> Tensor:
    if not options.gated:
        return _pointwise(z, options.activation)
    gate, up = (z[..., ::2], z[..., 1::2]) if options.interleaved else z.chunk(2, -1)
    if options.activation == "clamped_swiglu":
        gate, up = gate.clamp(max=options.limit), up.clamp(-options.limit, options.limit)
        return gate * torch.sigmoid(options.alpha * gate) * (up + 1)
    if options.activation == "clamped_silu":
        gate, up = gate.clamp(max=options.limit), up.clamp(-options.limit, options.limit)
        return gate * torch.sigmoid(gate) * up
    if options.activation == "softcapped_silu":
        up = options.limit * torch.tanh(up / options.limit)
        return options.alpha * torch.tanh(gate / options.alpha) * torch.sigmoid(gate) * up
    return _pointwise(gate, options.activation) * up


def _pointwise(z: Tensor, activation: str) -> Tensor:
    if activation == "gelu":
        return 0.5 * z * (1 + torch.erf(z / 2**0.5))
    if activation == "gelu_tanh":
        return 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))
    if activation == "silu":
        return z / (1 + torch.exp(-z))
    if activation == "quick_gelu":
        return z / (1 + torch.exp(-1.702 * z))
    if activation == "tanh":
        return torch.tanh(z)
    if activation == "mish":
        return z * torch.tanh(torch.nn.functional.softplus(z))
    if activation == "hardswish":
        return z * (z / 6 + 0.5).clamp(0, 1)
    if activation == "elu":
        return torch.where(z > 0, z, torch.expm1(z.clamp(max=0)))
    if activation == "identity":
        return z
    if activation == "leaky_relu":
        return torch.where(z > 0, z, 0.01 * z)
    return torch.relu(z) ** (2 if activation == "relu2" else 1)
