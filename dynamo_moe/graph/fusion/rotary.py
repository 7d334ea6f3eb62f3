"""Rotary position embeddings as one node: RoFormer, Su et al., 2021.

Legend: B batch, S tokens, H heads, D width of a head, R how much of it is turned.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import onnx_ir as ir

from dynamo_moe.graph.matching import (
    FLOATS,
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
    tables = _Tables(writer)
    for node in list(writer.graph):
        rotation = _of_whole(node) or _of_halves(writer, node)
        if rotation is not None:
            _fuse(writer, node.outputs[0], rotation, tables)


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


def _of_halves(writer: Writer, node: ir.Node) -> _Rotation | None:
    """Matches ``concat(a * cos - b * sin, b * cos + a * sin)``.

    If a and b are not the halves of one value, such as its even and odd elements (DeepSeek), they
    are put side by side.
    """
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
                    x = _whole_of_halves(a, b) or _side_by_side(writer, node, a, b)
                    return None if x is None else _Rotation(x, cos, sin)
    return None


def _side_by_side(
    writer: Writer, before: ir.Node, first: ir.Value, second: ir.Value
) -> ir.Value | None:
    sizes = dimensions(first)
    if not sizes or sizes != dimensions(second) or not isinstance(sizes[-1], int):
        return None
    join = writer.node(before, "Concat", [first, second], {"axis": len(sizes) - 1})
    return typed(join.outputs[0], first, (*sizes[:-1], 2 * sizes[-1]))


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


def _fuse(writer: Writer, old: ir.Value, rotation: _Rotation, tables: _Tables) -> None:
    both = [tables.of(value, rotation.x) for value in (rotation.cos, rotation.sin)]
    width, old, x = _with_rest(old, rotation.x)
    node, sizes = old.producer(), dimensions(x)
    found = [entry for entry in both if entry is not None]
    if node is None or len(found) < len(both) or len({axis for _, axis in found}) > 1:
        return
    axis = found[0][1]
    heads, head = sizes[axis], sizes[3]
    if not isinstance(heads, int) or not isinstance(head, int):
        return
    cos_sin = [tables.for_batch(node, table, x) for table, _ in found]
    options = {} if width == head else {"rotary_embedding_dim": width}
    turn = maker(x, "Transpose")
    by_token = x if axis == 2 else None
    if turn is not None and axis == 1 and permutation(turn) == HEADS_FIRST:
        by_token = operand(turn, 0)
    if by_token is None:
        new = writer.node(node, "RotaryEmbedding", [x, *cos_sin], options)
        writer.replace(old, new.outputs[0])
        return
    # The heads stay side by side, as attention takes them too.
    flat = flattened(writer, node, by_token)
    options["num_heads"] = heads
    rotated = writer.node(node, "RotaryEmbedding", [flat, *cos_sin], options).outputs[0]
    parts = [typed(rotated, x, dimensions(flat)), writer.ints([0, 0, heads, head])]
    result = typed(writer.node(node, "Reshape", parts).outputs[0], x, dimensions(by_token))
    if by_token is not x:
        result = writer.node(node, "Transpose", [result], {"perm": HEADS_FIRST}).outputs[0]
    writer.replace(old, result)


def flattened(writer: Writer, before: ir.Node, value: ir.Value) -> ir.Value:
    """Returns a value [B, S, H, D] as [B, S, H * D]; H and D are numbers."""
    sizes = dimensions(value)
    merged = math.prod(size for size in sizes[2:] if isinstance(size, int))
    split = maker(value, "Reshape")
    if split is not None and dimensions(split.inputs[0]) == (*sizes[:2], merged):
        return operand(split, 0)
    flat = writer.node(before, "Reshape", [value, writer.ints([0, 0, merged])])
    return typed(flat.outputs[0], value, (*sizes[:2], merged))


def _with_rest(result: ir.Value, x: ir.Value) -> tuple[int, ir.Value, ir.Value]:
    """Returns R, and result and operand with the rest of the axis that is not turned, if any."""
    width = math.prod(size for size in dimensions(x)[-1:] if isinstance(size, int))
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


class _Tables:
    """The tables of cosines and sines, in the form that the operator takes."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._halves: dict[ir.Value, ir.Value | None] = {}
        self._wide: dict[tuple[ir.Value, Dimension], ir.Value] = {}

    def of(self, value: ir.Value, x: ir.Value) -> tuple[ir.Value, int] | None:
        """Returns [B or 1, S, R / 2] of what x is multiplied by, and the axis of its heads.

        A table of twice the width must have been made of two equal halves side by side.
        """
        spread, sizes = maker(value, "Unsqueeze"), dimensions(x)
        axes = None if spread is None else integers(spread.inputs[1])
        if spread is None or axes not in ([1], [2]) or len(sizes) != 4 or x.dtype not in FLOATS:
            return None
        (axis,), table = axes, operand(spread, 0)
        match dimensions(table), sizes[3]:
            case (batch, tokens, int(width)), int(head):
                fits = batch == 1 or are_alike(batch, sizes[0])
                if not fits or not are_alike(tokens, sizes[3 - axis]):
                    return None
                half = table if 2 * width == head else self._half(table) if width == head else None
                return None if half is None else (half, axis)
        return None

    def for_batch(self, before: ir.Node, table: ir.Value, x: ir.Value) -> ir.Value:
        """Returns a table [B, S, R / 2] of one that may be for all of x's batch.

        Calls come in the order of the nodes, so the first has its nodes before all others'.
        """
        sizes, batch = dimensions(table), dimensions(x)[0]
        if sizes[0] != 1 or batch == 1:
            return table
        if (table, batch) not in self._wide:
            write, one = self._writer, self._writer.ints([1])
            count = write.node(before, "Shape", [x], {"start": 0, "end": 1}).outputs[0]
            parts = [typed(count, one, [1]), one, one]
            shape = write.node(before, "Concat", parts, {"axis": 0}).outputs[0]
            wide = write.node(before, "Expand", [table, typed(shape, one, [3])]).outputs[0]
            self._wide[table, batch] = typed(wide, table, (batch, *sizes[1:]))
        return self._wide[table, batch]

    def _half(self, value: ir.Value) -> ir.Value | None:
        """Returns the first half of what is made of two equal halves, element by element."""
        if value not in self._halves:
            self._halves[value] = self._made_of_halves(value)
        return self._halves[value]

    def _made_of_halves(self, value: ir.Value) -> ir.Value | None:
        node = maker(value, "Concat", "Cos", "Sin", "Cast", "Mul", "Div")
        if node is None or not dimensions(value):
            return None
        if node.op_type == "Concat":
            equal = len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
            last = is_last_axis(node.attributes.get_int("axis", 0), value)
            return node.inputs[0] if equal and last else None
        if any(scalar(factor) is None for factor in node.inputs[1:]):
            return None
        half = self._half(operand(node, 0))
        if half is None:
            return None
        attributes = {name: entry.value for name, entry in node.attributes.items()}
        made = self._writer.node(node, node.op_type, [half, *node.inputs[1:]], attributes)
        return typed(made.outputs[0], value, dimensions(half))
