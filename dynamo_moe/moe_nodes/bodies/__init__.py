"""What the operators of domain ``moe`` compute, as functions of standard ONNX operators.

A file whose nodes carry such a function runs in every ONNX runtime; a runtime that has the
operator itself (TensorRT with the plugin) ignores the function.

- ``body``: a loop over the experts that have rows, or copies of the weights that few slots need.
  What ships with the operator's node.
- ``unrolled_body``: two products for each expert, which a runtime can prepare for as it loads.
- ``dense_body``: every expert on every token, without control flow.
- ``onnxruntime_body``: ONNX Runtime's own MoE operator.
- ``rms_norm_body``: the normalisation.

Map: ``_config`` what a body depends on, ``_ops`` recording nodes, ``_layer`` the function around
a layer, ``_router`` the choice of experts, ``_slots`` the rows of each, ``_expert`` the activation
and dtypes of one, ``_dropless`` (with ``_gathered``), ``_unrolled``, ``_dense`` and
``_onnxruntime`` the ways to run them; ``_rms_norm`` the other one.
"""

from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.layer import body, dense_body, onnxruntime_body, unrolled_body
from dynamo_moe.moe_nodes.bodies.rms_norm import rms_norm_body

__all__ = ["BodyConfig", "body", "dense_body", "onnxruntime_body", "rms_norm_body", "unrolled_body"]
