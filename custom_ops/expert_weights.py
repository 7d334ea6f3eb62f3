"""The experts' weights and biases as the operators take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from custom_ops.packed_weights import PackedMatrices


class ExpertWeights(NamedTuple):
    """The operators' arguments: ``[E, F, D]``, ``[E, F]``, ``[E, D, H]`` and ``[E, D]``.

    Legend: E experts, D model width, H hidden width, F = H, or 2H when gated.
    """

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None


class PackedExperts(NamedTuple):
    """The same, where w1 and w2 are packed."""

    w1: PackedMatrices
    b1: Tensor | None
    w2: PackedMatrices
    b2: Tensor | None
