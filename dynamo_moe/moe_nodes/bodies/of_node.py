"""The body of an MoE node, derived from its attributes and the dtypes of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from dynamo_moe.moe_nodes.bodies.config import BodyConfig, GradientConfig, RoutedConfig
from dynamo_moe.moe_nodes.bodies.gradients import gradient_body, routed_body
from dynamo_moe.moe_nodes.bodies.layer import unrolled_body
from dynamo_moe.moe_nodes.nodes import (
    DROPLESS_GRAD,
    DROPLESS_ROUTED,
    EXPERTS_GRAD,
    OPTIONAL_INPUTS,
    TRAIN_PARAMETERS,
    parse,
)

LayerBody = Callable[[ir.Node, int], ir.Function]
"""From an MoE node and the opset to the function that computes it."""

_TRAINING_BODIES: dict[str, Callable[..., ir.Function]] = {
    DROPLESS_ROUTED: routed_body,
    DROPLESS_GRAD: gradient_body,
    EXPERTS_GRAD: gradient_body,
}
_CONFIGS: dict[str, type[BodyConfig]] = {
    DROPLESS_ROUTED: RoutedConfig,
    DROPLESS_GRAD: GradientConfig,
    EXPERTS_GRAD: GradientConfig,
}


def of_configuration(body: Callable[[BodyConfig, int], ir.Function]) -> LayerBody:
    """Returns a body that depends on a node's configuration alone, and is named after it."""

    def layer_body(node: ir.Node, opset: int) -> ir.Function:
        config = config_of(node)
        function = body(config, opset)
        function.overload = config.overload
        return function

    return layer_body


def training_body(node: ir.Node, opset: int) -> ir.Function:
    """Returns the body of a node of training files, named after its configuration."""
    return of_configuration(_TRAINING_BODIES[node.op_type])(node, opset)


def unrolled_layer_body(node: ir.Node, opset: int) -> ir.Function:
    """Returns the body of an MoE node with separate products for each of its experts."""
    config, experts = config_of(node), node.attributes["num_experts"].as_int()
    function = unrolled_body(config, opset, num_experts=experts)
    function.overload = f"{config.overload}_{experts}_experts"
    return function


def config_of(node: ir.Node) -> BodyConfig:
    """Returns the configuration that the body of an MoE node depends on."""
    layer = parse(node)
    # Numbers are not part of it, so the options must say whether groups limit the choice.
    records = [
        record.canonical() for record in (layer.experts, layer.router, layer.layout) if record
    ]
    # The body takes numbers from the node.
    options: dict[str, Any] = {
        row.name: getattr(record, row.name)
        for record in records
        for row in record.rows
        if not row.is_number
    } | {f"has_{name}": name in layer.inputs for name in OPTIONAL_INPUTS}

    def dtype(name: str) -> ir.DataType:
        found = layer.inputs[name].dtype
        if found is None:
            raise ValueError(f"node {node.name!r}: the dtype of input {name} is unknown")
        return found

    trained = node.attributes.get(TRAIN_PARAMETERS)
    if trained is not None:
        options[TRAIN_PARAMETERS] = bool(trained.as_int())
    return _CONFIGS.get(node.op_type, BodyConfig)(
        **options,
        router=layer.router is not None,
        x_dtype=dtype("x"),
        w_dtype=dtype("w1"),
        selection_dtype=(
            dtype("selection_bias") if "selection_bias" in layer.inputs else ir.DataType.FLOAT
        ),
        router_dtype=dtype("router_weight" if layer.router else "expert_weights"),
        ids_dtype=dtype("expert_ids") if "expert_ids" in layer.inputs else ir.DataType.INT64,
    )
