"""Records nodes with code that reads like the formula: ``op.Add(x, y, out="sum_TD")``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, count
from typing import overload

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike

Operand = ir.Value | int | Sequence[int] | None
Attribute = int | float | str | Sequence[int] | ir.TensorProtocol | ir.Graph


class Ops:
    """Records the nodes of a function's body or of a subgraph in it.

    ``op.Add(x, y, out="sum_TD")`` appends a node and returns its output. If ``out`` is a pair of
    names it returns two outputs, if it is a list of names, a list. Integers and lists of integers
    become INT64 constants. Names are unique over the body and its subgraphs, because a subgraph
    sees the names around it; for the same reason, constants are recorded once, in the outermost
    graph.

    Args:
        opset: Version of the standard operators.
        beside: The body stays a function beside its node, whose input dtypes a tool may change.
    """

    def __init__(self, opset: int, *, beside: bool = False) -> None:
        self.opset = opset
        self.beside = beside
        self.nodes: list[ir.Node] = []
        self._names: set[str] = set()
        self._constants: dict[object, ir.Value] = {}
        self._outermost = self

    def inner(self) -> Ops:
        """Returns a recorder for a subgraph, to be filled before the node that runs it."""
        ops = Ops(self.opset, beside=self.beside)
        ops._names, ops._outermost = self._names, self._outermost
        return ops

    def graph(self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], name: str) -> ir.Graph:
        """Returns the recorded nodes as a subgraph."""
        return ir.Graph(inputs, outputs, nodes=self.nodes, name=name)

    def __getattr__(self, op_type: str) -> _Recorder:
        if op_type.startswith("_"):
            raise AttributeError(op_type)
        return _Recorder(self, op_type)

    def value(
        self,
        name: str,
        type: ir.TypeProtocol | None = None,
        shape: Sequence[int] | None = None,
    ) -> ir.Value:
        """Returns a new value called ``name``, with a number if the name is taken."""
        unique = next(
            candidate
            for candidate in chain([name], (f"{name}_{number}" for number in count(2)))
            if candidate not in self._names
        )
        self._names.add(unique)
        return ir.Value(name=unique, type=type, shape=None if shape is None else ir.Shape(shape))

    def record(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Sequence[ir.Attr],
        names: Sequence[str],
    ) -> Sequence[ir.Value]:
        """Appends a node, named after its first output."""
        outputs = [self.value(name) for name in names]
        self.nodes.append(
            ir.Node("", op_type, inputs, attributes, outputs=outputs, name=outputs[0].name)
        )
        return outputs

    def constant(self, name: str, value: ArrayLike, dtype: ir.DataType) -> ir.Value:
        """Returns a constant of the given dtype."""
        tensor = ir.tensor(np.asarray(value, dtype.numpy()))
        return self._once((name, dtype), lambda op: op.Constant(value=tensor, out=name))

    def size(self, attribute: str) -> ir.Value:
        """Returns the function's INT attribute as INT64 ``[1]``."""
        scalar = self._attribute(attribute, "value_int", ir.AttributeType.INT)
        return self._once(
            (attribute, "size"), lambda op: op.Reshape(scalar, [1], out=f"{attribute}_1")
        )

    def real(self, attribute: str, dtype: ir.DataType) -> ir.Value:
        """Returns the function's FLOAT attribute as a scalar of the given dtype."""
        scalar = self._attribute(attribute, "value_float", ir.AttributeType.FLOAT)
        return self.cast(scalar, ir.DataType.FLOAT, dtype, out=f"{attribute}_wide")

    def zeros(self, shape: ir.Value, dtype: ir.DataType, out: str) -> ir.Value:
        """Returns zeros whose shape is the value of ``shape``."""
        return self.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, dtype.numpy())), out=out)

    def cast(self, value: ir.Value, source: ir.DataType, to: ir.DataType, out: str) -> ir.Value:
        """Casts ``value`` from dtype ``source`` to ``to``; adds no node if they are equal."""
        return value if source == to else self.Cast(value, to=to, out=out)

    def entered(self, value: ir.Value, dtype: ir.DataType, out: str) -> ir.Value:
        """Returns an input of the function, or a part of one, in its declared dtype.

        Tools that convert a file to half precision change the inputs of its nodes but not its
        functions. So a float32 input is cast to float32, which a runtime's optimisations remove.
        """
        if not self.beside or dtype != ir.DataType.FLOAT:
            return value
        return self.Cast(value, to=dtype, out=out)

    def leaving(self, value: ir.Value, like: ir.Value, dtype: ir.DataType, out: str) -> ir.Value:
        """Casts the function's result, of the given dtype, to the current dtype of an input."""
        if not self.beside or dtype != ir.DataType.FLOAT:
            return value
        return self.CastLike(value, like, out=out)

    def operand(self, operand: Operand) -> ir.Value | None:
        """Returns a node's input; integers become a constant."""
        if operand is None or isinstance(operand, ir.Value):
            return operand
        kind, numbers = ("int", [operand]) if isinstance(operand, int) else ("ints", operand)
        name = "_".join([kind, *map(str, numbers)]).replace("-", "minus")
        return self.constant(name, operand, ir.DataType.INT64)

    def _attribute(self, name: str, field: str, type: ir.AttributeType) -> ir.Value:
        reference = ir.RefAttr(field, name, type)
        return self._once(name, lambda op: op.record("Constant", [], [reference], [name])[0])

    def _once(self, key: object, record: Callable[[Ops], ir.Value]) -> ir.Value:
        known = self._outermost._constants
        if key not in known:
            known[key] = record(self._outermost)
        return known[key]


class _Recorder:
    """An operator of an :class:`Ops`; calling it records a node."""

    def __init__(self, ops: Ops, op_type: str) -> None:
        self._ops = ops
        self._op_type = op_type

    @overload
    def __call__(self, *inputs: Operand, out: str, **attributes: Attribute) -> ir.Value: ...

    @overload
    def __call__(
        self, *inputs: Operand, out: tuple[str, str], **attributes: Attribute
    ) -> tuple[ir.Value, ir.Value]: ...

    @overload
    def __call__(
        self, *inputs: Operand, out: list[str], **attributes: Attribute
    ) -> list[ir.Value]: ...

    def __call__(
        self, *inputs: Operand, out: str | tuple[str, str] | list[str], **attributes: Attribute
    ) -> ir.Value | tuple[ir.Value, ir.Value] | list[ir.Value]:
        values = [self._ops.operand(operand) for operand in inputs]
        while values and values[-1] is None:
            values.pop()
        attrs = ir.convenience.convert_attributes(attributes)
        names = (out,) if isinstance(out, str) else out
        outputs = self._ops.record(self._op_type, values, attrs, names)
        if isinstance(out, list):
            return list(outputs)
        return outputs[0] if isinstance(out, str) else (outputs[0], outputs[1])
