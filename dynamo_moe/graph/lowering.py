"""Giving operators' nodes a body beside them, or standard operators in their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from dynamo_moe.files.block_functions import has_moe_in_blocks
from dynamo_moe.moe_nodes.nodes import INPUTS, is_moe
from dynamo_moe.moe_nodes.targets.record import Target
from dynamo_moe.operators.foreign import ONNXRUNTIME_ATTENTION
from dynamo_moe.operators.registry import find, operators
from dynamo_moe.operators.user_bodies import content, omit_absent, prepare_body


def lower(model: ir.Model, target: Target, body: str | None = None) -> None:
    """Gives every node of a registered operator the body of its configuration, in place.

    Where the target keeps nodes, the body is a model-local function beside the node. MoE nodes get
    the ``body`` of this name, or the target's default.
    """
    opset = model.opset_imports[""]
    domains: dict[str, dict[tuple[str, bytes], str]] = {}
    for node in list(model.graph.all_nodes()):
        operator = find(node)
        if operator is None or operator.body is None:
            continue
        if is_moe(node):
            function = target.layer_body(node, opset, body)
        else:
            function = operator.body(node, opset, target.name)
        omit_absent(function, node, operator.name)
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
    if not target.keeps_nodes:
        common_passes.InlinePass()(model)
        common_passes.RemoveUnusedOpsetsPass()(model)


def _domain(domain: str, overload: str, known: list[str]) -> str:
    """Returns the domain of an operator's next body; given the overloads of those before."""
    if not known:
        return domain
    if overload in known:
        return f"{domain}.{overload or 'body'}_{len(known) + 1}"
    return f"{domain}.{overload or 'complete'}"


def notes(model: ir.Model, activations: Collection[str], target: Target) -> list[str]:
    """Returns notes for a user of the lowered graph, given its layers' activations."""
    messages = target.notes(activations)
    names = Counter(function.name for function in model.functions.values())
    moe = sum(names[name] for name in INPUTS)
    if any(names[name] > 1 for name in INPUTS):
        messages.append(
            f"{moe} configurations of MoE layers: TensorRT's parser finds functions by name "
            "alone, so it needs a plugin for them"
        )
    for name, count in names.items():
        if count > 1 and name not in INPUTS:
            messages.append(
                f"{count} configurations of {name}: TensorRT's parser finds functions by name "
                "alone, so it needs a plugin for it"
            )
    if any(ONNXRUNTIME_ATTENTION.is_of(node.domain, node.op_type) for node in model.graph):
        messages.append(
            "GroupQueryAttention of ONNX Runtime takes several tokens after others for one "
            "sequence at a time, not for a batch"
        )
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    if has_moe_in_blocks(model):
        messages.append(
            "MoE layers are inside of functions, where TensorRT's parser looks for no plugin: for "
            "an engine with the plugin, export without layers_as_functions"
        )
    bodiless = {operator.name for operator in operators() if operator.body is None}
    if bodiless:  # All operators of this package have one.
        bodiless &= {f"{n.domain}::{n.op_type}" for graph in graphs for n in graph.all_nodes()}
    return messages + [
        f"{name} has no body: only a runtime that knows the operator runs the file"
        for name in sorted(bodiless)
    ]
