"""What becomes of an MoE node: a body beside it, or standard operators in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from dynamo_moe import _schemas
from dynamo_moe._bodies import BodyConfig, body, dense_body
from dynamo_moe._bodies._layer import function as _function
from dynamo_moe._bodies import _onnxruntime

__all__ = ["TARGETS", "Target", "lower", "moe_nodes"]

Target = Literal["plugin", "dense", "onnxruntime"]

def ort_body(config,opset,domain="moe"):
    f=_function(config,opset,domain,_onnxruntime.experts)
    f.opset_imports["com.microsoft"]=1
    return f

_BODIES: dict[str, Callable[[BodyConfig, int], ir.Function]] = {
    "plugin": body,
    "dense": dense_body,
    "onnxruntime": ort_body,
}
TARGETS = tuple(_BODIES)


def moe_nodes(model: ir.Model) -> list[ir.Node]:
    """Returns the nodes of domain ``moe`` in the main graph."""
    return [node for node in model.graph if node.domain == _schemas.DOMAIN]


def lower(model: ir.Model, target: str) -> None:
    """Gives every MoE node the body of its configuration, in place.

    For ``plugin`` the body is a model-local function beside the node; for the others it takes the
    node's place.
    """
    nodes = moe_nodes(model)
    configs = {node: _config(node) for node in nodes}
    opset = model.opset_imports[""]
    for op_type in {node.op_type for node in nodes}:
        used = {config for node, config in configs.items() if node.op_type == op_type}
        for config in sorted(used, key=lambda config: config.overload):
            function = _BODIES[target](config, opset)
            # One configuration needs no overload, which older tools do not know.
            function.overload = config.overload if len(used) > 1 else ""
            model.functions[function.identifier()] = function
            model.opset_imports.update(
                {d: v for d, v in function.opset_imports.items() if d not in model.opset_imports}
            )
            for node, node_config in configs.items():
                if node_config == config:
                    node.overload = function.overload
    if target != "plugin":
        common_passes.InlinePass()(model)
        common_passes.RemoveUnusedOpsetsPass()(model)


def _config(node: ir.Node) -> BodyConfig:
    router = node.op_type == _schemas.DROPLESS
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
        has_router_bias=router and present > 4,
        has_b1=present > 5,
        has_b2=present > 6,
        x_dtype=dtype(0),
        w_dtype=dtype(2 if router else 3),
        router_dtype=dtype(1 if router else 2),
        ids_dtype=ir.DataType.INT64 if router else dtype(1),
    )


def notes(layers,target): return []
