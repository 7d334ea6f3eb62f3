"""Checks, measures and tunes the kernels on a GPU.

Without a GPU, Triton interprets the kernels; it reads the variable when it is imported.
"""

import os

import torch

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
