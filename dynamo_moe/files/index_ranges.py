"""How large the integers that enter an ONNX graph may be: what they index tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from dynamo_moe.files.model_files import all_nodes
from dynamo_moe.moe_nodes.nodes import EXPERTS

__all__ = ["index_limits"]

# Their first result holds elements of their first input, no others.
_PASSING = {
    "Cast",
    "Expand",
    "Flatten",
    "Identity",
    "Reshape",
    "Slice",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
}
_INTEGERS = {onnx.TensorProto.INT64, onnx.TensorProto.INT32}
# Constants that are read: those of a shift are scalars.
_SMALL = 64


def index_limits(graph: onnx.GraphProto) -> dict[str, int]:
    """Returns, by input, what each of its integers must stay below, where the graph tells.

    An input tells by what it indexes, as an embedding's rows, on its way there moved, cast or
    shifted by a constant.
    """
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    sizes = _sizes(graph, initializers)
    # By value: the inputs whose elements it holds, and what was added to them.
    origins: dict[str, dict[str, int]] = {
        value.name: {value.name: 0}
        for value in graph.input
        if value.type.tensor_type.elem_type in _INTEGERS and value.name not in initializers
    }
    limits: dict[str, int] = {}
    for node in all_nodes(graph.node):
        for value, limit in _limited(node, sizes, initializers):
            for name, shift in origins.get(value, {}).items():
                limits[name] = min(limits.get(name, limit - shift), limit - shift)
        if node.output:
            found = _origins(node, origins, initializers)
            if found:
                origins[node.output[0]] = found
    return {name: limit for name, limit in limits.items() if limit > 0}


def _origins(
    node: onnx.NodeProto,
    origins: Mapping[str, dict[str, int]],
    initializers: Mapping[str, onnx.TensorProto],
) -> dict[str, int]:
    """What the elements of the node's first result are."""
    if node.domain or not node.input:
        return {}
    if node.op_type in _PASSING:
        return origins.get(node.input[0], {})
    if node.op_type == "Concat":
        return {
            name: shift for value in node.input for name, shift in origins.get(value, {}).items()
        }
    if node.op_type in {"Add", "Sub"}:
        first, second = node.input
        sign = 1 if node.op_type == "Add" else -1
        if second in initializers:
            value, added = first, _greatest(initializers[second], sign)
        elif first in initializers and sign > 0:
            value, added = second, _greatest(initializers[first], 1)
        else:
            return {}
        if added is not None:
            return {name: shift + added for name, shift in origins.get(value, {}).items()}
    return {}


def _limited(
    node: onnx.NodeProto,
    sizes: Mapping[str, tuple[int | None, ...]],
    initializers: Mapping[str, onnx.TensorProto],
) -> Iterator[tuple[str, int]]:
    """Yields the values that the node takes for indices, and the number of what they index."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if not node.domain and node.op_type in {"Gather", "GatherElements"}:
        shape = sizes.get(node.input[0])
        axis = attributes["axis"].i if "axis" in attributes else 0
        size = shape[axis] if shape and -len(shape) <= axis < len(shape) else None
        if size is not None:
            yield node.input[1], size
    elif not node.domain and node.op_type == "OneHot" and node.input[1] in initializers:
        depth = _greatest(initializers[node.input[1]], 1)
        if depth is not None:
            yield node.input[0], depth
    elif node.op_type == EXPERTS and "num_experts" in attributes:
        yield node.input[1], attributes["num_experts"].i


def _sizes(
    graph: onnx.GraphProto, initializers: Mapping[str, onnx.TensorProto]
) -> dict[str, tuple[int | None, ...]]:
    values = (*graph.input, *graph.value_info)
    sizes: dict[str, tuple[int | None, ...]] = {
        value.name: tuple(
            dim.dim_value if dim.HasField("dim_value") else None
            for dim in value.type.tensor_type.shape.dim
        )
        for value in values
        if value.type.tensor_type.HasField("shape")
    }
    return sizes | {name: tuple(tensor.dims) for name, tensor in initializers.items()}


def _greatest(tensor: onnx.TensorProto, sign: int) -> int | None:
    external = tensor.data_location == onnx.TensorProto.EXTERNAL
    if tensor.data_type not in _INTEGERS or external or not 0 < np.prod(tensor.dims) <= _SMALL:
        return None
    return int((sign * numpy_helper.to_array(tensor)).max())
