"""Checking whether a graph is valid ONNX, without reading the values of its weights."""

from __future__ import annotations

import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir

from dynamo_moe.files import model_files, protobuf
from dynamo_moe.files.copies import Copies
from dynamo_moe.progress import phases


class InvalidGraphError(Exception):
    """The graph is refused by onnx's checker."""


@phases.phase("check")
def check(model: ir.Model, copies: Copies | None = None) -> onnx.ModelProto:
    """Checks a model as ``onnx.checker.check_model(full_check=True)`` does, its copies too.

    Inputs of the graph stand for its weights: no value is read, however many bytes they have, and
    wherever they are. Types are inferred without the copies, whose results are inputs too: they
    have the types of their sources' results.

    Returns:
        The model without its weights.

    Raises:
        InvalidGraphError: With the node and the reason.
    """
    proto = model_files.without_weights(model, as_inputs=True)
    inputs = proto.graph.input
    count, used = len(inputs), _used_results(copies or {})
    # An input has to have both.
    alone = bool(copies) and all(value.type and value.shape is not None for value in used)
    try:
        if alone:
            for value in used:
                ir.serde.serialize_value_into(inputs.add(), value)
            onnx.checker.check_model(proto, full_check=True)
            del inputs[count:]
        if copies:
            protobuf.add_copies(proto.graph, model.graph, copies)
        onnx.checker.check_model(proto, full_check=not alone)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = " ".join(str(error).removeprefix("[ShapeInferenceError] ").split())
        raise InvalidGraphError(reason) from error
    del inputs[len(model.graph.inputs) :]
    return proto


def _used_results(copies: Copies) -> list[ir.Value]:
    """Returns the copies' results that the graph itself uses."""
    results = (value for added in copies.values() for copy in added for value in copy.outputs)
    return [value for value in results if value.uses() or value.is_graph_output()]
