"""What distinguishes a file from others of its model, as its record of layers tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike

import torch
from onnx_ir import DataType
from onnx_ir.tensor_adapters import to_torch_dtype

from custom_ops.packed_weights import encoding_of
from dynamo_moe.files.metadata import Layer, layers_of
from dynamo_moe.files.model_files import load_graph
from dynamo_moe.moe_nodes.nodes import INPUTS


@dataclass(frozen=True)
class ExpertsForm:
    """How experts' weights are stored.

    Attributes:
        dtype: Their dtype; None if they are packed, or the file has no such weights.
        weight_format: One of :data:`custom_ops.packed_weights.ENCODINGS`; None if they are plain.
        group: The columns that share a scale, where the format leaves that open; None: a row.
        zero_points: Whether groups have zero points.
    """

    dtype: torch.dtype | None = None
    weight_format: str | None = None
    group: int | None = None
    zero_points: bool = False


@dataclass(frozen=True)
class FileForm:
    """The form of a file.

    Attributes:
        dtype: The dtype of its first result; None if that is no float.
        experts: The form of the experts of all its layers; None if there are none, or several.
    """

    dtype: torch.dtype | None
    experts: ExpertsForm | None


def form_of(path: str | PathLike[str]) -> FileForm:
    """Reads the form of a file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not an ONNX model.
    """
    proto = load_graph(path)
    types = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    forms = {_experts_form(layer, types) for layer in layers_of(proto)}
    results = [result.type.tensor_type.elem_type for result in proto.graph.output[:1]]
    experts = forms.pop() if len(forms) == 1 else None
    return FileForm(_float(results[0] if results else None), experts)


def _experts_form(layer: Layer, types: Mapping[str, int]) -> ExpertsForm:
    inputs = dict(zip(INPUTS[layer.op_type], layer.inputs, strict=False))
    weight_format = layer.attributes.get("weight_format")
    if weight_format is None:
        return ExpertsForm(dtype=_float(types.get(inputs["w1"])))
    is_open = encoding_of(weight_format).block is None
    return ExpertsForm(
        weight_format=weight_format,
        group=(layer.attributes["block_size"] or None) if is_open else None,
        zero_points=is_open and bool(inputs.get("w1_zero_points")),
    )


def _float(data_type: int | None) -> torch.dtype | None:
    if not data_type or not DataType(data_type).is_floating_point():
        return None
    return to_torch_dtype(DataType(data_type))
