"""Dropless MoE layers: the PyTorch operators and their oracle.

Importing this package registers ``torch.ops.moe.dropless`` and ``torch.ops.moe.experts``, both also
for packed weights, ``torch.ops.moe.rms_norm``, ``torch.ops.moe.sum_over_ranks`` and
``torch.ops.moe.write_to_cache``.
"""

from custom_ops.cache_writes import write_to_cache
from custom_ops.dropless import dropless
from custom_ops.experts import experts
from custom_ops.offload.calls import offload_experts
from custom_ops.options import ACTIVATIONS, PRE_NORMS, SCORINGS, ExpertOptions, RouterOptions
from custom_ops.packed import dropless_packed, experts_packed
from custom_ops.ranks import sum_over_ranks
from custom_ops.rms_norm import rms_norm

__all__ = [
    # Operators
    "dropless",
    "experts",
    "dropless_packed",
    "experts_packed",
    "rms_norm",
    "sum_over_ranks",
    "write_to_cache",
    # Experts in host memory
    "offload_experts",
    # Options
    "ACTIVATIONS",
    "PRE_NORMS",
    "SCORINGS",
    "ExpertOptions",
    "RouterOptions",
]
