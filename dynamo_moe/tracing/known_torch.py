"""The versions of PyTorch whose private names are used, with public ways beside them."""

from __future__ import annotations

import torch

__all__ = ["KNOWN_VERSIONS", "is_known"]

KNOWN_VERSIONS = ((2, 11), (2, 13), (2, 15))
"""Of PyTorch, with which our own steps have been run."""


def is_known() -> bool:
    """Whether this PyTorch is one of them."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) in KNOWN_VERSIONS
