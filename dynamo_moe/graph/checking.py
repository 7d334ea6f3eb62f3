"""Checking whether a graph is valid ONNX, without reading the values of its weights."""

from __future__ import annotations

import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir

from dynamo_moe.files import model_files, protobuf
from dynamo_moe.progress import phases


class InvalidGraphError(Exception):
    """The graph is refused by onnx's checker."""


@phases.phase("check")
def check(model: ir.Model) -> None:
    """Checks a model as ``onnx.checker.check_model(full_check=True)`` does.

    Inputs of the graph stand for its weights: no value is read, however many bytes they have, and
    wherever they are.

    Raises:
        InvalidGraphError: With the node and the reason.
    """
    initializers = model.graph.initializers.values()
    weights = [value for value in initializers if not model_files.is_small(value)]
    proto = protobuf.without(model, weights)
    tensors = {str(weight.name): weight.const_value for weight in weights}
    proto.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, tensor.dtype.value, tensor.shape.numpy())
        for name, tensor in tensors.items()
        if tensor is not None
    )
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = " ".join(str(error).removeprefix("[ShapeInferenceError] ").split())
        raise InvalidGraphError(reason) from error
