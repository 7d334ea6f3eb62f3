"""Masks of attention, in the forms that operators take.

Legend: B batch, S new tokens, P tokens in the cache, L keys, H heads, D width of a head.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dynamo_moe.graph.matching import (
    FLOATS,
    Writer,
    dimensions,
    integers,
    maker,
    operand,
    scalar,
    typed,
)

_LEAST, _LEAST_OF_HALF = -1e30, -6e4
"""Numbers that no score makes up for, above the least of float32 and bfloat16, and of float16."""


def seen_keys(mask: ir.Value) -> ir.Value:
    """Returns the booleans that an added mask is made of, 0 for a key that is seen, if it is."""
    choice = maker(mask, "Where")
    if choice is None or scalar(choice.inputs[1]) != 0 or scalar(choice.inputs[2]) != -np.inf:
        return mask
    return operand(choice, 0)


def with_rows(writer: Writer, node: ir.Node, mask: ir.Value, queries: ir.Value) -> ir.Value:
    """Returns a mask with a row for each of the tokens of queries [B, H, S, D]."""
    sizes, tokens = dimensions(mask), dimensions(queries)[2]
    if len(sizes) < 2 or sizes[-2] != 1 or tokens == 1:
        return mask
    one = writer.ints([1])
    count = writer.node(node, "Shape", [queries], {"start": 2, "end": 3}).outputs[0]
    parts = [*[one] * (len(sizes) - 2), typed(count, one, [1]), one]
    shape = writer.node(node, "Concat", parts, {"axis": 0}).outputs[0]
    wide = writer.node(node, "Expand", [mask, typed(shape, one, [len(sizes)])]).outputs[0]
    return typed(wide, mask, (*sizes[:-2], tokens, sizes[-1]))


def above_least(writer: Writer, node: ir.Node, mask: ir.Value) -> ir.Value:
    """Returns an added mask whose numbers are above the dtype's least.

    ONNX Runtime 1.31 takes that one for minus infinity: of a token that sees no key, Attention
    would give zeros in place of the mean of all values.
    """
    if mask.dtype not in FLOATS:
        return mask
    floor = np.asarray(_LEAST_OF_HALF if mask.dtype == ir.DataType.FLOAT16 else _LEAST)
    bound = writer.constant(floor.astype(mask.dtype.numpy()))
    choice = maker(mask, "Where")
    other = None if choice is None else scalar(choice.inputs[2])
    if choice is not None and other is not None and np.isfinite(other) and other < floor:
        new = writer.node(node, "Where", [*choice.inputs[:2], bound])
    else:
        new = writer.node(node, "Max", [mask, bound])
    return typed(new.outputs[0], mask, dimensions(mask))


def is_causal(mask: ir.Value) -> bool:
    """Whether a mask [B, 1, S, L] hides what comes after a token, as far as its nodes show that.

    They must compare ``range(L)`` with ``range(S) + P``, and hide at least where that says so.
    """
    choice = maker(mask, "Where")
    if choice is not None:
        least = np.finfo(np.float16).min if mask.dtype == ir.DataType.FLOAT16 else _LEAST
        other = scalar(choice.inputs[2])
        hides = scalar(choice.inputs[1]) == 0 and other is not None and other <= least
        return bool(hides) and is_causal(operand(choice, 0))
    both = maker(mask, "And")
    if both is not None:
        return any(is_causal(operand(both, position)) for position in (0, 1))
    compared = maker(mask, "LessOrEqual")
    if compared is None:
        return False
    keys, queries = (
        _along(value, axis) for value, axis in zip(compared.inputs, (3, 2), strict=True)
    )
    later = maker(queries, "Add")
    if later is None or not _counts_from_zero(keys):
        return False
    starts = [operand(later, position) for position in (0, 1)]
    return any(
        _counts_from_zero(one) and _is_length_of_cache(other)
        for one, other in (starts, reversed(starts))
    )


def _along(value: ir.Value | None, axis: int) -> ir.Value | None:
    """Returns the values that stand along an axis of four."""
    spread = maker(value, "Unsqueeze")
    axes = None if spread is None else integers(spread.inputs[1])
    return spread.inputs[0] if spread and axes == [i for i in range(4) if i != axis] else None


def _counts_from_zero(value: ir.Value | None) -> bool:
    counts = maker(value, "Range")
    return counts is not None and scalar(counts.inputs[0]) == 0 and scalar(counts.inputs[2]) == 1


def _is_length_of_cache(value: ir.Value) -> bool:
    """Whether a value is P of an input [B, G, P, D] of the graph."""
    flat = maker(value, "Squeeze", "Reshape")
    size = maker(value if flat is None else flat.inputs[0], "Shape")
    if size is None:
        return False
    ends = [size.attributes.get_int(name, -1) for name in ("start", "end")]
    return ends == [2, 3] and operand(size, 0).is_graph_input()
