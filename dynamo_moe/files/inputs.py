"""Random inputs for an ONNX file, of other sizes than the example it was exported with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import to_torch_dtype
from torch import Tensor

from custom_ops.dtypes import FLOATS
from dynamo_moe.files.index_ranges import index_limits
from dynamo_moe.private import FakeTensor
from dynamo_moe.tracing.dynamic_shapes import BATCH

__all__ = ["KEY", "random_inputs", "store"]

KEY = "dynamo_moe.integers"
"""Of the file's metadata: the least and the greatest of the example's integers, by input."""

# Sizes of the batch, and of every other symbolic dimension, per case.
_CASES = ((1, 4), (3, 7), (2, 1))
# Where nothing is known.
_SOME = (0, 9)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def store(model: ir.Model, example: Sequence[Tensor]) -> None:
    """Notes in the metadata of which size the example's integers are.

    Args:
        model: The graph.
        example: A tensor for each of its inputs.
    """
    ranges = {
        str(value.name): [int(tensor.min()), int(tensor.max())]
        for value, tensor in zip(model.graph.inputs, example, strict=False)
        if tensor.dtype in _INTS and tensor.numel() and _has_values(tensor)
    }
    if ranges:
        model.metadata_props[KEY] = json.dumps(ranges)


def random_inputs(proto: onnx.ModelProto) -> list[dict[str, Tensor]]:
    """Returns a few cases, each a tensor by graph input, the same in every run.

    Raises:
        ValueError: If a dimension is an expression, or a dtype has no random values here.
    """
    generator = torch.Generator().manual_seed(20)
    symbols = {
        dim.dim_param
        for graph_input in proto.graph.input
        for dim in graph_input.type.tensor_type.shape.dim
        if dim.dim_param
    }
    ranges = _ranges(proto)
    cases = []
    for batch, other in _CASES:
        # Each symbol has a size of its own, so that axes taken for one another show.
        places = enumerate(sorted(symbols - {BATCH}))
        sizes = {symbol: 1 if other == 1 else other + place for place, symbol in places}
        sizes[BATCH] = batch
        cases.append({i.name: _random(i, sizes, ranges, generator) for i in proto.graph.input})
    return cases


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _ranges(proto: onnx.ModelProto) -> dict[str, tuple[int, int]]:
    """The integers that an input may hold: what the graph tells, or else the example."""
    metadata = {prop.key: prop.value for prop in proto.metadata_props}
    ranges: dict[str, tuple[int, int]] = {}
    for name, (least, greatest) in json.loads(metadata.get(KEY, "{}")).items():
        if greatest == 1 and least >= 0:
            ranges[name] = (1, 1)  # A mask, most likely: tokens that see none have no result.
        elif (least, greatest) != (0, 0):  # Zeros alone stand for anything.
            ranges[name] = (least, greatest)
    return ranges | {name: (0, limit - 1) for name, limit in index_limits(proto.graph).items()}


def _random(
    graph_input: onnx.ValueInfoProto,
    sizes: dict[str, int],
    ranges: Mapping[str, tuple[int, int]],
    generator: torch.Generator,
) -> Tensor:
    tensor_type = graph_input.type.tensor_type
    shape = [_size(graph_input.name, dim, sizes) for dim in tensor_type.shape.dim]
    element = ir.DataType(tensor_type.elem_type)
    dtype = None if element == ir.DataType.STRING else to_torch_dtype(element)
    if dtype in FLOATS:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype in _INTS:
        least, greatest = ranges.get(graph_input.name, _SOME)
        return torch.randint(least, greatest + 1, shape, generator=generator, dtype=dtype)
    if dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    raise ValueError(
        f"input {graph_input.name!r} is {element.name}: pass inputs of your own to verify"
    )


def _size(name: str, dimension: Any, sizes: dict[str, int]) -> int:
    if dimension.HasField("dim_value"):
        return int(dimension.dim_value)
    if not dimension.dim_param.isidentifier():
        raise ValueError(
            f"input {name!r} has a dimension {dimension.dim_param!r}: pass inputs of your own"
        )
    return sizes[dimension.dim_param]
