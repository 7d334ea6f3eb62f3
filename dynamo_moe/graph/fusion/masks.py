"""Masks of attention, in the forms that operators take.

Legend: B batch, S new tokens, P tokens in the cache, L keys, H heads, D width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from dynamo_moe.graph.matching import (
    FLOATS,
    Writer,
    are_alike,
    both_orders,
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
    return _lengths_of(mask) is not None


def fuse_masks(writer: Writer) -> None:
    """Computes what a token sees by ``Trilu`` of one row of keys that are no padding.

    Of masks that hide what is later, padding, and what is before a sliding window.
    """
    for node in list(writer.graph):
        if node.domain or node.op_type != "And" or node.outputs[0].dtype != ir.DataType.BOOL:
            continue
        found = _seen(node)
        if found is not None:
            _by_triangles(writer, node, found)


class _Lengths(NamedTuple):
    """Of a causal mask: the numbers of new tokens and of those in the cache, one element each."""

    new: ir.Value
    past: ir.Value


class _Seen(NamedTuple):
    """What tokens see: keys up to their own that are kept [B, 1, 1, L], and in a window."""

    lengths: _Lengths
    kept: ir.Value
    window: int | None


def _lengths_of(value: ir.Value | None) -> _Lengths | None:
    """Returns the lengths of ``range(L) <= range(S) + P``, keys along axis 3, tokens along 2."""
    compared = maker(value, "LessOrEqual")
    if compared is None:
        return None
    keys, queries = (
        _along(value, axis) for value, axis in zip(compared.inputs, (3, 2), strict=True)
    )
    if _count_from_zero(keys) is None:
        return None
    for counts, past in both_orders(maker(queries, "Add")):
        new = _count_from_zero(counts)
        if new is not None and _is_length_of_cache(past):
            return _Lengths(new, past)
    return None


def _seen(node: ir.Node) -> _Seen | None:
    """Returns what a conjunction says that tokens see, if it says that and nothing else."""
    parts = _conjuncts(node.outputs[0])
    causal = next((part for part in parts if _lengths_of(part) is not None), None)
    lengths, result = _lengths_of(causal), dimensions(node.outputs[0])
    if causal is None or lengths is None or len(result) != 4:
        return None
    others = parts - {causal}
    windows = {part: width for part in others if (width := _window(part, causal)) is not None}
    kept = [part for part in others if part not in windows]
    if len(windows) > 1 or len(kept) != 1:
        return None
    sizes = dimensions(kept[0])
    if len(sizes) != 4 or sizes[1:3] != (1, 1) or not are_alike(sizes[3], result[3]):
        return None
    return _Seen(lengths, kept[0], next(iter(windows.values()), None))


def _conjuncts(value: ir.Value) -> set[ir.Value]:
    both = maker(value, "And")
    if both is None:
        return {value}
    return _conjuncts(operand(both, 0)) | _conjuncts(operand(both, 1))


def _window(value: ir.Value, causal: ir.Value) -> int | None:
    """Returns W if keys are greater than tokens less W, as both are compared in a causal mask."""
    greater, compared = maker(value, "Greater"), maker(causal, "LessOrEqual")
    if greater is None or compared is None or greater.inputs[0] is not compared.inputs[0]:
        return None
    before = maker(greater.inputs[1], "Sub")
    width = None if before is None else scalar(before.inputs[1])
    if before is None or width is None or before.inputs[0] is not compared.inputs[1]:
        return None
    return int(width)


def _by_triangles(writer: Writer, node: ir.Node, seen: _Seen) -> None:
    """Puts what tokens see in the place of a conjunction's result."""
    result = node.outputs[0]
    sizes, one = dimensions(result), writer.ints([1])
    new, past = (_as_list(writer, node, length) for length in seen.lengths)
    shape = writer.node(node, "Concat", [new, one], {"axis": 0}).outputs[0]
    rows = writer.node(node, "Expand", [seen.kept, typed(shape, one, [2])]).outputs[0]
    # The standard has the diagonal's number without axes; ONNX Runtime takes [1] as well.
    before = writer.node(node, "Trilu", [typed(rows, result, sizes), past], {"upper": 0}).outputs[0]
    if seen.window is not None:
        least = writer.node(node, "Sub", [past, writer.ints([seen.window - 1])]).outputs[0]
        parts = [typed(before, result, sizes), typed(least, one, [1])]
        before = writer.node(node, "Trilu", parts, {"upper": 1}).outputs[0]
    writer.replace(result, before)


def _as_list(writer: Writer, before: ir.Node, value: ir.Value) -> ir.Value:
    """Returns a number as [1]."""
    flat = maker(value, "Squeeze", "Reshape")
    if flat is not None and dimensions(flat.inputs[0]) == (1,):
        return operand(flat, 0)
    one = writer.ints([1])
    return typed(writer.node(before, "Reshape", [value, one]).outputs[0], one, [1])


def _along(value: ir.Value | None, axis: int) -> ir.Value | None:
    """Returns the values that stand along an axis of four."""
    spread = maker(value, "Unsqueeze")
    axes = None if spread is None else integers(spread.inputs[1])
    return spread.inputs[0] if spread and axes == [i for i in range(4) if i != axis] else None


def _count_from_zero(value: ir.Value | None) -> ir.Value | None:
    """Returns N of ``range(N)``."""
    counts = maker(value, "Range")
    if counts is None or scalar(counts.inputs[0]) != 0 or scalar(counts.inputs[2]) != 1:
        return None
    return operand(counts, 1)


def _is_length_of_cache(value: ir.Value) -> bool:
    """Whether a value is P of an input [B, G, P, D] of the graph."""
    flat = maker(value, "Squeeze", "Reshape")
    size = maker(value if flat is None else flat.inputs[0], "Shape")
    if size is None:
        return False
    ends = [size.attributes.get_int(name, -1) for name in ("start", "end")]
    return ends == [2, 3] and operand(size, 0).is_graph_input()
