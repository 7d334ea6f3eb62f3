"""One ONNX file whose weights go from where they are into the file, without a copy in between.

A protobuf message is its fields one after the other, each with its number and length. So the
weights can follow what protobuf's own library has written of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from dynamo_moe.files.copies import Copies, Copy, with_copies
from dynamo_moe.progress import phases

_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
_INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_RAW_DATA = onnx.TensorProto.RAW_DATA_FIELD_NUMBER


def write(model: onnx.ModelProto, path: Path, weights: Sequence[ir.Value]) -> None:
    """Writes a model, which is taken apart, and initializers that its main graph lacks.

    Of those that are in other files, the model says where.
    """
    graph = model.graph.SerializeToString()
    model.ClearField("graph")
    head = model.SerializeToString()
    fields = [
        _field(weight.name, weight.const_value)
        for weight in weights
        if weight.const_value is not None
    ]
    total = sum(tensor.nbytes for _, tensor in fields if tensor is not None)
    size = len(graph) + sum(len(start) for start, _ in fields) + total
    done = 0
    with path.open("wb") as file:
        file.write(head + _key(_GRAPH) + _varint(size) + graph)
        for start, tensor in fields:
            file.write(start)
            if tensor is None:
                continue
            phases.report(done, total)
            if hasattr(tensor, "tofile"):  # Not all kinds of onnx_ir's tensors have it.
                tensor.tofile(file)
            else:
                file.write(tensor.tobytes())
            done += tensor.nbytes
    if total:
        phases.report(done, total)


def without(model: ir.Model, weights: Sequence[ir.Value]) -> onnx.ModelProto:
    """Returns the model without some of the main graph's initializers."""
    initializers = model.graph.initializers
    values = list(initializers.values())
    for weight in weights:
        del initializers[weight.name or ""]
    results = _only_typed(model.graph)
    types = [(value, value.type, value.shape) for value in results]
    for value in results:
        value.type = value.shape = None
    try:
        proto = ir.to_proto(model)
    finally:
        for value, kind, shape in types:
            value.type, value.shape = kind, shape
        initializers.clear()
        for value in values:
            initializers.add(value)
    _add_types(proto.graph, results)
    return proto


def add_copies(proto: onnx.GraphProto, graph: ir.Graph, copies: Copies) -> None:
    """Adds copies of nodes to what :func:`without` has made of their graph."""
    protos = dict(zip(graph, list(proto.node), strict=True))
    del proto.node[:]
    del proto.value_info[len(proto.value_info) - len(_only_typed(graph)) :]
    nodes = list(with_copies(graph, copies))
    for node in nodes:
        added = proto.node.add()
        if isinstance(node, Copy):
            added.CopyFrom(protos[node.source])
            added.name = node.name
            added.input[:] = ["" if value is None else value.name for value in node.inputs]
            added.output[:] = [value.name for value in node.outputs]
        else:
            added.CopyFrom(protos[node])
    _add_types(proto, _only_typed(nodes))


def add_inputs(graph: onnx.GraphProto, weights: Iterable[ir.Value]) -> None:
    """Adds inputs of weights' types; equal types, as equal blocks have, are made once."""
    made: dict[tuple[int, tuple[int | str, ...]], onnx.TypeProto] = {}
    for weight in weights:
        tensor = weight.const_value
        if tensor is None:
            continue
        kind = tensor.dtype.value, tuple(tensor.shape.numpy())
        if kind not in made:
            made[kind] = onnx.helper.make_tensor_type_proto(*kind)
        info = graph.input.add(name=weight.name or "")
        info.type.CopyFrom(made[kind])


def _only_typed(nodes: Iterable[ir.Node | Copy]) -> list[ir.Value]:
    """Returns results of which a graph's ``value_info`` has the name, type and shape alone."""
    return [
        value
        for node in nodes
        for value in node.outputs
        if value.name and value.type is not None
        if not (value.metadata_props or value.doc_string or value.is_graph_output())
    ]


def _add_types(graph: onnx.GraphProto, values: Sequence[ir.Value]) -> None:
    """Adds values' types and shapes; those that values share, as equal blocks do, are made once."""
    made: dict[tuple[int, int], onnx.ValueInfoProto] = {}
    for value in values:
        info = graph.value_info.add()
        same = made.setdefault((id(value.type), id(value.shape)), info)
        if same is info:
            ir.serde.serialize_value_into(info, value)
        else:
            info.name = value.name or ""
            info.type.CopyFrom(same.type)


def _field(name: str | None, tensor: ir.TensorProtocol) -> tuple[bytes, ir.TensorProtocol | None]:
    """Returns the bytes before a weight's values, and the weight; None if they are elsewhere."""
    proto = onnx.TensorProto(
        name=name or "", dims=tensor.shape.numpy(), data_type=tensor.dtype.value
    )
    if not isinstance(tensor, ir.ExternalTensor):
        named: bytes = proto.SerializeToString() + _key(_RAW_DATA) + _varint(tensor.nbytes)
        return _key(_INITIALIZER) + _varint(len(named) + tensor.nbytes) + named, tensor
    if tensor.doc_string:  # Even an empty one would be in the file.
        proto.doc_string = tensor.doc_string
    for key, text in tensor.metadata_props.items():
        proto.metadata_props.add(key=key, value=text)
    proto.data_location = onnx.TensorProto.EXTERNAL
    said = {"location": tensor.location, "offset": tensor.offset, "length": tensor.length}
    for key, value in said.items():
        if value is not None:
            proto.external_data.add(key=key, value=str(value))
    where = proto.SerializeToString()
    return _key(_INITIALIZER) + _varint(len(where)) + where, None


def _key(field: int) -> bytes:
    """The key of a field that has a length (https://protobuf.dev/programming-guides/encoding)."""
    return _varint(field << 3 | 2)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    result = bytearray()
    while number > 0x7F:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    result.append(number)
    return bytes(result)
