"""Rotary position embeddings as one node: RoFormer, Su et al., 2021.

Legend: B batch, S tokens, H heads, D width of a head, R how much of it is turned.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from dynamo_moe.graph.matching import (
    Dimension,
    Writer,
    are_alike,
    both_orders,
    dimensions,
    integers,
    is_last_axis,
    maker,
    only_use,
    operand,
    permutation,
    scalar,
    slice_of_last_axis,
    typed,
)

HEADS_FIRST = (0, 2, 1, 3)
"""From [B, S, H, D] to [B, H, S, D], and back."""


class _Rotation(NamedTuple):
    """``x`` with the halves of its last axis, a and b, turned: ``a cos - b sin, b cos + a sin``."""

    x: ir.Value
    cos: ir.Value  # [B, 1, S, R / 2] or [B, S, 1, R / 2], or twice that side by side
    sin: ir.Value


def fuse_rotary_embeddings(writer: Writer) -> None:
    """Makes each rotation by ``cos`` and ``sin`` of one width one RotaryEmbedding."""
    halves: dict[ir.Value, ir.Value | None] = {}
    for node in list(writer.graph):
        rotation = _of_whole(node) or _of_halves(node)
        if rotation is not None:
            _fuse(writer, node.outputs[0], rotation, halves)


def _of_whole(node: ir.Node) -> _Rotation | None:
    """Matches ``x * cos + concat(-b, a) * sin``."""
    if node.domain or node.op_type != "Add":
        return None
    for kept, crossed in both_orders(node):
        for turned, sin in both_orders(only_use(crossed, "Mul")):
            whole = _turned(turned)
            if whole is None:
                continue
            for x, cos in both_orders(only_use(kept, "Mul")):
                if x is whole:
                    return _Rotation(x, cos, sin)
    return None


def _turned(value: ir.Value) -> ir.Value | None:
    """Returns x if a value is ``concat(-b, a)`` of its halves."""
    join = only_use(value, "Concat")
    if join is None or len(join.inputs) != 2:
        return None
    if not is_last_axis(join.attributes.get_int("axis", 0), value):
        return None
    negation = maker(join.inputs[0], "Neg")
    if negation is None:
        return None
    return _whole_of_halves(operand(join, 1), operand(negation, 0))


def _of_halves(node: ir.Node) -> _Rotation | None:
    """Matches ``concat(a * cos - b * sin, b * cos + a * sin)``."""
    if node.domain or node.op_type != "Concat" or len(node.inputs) != 2:
        return None
    if not is_last_axis(node.attributes.get_int("axis", 0), node.outputs[0]):
        return None
    difference, total = only_use(node.inputs[0], "Sub"), only_use(node.inputs[1], "Add")
    if difference is None or total is None:
        return None
    for a, cos in both_orders(only_use(difference.inputs[0], "Mul")):
        for b, sin in both_orders(only_use(difference.inputs[1], "Mul")):
            for first, second in both_orders(total):
                if {b, cos} == _operands(first) and {a, sin} == _operands(second):
                    x = _whole_of_halves(a, b)
                    return None if x is None else _Rotation(x, cos, sin)
    return None


def _operands(value: ir.Value) -> set[ir.Value | None]:
    product = only_use(value, "Mul")
    return set() if product is None else set(product.inputs)


def _whole_of_halves(first: ir.Value, second: ir.Value) -> ir.Value | None:
    """Returns the value whose last axis has these two halves; a slice is a value of its own."""
    one, other = slice_of_last_axis(first), slice_of_last_axis(second)
    if one is None or other is None or one[0] is not other[0]:
        return None
    whole, start, middle = one
    width = dimensions(whole)[-1]
    halves = start == 0 and other[1:] == (middle, width) and width == 2 * middle
    return whole if halves else None


def _fuse(
    writer: Writer, old: ir.Value, rotation: _Rotation, halves: dict[ir.Value, ir.Value | None]
) -> None:
    x, sizes = rotation.x, dimensions(rotation.x)
    tables = [_table(writer, value, sizes, halves) for value in (rotation.cos, rotation.sin)]
    if len(sizes) != 4 or None in tables:
        return
    width, old, x = _with_rest(old, x)
    node = old.producer()
    sizes = dimensions(x)
    heads_first = maker(x, "Transpose")
    first = permutation(heads_first) == HEADS_FIRST
    if node is None or not isinstance(sizes[1], int) or not isinstance(sizes[3], int):
        return
    options = {} if width == sizes[3] else {"rotary_embedding_dim": width}
    if heads_first is None or not first:
        new = writer.node(node, "RotaryEmbedding", [x, *tables], options)
        writer.replace(old, new.outputs[0])
        return
    # Without turning axes, which attention does not need either.
    by_token = operand(heads_first, 0)
    options["num_heads"] = sizes[1]
    flat = flattened(writer, node, by_token)
    new = writer.node(node, "RotaryEmbedding", [flat, *tables], options)
    result = typed(new.outputs[0], x, dimensions(flat))
    shape = writer.ints([0, 0, sizes[1], sizes[3]])
    heads = writer.node(node, "Reshape", [result, shape])
    typed(heads.outputs[0], x, dimensions(by_token))
    turned = writer.node(node, "Transpose", [heads.outputs[0]], {"perm": HEADS_FIRST})
    writer.replace(old, turned.outputs[0])


def flattened(writer: Writer, before: ir.Node, value: ir.Value) -> ir.Value:
    """Returns a value [B, S, H, D] as [B, S, H * D]; H and D are numbers."""
    sizes = dimensions(value)
    merged = int(sizes[2] or 0) * int(sizes[3] or 0)
    split = maker(value, "Reshape")
    if split is not None and dimensions(split.inputs[0]) == (*sizes[:2], merged):
        return operand(split, 0)
    flat = writer.node(before, "Reshape", [value, writer.ints([0, 0, merged])])
    return typed(flat.outputs[0], value, (*sizes[:2], merged))


def _with_rest(result: ir.Value, x: ir.Value) -> tuple[int, ir.Value, ir.Value]:
    """Returns R, and result and operand with the rest of the axis that is not turned, if any."""
    width = int(dimensions(x)[-1] or 0)
    part = slice_of_last_axis(x)
    users = list(result.uses())
    if part is None or part[1] != 0 or len(users) != 1 or result.is_graph_output():
        return width, result, x
    join, position = users[0]
    if (join.domain, join.op_type, len(join.inputs), position) != ("", "Concat", 2, 0):
        return width, result, x
    rest = slice_of_last_axis(join.inputs[1])
    whole = part[0]
    if rest != (whole, width, dimensions(whole)[-1]) or not is_last_axis(
        join.attributes.get_int("axis", 0), join.outputs[0]
    ):
        return width, result, x
    return width, join.outputs[0], whole


def _table(
    writer: Writer,
    value: ir.Value,
    sizes: tuple[Dimension, ...],
    halves: dict[ir.Value, ir.Value | None],
) -> ir.Value | None:
    """Returns [B, S, R / 2] of what x of these sizes is multiplied by, None where it has not that.

    A table of twice the width must have been made of two equal halves side by side.
    """
    spread = maker(value, "Unsqueeze")
    if spread is None or len(sizes) != 4:
        return None
    axis, table = integers(spread.inputs[1]), operand(spread, 0)
    tokens = {1: sizes[2], 2: sizes[1]}.get(axis[0]) if axis and len(axis) == 1 else None
    width = dimensions(table)[-1:]
    its = dimensions(table)[:2]
    if len(its) < 2 or not isinstance(sizes[3], int):
        return None
    if not all(are_alike(*pair) for pair in zip(its, (sizes[0], tokens), strict=True)):
        return None
    if width == (sizes[3] // 2,):
        return table
    return _half(writer, table, halves) if width == (sizes[3],) else None


def _half(
    writer: Writer, value: ir.Value, known: dict[ir.Value, ir.Value | None]
) -> ir.Value | None:
    """Returns the first half of a value that is made of two equal halves, element by element."""
    if value not in known:
        known[value] = _made_of_halves(writer, value, known)
    return known[value]


def _made_of_halves(
    writer: Writer, value: ir.Value, known: dict[ir.Value, ir.Value | None]
) -> ir.Value | None:
    node = maker(value, "Concat", "Cos", "Sin", "Cast", "Mul", "Div")
    if node is None or not dimensions(value):
        return None
    if node.op_type == "Concat":
        equal = len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
        last = is_last_axis(node.attributes.get_int("axis", 0), value)
        return node.inputs[0] if equal and last else None
    if any(scalar(factor) is None for factor in node.inputs[1:]):
        return None
    half = _half(writer, operand(node, 0), known)
    if half is None:
        return None
    attributes = {name: entry.value for name, entry in node.attributes.items()}
    made = writer.node(node, node.op_type, [half, *node.inputs[1:]], attributes)
    return typed(made.outputs[0], value, dimensions(half))
