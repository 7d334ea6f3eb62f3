"""A file in bfloat16, computed in float32: ONNX Runtime has few operators of bfloat16 on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np
import onnx
from onnx import helper, numpy_helper

from dynamo_moe.files.model_files import all_nodes

_NARROW, _WIDE = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
# Attributes that say of which type a node's results, or its steps, are.
_TYPES = {"to", "dtype", "output_dtype", "softmax_precision"}


def has_bfloat16(proto: onnx.ModelProto) -> bool:
    """Whether a model has inputs, weights or steps in bfloat16."""
    types = {tensor.data_type for tensor in proto.graph.initializer}
    types.update(map(_dtype, proto.graph.input))
    nodes = chain(proto.graph.node, *(function.node for function in proto.functions))
    for node in all_nodes(nodes):
        types.update(a.i for a in node.attribute if a.name in _TYPES)
    return _NARROW in types


def in_float32(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model that computes in float32 what another one does in bfloat16.

    Weights stay as they are, also those in files beside it, and are cast before they are used; so
    are inputs. Outputs are float32.
    """
    wide = onnx.ModelProto()
    wide.CopyFrom(proto)
    graph = wide.graph
    narrow = [tensor.name for tensor in graph.initializer if tensor.data_type == _NARROW]
    narrow += [value.name for value in graph.input if _dtype(value) == _NARROW]
    names = {name: f"{name}.float32" for name in narrow}
    _widen_nodes(graph.node, names)
    _widen_values(output for output in graph.output if output.name not in names)
    del graph.value_info[:]
    for function in wide.functions:
        _widen_nodes(function.node, {})
        del function.value_info[:]
    casts = [helper.make_node("Cast", [name], [new], to=_WIDE) for name, new in names.items()]
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return wide


def _dtype(value: onnx.ValueInfoProto) -> int:
    return value.type.tensor_type.elem_type


def _widen_values(values: Iterable[onnx.ValueInfoProto]) -> None:
    for value in values:
        if _dtype(value) == _NARROW:
            value.type.tensor_type.elem_type = _WIDE


def _widen_nodes(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        for attribute in node.attribute:
            if attribute.name in _TYPES and attribute.i == _NARROW:
                attribute.i = _WIDE
            elif attribute.type == onnx.AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _widen_part(attribute.g, names)


def _widen_part(part: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Widens a branch or the body of a loop, which sees the values around it."""
    for tensor in part.initializer:
        _widen_tensor(tensor)
    _widen_values((*part.input, *part.output))
    _widen_nodes(part.node, names)
    del part.value_info[:]


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == _NARROW:
        values = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
