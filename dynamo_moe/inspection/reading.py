"""``inspect``: reads the contents of an ONNX file.

Sizes come from shapes and dtypes. Files of external data are never opened, so a model of many
gigabytes takes the time and memory of its graph; weights stored inside the file itself (2 GB at
most, protobuf's limit) are read with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from custom_ops.offload import WeightSource
from custom_ops.packed_weights import ENCODINGS, encoding_of
from custom_ops.weight_formats import suffixes_of
from dynamo_moe.files import rank_files
from dynamo_moe.files.block_functions import inlined
from dynamo_moe.files.model_files import all_nodes, load_graph, subgraphs
from dynamo_moe.files.offload_report import OffloadedLayer
from dynamo_moe.inspection.summary import (
    AttributeValue,
    FunctionSummary,
    ModelSummary,
    MoELayer,
    ValueSummary,
    WeightsSummary,
)
from dynamo_moe.moe_nodes.nodes import (
    INPUTS,
    RESIDENT_EXPERTS,
    SOURCES,
    WEIGHT_FORMAT,
    is_moe,
    layer_name,
)
from dynamo_moe.operators.foreign import foreign_operator


def inspect(path: str | PathLike[str]) -> ModelSummary:
    """Tells what is in an ONNX file, without opening its external data.

    Args:
        path: The ``.onnx`` file.

    Returns:
        The summary: ``rich.print`` shows it as tables, ``to_dict`` is for JSON.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not an ONNX model; the message says why.
    """
    path = Path(path)
    model = load_graph(path)
    initializers = {tensor.name: tensor for tensor in _initializers(model.graph)}
    weights: dict[str, WeightsSummary] = {}
    for tensor in initializers.values():
        name = _dtype(tensor.data_type)
        weights[name] = weights.get(name, WeightsSummary()) + _size(tensor)
    weights = dict(sorted(weights.items(), key=lambda item: (-item[1].bytes, item[0])))
    total = sum(weights.values(), WeightsSummary())
    external = [t for t in initializers.values() if t.data_location == onnx.TensorProto.EXTERNAL]
    files = {entry.value for t in external for entry in t.external_data if entry.key == "location"}
    operators = _count_operators(model.graph.node)
    graph = inlined(model).graph
    constants = {tensor.name: tensor for tensor in _initializers(graph)}
    moe_layers = [moe_layer(node, constants) for node in all_nodes(graph.node) if is_layer(node)]
    return ModelSummary(
        path=path,
        file_bytes=path.stat().st_size,
        external_bytes=sum(_size(tensor).bytes for tensor in external),
        missing_files=tuple(sorted(file for file in files if not (path.parent / file).is_file())),
        producer=f"{model.producer_name} {model.producer_version}".strip(),
        ir_version=model.ir_version,
        opsets={opset.domain or "ai.onnx": opset.version for opset in model.opset_import},
        inputs=tuple(_value(v) for v in model.graph.input if v.name not in initializers),
        outputs=tuple(_value(v) for v in model.graph.output),
        nodes=sum(operators.values()),
        operators=operators,
        moe_layers=tuple(moe_layers),
        offloaded=tuple(_offloaded(layer, path) for layer in moe_layers if _is_offloaded(layer)),
        weights=weights,
        parameters=total.elements,
        weight_bytes=total.bytes,
        functions=tuple(_function(function) for function in model.functions),
        rank=rank_files.record_of(model),
        rank_problem=_rank_problem(path, model),
    )


def _rank_problem(path: Path, model: onnx.ModelProto) -> str:
    if rank_files.record_of(model) is None:
        return ""
    try:
        rank_files.files_of_ranks(path)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return ""


def is_layer(node: onnx.NodeProto) -> bool:
    """Whether a node is a whole MoE layer: one of ours, or a runtime's own."""
    return bool(_input_names(node))


def _input_names(node: onnx.NodeProto) -> tuple[str, ...]:
    """Returns the names of an MoE layer's inputs; none if the node is not a whole layer."""
    foreign = foreign_operator(node.domain, node.op_type)
    if foreign is not None:
        return foreign.inputs
    return INPUTS[node.op_type] if is_moe(node) else ()


def moe_layer(node: onnx.NodeProto, initializers: Mapping[str, onnx.TensorProto]) -> MoELayer:
    """Describes a node for which :func:`is_layer` holds."""
    _, *inputs = zip(_input_names(node), node.input, strict=False)
    tensors = {role: initializers[name] for role, name in inputs if name in initializers}
    weights = {role: tensor.name for role, tensor in tensors.items()}
    pairs = ((attribute.name, _attribute(attribute)) for attribute in node.attribute)
    attributes = {name: value for name, value in sorted(pairs) if value is not None}
    w1, w2 = tensors.get("w1"), tensors.get("w2")
    experts, _, width = w1.dims if w1 and len(w1.dims) == 3 else (None, None, None)
    size = sum((_size(tensor) for tensor in tensors.values()), WeightsSummary())
    per_element = _values_per_element(attributes)
    node_name = node.name or node.output[0]

    def number(name: str, default: int | None = None) -> int | None:
        value = attributes.get(name, default)
        return value if isinstance(value, int) else None

    return MoELayer(
        name=layer_name(weights.get("w1", ""), node_name),
        node=node_name,
        domain=node.domain,
        op_type=node.op_type,
        num_experts=number("num_experts", experts),
        top_k=number("top_k", number("k")),
        in_features=number("in_features", width and width * per_element),
        hidden_features=number(
            "hidden_features", w2.dims[-1] * per_element if w2 and w2.dims else None
        ),
        activation=str(attributes.get("activation", attributes.get("activation_type", ""))),
        precision=_precision(w1, attributes),
        parameters=sum(
            _size(tensor).elements * (per_element if role in ("w1", "w2", "w3") else 1)
            for role, tensor in tensors.items()
            if not role.endswith(("_scales", "_zero_points"))
        ),
        bytes=size.bytes,
        expert_bytes=_expert_bytes(tensors, number("num_experts", experts)),
        weights=weights,
        attributes=attributes,
    )


def _precision(w1: onnx.TensorProto | None, attributes: Mapping[str, Any]) -> str | None:
    if WEIGHT_FORMAT in attributes:
        return str(attributes[WEIGHT_FORMAT])
    if "expert_weight_bits" in attributes:
        return f"{attributes.get('quant_type', 'int')}{attributes['expert_weight_bits']}"
    return _dtype(w1.data_type) if w1 else None


def _values_per_element(attributes: Mapping[str, Any]) -> int:
    """Returns how many values an element of the experts' weights has: two where they are packed."""
    encoding = ENCODINGS.get(str(attributes.get(WEIGHT_FORMAT)))
    if encoding is not None:
        return encoding.per_byte
    bits = attributes.get("expert_weight_bits")
    return 8 // bits if isinstance(bits, int) and bits > 0 else 1


def _expert_bytes(tensors: Mapping[str, onnx.TensorProto], experts: int | None) -> int | None:
    """Returns the bytes of an expert's w1 and w2, with their scales and zero points."""
    w1 = tensors.get("w1")
    if w1 is None or "w2" not in tensors or not experts or len(w1.dims) < 3:
        return None
    of_weights = [tensor for role, tensor in tensors.items() if role.startswith(("w1", "w2"))]
    return sum(_size(tensor).bytes for tensor in of_weights) // experts


def _is_offloaded(layer: MoELayer) -> bool:
    return bool(layer.attributes.get(RESIDENT_EXPERTS))


def _offloaded(layer: MoELayer, path: Path) -> OffloadedLayer:
    where = f"{path}: offloaded node {layer.node!r}"
    numbers: dict[str, Any] = {
        "top_k": layer.top_k,
        "num_experts": layer.num_experts,
        RESIDENT_EXPERTS: layer.attributes[RESIDENT_EXPERTS],
    }
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{where}: {name} must be a positive integer, got {number}")
    try:
        packed = layer.attributes.get(WEIGHT_FORMAT)
        suffixes = suffixes_of(None if packed is None else encoding_of(str(packed)))
        tensors = {
            name: source
            for weight, attribute in SOURCES.items()
            for name, source in WeightSource.parse_lines(
                weight, str(layer.attributes.get(attribute)), suffixes
            ).items()
        }
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    top_k, experts, slots = numbers.values()
    return OffloadedLayer(layer.name, layer.node, top_k, experts, slots, tensors)


def _initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for subgraph in subgraphs(node):
            yield from _initializers(subgraph)


def _count_operators(nodes: Iterable[onnx.NodeProto]) -> dict[str, int]:
    names = (
        f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        for node in all_nodes(nodes)
    )
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def _function(function: onnx.FunctionProto) -> FunctionSummary:
    operators = _count_operators(function.node)
    return FunctionSummary(
        domain=function.domain,
        name=function.name,
        overload=function.overload,
        nodes=sum(operators.values()),
        operators=operators,
    )


def _value(value: onnx.ValueInfoProto) -> ValueSummary:
    if not value.type.HasField("tensor_type"):
        return ValueSummary(value.name, "", None)
    tensor = value.type.tensor_type
    shape = None
    if tensor.HasField("shape"):
        shape = tuple(
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
            for dim in tensor.shape.dim
        )
    return ValueSummary(value.name, _dtype(tensor.elem_type), shape)


def _attribute(attribute: onnx.AttributeProto) -> AttributeValue | None:
    """The value of a number, a string or a list of them; None for tensors, types and graphs."""
    kinds = onnx.AttributeProto
    match attribute.type:
        case kinds.INT:
            return attribute.i
        case kinds.FLOAT:
            return round(attribute.f, 6)
        case kinds.STRING:
            return attribute.s.decode(errors="replace")
        case kinds.INTS:
            return list(attribute.ints)
        case kinds.FLOATS:
            return [round(value, 6) for value in attribute.floats]
        case kinds.STRINGS:
            return [value.decode(errors="replace") for value in attribute.strings]
    return None


def _dtype(data_type: int) -> str:
    # A dtype newer than the installed onnx still gets a name.
    known = onnx.TensorProto.DataType.values()
    if data_type not in known:
        return f"dtype {data_type}"
    name: str = onnx.TensorProto.DataType.Name(data_type).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def _size(tensor: onnx.TensorProto) -> WeightsSummary:
    elements = math.prod(tensor.dims)
    if tensor.data_type == onnx.TensorProto.STRING:
        return WeightsSummary(1, elements, sum(map(len, tensor.string_data)))
    try:
        bits = ir.DataType(tensor.data_type).bitwidth
    except (ValueError, TypeError):
        return WeightsSummary(1, elements, len(tensor.raw_data) or _external_length(tensor))
    return WeightsSummary(1, elements, math.ceil(elements * bits / 8))


def _external_length(tensor: onnx.TensorProto) -> int:
    return next((int(e.value) for e in tensor.external_data if e.key == "length"), 0)
