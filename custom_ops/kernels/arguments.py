"""The arguments of a layer's kernels, by the names of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.expressions import W_INDEX, E, Expression, IntLike, K, T, minimum
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import (
    Argument,
    Constant,
    KernelSpec,
    Scalar,
    StatePointer,
    TensorPointer,
    WorkspacePointer,
)
from custom_ops.weight_formats import STORED_SUFFIXES

_ABSENT = Constant(None)
_INT32_BUFFERS = ("slot_of_row", "row_of_slot", "row_starts", "tile_expert", "tile_row")
_WAVE_BUFFERS = ("wave_tiles", "wave_of_expert", "place_of_expert")


def kernel_of(
    function: Any,
    layer: Layer,
    architecture: Architecture,
    grid: Sequence[IntLike],
    launch: Mapping[str, int],
    **kernel_arguments: Argument | float | str,
) -> KernelSpec:
    """Returns the launch of one of a layer's kernels.

    Arguments that mean the same in every kernel are known by their parameters' names: pointers to
    tensors and buffers, T, E, K, D and H, the wave and R, and options in capital letters.

    Args:
        function: The Triton kernel.
        layer: The layer.
        architecture: Where it runs.
        grid: Programs along x, y and z; 1 along those left out.
        launch: ``num_warps``, ``num_stages`` if not 1, and the block's sizes, such as ``block_m``
            for the constant ``BLOCK_M``.
        kernel_arguments: The kernel's other arguments; they also replace those known by name.

    Raises:
        ValueError: If the kernel has a parameter that is neither in ``kernel_arguments`` nor known
            by name, or lacks one that is in ``kernel_arguments``.
    """
    arguments = _arguments(layer, architecture)
    for name, value in ({size.upper(): launch[size] for size in launch} | kernel_arguments).items():
        arguments[name] = value if isinstance(value, Argument) else Constant(value)
    x, y, z = map(Expression.of, (*grid, 1, 1)[:3])
    return KernelSpec(
        function,
        {
            name: arguments[name]
            for name in (*function.arg_names, *kernel_arguments)
            if name in arguments
        },
        grid=(x, y, z),
        num_warps=launch["num_warps"],
        num_stages=launch.get("num_stages", 1),
        dependent_launch=_has_dependent_launch(layer, architecture),
    )


def first_product(layer: Layer) -> dict[str, Argument]:
    """Returns the routing weights for a first product: None where they are on the results."""
    on_input = layer.shape.options.weight_on_input
    return {"expert_weights_ptr": _routing(layer)[1] if on_input else _ABSENT}


def sum_of_results(layer: Layer) -> dict[str, Argument]:
    """Returns the arguments of the sum of results: x for the residual, routing weights, or None."""
    x = TensorPointer("x", layer.shape.tokens_dtype)
    return {
        "x_ptr": x if layer.shape.options.residual else _ABSENT,
        "expert_weights_ptr": _ABSENT
        if layer.shape.options.weight_on_input
        else _routing(layer)[1],
    }


def weights_pointer(layer: Layer, tensor: str) -> TensorPointer | StatePointer:
    """Returns where the products read w1 or w2: the call's tensor, or the layer's slots."""
    return _stored(layer, tensor, layer.shape.weight_format.values_dtype)


def _stored(layer: Layer, tensor: str, dtype: torch.dtype) -> TensorPointer | StatePointer:
    if layer.resident_experts is None:
        return TensorPointer(tensor, dtype)
    return StatePointer(f"{tensor}_slots", dtype)


def max_tiles(block_m: int, experts: IntLike = E) -> Expression:
    """Returns how many tiles of ``block_m`` rows the slots of T tokens take at most.

    Each active expert, of which there are at most ``min(experts, T*K)``, begins a tile with its
    first row; only ``block_m`` further rows begin another.
    """
    slots = T * K
    active = minimum(experts, slots)
    return active + (slots - active) // block_m


def _arguments(layer: Layer, architecture: Architecture) -> dict[str, Argument]:
    shape, weight_format = layer.shape, layer.shape.weight_format
    has_bias = {"b1": shape.b1, "b2": shape.b2}
    expert_ids, expert_weights = _routing(layer)
    has_norm = layer.shape.options.pre_norm != "none"
    records = filter(None, (layer.shape.router, layer.shape.options))
    constants = {
        **layer.shape.sizes,
        **{
            row.name.upper(): getattr(record, row.name) for record in records for row in record.rows
        },
        "PRECISION": "tf32" if layer.tf32 else "ieee",
        "ENCODING": weight_format.encoding,
        # Those of whole rows or matrices are as large as the larger weight: they fit 32 bits.
        "SCALE_N": min(max(weight_format.block[0], 1), max(shape.rows, shape.width)),
        "SCALE_K": min(max(weight_format.block[1], 1), max(shape.width, shape.hidden)),
        "ONE_ZERO_POINT": weight_format.zero_points_block not in (None, weight_format.block),
        "W1_TRANSPOSED": layer.shape.layout.w1_transposed,
        "W2_TRANSPOSED": layer.shape.layout.w2_transposed,
        "PDL": _has_dependent_launch(layer, architecture),
        "R": layer.resident_experts,
    }
    offloaded = layer.resident_experts is not None
    tables = {f"{name}_ptr": WorkspacePointer(name, torch.int32) for name in _WAVE_BUFFERS}
    return {
        "x_ptr": TensorPointer("x", layer.shape.tokens_dtype),
        "y_ptr": TensorPointer("y", layer.shape.tokens_dtype),
        **{f"{name}_ptr": weights_pointer(layer, name) for name in ("w1", "w2")},
        **_beside_values(layer),
        **{
            f"{name}_ptr": TensorPointer(name, weight_format.bias_dtype) if present else _ABSENT
            for name, present in has_bias.items()
        },
        "expert_ids_ptr": expert_ids,
        "expert_weights_ptr": expert_weights,
        "row_scale_ptr": WorkspacePointer("row_scale", torch.float32) if has_norm else _ABSENT,
        "hidden_ptr": WorkspacePointer("hidden", weight_format.operand_dtype),
        "rows_ptr": WorkspacePointer("rows", layer.shape.tokens_dtype),
        **{f"{name}_ptr": WorkspacePointer(name, torch.int32) for name in _INT32_BUFFERS},
        **{name: table if offloaded else _ABSENT for name, table in tables.items()},
        "tokens": Scalar(T),
        "wave": Scalar(W_INDEX) if offloaded else _ABSENT,
        **{name: Constant(value) for name, value in constants.items()},
    }


def _beside_values(layer: Layer) -> dict[str, Argument]:
    """Returns the tensors beside the values of packed weights, or None for each there is not."""
    dtypes = {tensor.suffix: tensor.dtype for tensor in layer.shape.weight_format.stored}
    return {
        f"{name}{suffix}_ptr": _stored(layer, name + suffix, dtypes[suffix])
        if suffix in dtypes
        else _ABSENT
        for name in ("w1", "w2")
        for suffix in STORED_SUFFIXES[1:]
    }


def _has_dependent_launch(layer: Layer, architecture: Architecture) -> bool:
    # Beside a second stream, no kernel is the only one ahead.
    return architecture.has_dependent_launch and layer.resident_experts is None


def _routing(layer: Layer) -> tuple[Argument, Argument]:
    """Returns where expert ids and routing weights are: the router's buffers, or the call's."""
    if layer.shape.router is not None:
        return (
            WorkspacePointer("expert_ids", torch.int32),
            WorkspacePointer("expert_weights", torch.float32),
        )
    return (
        TensorPointer("expert_ids", layer.shape.routing_dtype),
        TensorPointer("expert_weights", layer.shape.weights_dtype or torch.float32),
    )
