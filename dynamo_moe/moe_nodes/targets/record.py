"""The record of a target: all that an export, a check or a view has to know of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from custom_ops.options import WeightLayout
from dynamo_moe.moe_nodes.bodies.of_node import LayerBody, config_of
from dynamo_moe.moe_nodes.targets.names import TargetName
from dynamo_moe.operators.foreign import TENSORRT_COLLECTIVE, ForeignOperator

DEFAULT_OPSET = 20
"""Has Gelu as an operator; ONNX Runtime 1.17 and TensorRT 10 read it."""


@dataclass(frozen=True, eq=False)
class Target:
    """The runtime, or kind of runtime, that a file is written for.

    Attributes:
        name: Its name in the public API.
        bodies: How an MoE layer is computed, by the names of the public API's ``body``, the default
            first; under None where there is no choice.
        keeps_nodes: Whether the nodes of registered operators stay, with their bodies as functions
            beside them. Otherwise a body takes its node's place before the graph is simplified.
        takes_transposed_weights: Whether the bodies take weights that lie as (in, out).
        takes_packed_weights: Whether there are bodies of packed weights.
        opset: Version of the standard operators where a user names none.
        takes_attention: Whether the runtime computes the standard's Attention in every dtype.
        foreign: The operators of a runtime that the bodies use.
        packed_product: The runtime's operator that multiplies packed matrices; None:
            DequantizeLinear reads them for the standard's products.
        collective: The runtime's operator that sums over ranks.
        runs_in_onnxruntime: Whether ONNX Runtime runs the files.
        approximations: What a user should know of activations that are computed in another form.
        note: What a user of any file with MoE layers should know.
    """

    name: TargetName
    bodies: Mapping[str | None, LayerBody]
    keeps_nodes: bool = False
    takes_transposed_weights: bool = False
    takes_packed_weights: bool = False
    opset: int = DEFAULT_OPSET
    takes_attention: bool = False
    foreign: tuple[ForeignOperator, ...] = ()
    packed_product: ForeignOperator | None = None
    collective: ForeignOperator = TENSORRT_COLLECTIVE
    runs_in_onnxruntime: bool = True
    approximations: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def layer_body(self, node: ir.Node, opset: int, body: str | None = None) -> ir.Function:
        """Returns the function that computes an MoE node, named after its configuration.

        Args:
            node: The node.
            opset: Version of the standard operators.
            body: One of :attr:`bodies`; what is not among them means the default.

        Raises:
            ValueError: If the target has no form of the layer, or does not take its weights as they
                lie.
        """
        shape = config_of(node).shape
        if not shape.weight_format.is_plain and not self.takes_packed_weights:
            raise ValueError(
                f"node {node.name!r}: target {self.name!r} has no form of packed weights "
                f"({shape.weight_format}): convert with experts_dtype decodes a checkpoint's"
            )
        if shape.layout != WeightLayout() and not self.takes_transposed_weights:
            raise ValueError(
                f"node {node.name!r}: with target {self.name!r} weights must be (out, in)"
            )
        default = next(iter(self.bodies.values()))
        return self.bodies.get(body, default)(node, opset)

    def notes(self, activations: Collection[str]) -> list[str]:
        """Returns notes for a user of a file, given the activations of its MoE layers."""
        approximated = [
            note for activation, note in self.approximations.items() if activation in activations
        ]
        return [*approximated, *([self.note] if self.note and activations else [])]
