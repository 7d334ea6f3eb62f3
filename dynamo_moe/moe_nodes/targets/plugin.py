"""``plugin``: one node per layer, for the TensorRT plugin, with a body for ONNX Runtime."""

from __future__ import annotations

from dynamo_moe.moe_nodes.bodies.layer import body
from dynamo_moe.moe_nodes.bodies.of_node import of_configuration, unrolled_layer_body
from dynamo_moe.moe_nodes.targets.record import Target

PLUGIN = Target(
    name="plugin",
    bodies={"loop": of_configuration(body), "unrolled": unrolled_layer_body},
    keeps_nodes=True,
    takes_transposed_weights=True,
    takes_packed_weights=True,
)
