"""ONNX Runtime's sessions in which the native library computes the MoE layers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch

from dynamo_moe.files import rank_files
from dynamo_moe.files.kernel_layers import inlined_model
from dynamo_moe.files.model_files import all_nodes, load_graph
from dynamo_moe.moe_nodes.nodes import (
    DOMAIN,
    DROPLESS,
    DROPLESS_PACKED,
    EXPERTS,
    EXPERTS_PACKED,
    moe_nodes,
    parse,
)

if TYPE_CHECKING:
    import onnxruntime

#: Operators that the native library has.
OPERATORS = (DROPLESS, EXPERTS, DROPLESS_PACKED, EXPERTS_PACKED)
_EXTERNAL_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
# Of layers that the library does not compute; its operators have the domain DOMAIN.
_BODIES_DOMAIN = f"{DOMAIN}.body"
_CPU = ("CPUExecutionProvider",)


def session(
    path: str | os.PathLike[str],
    *,
    options: onnxruntime.SessionOptions | None = None,
    providers: Sequence[Any] = _CPU,
) -> onnxruntime.InferenceSession:
    """Opens an exported file in ONNX Runtime, with the native library's operators for its layers.

    The operators compute MoE layers on the CPU, with plain and with packed weights; ONNX Runtime
    takes them in place of the functions beside the nodes. Functions still compute layers in
    float64. A file whose layers have several configurations, or some in float64, is changed in
    memory so that each layer finds its operator.

    Args:
        path: The file, as :func:`dynamo_moe.export` writes it with the target ``plugin``. One with
            another target has no such nodes, and opens as in ONNX Runtime.
        options: Options of the session, to which the library is added. A set of options takes the
            library once.
        providers: ONNX Runtime's execution providers. The operators are for the CPU alone.

    Raises:
        FileNotFoundError: If there is no such file, or the native library is missing.
        ModuleNotFoundError: If ONNX Runtime is not installed.
        ValueError: If the file is not an ONNX model.
    """
    import onnxruntime

    model = load_graph(path)
    rank_files.need_no_rank(path, model)
    options = onnxruntime.SessionOptions() if options is None else options
    options.register_custom_ops_library(library())
    if not take_operators(model):
        return onnxruntime.InferenceSession(os.fspath(path), options, providers=list(providers))
    folder = Path(path).resolve().parent
    options.add_session_config_entry(_EXTERNAL_DATA_FOLDER, str(folder))
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=list(providers)
    )


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
