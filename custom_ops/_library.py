"""What the files of the ops share: the library ``moe``, the options' schema and autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["EXPERT_OPTIONS", "LIBRARY", "register_autocast"]

LIBRARY = torch.library.Library("moe", "FRAGMENT")

# The fields of custom_ops.options.ExpertOptions, in its order.
EXPERT_OPTIONS = (
    'str activation="gelu", bool gated=False, bool interleaved=False, '
    "bool weight_on_input=False, float alpha=1.702, float limit=7.0, "
    'str pre_norm="none", float norm_eps=1e-6, bool residual=False'
)


def register_autocast(op: str, parameters: slice) -> None:
    """Casts the experts' parameters, which the slice of the op's arguments holds, under autocast.

    Tokens and router keep their dtype, so that autocast never changes which experts are chosen.
    float64 parameters stay, as in PyTorch's own autocast rules.
    """
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        LIBRARY.impl(op, _autocast(op, parameters, device_type), key)


def _autocast(op: str, parameters: slice, device_type: str) -> Callable[..., Tensor]:
    def with_autocast(*arguments: Any, **options: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        cast = list(arguments)
        cast[parameters] = [
            p if p is None or p.dtype == torch.float64 else p.to(dtype) for p in cast[parameters]
        ]
        with torch.autocast(device_type, enabled=False):
            result: Tensor = getattr(torch.ops.moe, op)(*cast, **options)
        return result

    return with_autocast
