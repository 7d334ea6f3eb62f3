"""A sum and its RMS norm as one node of ONNX Runtime's, which gives both.

Legend: B batch, S tokens, W width.
"""

from __future__ import annotations

import onnx_ir as ir

from dynamo_moe.graph.matching import Writer, dimensions, is_last_axis, maker, operand
from dynamo_moe.operators.foreign import ONNXRUNTIME_SKIP_NORM

_SUM = 3
"""The sum's place among the results; those between the norm and it are for training."""


def fuse_skip_norms(writer: Writer) -> None:
    """Makes ``RMSNormalization(x + y)`` of tensors [B, S, W] one node, the sum a second result.

    The node stands where the norm does, so nothing before may use the sum.
    """
    places = {node: place for place, node in enumerate(writer.graph)}
    for norm in list(writer.graph):
        add = _normed_sum(norm)
        if add is None:
            continue
        place = places[norm]
        # One in a branch has no place here.
        users = (user for user, _ in add.outputs[0].uses() if user is not norm)
        if all(places.get(user, -1) > place for user in users):
            places[_fuse(writer, norm, add)] = place


def drop_unused_sums(model: ir.Model) -> None:
    """Lets nodes give the norm alone whose sum nothing uses."""
    for node in model.graph:
        if ONNXRUNTIME_SKIP_NORM.is_of(node.domain, node.op_type) and len(node.outputs) > _SUM:
            total = node.outputs[_SUM]
            if not (total.uses() or total.is_graph_output()):
                node.resize_outputs(1)


def _normed_sum(norm: ir.Node) -> ir.Node | None:
    """Returns the sum of two tensors of one shape that a node normalises, if it is such a norm."""
    if norm.domain or norm.op_type != "RMSNormalization":
        return None
    total, weight = operand(norm, 0), operand(norm, 1)
    add, sizes = maker(total, "Add"), dimensions(total)
    if add is None or len(sizes) != 3 or any(dimensions(x) != sizes for x in add.inputs):
        return None
    is_plain = is_last_axis(norm.attributes.get_int("axis", -1), total)
    is_plain &= dimensions(weight) == sizes[-1:] and weight.dtype == total.dtype
    # In half precision the operators round in different places.
    return add if is_plain and total.dtype == ir.DataType.FLOAT else None


def _fuse(writer: Writer, norm: ir.Node, add: ir.Node) -> ir.Node:
    """Puts the operator in the place of a norm and of the sum; returns it."""
    operator = ONNXRUNTIME_SKIP_NORM
    fused = writer.node(
        norm,
        operator.op_type,
        [*add.inputs, norm.inputs[1]],
        {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
        results=_SUM + 1,
        domain=operator.domain,
    )
    for unused in fused.outputs[1:_SUM]:
        unused.name = ""
    writer.replace(norm.outputs[0], fused.outputs[0])
    writer.replace(add.outputs[0], fused.outputs[_SUM])
    return fused
