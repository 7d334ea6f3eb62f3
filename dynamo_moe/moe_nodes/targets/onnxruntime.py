"""``onnxruntime``: ONNX Runtime's own operators, ``com.microsoft::MoE`` and ``QMoE``."""

from __future__ import annotations

from dynamo_moe.moe_nodes.bodies.layer import onnxruntime_body
from dynamo_moe.moe_nodes.bodies.of_node import of_configuration
from dynamo_moe.moe_nodes.targets.record import Target
from dynamo_moe.operators.foreign import (
    ONNXRUNTIME_ALL_REDUCE,
    ONNXRUNTIME_MATMUL,
    ONNXRUNTIME_MOE,
    ONNXRUNTIME_QMOE,
)

ONNXRUNTIME = Target(
    name="onnxruntime",
    bodies={None: of_configuration(onnxruntime_body)},
    takes_packed_weights=True,
    opset=23,
    takes_attention=True,
    foreign=(ONNXRUNTIME_MOE, ONNXRUNTIME_QMOE),
    packed_product=ONNXRUNTIME_MATMUL,
    collective=ONNXRUNTIME_ALL_REDUCE,
    approximations={
        "gelu": "com.microsoft::MoE computes GELU in its tanh form: up to 5.5e-4 off the exact"
    },
)
