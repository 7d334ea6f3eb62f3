"""Whether there is a GPU; without one, Triton is told to interpret kernels.

To be imported ahead of Triton.
"""

from __future__ import annotations

import os

import torch

__all__ = ["HAS_GPU"]

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    # Triton reads it when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
