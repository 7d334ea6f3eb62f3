"""The backward pass of a layer's experts as a list of launches for every number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.backward import (
    hidden_gradient_step,
    input_gradient_step,
    slot_gradient_step,
    weight_gradients_step,
)
from custom_ops.kernels.combine import combine_step
from custom_ops.kernels.configs import TileConfig, on_tensor_cores
from custom_ops.kernels.index_sort import index_sort_step
from custom_ops.kernels.layer import Layer, power_of_2
from custom_ops.kernels.row_scale import row_scale_step
from custom_ops.kernels.spec import (
    MAX_SLOTS,
    MAX_TOKENS,
    Constant,
    ForwardPlan,
    Step,
    TensorPointer,
    TokenRange,
)

# Rows of a tile, by the mean number of rows of an expert.
_BLOCKS_M = (16, 64)


@lru_cache(maxsize=256)
def backward_plan(
    layer: Layer, architecture: Architecture, *, train_parameters: bool
) -> ForwardPlan:
    """Returns the backward pass of a layer that has no router.

    Sort, norm, hidden rows, slots, inputs, combination, parameters. It reads the operator's tensors
    and ``dy``, and writes ``dx`` and ``dweights``; with ``train_parameters`` also ``dw1``, ``dw2``
    and, where there are biases, ``db1`` and ``db2``, each of which lies in memory as its parameter.
    Nothing on the host waits for the device.
    """
    layer.check_plain("backward passes")
    layer = layer.canonical()
    *smaller, largest = _BLOCKS_M
    lasts = {block_m * layer.shape.experts // layer.shape.top_k: block_m for block_m in smaller}
    lasts = {last: block_m for last, block_m in lasts.items() if last > 0} | {MAX_TOKENS: largest}

    most = MAX_SLOTS // layer.shape.top_k
    firsts = [1, *(last + 1 for last in lasts)]
    return ForwardPlan(
        layer,
        architecture,
        tuple(
            TokenRange.of(
                first,
                min(last, most),
                _backward_steps(layer, architecture, block_m, last, train_parameters),
            )
            for first, (last, block_m) in zip(firsts, lasts.items(), strict=False)
        ),
    )


def _backward_steps(
    layer: Layer,
    architecture: Architecture,
    block_m: int,
    last_tokens: int,
    train_parameters: bool,
) -> Iterator[Step]:
    hidden = hidden_config(layer, architecture, block_m)
    yield index_sort_step(layer, architecture, block_m, last_tokens)
    if layer.shape.options.pre_norm != "none":
        yield row_scale_step(layer, architecture)
    yield hidden_gradient_step(layer, architecture, hidden, train_parameters=train_parameters)
    yield slot_gradient_step(layer, architecture, hidden)
    yield input_gradient_step(layer, architecture, input_config(layer, architecture, block_m))
    dy = TensorPointer("dy", layer.shape.tokens_dtype)
    yield combine_step(
        layer,
        architecture,
        x_ptr=dy if layer.shape.options.residual else Constant(None),
        expert_weights_ptr=Constant(None),
        y_ptr=TensorPointer("dx", layer.shape.tokens_dtype),
    )
    if train_parameters:
        yield weight_gradients_step(layer, architecture, weight_config(layer, architecture))


def hidden_config(layer: Layer, architecture: Architecture, block_m: int) -> TileConfig:
    """Chooses the tile of the hidden rows, which has an accumulator for gate, up and gradient."""
    block_n, block_k = (64, 64) if on_tensor_cores(layer, architecture) else (32, 32)
    num_warps = 8 if block_m == 64 else 4
    tile = TileConfig(block_m, block_n, block_k, num_warps, num_stages=3)
    gates = layer.shape.options.rows_per_hidden
    return _fitted(
        tile, layer, architecture, layer.shape.hidden, depth=layer.shape.width, gates=gates
    )


def input_config(layer: Layer, architecture: Architecture, block_m: int) -> TileConfig:
    """Chooses the tile of the rows of x."""
    if on_tensor_cores(layer, architecture):
        tile = TileConfig(block_m, 128, 64, num_warps=4, num_stages=4)
    else:
        # With four warps, 64 rows spill 8 bytes.
        tile = TileConfig(block_m, 64, 32, num_warps=8 if block_m == 64 else 4, num_stages=4)
    return _fitted(tile, layer, architecture, layer.shape.width, depth=layer.shape.rows)


def weight_config(layer: Layer, architecture: Architecture) -> TileConfig:
    """Chooses the tile of a parameter; its depth are an expert's rows."""
    rows = max(16, power_of_2(layer.shape.hidden))
    if on_tensor_cores(layer, architecture):
        # Rows of tokens are found by a load of their own, so half of the stages hold operands.
        tile = TileConfig(min(128, rows), 128, 32, num_warps=8, num_stages=7)
    else:
        tile = TileConfig(min(64, rows), 64, 16, num_warps=4, num_stages=4)
    return _fitted(tile, layer, architecture, layer.shape.width)


def _fitted(
    tile: TileConfig,
    layer: Layer,
    architecture: Architecture,
    columns: int,
    *,
    depth: int = 0,
    gates: int = 1,
) -> TileConfig:
    """Narrows a tile to the columns and to blocks that divide the depth, with stages that fit."""
    block_n, block_k = min(tile.block_n, max(16, power_of_2(columns))), tile.block_k
    while block_k > 16 and depth % block_k:
        block_k //= 2
    itemsize = layer.shape.weight_format.operand_dtype.itemsize
    stage = (tile.block_m + gates * block_n) * block_k * itemsize
    num_stages = max(1, min(tile.num_stages, (architecture.shared_memory - 4096) // stage))
    return replace(tile, block_n=block_n, block_k=block_k, num_stages=num_stages)
