"""The MoE nodes of an ONNX file, as the kernels' layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx.inliner
import onnx.shape_inference
import torch

from custom_ops import ExpertOptions, RouterOptions
from custom_ops.kernels.layer import Layer
from dynamo_moe.files.model_files import load_graph
from dynamo_moe.moe_nodes import schemas

__all__ = ["NamedLayer", "kernel_layers"]

_DTYPES: Mapping[int, torch.dtype] = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
    onnx.TensorProto.DOUBLE: torch.float64,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.INT64: torch.int64,
}
# Type inference reads small tensors, such as shapes. It copies all.
_INFERENCE_READS = 1024


class NamedLayer(NamedTuple):
    """A layer and the name of its node."""

    name: str
    layer: Layer


def kernel_layers(path: str | PathLike[str]) -> list[NamedLayer]:
    """Reads what kernels the MoE nodes of a file need, without its external data.

    Nodes in branches, loops and functions are found too; ``com.microsoft::MoE`` is not one of ours.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not an ONNX model or has no MoE nodes, or there are no kernels for
            one, which is named.
    """
    model = _without_weights(load_graph(path))
    if any(_is_moe(node) for function in model.functions for node in function.node):
        # The types in a function are those of its call.
        kept = [(f.domain, f.name) for f in model.functions if _is_ours(f.domain)]
        model = onnx.inliner.inline_selected_functions(model, kept, exclude=True)
    nodes = list(_moe_nodes(model.graph, {}))
    if any(name and name not in types for node, types in nodes for name in node.input):
        # Where the file contradicts itself, what is not known is named below.
        with suppress(onnx.shape_inference.InferenceError):
            model = onnx.shape_inference.infer_shapes(model)
        nodes = list(_moe_nodes(model.graph, {}))
    if not nodes:
        raise ValueError(
            f"{Path(path)} has no MoE nodes of domain {schemas.DOMAIN!r}, as files of target "
            "plugin do"
        )
    return [_layer(node, types) for node, types in nodes]


def _is_ours(domain: str) -> bool:
    return domain.split(".", maxsplit=1)[0] == schemas.DOMAIN


def _is_moe(node: onnx.NodeProto) -> bool:
    return _is_ours(node.domain) and node.op_type in (schemas.DROPLESS, schemas.EXPERTS)


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) > _INFERENCE_READS:
            tensor.ClearField("raw_data")
    return model


def _moe_nodes(
    graph: onnx.GraphProto, outer: Mapping[str, int]
) -> Iterator[tuple[onnx.NodeProto, Mapping[str, int]]]:
    """Yields each MoE node, and the data types of the values that it sees."""
    types = dict(outer)
    for values in (graph.input, graph.output, graph.value_info):
        for value in values:
            if value.type.tensor_type.elem_type:
                types[value.name] = value.type.tensor_type.elem_type
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if _is_moe(node):
            yield node, types
        for attribute in node.attribute:
            for subgraph in (attribute.g, *attribute.graphs):
                yield from _moe_nodes(subgraph, types)


def _layer(node: onnx.NodeProto, types: Mapping[str, int]) -> NamedLayer:
    name = node.name or next(iter(node.output), "")
    try:
        return NamedLayer(name, _checked_layer(node, types).canonical())
    except (ValueError, TypeError) as error:
        raise ValueError(f"node {name!r}: {error}") from None


def _checked_layer(node: onnx.NodeProto, types: Mapping[str, int]) -> Layer:
    schema = schemas.SCHEMAS[node.op_type]
    attributes = _attributes(node, schema)
    dtypes: dict[str, torch.dtype] = {}
    shared: dict[str, str] = {}
    for formal, value in zip(schema.inputs, node.input, strict=False):
        if not value:
            continue
        dtypes[formal.name] = _dtype(formal.name, value, types)
        first = shared.setdefault(formal.type_str, formal.name)
        if dtypes[first] != dtypes[formal.name]:
            raise ValueError(
                f"{formal.name} must have the dtype of {first}, {dtypes[first]}; "
                f"got {dtypes[formal.name]}"
            )
    required = [f.name for f in schema.inputs if f.option == f.option.Single]
    missing = [formal for formal in required if formal not in dtypes]
    if missing:
        raise ValueError(f"it has no input {', '.join(missing)}")
    router = None
    routing = ("expert_ids", "expert_weights")
    if node.op_type == schemas.DROPLESS:
        routing = ("router_weight", "router_bias")
        router = RouterOptions(
            attributes["top_k"],
            scoring=attributes["scoring"],
            renormalize=bool(attributes["renormalize"]),
            routed_scaling=attributes["routed_scaling"],
        )
    return Layer(
        experts=attributes["num_experts"],
        width=attributes["in_features"],
        hidden=attributes["hidden_features"],
        top_k=attributes["top_k"],
        tokens_dtype=dtypes["x"],
        experts_dtype=dtypes["w1"],
        options=ExpertOptions(
            activation=attributes["activation"],
            gated=bool(attributes["gated"]),
            interleaved=bool(attributes["interleaved"]),
            weight_on_input=bool(attributes["weight_on_input"]),
            alpha=attributes["activation_alpha"],
            limit=attributes["activation_limit"],
            pre_norm=attributes["pre_norm"],
            norm_eps=attributes["norm_eps"],
            residual=bool(attributes["residual"]),
        ),
        router=router,
        routing_dtype=dtypes[routing[0]],
        weights_dtype=dtypes.get(routing[1]),
        b1="b1" in dtypes,
        b2="b2" in dtypes,
    )


def _attributes(node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> dict[str, Any]:
    """The node's attributes, and the defaults of those that it leaves out."""
    given = {attribute.name: attribute for attribute in node.attribute}
    values = {}
    for name, formal in schema.attributes.items():
        attribute = given.get(name, formal.default_value)
        if formal.required and name not in given:
            raise ValueError(f"it has no attribute {name}")
        kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
        if getattr(onnx.defs.OpSchema.AttrType, kind) != formal.type:
            raise ValueError(f"its attribute {name} has type {kind}, another than the operator's")
        value = onnx.helper.get_attribute_value(attribute)
        values[name] = value.decode() if isinstance(value, bytes) else value
    return values


def _dtype(formal: str, value: str, types: Mapping[str, int]) -> torch.dtype:
    code = types.get(value)
    if code is None:
        raise ValueError(f"the dtype of its input {formal}, {value!r}, is not known")
    if code not in _DTYPES:
        name = onnx.TensorProto.DataType.Name(code).lower()
        raise ValueError(f"there are no kernels for its input {formal}, {value!r}, of {name}")
    return _DTYPES[code]
