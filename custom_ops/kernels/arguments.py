"""Arguments that the experts' kernels have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from custom_ops.kernels.expressions import E, Expression, K, T, minimum
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import Argument, Constant, TensorPointer, WorkspacePointer
from custom_ops.options import EXPERT_OPTIONS

__all__ = [
    "TILE_TABLE",
    "bias_pointer",
    "expert_constants",
    "input_weights",
    "max_tiles",
    "residual_pointer",
    "result_weights",
    "row_scale_pointer",
    "weight_pointer",
]

#: Which rows of which expert a tile has.
TILE_TABLE: Mapping[str, Argument] = {
    f"{buffer}_ptr": WorkspacePointer(buffer, torch.int32)
    for buffer in ("row_starts", "tile_expert", "tile_row")
}


def max_tiles(block_m: int) -> Expression:
    """Returns how many tiles of ``block_m`` rows T tokens take at most.

    Each active expert, of which there are at most ``min(E, T*K)``, begins a tile with its first
    row; only ``block_m`` further rows begin another.
    """
    slots = T * K
    active = minimum(E, slots)
    return active + (slots - active) // block_m


def weight_pointer(layer: Layer, tensor: str) -> Argument:
    """Returns a pointer to w1 or w2."""
    return TensorPointer(tensor, layer.experts_dtype)


def bias_pointer(layer: Layer, tensor: str) -> Argument:
    """Returns a pointer to b1 or b2, or None where the layer has none."""
    return weight_pointer(layer, tensor) if getattr(layer, tensor) else Constant(None)


def row_scale_pointer(layer: Layer) -> Argument:
    """Returns a pointer to the tokens' scales, or None where the layer has no norm."""
    if layer.options.pre_norm == "none":
        return Constant(None)
    return WorkspacePointer("row_scale", torch.float32)


def residual_pointer(layer: Layer) -> Argument:
    """Returns a pointer to x, or None where the result is the sum alone."""
    return TensorPointer("x", layer.tokens_dtype) if layer.options.residual else Constant(None)


def input_weights(layer: Layer, expert_weights: Argument) -> Argument:
    """Returns the routing weights for a first product, or None where they are on the results."""
    return expert_weights if layer.options.weight_on_input else Constant(None)


def result_weights(layer: Layer, expert_weights: Argument) -> Argument:
    """Returns the routing weights for the sum of results, or None where they are on the input."""
    return Constant(None) if layer.options.weight_on_input else expert_weights


def expert_constants(kernel: Any, layer: Layer) -> dict[str, Argument]:
    """Returns the experts' options that a kernel takes as constants: those in capital letters."""
    options = {option.name.upper(): option.name for option in EXPERT_OPTIONS}
    return {
        name: Constant(getattr(layer.options, options[name]))
        for name in kernel.arg_names
        if name in options
    }
