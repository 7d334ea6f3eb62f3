"""What the files of the ops share: the library ``moe``, the options' schema and autocast."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["EXPERT_OPTIONS", "LIBRARY", "autocast_parameters"]

LIBRARY = torch.library.Library("moe", "FRAGMENT")

# The fields of custom_ops.options.ExpertOptions, in its order.
EXPERT_OPTIONS = (
    'str activation="gelu", bool gated=False, bool interleaved=False, '
    "bool weight_on_input=False, float alpha=1.702, float limit=7.0"
)


def autocast_parameters(
    device_type: str, *parameters: Tensor | None
) -> tuple[torch.autocast, list[Tensor | None]]:
    """Returns a context without autocast and the experts' parameters in the autocast dtype.

    Tokens and router keep their dtype, so that autocast never changes which experts are chosen.
    float64 parameters stay, as in PyTorch's own autocast rules.
    """
    dtype = torch.get_autocast_dtype(device_type)
    cast = [p if p is None or p.dtype == torch.float64 else p.to(dtype) for p in parameters]
    return torch.autocast(device_type, enabled=False), cast
