"""The native library's operators in ONNX Runtime: for which nodes of a file they are."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import torch

from dynamo_moe.files.kernel_layers import inlined_model
from dynamo_moe.files.model_files import all_nodes
from dynamo_moe.moe_nodes.nodes import (
    DOMAIN,
    DROPLESS,
    DROPLESS_PACKED,
    EXPERTS,
    EXPERTS_PACKED,
    moe_nodes,
    parse,
)
from dynamo_moe.operators.schemas import is_own_domain

#: Operators that the native library has.
OPERATORS = (DROPLESS, EXPERTS, DROPLESS_PACKED, EXPERTS_PACKED)
# Of layers that the library does not compute; its operators have the domain DOMAIN.
_BODIES_DOMAIN = f"{DOMAIN}.body"


def library() -> str:
    """Returns the path of the native library.

    Raises:
        FileNotFoundError: If it is missing.
    """
    from trt_plugin import library_path

    return str(library_path())


def take_operators(model: onnx.ModelProto) -> bool:
    """Gives layers the domain of their operator or, in float64, of functions; whether any changed.

    The operators have one domain, the functions of each configuration have their own.
    """
    domains = {
        (function.domain, function.name)
        for function in model.functions
        if function.name in OPERATORS
        and (function.domain == DOMAIN or function.domain.startswith(f"{DOMAIN}."))
    }
    renamed = {}
    for domain, operator in domains:
        if (domain, operator) in _in_float64(model):
            if domain == DOMAIN:
                renamed[domain, operator] = _BODIES_DOMAIN
        elif domain != DOMAIN:
            renamed[domain, operator] = DOMAIN
    if not renamed:
        return False
    for node in _nodes(model):
        node.domain = renamed.get((node.domain, node.op_type), node.domain)
    kept = []
    for function in model.functions:
        domain = renamed.get((function.domain, function.name), function.domain)
        if domain != DOMAIN or function.name not in OPERATORS:
            function.domain = domain
            kept.append(function)
    for imports in (model.opset_import, *(function.opset_import for function in kept)):
        known = {opset.domain for opset in imports}
        if known & {domain for domain, _ in domains}:
            for domain in {DOMAIN, *renamed.values()} - known:
                imports.add(domain=domain, version=1)
    del model.functions[:]
    model.functions.extend(kept)
    return True


def operator_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Returns the nodes that operators of the library are for."""
    return [
        node for node in _nodes(model) if is_own_domain(node.domain) and node.op_type in OPERATORS
    ]


def _in_float64(model: onnx.ModelProto) -> set[tuple[str, str]]:
    found = set()
    for node in moe_nodes(inlined_model(model)):
        shape = parse(node).shape
        dtypes = shape.tokens_dtype, shape.weight_format.operand_dtype, shape.routing_dtype
        if torch.float64 in (*dtypes, shape.weights_dtype, shape.selection_dtype):
            found.add((node.domain, node.op_type))
    return found


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    yield from all_nodes(model.graph.node)
    for function in model.functions:
        yield from all_nodes(function.node)
