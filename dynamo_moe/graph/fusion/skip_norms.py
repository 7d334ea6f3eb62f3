"""A sum and its RMS norm as one node of ONNX Runtime's, which gives both, and adds a bias too.

Legend: B batch, S tokens, W width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from dynamo_moe.graph.matching import (
    Dimension,
    Writer,
    both_orders,
    dimensions,
    is_last_axis,
    maker,
    only_use,
    operand,
)
from dynamo_moe.operators.foreign import ONNXRUNTIME_SKIP_NORM

_SUM = 3
"""The sum's place among the results; those between the norm and it are for training."""


def fuse_skip_norms(writer: Writer, ends: Collection[str] = ()) -> None:
    """Makes ``RMSNormalization(x + y)`` of tensors [B, S, W] one node, the sum a second result.

    The node stands where the norm does, so nothing before may use the sum. If a term is a sum with
    a bias [W], the node adds that too.

    Args:
        writer: Of the graph.
        ends: The names of values that end a block. The next block's norm takes no bias of theirs.
    """
    places = {node: place for place, node in enumerate(writer.graph)}
    for norm in list(writer.graph):
        add = _normed_sum(norm)
        if add is None:
            continue
        place = places[norm]
        total = add.outputs[0]
        # One in a branch has no place here.
        users = (user for user, _ in total.uses() if user is not norm)
        if all(places.get(user, -1) > place for user in users):
            places[_fuse(writer, norm, add, takes_bias=total.name not in ends)] = place


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


def _without_bias(
    terms: Sequence[ir.Value], sizes: tuple[Dimension, ...]
) -> tuple[Sequence[ir.Value], list[ir.Value]]:
    """Returns the terms of a sum, and the bias [W] of one of them if it has one, which is gone."""
    for place, term in enumerate(terms):
        for inner, bias in both_orders(only_use(term, "Add")):
            if dimensions(inner) == sizes and dimensions(bias) == sizes[-1:]:
                return [*terms[:place], inner, *terms[place + 1 :]], [bias]
    return terms, []


def _fuse(writer: Writer, norm: ir.Node, add: ir.Node, *, takes_bias: bool) -> ir.Node:
    """Puts the operator in the place of a norm and of the sum; returns it."""
    operator = ONNXRUNTIME_SKIP_NORM
    terms: Sequence[ir.Value] = [operand(add, 0), operand(add, 1)]
    bias: list[ir.Value] = []
    if takes_bias:
        terms, bias = _without_bias(terms, dimensions(add.outputs[0]))
    fused = writer.node(
        norm,
        operator.op_type,
        [*terms, norm.inputs[1], *bias],
        {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
        results=_SUM + 1,
        domain=operator.domain,
    )
    for unused in fused.outputs[1:_SUM]:
        unused.name = ""
    writer.replace(norm.outputs[0], fused.outputs[0])
    writer.replace(add.outputs[0], fused.outputs[_SUM])
    return fused
