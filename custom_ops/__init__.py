"""Dropless MoE layers: the PyTorch operators and their oracle.

Importing this package registers ``torch.ops.moe.dropless``, ``torch.ops.moe.experts`` and
``torch.ops.moe.rms_norm``.
"""

from custom_ops.dropless import dropless
from custom_ops.experts import experts
from custom_ops.offload.calls import offload_experts
from custom_ops.options import ACTIVATIONS, PRE_NORMS, SCORINGS, ExpertOptions, RouterOptions
from custom_ops.rms_norm import rms_norm

__all__ = [
    # Operators
    "dropless",
    "experts",
    "rms_norm",
    # Experts in host memory
    "offload_experts",
    # Options
    "ACTIVATIONS",
    "PRE_NORMS",
    "SCORINGS",
    "ExpertOptions",
    "RouterOptions",
]
