"""Random inputs for an ONNX file, of other sizes than the example it was exported with."""

from __future__ import annotations

from typing import Any

import onnx
import torch
from torch import Tensor

from dynamo_moe._dynamic_shapes import BATCH

__all__ = ["random_inputs"]

# Sizes of the batch, and of every other symbolic dimension, per case.
_CASES = ((1, 4), (3, 7), (2, 1))
_FLOATS: dict[int, torch.dtype] = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.DOUBLE: torch.float64,
}
_INTS: dict[int, torch.dtype] = {
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.INT32: torch.int32,
}


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
    cases = []
    for batch, other in _CASES:
        # Each symbol has a size of its own, so that axes taken for one another show.
        places = enumerate(sorted(symbols - {BATCH}))
        sizes = {symbol: 1 if other == 1 else other + place for place, symbol in places}
        sizes[BATCH] = batch
        cases.append({i.name: _random(i, sizes, generator) for i in proto.graph.input})
    return cases


def _random(
    graph_input: onnx.ValueInfoProto, sizes: dict[str, int], generator: torch.Generator
) -> Tensor:
    tensor_type = graph_input.type.tensor_type
    shape = [_size(graph_input.name, dim, sizes) for dim in tensor_type.shape.dim]
    if tensor_type.elem_type in _FLOATS:
        return torch.randn(shape, generator=generator).to(_FLOATS[tensor_type.elem_type])
    if tensor_type.elem_type in _INTS:
        dtype = _INTS[tensor_type.elem_type]
        return torch.randint(0, 10, shape, generator=generator, dtype=dtype)
    if tensor_type.elem_type == onnx.TensorProto.BOOL:
        return torch.ones(shape, dtype=torch.bool)
    name = onnx.TensorProto.DataType.Name(tensor_type.elem_type)
    raise ValueError(f"input {graph_input.name!r} is {name}: pass inputs of your own to verify")


def _size(name: str, dimension: Any, sizes: dict[str, int]) -> int:
    if dimension.HasField("dim_value"):
        return int(dimension.dim_value)
    if not dimension.dim_param.isidentifier():
        raise ValueError(
            f"input {name!r} has a dimension {dimension.dim_param!r}: pass inputs of your own"
        )
    return sizes[dimension.dim_param]
