"""``onnxruntime``: ONNX Runtime's own operator, ``com.microsoft::MoE``."""

from __future__ import annotations

from dynamo_moe.moe_nodes.bodies.layer import onnxruntime_body
from dynamo_moe.moe_nodes.bodies.of_node import of_configuration
from dynamo_moe.moe_nodes.targets.record import Target
from dynamo_moe.operators.foreign import ONNXRUNTIME_MOE

ONNXRUNTIME = Target(
    name="onnxruntime",
    bodies={None: of_configuration(onnxruntime_body)},
    foreign=(ONNXRUNTIME_MOE,),
    approximations={
        "gelu": "com.microsoft::MoE computes GELU in its tanh form: up to 5.5e-4 off the exact"
    },
)
