"""What a dropless MoE layer computes: the PyTorch operators and their oracle.

Importing this package registers ``torch.ops.moe.dropless`` and ``torch.ops.moe.experts``.
"""

from custom_ops.dropless import dropless
from custom_ops.experts import experts
from custom_ops.options import ACTIVATIONS, PRE_NORMS, SCORINGS, ExpertOptions, RouterOptions

__all__ = [
    # Operators
    "dropless",
    "experts",
    # Options
    "ACTIVATIONS",
    "PRE_NORMS",
    "SCORINGS",
    "ExpertOptions",
    "RouterOptions",
]
