"""A file's record of its MoE layers, whatever became of their nodes.

It is kept in the model's metadata, which runtimes ignore: a ``dense`` file has no MoE node left,
but its layers, the values that enter them and their routers can still be found.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx
import onnx_ir as ir

from dynamo_moe.moe_nodes.nodes import TENSORRT_ATTRIBUTES, module_of, moe_nodes

KEY = "dynamo_moe.layers"


@dataclass(frozen=True)
class Layer:
    """One MoE layer.

    Attributes:
        name: Its path in the PyTorch model.
        op_type: The node's operator, such as ``DroplessMoE``.
        tokens: The value that enters it; like an input, of no value in the file where that has
            been removed.
        attributes: The node's attributes.
        inputs: The node's inputs; empty for those that the exporter filled with zeros.
    """

    name: str
    op_type: str
    tokens: str
    attributes: dict[str, Any]
    inputs: tuple[str, ...]

    def renamed(self, names: Mapping[str, str]) -> Layer:
        """Returns the layer with other names for some values."""
        inputs = tuple(names.get(name, name) for name in self.inputs)
        return replace(self, tokens=names.get(self.tokens, self.tokens), inputs=inputs)

    def in_file(self, values: Collection[str]) -> Layer:
        """Returns the layer with names after it for values that optimisation has removed.

        Args:
            values: The names of the file's values.
        """
        names = {
            name: f"{self.name}/{position}"
            for position, name in enumerate(self.inputs)
            if name and name not in values
        }
        return self.renamed(names)


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
        model.metadata_props[KEY] = json.dumps([vars(layer) for layer in layers])


def layers_of(proto: onnx.ModelProto) -> list[Layer]:
    """Reads what :func:`store` wrote; a file of another origin has none."""
    stored = next((entry.value for entry in proto.metadata_props if entry.key == KEY), "[]")
    return [Layer(**{**record, "inputs": tuple(record["inputs"])}) for record in json.loads(stored)]


def _name(value: ir.Value | None) -> str:
    producer = None if value is None else value.producer()
    constant = producer is not None and producer.op_type == "Constant"
    return "" if value is None or constant else value.name or ""
