"""Reading a simplified graph backwards from a value, and putting nodes in others' place.

All nodes here are the standard's own. A symbolic dimension is a name, or an expression of names,
which mean the same size everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from dynamo_moe.moe_nodes.nodes import module_of

Dimension = int | str | object
"""A size, the name of one, or of one without a name something that is like no other."""

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""The dtypes that rotary embeddings and attention have in the standard and in ONNX Runtime."""


def maker(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Returns the node that makes a value, if it is one of these operators; None otherwise."""
    node = None if value is None else value.producer()
    return node if node is not None and not node.domain and node.op_type in op_types else None


def only_use(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Returns the node that makes a value which one node alone uses, if it is one of these."""
    if value is None or value.is_graph_output() or len(value.uses()) != 1:
        return None
    return maker(value, *op_types)


def only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """Returns the one node that uses a value, if it is of this operator."""
    users = [user for user, _ in value.uses()]
    if len(users) != 1 or value.is_graph_output():
        return None
    return users[0] if not users[0].domain and users[0].op_type == op_type else None


def operand(node: ir.Node, position: int) -> ir.Value:
    """Returns a node's input.

    Raises:
        ValueError: If it is absent.
    """
    value = node.inputs[position]
    if value is None:
        raise ValueError(f"node {node.name!r} has no input {position}")
    return value


def both_orders(node: ir.Node | None) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yields a node's two operands in one order and in the other; nothing for None."""
    if node is not None:
        first, second = operand(node, 0), operand(node, 1)
        yield first, second
        yield second, first


def integers(value: ir.Value | None) -> list[int] | None:
    """Returns the numbers of a constant of integers; None if it is another value."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.dtype not in (ir.DataType.INT32, ir.DataType.INT64):
        return None
    return [int(number) for number in tensor.numpy().flat]


def scalar(value: ir.Value | None) -> float | None:
    """Returns the number of a constant with one element; None if it is another value."""
    if value is None or value.is_graph_input() or value.const_value is None:
        return None
    tensor = value.const_value
    if tensor.size != 1 or tensor.dtype.is_string():
        return None
    return float(np.asarray(tensor.numpy()).reshape(-1)[0])


def dimensions(value: ir.Value | None) -> tuple[Dimension, ...]:
    """Returns a value's sizes and names of sizes; nothing if its rank is unknown."""
    if value is None or value.shape is None:
        return ()
    sizes = (size if isinstance(size, int) else size.value for size in value.shape)
    return tuple(object() if size is None else size for size in sizes)


def are_alike(size: Dimension, other: Dimension) -> bool:
    """Whether two sizes that broadcast with each other are equal wherever neither is 1.

    Symbolic ones are: their names may be two ways to compute one number.
    """
    return size == other or (isinstance(size, str) and isinstance(other, str))


def permutation(node: ir.Node | None) -> tuple[int, ...]:
    """Returns how a Transpose orders axes; nothing for None."""
    return () if node is None else tuple(node.attributes.get_ints("perm", ()))


def is_last_axis(axis: int, value: ir.Value) -> bool:
    """Whether an axis, which may be negative, is a value's last one."""
    return axis in (-1, len(dimensions(value)) - 1)


def reduces_last_axis(reduce: ir.Node, value: ir.Value) -> bool:
    """Whether a reduction is over a value's last axis alone, and keeps it with the size 1."""
    kept = reduce.attributes.get_int("keepdims", 1) == 1
    axes = integers(reduce.inputs[1]) if len(reduce.inputs) > 1 else None
    return kept and axes is not None and len(axes) == 1 and is_last_axis(axes[0], value)


def slice_of_last_axis(value: ir.Value | None) -> tuple[ir.Value, int, int] | None:
    """Returns what a value is a slice of, along its last axis, with start and end; None if none is.

    The value may be an output of Slice or of Split.
    """
    node = maker(value, "Slice", "Split")
    if node is None or value is None:
        return None
    whole = operand(node, 0)
    width = dimensions(whole)[-1:]
    if not width or not isinstance(width[0], int):
        return None
    if node.op_type == "Split":
        if not is_last_axis(node.attributes.get_int("axis", 0), whole):
            return None
        sizes = [dimensions(output)[-1:] for output in node.outputs]
        start = 0
        for output, size in zip(node.outputs, sizes, strict=True):
            if not size or not isinstance(size[0], int):
                return None
            if output is value:
                return whole, start, start + size[0]
            start += size[0]
        return None
    bounds = [integers(bound) for bound in node.inputs[1:]]
    if len(bounds) != 4 or any(numbers is None or len(numbers) != 1 for numbers in bounds):
        return None
    (start,), (end,), (axis,), (step,) = ([*(numbers or ())] for numbers in bounds)
    if step != 1 or not is_last_axis(axis, whole):
        return None
    first, last, _ = slice(start, end).indices(width[0])
    return whole, first, last


class Writer:
    """Adds nodes to a graph.

    Attributes:
        graph: The graph.
    """

    def __init__(self, graph: ir.Graph, name: str) -> None:
        """Makes a writer whose nodes and values are named after it, as no others in the graph."""
        self.graph, self._prefix = graph, name
        self._constants: dict[tuple[object, ...], ir.Value] = {}
        self._count = 0

    def node(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        results: int = 1,
        domain: str = "",
    ) -> ir.Node:
        """Adds a node before another one, as a part of the same module."""
        node = ir.node(
            op_type, inputs, attributes or {}, domain=domain, num_outputs=results,
            name=self._name("/".join(filter(None, [module_of(before), op_type]))),
        )  # fmt: skip
        node.metadata_props.update(before.metadata_props)
        for output in node.outputs:
            output.name = self._name(op_type)
        self.graph.insert_before(before, node)
        return node

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        """Returns a constant of integers, the same one for the same numbers."""
        return self.constant(np.array(numbers, np.int64))

    def constant(self, array: np.ndarray[Any, Any]) -> ir.Value:
        """Returns a constant, the same one for the same values."""
        key = array.dtype.str, array.shape, array.tobytes()
        if key not in self._constants:
            constant = ir.Value(name=self._name("constant"), const_value=ir.tensor(array))
            constant.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            constant.shape = ir.Shape(array.shape)
            self.graph.register_initializer(constant)
            self._constants[key] = constant
        return self._constants[key]

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Puts one value in the place of another, under its name and with its type and shape."""
        name, self._count = old.name, self._count + 1
        old.name, new.name = f"{name}/replaced_{self._count}", name
        new.type, new.shape = old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)

    def _name(self, base: str) -> str:
        self._count += 1
        return f"{self._prefix}/{base}_{self._count}"


def typed(value: ir.Value, like: ir.Value, sizes: Sequence[Dimension]) -> ir.Value:
    """Gives a value the type of another one and these dimensions; returns it."""
    known = [size if isinstance(size, (int, str)) else None for size in sizes]
    value.type, value.shape = like.type, ir.Shape(known)
    return value
