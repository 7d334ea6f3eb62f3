"""A file's record of its MoE layers, whatever became of their nodes.

It is kept in the model's metadata, which runtimes ignore: a ``dense`` file has no MoE node left,
but its layers, the values that enter them and their routers can still be found.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

from dynamo_moe.moe_nodes.nodes import TENSORRT_ATTRIBUTES, module_of, moe_nodes

__all__ = ["KEY", "Layer", "from_metadata", "record", "store"]

KEY = "dynamo_moe.layers"


@dataclass(frozen=True)
class Layer:
    """One MoE layer.

    Attributes:
        name: Its path in the PyTorch model.
        op_type: ``DroplessMoE`` or ``DroplessMoEExperts``.
        tokens: The value that enters it.
        attributes: The node's attributes.
        inputs: The node's inputs; empty for those that the exporter filled with zeros.
    """

    name: str
    op_type: str
    tokens: str
    attributes: dict[str, Any]
    inputs: tuple[str, ...]


def record(model: ir.Model) -> list[Layer]:
    """Returns the layers of a graph whose MoE nodes are still there, in graph order."""
    return [
        Layer(
            name=module_of(node),
            op_type=node.op_type,
            tokens=_name(node.inputs[0]),
            attributes={
                name: attribute.value
                for name, attribute in sorted(node.attributes.items())
                if name not in TENSORRT_ATTRIBUTES
            },
            inputs=tuple(_name(value) for value in node.inputs),
        )
        for node in moe_nodes(model)
    ]


def store(model: ir.Model, layers: list[Layer]) -> None:
    """Writes the layers into the model's metadata."""
    if layers:
        model.metadata_props[KEY] = json.dumps([asdict(layer) for layer in layers])


def from_metadata(metadata: dict[str, str]) -> list[Layer]:
    """Reads what :func:`store` wrote; a file of another origin has none."""
    entries = json.loads(metadata.get(KEY, "[]"))
    return [Layer(**{**entry, "inputs": tuple(entry["inputs"])}) for entry in entries]


def _name(value: ir.Value | None) -> str:
    producer = None if value is None else value.producer()
    constant = producer is not None and producer.op_type == "Constant"
    return "" if value is None or constant else value.name or ""
