"""The body of an MoE node, derived from its attributes and the dtypes of its inputs."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from dynamo_moe.moe_nodes import schemas
from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.layer import body, dense_body, onnxruntime_body, unrolled_body

__all__ = ["config_of", "moe_body", "unrolled_moe_body"]

_BODIES: dict[str, Callable[..., ir.Function]] = {
    "plugin": body,
    "dense": dense_body,
    "onnxruntime": onnxruntime_body,
}


def moe_body(node: ir.Node, opset: int, target: str) -> ir.Function:
    """Returns the body of an MoE node, named after its configuration."""
    config = config_of(node)
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
    """Returns the configuration that the body of an MoE node depends on."""
    router = node.op_type == schemas.DROPLESS
    attributes = node.attributes

    def dtype(index: int) -> ir.DataType:
        value = node.inputs[index]
        if value is None or value.dtype is None:
            raise ValueError(f"node {node.name!r}: the dtype of input {index} is unknown")
        return value.dtype

    present = len(node.inputs)
    return BodyConfig(
        router=router,
        scoring=attributes["scoring"].as_string() if router else "softmax",
        renormalize=bool(attributes["renormalize"].as_int()) if router else True,
        activation=attributes["activation"].as_string(),
        gated=bool(attributes["gated"].as_int()),
        interleaved=bool(attributes["interleaved"].as_int()),
        weight_on_input=bool(attributes["weight_on_input"].as_int()),
        pre_norm=attributes["pre_norm"].as_string(),
        residual=bool(attributes["residual"].as_int()),
        has_router_bias=router and present > 4,
        has_b1=present > 5,
        has_b2=present > 6,
        x_dtype=dtype(0),
        w_dtype=dtype(2 if router else 3),
        router_dtype=dtype(1 if router else 2),
        ids_dtype=ir.DataType.INT64 if router else dtype(1),
    )
