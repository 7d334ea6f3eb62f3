"""What becomes of an operator's node: a body beside it, or standard operators in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Literal, get_args

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from dynamo_moe import _schemas
from dynamo_moe._bodies import BodyConfig, body, dense_body, onnxruntime_body, unrolled_body
from dynamo_moe._op_bodies import (
    check_absent_attributes,
    content,
    omit_absent_inputs,
    prepare_body,
)
from dynamo_moe._operators import find

__all__ = ["BODIES", "TARGETS", "Body", "Target", "lower", "moe_body", "moe_nodes", "notes"]

Target = Literal["plugin", "dense", "onnxruntime"]
Body = Literal["loop", "unrolled"]

_BODIES: dict[str, Callable[..., ir.Function]] = {
    "plugin": body,
    "dense": dense_body,
    "onnxruntime": onnxruntime_body,
}
TARGETS: tuple[str, ...] = get_args(Target)
BODIES: tuple[str, ...] = get_args(Body)


def moe_nodes(model: ir.Model) -> list[ir.Node]:
    """Returns the MoE nodes, those in the branches of control flow too."""
    return [
        node
        for node in model.graph.all_nodes()
        if node.domain == _schemas.DOMAIN and node.op_type in _schemas.SCHEMAS
    ]


def lower(model: ir.Model, target: str, body: str = "loop") -> None:
    """Gives every node of a registered operator the body of its configuration, in place.

    For ``plugin`` the body is a model-local function beside the node, that of MoE nodes of the
    given kind; for the others it takes the node's place.
    """
    opset = model.opset_imports[""]
    unrolled = set(moe_nodes(model)) if body == "unrolled" else set()
    domains: dict[str, dict[tuple[str, bytes], str]] = {}
    for node in list(model.graph.all_nodes()):
        operator = find(node)
        if operator is None or operator.body is None:
            continue
        if node in unrolled:
            function = _unrolled_body(node, opset)
        else:
            function = operator.body(node, opset, target)
        omit_absent_inputs(function, node, operator.name)
        check_absent_attributes(function, node, operator.name)
        # A function is found by domain and name. Overloads, ONNX's own way to have several, are
        # lost in onnxslim (seen with 0.1.98); TensorRT's parser ignores the domain.
        overload, function.overload = function.overload, ""
        known = domains.setdefault(operator.name, {})
        key = overload, content(function)
        if key not in known:
            known[key] = _domain(node.domain, overload, [other for other, _ in known])
            prepare_body(function, node, operator.schema, opset)
            function.domain, function.name = known[key], node.op_type
            model.functions[function.identifier()] = function
            for domain, version in (*function.opset_imports.items(), (known[key], 1)):
                model.opset_imports.setdefault(domain, version)
        node.domain = known[key]
    if target != "plugin":
        common_passes.InlinePass()(model)
        common_passes.RemoveUnusedOpsetsPass()(model)


def moe_body(node: ir.Node, opset: int, target: str) -> ir.Function:
    """Returns the body of an MoE node, called by its configuration."""
    config = _config(node)
    function = _BODIES[target](config, opset)
    function.overload = config.overload
    return function


def _unrolled_body(node: ir.Node, opset: int) -> ir.Function:
    config, experts = _config(node), node.attributes["num_experts"].as_int()
    function = unrolled_body(config, opset, num_experts=experts)
    function.overload = f"{config.overload}_{experts}_experts"
    return function


def _domain(own: str, overload: str, known: list[str]) -> str:
    """Returns the domain of an operator's next body; given the overloads of those before."""
    if not known:
        return own
    if overload in known:
        return f"{own}.{overload or 'body'}_{len(known) + 1}"
    return f"{own}.{overload or 'complete'}"


def notes(model: ir.Model, activations: Collection[str], target: str) -> list[str]:
    """Returns what a user of the lowered graph should know; given its layers' activations."""
    found = []
    if target == "onnxruntime" and "gelu" in activations:
        found.append(
            "com.microsoft::MoE computes GELU in its tanh form: up to 5.5e-4 off the exact"
        )
    names = Counter(function.name for function in model.functions.values())
    moe = sum(names[name] for name in _schemas.SCHEMAS)
    if any(names[name] > 1 for name in _schemas.SCHEMAS):
        found.append(
            f"{moe} configurations of MoE layers: TensorRT's parser finds functions by name "
            "alone, so it needs a plugin for them"
        )
    for name, count in names.items():
        if count > 1 and name not in _schemas.SCHEMAS:
            found.append(
                f"{count} configurations of {name}: TensorRT's parser finds functions by name "
                "alone, so it needs a plugin for it"
            )
    known = {find(node) for node in model.graph.all_nodes()} - {None}
    found += sorted(
        f"{operator.name} has no body: only a runtime that knows the operator runs the file"
        for operator in known
        if operator is not None and operator.body is None
    )
    return found


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
