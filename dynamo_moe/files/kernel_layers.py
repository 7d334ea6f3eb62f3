"""The MoE nodes of an ONNX file, as the kernels' layers."""

from __future__ import annotations

from os import PathLike
from typing import Any

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch
from onnx_ir import tensor_adapters

from custom_ops.dtypes import FLOATS, IDS
from custom_ops.kernels.layer import Layer
from dynamo_moe.files.block_functions import inlined
from dynamo_moe.files.model_files import load_graph
from dynamo_moe.moe_nodes.nodes import is_moe, moe_nodes, parse
from dynamo_moe.moe_nodes.schemas import SCHEMAS
from dynamo_moe.operators.schemas import is_own_domain

_DTYPES = {tensor_adapters.from_torch_dtype(dtype): dtype for dtype in (*FLOATS, *IDS)}


def kernel_layers(path: str | PathLike[str]) -> list[Layer]:
    """Reads what kernels the MoE nodes of a file need, without its external data.

    Nodes in branches, loops and functions are found too; ``com.microsoft::MoE`` is not one of ours.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not an ONNX model, or there are no kernels for a node, which is
            named.
    """
    return kernel_layers_of(load_graph(path))


def kernel_layers_of(stored: onnx.ModelProto) -> list[Layer]:
    """Returns what kernels the MoE nodes of a graph need, as :func:`kernel_layers` of its file.

    Raises:
        ValueError: If there are no kernels for a node, which is named.
    """
    model = inlined_model(stored)
    nodes = moe_nodes(model)
    if any(value.dtype is None for node in nodes for value in node.inputs if value is not None):
        # Not strict: where the file contradicts itself, what is not known is named below.
        common_passes.ShapeInferencePass(check_type=False, strict_mode=False)(model)
    layers = []
    for node in nodes:
        try:
            layers.append(_layer(node).canonical())
        except (ValueError, TypeError) as error:
            name = node.name or next((output.name for output in node.outputs if output.name), "")
            raise ValueError(f"node {name!r}: {error}") from None
    return layers


def inlined_model(stored: onnx.ModelProto) -> ir.Model:
    """Returns a model whose MoE nodes are all in its graph, and not in functions."""
    model = ir.from_proto(inlined(stored))
    if any(is_moe(node) for function in model.functions.values() for node in function.all_nodes()):
        # A function's types and weights are those of its call.
        common_passes.InlinePass(lambda function: not is_own_domain(function.domain))(model)
    return model


def _layer(node: ir.Node) -> Layer:
    parsed = parse(node)
    dtypes = {name: _dtype(name, value) for name, value in parsed.inputs.items()}
    shared: dict[str, str] = {}
    for formal in SCHEMAS[node.op_type].inputs:
        if formal.name in dtypes:
            first = shared.setdefault(formal.type_str, formal.name)
            if dtypes[first] != dtypes[formal.name]:
                raise ValueError(
                    f"{formal.name} must have the dtype of {first}, {dtypes[first]}; "
                    f"got {dtypes[formal.name]}"
                )
    given = ("expert_ids", "expert_weights")
    routing, weights = ("router_weight", "router_bias") if parsed.router else given
    sizes: dict[str, Any] = dict(parsed.sizes)
    return Layer(
        **sizes,
        tokens_dtype=dtypes["x"],
        experts_dtype=dtypes["w1"],
        options=parsed.experts,
        router=parsed.router,
        routing_dtype=dtypes[routing],
        weights_dtype=dtypes.get(weights),
        selection_dtype=dtypes.get("selection_bias"),
        b1="b1" in dtypes,
        b2="b2" in dtypes,
        w1_transposed=parsed.layout.w1_transposed,
        w2_transposed=parsed.layout.w2_transposed,
        resident_experts=parsed.resident_experts,
    )


def _dtype(formal: str, value: ir.Value) -> torch.dtype:
    if value.dtype is None:
        raise ValueError(f"the dtype of its input {formal}, {value.name!r}, is not known")
    if value.dtype not in _DTYPES:
        raise ValueError(
            f"there are no kernels for its input {formal}, {value.name!r}, of "
            f"{value.dtype.name.lower()}"
        )
    return _DTYPES[value.dtype]
