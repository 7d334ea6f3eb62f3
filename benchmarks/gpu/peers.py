"""What a layer is compared with in PyTorch: sorted rows with ``grouped_mm``.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K choices,
N = T*K slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.layers import Parameters, Routing, Shape
from custom_ops import ExpertOptions


def torch_router(shape: Shape, parameters: Parameters, x_TD: Tensor) -> Routing:
    """The router as models write it: a linear layer, scores in float32, top-k."""
    options = shape.router
    logits_TE = F.linear(x_TD, parameters["router_weight"], parameters.get("router_bias")).float()
    if options.scoring == "topk_softmax":
        top_TK, ids_TK = logits_TE.topk(options.top_k, dim=-1)
        return ids_TK, top_TK.softmax(-1)
    scores_TE = logits_TE.sigmoid() if options.scoring == "sigmoid" else logits_TE.softmax(-1)
    ranked_TE = scores_TE + parameters.get("selection_bias", 0)
    if options.limits_groups:
        groups = ranked_TE.unflatten(-1, (options.n_group, -1))
        best = groups.topk(2 if options.group_scoring == "top2_sum" else 1, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(-1, best.topk(options.topk_group, dim=-1).indices, 1)
        ranked_TE = groups.masked_fill(kept[..., None] == 0, -torch.inf).flatten(-2)
    ids_TK = ranked_TE.topk(options.top_k, dim=-1).indices
    weights_TK = scores_TE.gather(-1, ids_TK)
    if options.renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return ids_TK, weights_TK * options.routed_scaling


def activate(z: Tensor, options: ExpertOptions) -> Tensor:
    """The non-linearity, in the operations that models use."""
    if not options.gated:
        return F.gelu(z)
    gate, up = (z[..., ::2], z[..., 1::2]) if options.interleaved else z.chunk(2, dim=-1)
    if options.activation == "clamped_swiglu":
        gate, up = gate.clamp(max=options.limit), up.clamp(-options.limit, options.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * options.alpha))
    return F.silu(gate) * up


def grouped(shape: Shape, parameters: Parameters, x_TD: Tensor, routing: Routing) -> Tensor:
    """The experts by PyTorch's grouped product, in the order of transformers' implementation.

    Sort, gather, product, activation, product, weights, inverse order, sum over the choices.
    """
    ids_TK, weights_TK = routing
    experts, top_k = shape.experts, ids_TK.shape[1]
    ids_N, order_N = torch.sort(ids_TK.reshape(-1))
    x_ND = x_TD[order_N // top_k]
    # CUDA's histc takes integers, the CPU's only floats.
    counted_N = ids_N.int() if ids_N.is_cuda else ids_N.float()
    counts_E = torch.histc(counted_N, bins=experts, min=0, max=experts - 1)
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    z_NF = F.grouped_mm(x_ND, parameters["w1"].mT, offs=ends_E)
    if shape.biases:
        z_NF += parameters["b1"][ids_N]
    h_NH = activate(z_NF, shape.options).contiguous()
    y_ND = F.grouped_mm(h_NH, parameters["w2"].mT, offs=ends_E)
    if shape.biases:
        y_ND += parameters["b2"][ids_N]
    weighted_ND = y_ND * weights_TK.reshape(-1)[order_N, None]
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return weighted_ND[inverse_N].view(-1, top_k, x_TD.shape[1]).sum(1).to(x_TD.dtype)
