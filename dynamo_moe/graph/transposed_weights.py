"""Experts' weights that a model holds as (in, out) stay as they lie, where files are linked."""

from __future__ import annotations

import onnx_ir as ir

from custom_ops.options import LAYOUT_OPTIONS
from dynamo_moe.moe_nodes.nodes import INPUTS, moe_nodes

_SWAPPED = (0, 2, 1)


def keep_transposed_weights(model: ir.Model) -> None:
    """Gives MoE nodes what their weights are transposed from, and says so in their attributes.

    So a checkpoint's own file can hold it. Where a file is written anyway, turning the weight once
    pays: with (in, out) and 64 tokens, ONNX Runtime's loop over the experts takes up to 1.7 times
    as long on a CPU, and the GPU's kernels for few tokens read shorter runs of memory.
    """
    for node in moe_nodes(model):
        for option in LAYOUT_OPTIONS:
            position = INPUTS[node.op_type].index(option.name.removesuffix("_transposed"))
            value = node.inputs[position]
            maker = None if value is None else value.producer()
            if value is None or maker is None or not _swaps(maker):
                continue
            node.replace_input_with(position, maker.inputs[0])
            node.attributes.add(ir.AttrInt64(option.attribute, 1))
            if maker.graph is not None and not value.uses() and not value.is_graph_output():
                maker.graph.remove(maker, safe=True)


def _swaps(node: ir.Node) -> bool:
    """Whether a node turns (in, out) to (out, in)."""
    if (node.domain, node.op_type) != ("", "Transpose"):
        return False
    return tuple(node.attributes.get_ints("perm", ())) == _SWAPPED
