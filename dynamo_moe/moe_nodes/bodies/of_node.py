"""The body of an MoE node, derived from its attributes and the dtypes of its inputs."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from dynamo_moe.moe_nodes.bodies.config import BodyConfig, GradientConfig, RoutedConfig
from dynamo_moe.moe_nodes.bodies.gradients import gradient_body, routed_body
from dynamo_moe.moe_nodes.bodies.layer import unrolled_body
from dynamo_moe.moe_nodes.nodes import (
    DROPLESS_GRAD,
    DROPLESS_ROUTED,
    EXPERTS_GRAD,
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
    """Returns the configuration that the body of an MoE node depends on.

    Raises:
        ValueError: As of :func:`dynamo_moe.moe_nodes.nodes.parse`; the node is named.
    """
    try:
        # The body takes numbers from the node, so the options say whether groups limit the choice.
        shape = parse(node).shape.canonical()
    except (ValueError, TypeError) as error:
        raise type(error)(f"node {node.name!r}: {error}") from error
    if node.op_type == DROPLESS_ROUTED:
        return RoutedConfig(shape)
    if node.op_type in _TRAINING_BODIES:
        trained = node.attributes.get(TRAIN_PARAMETERS)
        return GradientConfig(shape, trained is None or bool(trained.as_int()))
    return BodyConfig(shape)
