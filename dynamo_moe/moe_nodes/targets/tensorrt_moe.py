"""``tensorrt_moe``: TensorRT's own operator, ``TRT_MoE``."""

from __future__ import annotations

from dynamo_moe.moe_nodes.bodies.layer import tensorrt_body
from dynamo_moe.moe_nodes.bodies.of_node import of_configuration
from dynamo_moe.moe_nodes.targets.record import Target
from dynamo_moe.operators.foreign import TRT_MOE

TENSORRT_MOE = Target(
    name="tensorrt_moe",
    bodies={None: of_configuration(tensorrt_body)},
    foreign=(TRT_MOE,),
    runs_in_onnxruntime=False,
    note=(
        "experimental: only TensorRT has TRT_MoE, for compute capabilities 10.0, 10.3 and 11.0; "
        "ONNX Runtime does not run this file, so nothing has verified it"
    ),
)
