"""The router: tokens to expert indices and weights, in fp32, rounded where the options say so.

Legend: T tokens, D model width, E experts, K = top_k, G groups of S experts, of
which a token chooses C with M = C*S members.
"""

from __future__ import annotations

import torch
from torch import Tensor

from custom_ops.dtypes import accumulation_dtype
from custom_ops.options import RouterOptions

# Keeps a sum of sigmoid scores that all underflowed from dividing zero by zero. DeepSeek-V3 adds it
# too; in float32 it changes no sum above 1.7e-13, which takes logits below -29.
RENORMALIZE_EPS = 1e-20


def route(
    x_TD: Tensor,
    router_weight_ED: Tensor,
    router_bias_E: Tensor | None,
    options: RouterOptions,
    selection_bias_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses ``top_k`` experts per token.

    Args:
        x_TD: Tokens ``[T, D]``, any floating dtype.
        router_weight_ED: ``[E, D]``, any floating dtype.
        router_bias_E: ``[E]`` added to the logits, or None.
        options: Scoring, top-k, groups and scaling.
        selection_bias_E: ``[E]`` added to the scores by which experts are chosen, or None.

    Returns:
        ``expert_ids [T, K]`` int64, best first, ties to the lower expert; and
        ``expert_weights [T, K]`` in float32, or float64 where ``x_TD`` is float64.
    """
    dtype = accumulation_dtype(x_TD)
    # float64 on CUDA: a float32 product may be TF32 there, which chooses other experts than the
    # router's kernel does.
    wide = torch.float64 if x_TD.is_cuda else dtype
    logits_TE = _logits(x_TD, router_weight_ED, router_bias_E, wide, options).to(dtype)
    scores_TE = logits_TE
    if options.scoring != "topk_softmax":
        sigmoid = options.scoring == "sigmoid"
        scores_TE = torch.sigmoid(logits_TE) if sigmoid else torch.softmax(logits_TE, dim=-1)
    if selection_bias_E is not None:
        ranked_TE = scores_TE + selection_bias_E.to(scores_TE.dtype)
    elif options.scoring == "sigmoid" and not options.limits_groups:
        # In float32 the sigmoid of any beyond 17 is one.
        ranked_TE = logits_TE
    else:
        ranked_TE = scores_TE
    if options.limits_groups:
        members_TM = _members_of_best_groups(ranked_TE, options)
        _, places_TK = _top_k(ranked_TE.gather(-1, members_TM), options.top_k)
        ids_TK = members_TM.gather(-1, places_TK)
    else:
        _, ids_TK = _top_k(ranked_TE, options.top_k)
    top_TK = scores_TE.gather(-1, ids_TK)
    if options.scoring == "topk_softmax":
        top_TK = torch.softmax(top_TK, dim=-1)
    elif options.renormalize:
        top_TK = top_TK / (top_TK.sum(dim=-1, keepdim=True) + RENORMALIZE_EPS)
    weights_TK = top_TK * options.routed_scaling
    if options.routing_weights_dtype == "tokens":
        weights_TK = weights_TK.to(x_TD.dtype).to(dtype)
    return ids_TK, weights_TK


def route_backward(
    dweights_TK: Tensor,
    x_TD: Tensor,
    router_weight_ED: Tensor,
    router_bias_E: Tensor | None,
    ids_TK: Tensor,
    options: RouterOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`route`'s weights; the choice of experts has none, and rounding is passed.

    Returns:
        ``dx [T, D]``, ``drouter_weight [E, D]`` and ``drouter_bias [E]`` in the weights' dtype.
    """
    logits_TE = _logits(x_TD, router_weight_ED, router_bias_E, accumulation_dtype(x_TD), options)
    dweights_TK = dweights_TK * options.routed_scaling
    if options.scoring == "topk_softmax":
        weights_TK = torch.softmax(logits_TE.gather(-1, ids_TK), dim=-1)
        dtop_TK = _softmax_backward(dweights_TK, weights_TK)
        dlogits_TE = torch.zeros_like(logits_TE).scatter(-1, ids_TK, dtop_TK)
    else:
        sigmoid = options.scoring == "sigmoid"
        scores_TE = torch.sigmoid(logits_TE) if sigmoid else torch.softmax(logits_TE, dim=-1)
        if options.renormalize:
            top_TK = scores_TE.gather(-1, ids_TK)
            total_T1 = top_TK.sum(dim=-1, keepdim=True) + RENORMALIZE_EPS
            inner_T1 = (dweights_TK * top_TK).sum(dim=-1, keepdim=True) / total_T1
            dweights_TK = (dweights_TK - inner_T1) / total_T1
        dscores_TE = torch.zeros_like(scores_TE).scatter(-1, ids_TK, dweights_TK)
        if sigmoid:
            dlogits_TE = dscores_TE * scores_TE * (1 - scores_TE)
        else:
            dlogits_TE = _softmax_backward(dscores_TE, scores_TE)
    return (
        dlogits_TE @ router_weight_ED.to(dlogits_TE.dtype),
        dlogits_TE.mT @ x_TD.to(dlogits_TE.dtype),
        dlogits_TE.sum(dim=0),
    )


def _logits(
    x_TD: Tensor,
    router_weight_ED: Tensor,
    router_bias_E: Tensor | None,
    dtype: torch.dtype,
    options: RouterOptions,
) -> Tensor:
    """Returns the logits ``[T, E]`` in a dtype, or of that, rounded to the tokens'."""
    bias = None if router_bias_E is None else router_bias_E.to(dtype)
    logits_TE = torch.nn.functional.linear(x_TD.to(dtype), router_weight_ED.to(dtype), bias)
    return logits_TE.to(x_TD.dtype).to(dtype) if options.logits_dtype == "tokens" else logits_TE


def _members_of_best_groups(ranked_TE: Tensor, options: RouterOptions) -> Tensor:
    """Returns the experts ``[T, M]`` of each token's best groups, in ascending order."""
    ranked_TGS = ranked_TE.unflatten(-1, (options.n_group, -1))
    best, _ = _top_k(ranked_TGS, 2 if options.group_scoring == "top2_sum" else 1)
    _, groups_TC = _top_k(best.sum(dim=-1), options.topk_group)
    size = ranked_TGS.shape[-1]
    first_TC = size * groups_TC.sort(dim=-1).values
    member_S = torch.arange(size, device=ranked_TE.device)
    members_TM: Tensor = (first_TC.unsqueeze(-1) + member_S).flatten(-2)
    return members_TM


def _top_k(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    # torch.topk leaves the order of ties open; a stable sort gives them to the lower expert.
    values_TE, ids_TE = torch.sort(scores_TE, dim=-1, descending=True, stable=True)
    return values_TE[..., :top_k], ids_TE[..., :top_k]


def _softmax_backward(dp: Tensor, p: Tensor) -> Tensor:
    return p * (dp - (dp * p).sum(dim=-1, keepdim=True))
