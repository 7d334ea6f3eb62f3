"""``dense``: every expert on every token, in standard operators without control flow."""

from __future__ import annotations

from dynamo_moe.moe_nodes.bodies.layer import dense_body
from dynamo_moe.moe_nodes.bodies.of_node import of_configuration
from dynamo_moe.moe_nodes.targets.record import Target

DENSE = Target(name="dense", bodies={None: of_configuration(dense_body)}, takes_packed_weights=True)
