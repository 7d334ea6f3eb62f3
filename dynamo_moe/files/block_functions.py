"""Files in which equal blocks are calls of a function: how to read them as if they were not."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from dynamo_moe.moe_nodes.nodes import is_moe

DOMAIN = "dynamo_moe.blocks"
"""The domain of the functions."""


def inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model with the nodes of blocks in place of their calls; itself if it has none."""
    if not any(function.domain == DOMAIN for function in proto.functions):
        return proto
    model = ir.from_proto(proto)
    inline_blocks(model)
    return ir.to_proto(model)


def has_moe_in_blocks(model: ir.Model) -> bool:
    """Whether MoE nodes are inside of functions, where TensorRT's parser takes their bodies."""
    functions = (function for function in model.functions.values() if function.domain == DOMAIN)
    return any(is_moe(node) for function in functions for node in function.all_nodes())


def inline_blocks(model: ir.Model) -> None:
    """Puts the nodes of blocks in place of their calls, each named as :func:`inlined_name` says."""
    graph = model.graph
    for call in list(graph):
        if call.domain != DOMAIN or call.op_identifier() not in model.functions:
            continue
        function = model.functions[call.op_identifier()]
        known = {
            formal: actual
            for formal, actual in zip(function.inputs, call.inputs, strict=True)
            if actual is not None
        }
        nodes = [copied(node, known) for node in function]
        for node in nodes:
            node.name = inlined_name(str(call.name), str(node.name))
            for output in node.outputs:
                output.name = output.name and inlined_name(str(call.name), output.name)
        for result, output in zip(function.outputs, call.outputs, strict=True):
            made = known[result]
            made.name, made.type, made.shape = output.name, output.type, output.shape
            output.replace_all_uses_with(made, replace_graph_outputs=True)
        graph.insert_before(call, nodes)
        graph.remove(call, safe=True)
    for identifier in [key for key in model.functions if key[0] == DOMAIN]:
        del model.functions[identifier]
    model.opset_imports.pop(DOMAIN, None)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def inlined_name(call: str, name: str) -> str:
    """Returns how a value or a node of a function is called where one of its calls was."""
    return f"{call}/{name}"


def copied(node: ir.Node, known: dict[ir.Value, ir.Value]) -> ir.Node:
    """Returns a node of the same names on other inputs; its results become ``known``."""
    copy = ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else known[value] for value in node.inputs],
        list(node.attributes.values()),
        overload=node.overload,
        num_outputs=len(node.outputs),
        version=node.version,
        name=node.name,
    )
    for output, new in zip(node.outputs, copy.outputs, strict=True):
        new.name = output.name
        known[output] = new
    return copy
