"""The body of an MoE node, derived from its attributes and the dtypes of its inputs."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from custom_ops.options import WeightLayout
from dynamo_moe.moe_nodes.bodies.config import BodyConfig, GradientConfig, RoutedConfig
from dynamo_moe.moe_nodes.bodies.gradients import gradient_body, routed_body
from dynamo_moe.moe_nodes.bodies.layer import (
    body,
    dense_body,
    onnxruntime_body,
    tensorrt_body,
    unrolled_body,
)
from dynamo_moe.moe_nodes.nodes import (
    DROPLESS_GRAD,
    DROPLESS_ROUTED,
    EXPERTS_GRAD,
    TRAIN_PARAMETERS,
    parse,
)

_BODIES: dict[str, Callable[..., ir.Function]] = {
    "plugin": body,
    "dense": dense_body,
    "onnxruntime": onnxruntime_body,
    "tensorrt_moe": tensorrt_body,
}
_TRAINING_BODIES: dict[str, Callable[..., ir.Function]] = {
    DROPLESS_ROUTED: routed_body,
    DROPLESS_GRAD: gradient_body,
    EXPERTS_GRAD: gradient_body,
}


def moe_body(node: ir.Node, opset: int, target: str) -> ir.Function:
    """Returns the body of an MoE node, named after its configuration.

    Raises:
        ValueError: If the target's body does not take the node's weights as they lie.
    """
    config = config_of(node)
    if node.op_type in _TRAINING_BODIES:
        function = _TRAINING_BODIES[node.op_type](config, opset)
        function.overload = config.overload
        return function
    if target != "plugin" and config.shape.layout != WeightLayout():
        raise ValueError(f"node {node.name!r}: with target {target!r} weights must be (out, in)")
    function = _BODIES[target](config, opset)
    function.overload = config.overload
    return function


def unrolled_moe_body(node: ir.Node, opset: int) -> ir.Function:
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
