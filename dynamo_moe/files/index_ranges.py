"""How large the integers that enter an ONNX graph may be, by what they index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from dynamo_moe.moe_nodes.nodes import EXPERTS, EXPERTS_PACKED

# The first result of these operators holds elements of their first input, and no others.
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
_INTEGERS = {ir.DataType.INT64, ir.DataType.INT32}
# Larger constants are not read: those of a shift are scalars.
_MAX_CONSTANT = 64

# The inputs whose elements a value holds, and what was added to them.
_Origins = Mapping[ir.Value, int]


def index_limits(graph: ir.Graph) -> dict[str, int]:
    """Returns, by input, what each of its integers must stay below, where the graph shows it.

    An input is followed to what it indexes, such as the rows of an embedding; on the way it may be
    moved, cast or shifted by a constant.
    """
    origins: dict[ir.Value | None, _Origins] = {
        value: {value: 0}
        for value in graph.inputs
        if value.dtype in _INTEGERS and not value.is_initializer()
    }
    limits: dict[str, int] = {}
    for node in graph.all_nodes():
        for indices, size in _indexed(node):
            for value, shift in origins.get(indices, {}).items():
                name = value.name or ""
                limits[name] = min(limits.get(name, size - shift), size - shift)
        if node.outputs and (result_origins := _origins_of_result(node, origins)):
            origins[node.outputs[0]] = result_origins
    return {name: limit for name, limit in limits.items() if limit > 0}


def _origins_of_result(node: ir.Node, origins: Mapping[ir.Value | None, _Origins]) -> _Origins:
    if node.domain or not node.inputs:
        return {}
    if node.op_type in _PASSING:
        return origins.get(node.inputs[0], {})
    if node.op_type == "Concat":
        return {
            value: shift for part in node.inputs for value, shift in origins.get(part, {}).items()
        }
    if node.op_type in {"Add", "Sub"}:
        first, second = node.inputs
        if node.op_type == "Add" and _greatest(second) is None:
            first, second = second, first
        added = _greatest(second, -1 if node.op_type == "Sub" else 1)
        if added is not None:
            return {value: shift + added for value, shift in origins.get(first, {}).items()}
    return {}


def _indexed(node: ir.Node) -> Iterator[tuple[ir.Value | None, int]]:
    """Yields the values that the node takes as indices, and the number of what they index."""
    if not node.domain and node.op_type in {"Gather", "GatherElements"}:
        data, indices = node.inputs
        axis = node.attributes.get_int("axis", 0)
        shape = None if data is None else data.shape
        if shape is not None and -len(shape) <= axis < len(shape) and shape.is_static(axis):
            yield indices, int(shape[axis])  # type: ignore[arg-type]
    elif not node.domain and node.op_type == "OneHot":
        if (depth := _greatest(node.inputs[1])) is not None:
            yield node.inputs[0], depth
    elif node.op_type in (EXPERTS, EXPERTS_PACKED) and "num_experts" in node.attributes:
        yield node.inputs[1], node.attributes.get_int("num_experts", 0)


def _greatest(value: ir.Value | None, sign: int = 1) -> int | None:
    """Returns the greatest of a small constant's integers, times ``sign``; None if it is none."""
    tensor = None if value is None or not value.is_initializer() else value.const_value
    if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.dtype not in _INTEGERS:
        return None
    return int((sign * tensor.numpy()).max()) if 0 < tensor.size <= _MAX_CONSTANT else None
