"""Operators that the standard has for other types than a graph's.

Convolutions, sines and many activations take bfloat16 from opset 22 on, TopK from 24 and Einsum
from 28 on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import onnx
import onnx_ir as ir

from dynamo_moe.graph.matching import Writer

_NEWEST_RUN = 23
"""The last version of the standard operators that ONNX Runtime 1.23 reads."""

_WITHIN_FLOAT32 = frozenset({ir.DataType.BFLOAT16, ir.DataType.FLOAT16})
"""The types all of whose numbers float32 has."""


class _Refused(NamedTuple):
    """An operand whose type the graph's version of the standard does not take.

    Attributes:
        node: The node.
        schema: That of its operator.
        name: The type's name in the schema, which other operands and results share.
        dtype: The type.
        opset: The first later version that takes it; None if there is none.
    """

    node: ir.Node
    schema: onnx.defs.OpSchema
    name: str
    dtype: ir.DataType
    opset: int | None


def opset_of_types(model: ir.Model) -> int:
    """Returns the version that has a graph's operators for its types, as far as runtimes go."""
    opsets = (refused.opset for refused in _refused(model))
    known = (opset for opset in opsets if opset is not None and opset <= _NEWEST_RUN)
    return max(known, default=model.opset_imports[""])


def widen_refused(model: ir.Model) -> None:
    """Makes nodes of half precision that the graph's version does not have nodes of float32."""
    writer = Writer(model.graph, "widened")
    for refused in {(each.node, each.name): each for each in _refused(model)}.values():
        if refused.dtype in _WITHIN_FLOAT32:
            _widen(refused, writer)


def _widen(refused: _Refused, writer: Writer) -> None:
    node, schema, name, dtype, _ = refused
    graph = writer.graph = cast("ir.Graph", node.graph)

    def converted(value: ir.Value, to: ir.DataType) -> ir.Value:
        result = writer.node(node, "Cast", [value], {"to": to}).outputs[0]
        result.type, result.shape = ir.TensorType(to), value.shape
        return result

    inputs = [
        converted(value, ir.DataType.FLOAT)
        if value is not None and _formal(schema.inputs, position).type_str == name
        else value
        for position, value in enumerate(node.inputs)
    ]
    wide = writer.node(node, node.op_type, inputs, node.attributes, len(node.outputs))
    for position, (old, new) in enumerate(zip(node.outputs, wide.outputs, strict=True)):
        new.type, new.shape = old.type, old.shape
        if _formal(schema.outputs, position).type_str == name:
            new.type, old.type = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(dtype)
            writer.replace(old, converted(new, dtype))
        else:
            writer.replace(old, new)
    graph.remove(node, safe=True)


def _refused(model: ir.Model) -> Iterator[_Refused]:
    opset = model.opset_imports[""]
    dtypes: dict[ir.Value, ir.DataType] = {}
    for node in model.graph.all_nodes():
        schema = None if node.domain else _schema(node.op_type, opset)
        if schema is None or _makes_sequences(schema):
            continue
        operands = _operands(node, schema, dtypes)
        for formal, dtype in operands.items():
            first = _first_opset(node.op_type, opset, formal, dtype)
            if first != opset:
                yield _Refused(node, schema, schema.inputs[formal].type_str, dtype, first)
        _infer(node, schema, operands, dtypes)


def _makes_sequences(schema: onnx.defs.OpSchema) -> bool:
    """Whether an operator's results are sequences, which simplification makes tensors."""
    return any(name.startswith("seq(") for formal in schema.outputs for name in formal.types)


def _operands(
    node: ir.Node, schema: onnx.defs.OpSchema, dtypes: Mapping[ir.Value, ir.DataType]
) -> dict[int, ir.DataType]:
    """Returns the dtypes of a node's inputs, as far as known, by their places in the schema."""
    found = {}
    for position, value in enumerate(node.inputs):
        dtype = None if value is None else value.dtype or dtypes.get(value)
        if dtype is not None:
            found[min(position, len(schema.inputs) - 1)] = dtype
    return found


def _infer(
    node: ir.Node,
    schema: onnx.defs.OpSchema,
    operands: Mapping[int, ir.DataType],
    dtypes: dict[ir.Value, ir.DataType],
) -> None:
    """Notes the dtypes of results that have an operand's: translations leave some unsaid."""
    shared = {schema.inputs[formal].type_str: dtype for formal, dtype in operands.items()}
    for position, value in enumerate(node.outputs):
        name = _formal(schema.outputs, position).type_str
        if value.dtype is None and name in shared:
            dtypes[value] = shared[name]


@functools.cache
def _first_opset(op_type: str, opset: int, formal: int, dtype: ir.DataType) -> int | None:
    """Returns the first version from ``opset`` on whose operator takes a dtype; None if none."""
    name = f"tensor({dtype.name.lower()})"
    for version in range(opset, onnx.defs.onnx_opset_version() + 1):
        schema = _schema(op_type, version)
        if schema is not None and name in _formal(schema.inputs, formal).types:
            return version
    return None


@functools.cache
def _schema(op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        return None


def _formal(
    formals: Sequence[onnx.defs.OpSchema.FormalParameter], position: int
) -> onnx.defs.OpSchema.FormalParameter:
    return formals[min(position, len(formals) - 1)]  # The last one may be variadic.
