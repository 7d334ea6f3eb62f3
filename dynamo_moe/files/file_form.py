"""What distinguishes a file from others of its model, as its own records tell it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike

import onnx_ir as ir
import torch
from onnx_ir import DataType
from onnx_ir.tensor_adapters import to_torch_dtype
from torch import nn

from custom_ops.packed_weights import encoding_of
from dynamo_moe.files.metadata import Layer, layers_of
from dynamo_moe.files.model_files import load_graph
from dynamo_moe.moe_nodes.nodes import INPUTS
from dynamo_moe.weights.packed_linear import packed_layers

LINEAR_KEY = "dynamo_moe.linear_layers"
"""The entry of a file's metadata that has the forms of its rounded linear layers."""


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
class LinearForm:
    """How linear layers' weights were rounded before the export.

    Attributes:
        weight_format: One of :data:`custom_ops.packed_weights.ENCODINGS`.
        group: The columns that share a scale, where the format leaves that open; None: a row.
        zero_points: Whether groups have zero points.
        layers: Their paths.
    """

    weight_format: str
    group: int | None
    zero_points: bool
    layers: tuple[str, ...]


@dataclass(frozen=True)
class FileForm:
    """The form of a file.

    Attributes:
        dtype: The dtype of its first result; None if that is no float.
        experts: The form of the experts of all its layers; None if there are none, or several.
        linear: The forms of linear layers that were rounded; not of those that a checkpoint has
            packed.
    """

    dtype: torch.dtype | None
    experts: ExpertsForm | None
    linear: tuple[LinearForm, ...] = ()


def store_linear(file: ir.Model, model: nn.Module) -> None:
    """Writes the forms of a model's packed linear layers into the metadata of its file."""
    paths: dict[tuple[str, int | None, bool], list[str]] = {}
    for path, layer in packed_layers(model).items():
        form = layer.weight_format, layer.group, layer.packed().zero_points is not None
        paths.setdefault(form, []).append(path)
    if paths:
        forms = [vars(LinearForm(*form, tuple(layers))) for form, layers in paths.items()]
        file.metadata_props[LINEAR_KEY] = json.dumps(forms)


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
    stored = (entry.value for entry in proto.metadata_props if entry.key == LINEAR_KEY)
    linear = [
        LinearForm(**{**record, "layers": tuple(record["layers"])})
        for record in json.loads(next(stored, "[]"))
    ]
    return FileForm(_float(results[0] if results else None), experts, tuple(linear))


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
