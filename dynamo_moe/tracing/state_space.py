"""Mamba's selective scan as one ONNX Scan, whatever the length.

transformers' own code for PyTorch is a Python loop over the tokens, which a trace unrolls for the
example's length.

Legend: B batch, L length, C channels, N size of a channel's state.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dynamo_moe.private import tracer
from dynamo_moe.process_state import replaced

# Where transformers looks the function up.
_MODULE, _NAME = "transformers.models.jamba.modeling_jamba", "mamba_selective_scan"


def exportable_scans() -> AbstractContextManager[None]:
    """Lets transformers' models, if they are loaded, use :func:`_selective_scan`.

    Without PyTorch's ``scan`` they keep their own loop, whose length is the example's.
    """
    module = sys.modules.get(_MODULE)
    if tracer.scan is None or not hasattr(module, _NAME):
        return nullcontext()
    return replaced(module, _NAME, lambda _: _selective_scan)


def _selective_scan(
    u_BCL: Tensor,
    dt_BCL: Tensor,
    A_CN: Tensor,
    B_BNL: Tensor,
    C_BNL: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """The recurrence of Mamba (https://arxiv.org/abs/2312.00752, equation 2).

    ``h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t`` and ``y_t = C_t h_t + D u_t``, times ``silu(z)``.

    Returns:
        ``[B, C, L]``; with ``return_last_state`` also the last ``h``, ``[B, C, N]``.
    """
    dtype = u_BCL.dtype
    if delta_bias is not None:
        dt_BCL = dt_BCL + delta_bias.to(dt_BCL.dtype)[..., None]
    if delta_softplus:
        dt_BCL = F.softplus(dt_BCL)
    dt_LBC1, u_LBC1 = (value.permute(2, 0, 1)[..., None] for value in (dt_BCL, u_BCL.float()))
    B_LB1N, C_LB1N = (value.permute(2, 0, 1)[:, :, None].float() for value in (B_BNL, C_BNL))
    decay_LBCN = torch.exp(A_CN * dt_LBC1)
    update_LBCN = dt_LBC1 * B_LB1N * u_LBC1

    def step(h: Tensor, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        decay, update = inputs
        h = decay * h + update
        return h, h.clone()

    start = torch.zeros_like(update_LBCN[0])
    last, h_LBCN = tracer.scan(step, start, (decay_LBCN, update_LBCN))
    y = (h_LBCN.to(dtype) * C_LB1N.to(dtype)).sum(-1).permute(1, 2, 0)
    if D is not None:
        y = y + u_BCL * D[None, :, None]
    if z is not None:
        y = y * F.silu(z)
    return (y, last) if return_last_state else y
