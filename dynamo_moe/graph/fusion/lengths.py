"""Slices of a language model's mask that its lengths show to be the whole, or its last tokens.

A trace takes the number of tokens in the cache, that of new ones and the length of the mask for
three sizes. By their names the last is the sum of the others.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dynamo_moe.files.cache_entries import MASK, PAST, SEQUENCE, TOTAL
from dynamo_moe.graph.matching import (
    Writer,
    both_orders,
    dimensions,
    integers,
    is_last_axis,
    maker,
    operand,
    scalar,
    typed,
)

_END = np.iinfo(np.int64).max


def use_whole_masks(writer: Writer) -> None:
    """Drops slices that keep all tokens, and counts those that keep the new ones from the front."""
    inputs = list(writer.graph.inputs)
    mask = next((value for value in inputs if value.name == MASK), None)
    caches = [value for value in inputs if PAST in dimensions(value)]
    # One whose length is in the graph already, if there is one: equal nodes are merged.
    measured = [cache for cache in caches if any(_length(use) for use, _ in cache.uses())]
    cache = next(iter([*measured, *caches]), None)
    named = {size for value in inputs for size in dimensions(value)}
    if cache is None or dimensions(mask)[-1:] != (TOTAL,) or SEQUENCE not in named:
        return
    for node in list(writer.graph):
        if node.domain or node.op_type != "Slice" or len(node.inputs) != 5:
            continue
        whole, start, end = operand(node, 0), operand(node, 1), operand(node, 2)
        axes, steps = integers(node.inputs[3]), integers(node.inputs[4])
        if dimensions(whole)[-1:] != (TOTAL,) or steps != [1] or axes is None or len(axes) != 1:
            continue
        if not is_last_axis(axes[0], whole):
            continue
        if integers(start) == [0] and _size(end) == {PAST: 1, SEQUENCE: 1}:
            if not node.outputs[0].is_graph_output():
                node.outputs[0].replace_all_uses_with(whole)
        elif integers(end) == [_END] and _size(start) == {SEQUENCE: -1}:
            axis = dimensions(cache).index(PAST)
            ends = {"start": axis, "end": axis + 1}
            past = writer.node(node, "Shape", [cache], ends).outputs[0]
            node.replace_input_with(1, typed(past, start, [1]))


def _length(node: ir.Node) -> bool:
    """Whether a node gives the number of tokens in a cache."""
    return node.op_type == "Shape" and _size(node.outputs[0]) == {PAST: 1}


def _size(value: ir.Value | None) -> dict[str, int] | None:
    """Returns how often sizes of each name are in a value of one element; None if not known."""
    node = maker(value, "Shape", "Squeeze", "Reshape", "Neg", "Add", "Mul")
    if node is None:
        return None
    if node.op_type == "Shape":
        start, end = (node.attributes.get_int(name, 0) for name in ("start", "end"))
        sizes = dimensions(node.inputs[0])[start:end]
        return {sizes[0]: 1} if len(sizes) == 1 and isinstance(sizes[0], str) else None
    if node.op_type == "Add":
        one, other = (_size(term) for term in node.inputs)
        if one is None or other is None:
            return None
        return {name: one.get(name, 0) + other.get(name, 0) for name in {*one, *other}}
    if node.op_type == "Mul":
        negated = [x for x, factor in both_orders(node) if scalar(factor) == -1]
        counts = _size(negated[0]) if negated else None
    else:
        counts = _size(node.inputs[0])
    if node.op_type in ("Squeeze", "Reshape") or counts is None:
        return counts
    return {name: -count for name, count in counts.items()}
