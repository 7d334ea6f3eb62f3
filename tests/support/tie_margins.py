"""Which tokens choose their experts so narrowly that rounding decides.

Legend: T tokens, E experts, K = top_k, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from custom_ops import RouterOptions, reference

#: Rounding decides between scores that are closer than this share of the largest.
TIE = 1e-4


def choice_margins(
    x_TD: Tensor,
    router_weight: Tensor,
    router_bias: Tensor | None,
    options: RouterOptions,
    selection_bias: Tensor | None = None,
) -> Tensor:
    """Returns how far the last that a token chooses is from the next, ``[T]`` float64.

    Of experts and, where the choice is limited to groups, of groups: the narrower of the two, as a
    share of the token's largest score. It is infinite where nothing is left to choose.
    """
    every = RouterOptions(len(router_weight), options.scoring, renormalize=False)
    ids, scores = reference.router(x_TD, router_weight, router_bias, every)
    if options.scoring == "topk_softmax":
        # Groups are scored by logits, from which these differ by the same for all experts.
        scores = scores.log()
    scores_TE = torch.empty_like(scores).scatter_(-1, ids, scores)
    ranked_TE = scores_TE if selection_bias is None else scores_TE + selection_bias.double()
    margins_T = torch.full_like(scores_TE[:, 0], torch.inf)
    if options.limits_groups:
        groups = ranked_TE.unflatten(-1, (options.n_group, -1))
        best = 2 if options.group_scoring == "top2_sum" else 1
        group_scores_TG = groups.topk(best).values.sum(-1)
        margins_T = _gap(group_scores_TG, options.topk_group)
        kept = group_scores_TG.topk(options.topk_group).indices
        ranked_TE = groups.take_along_dim(kept[..., None], 1).flatten(1)
    margins_T = torch.minimum(margins_T, _gap(ranked_TE, options.top_k))
    return margins_T / scores_TE.abs().amax(-1)


def _gap(scores: Tensor, chosen: int) -> Tensor:
    if chosen == scores.shape[-1]:
        return torch.full_like(scores[:, 0], torch.inf)
    best = scores.topk(chosen + 1).values
    return best[:, -2] - best[:, -1]
