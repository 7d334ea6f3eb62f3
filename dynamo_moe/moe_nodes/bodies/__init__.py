"""The bodies of the operators of domain ``moe``: functions of standard ONNX operators.

A file whose nodes carry such a function runs in every ONNX runtime. A runtime that implements the
operator itself (TensorRT with the plugin) ignores the function.

- ``body``: a loop over the experts that have rows, or copies of the weights that a few slots need.
  This is the default body of an operator's node.
- ``unrolled_body``: two products for each expert, which a runtime can prepare when it loads the
  file.
- ``dense_body``: every expert on every token, without control flow.
- ``onnxruntime_body``: ONNX Runtime's own MoE operator.
- ``tensorrt_body``: TensorRT's own.
- ``routed_body`` and ``gradient_body``: a layer in training, and its gradients.
- ``rms_norm_body``: the normalisation.

Map: ``config`` holds what a body depends on, ``ops`` records nodes, ``layer`` builds the function
around a layer, ``router`` chooses the experts, ``slots`` assigns rows to experts, and ``expert``
has an expert's activation and dtypes. ``dropless`` (with ``gathered``), ``unrolled``, ``dense``,
``onnxruntime`` and ``tensorrt`` are the ways to run the experts. ``gradients`` (with
``activation_gradient``) is for training. ``rms_norm`` is the other operator.
"""

from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.gradients import gradient_body, routed_body
from dynamo_moe.moe_nodes.bodies.layer import (
    body,
    dense_body,
    onnxruntime_body,
    tensorrt_body,
    unrolled_body,
)
from dynamo_moe.moe_nodes.bodies.rms_norm import rms_norm_body

__all__ = [
    "BodyConfig",
    "body",
    "dense_body",
    "gradient_body",
    "onnxruntime_body",
    "rms_norm_body",
    "routed_body",
    "tensorrt_body",
    "unrolled_body",
]
