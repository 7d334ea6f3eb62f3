"""Rewrite rules for what PyTorch's exporter leaves where shapes are symbolic.

A symbolic dimension is a name here, or an expression of names. The tracer gives equal sizes equal
names, so two dimensions with the same text are equal in every run.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import RewriteRuleClassBase

from dynamo_moe.graph.matching import Dimension, dimensions, integers, maker, operand, scalar


class _Unchanged(RewriteRuleClassBase):
    """A rule for a node that gives ``x`` as it is."""

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> Any:
        return op.Identity(x)


class _Neutral(_Unchanged):
    """A sum with 0, or a product with 1; no other number, however near.

    An epsilon of 1e-8 keeps a logarithm or a quotient finite.
    """

    def __init__(self, op_type: str, number: int, *, is_first: bool = False) -> None:
        super().__init__(f"{op_type}{number}{'First' if is_first else ''}")
        self._op_type, self._number, self._is_first = op_type, number, is_first

    def pattern(self, op: Any, x: Any, number: Any) -> Any:
        operands = (number, x) if self._is_first else (x, number)
        return getattr(op, self._op_type)(*operands)

    def check(self, context: Any, x: ir.Value, number: ir.Value) -> bool:
        tensor = number.const_value
        return tensor is not None and not tensor.shape.dims and scalar(number) == self._number


class _SameShape(_Unchanged):
    """``Reshape`` or ``Expand`` to the shape that the tensor has."""

    def __init__(self, op_type: str) -> None:
        super().__init__(f"{op_type}ToSameShape")
        self._op_type = op_type

    def pattern(self, op: Any, x: Any, shape: Any) -> Any:
        return getattr(op, self._op_type)(x, shape, _outputs=["y"])

    def check(self, context: Any, x: ir.Value, y: ir.Value, **_: Any) -> bool:
        dimensions = _dimensions(x)
        return dimensions is not None and dimensions == _dimensions(y)


class _CopiedDimensions(RewriteRuleClassBase):
    """``Reshape`` to a computed shape whose symbolic dimensions all stay in their places.

    In a constant shape they are 0, for a copy. Unlike -1, that works for any number of them, and
    for tensors without elements.
    """

    def pattern(self, op: Any, x: Any, shape: Any) -> Any:
        return op.Reshape(x, shape, _outputs=["y"])

    def check(self, context: Any, x: ir.Value, shape: ir.Value, y: ir.Value) -> bool:
        before, after = _dimensions(x), _dimensions(y)
        if shape.const_value is not None or before is None or after is None or 0 in after:
            return False
        symbols = [axis for axis, size in enumerate(after) if not isinstance(size, int)]
        # One alone becomes -1 by a rule of onnxscript.
        return len(symbols) > 1 and all(before[p : p + 1] == after[p : p + 1] for p in symbols)

    def rewrite(self, op: Any, x: ir.Value, y: ir.Value, **_: Any) -> Any:
        sizes = [size if isinstance(size, int) else 0 for size in _dimensions(y) or ()]
        return op.Reshape(x, op.Constant(value_ints=sizes))


class _NoPadding(_Unchanged):
    """``Pad`` by nothing."""

    def pattern(self, op: Any, x: Any, pads: Any) -> Any:
        return op.Pad(x, pads, _allow_other_inputs=True)

    def check(self, context: Any, x: ir.Value, pads: ir.Value) -> bool:
        return pads.const_value is not None and not pads.const_value.numpy().any()


class _ReshapedAgain(RewriteRuleClassBase):
    """``Reshape`` of what has just been reshaped in any way, to a shape that copies nothing."""

    def __init__(self, op_type: str) -> None:
        super().__init__(f"ReshapeOf{op_type}", remove_nodes=False)
        self._op_type = op_type

    def pattern(self, op: Any, x: Any, first: Any, shape: Any) -> Any:
        return op.Reshape(getattr(op, self._op_type)(x, first), shape, _outputs=["y"])

    def check(self, context: Any, shape: ir.Value, y: ir.Value, **_: Any) -> bool:
        node = y.producer()
        if node is None or node.attributes.get_int("allowzero", 0) == 1:
            return True
        return shape.const_value is not None and bool(shape.const_value.numpy().all())

    def rewrite(self, op: Any, x: ir.Value, shape: ir.Value, **_: Any) -> Any:
        return op.Reshape(x, shape, allowzero=1)


class _UnsqueezedAgain(RewriteRuleClassBase):
    """``Unsqueeze`` of an ``Unsqueeze``, of any axes."""

    def pattern(self, op: Any, x: Any, first: Any, second: Any) -> Any:
        return op.Unsqueeze(op.Unsqueeze(x, first), second, _outputs=["y"])

    def check(self, context: Any, first: ir.Value, second: ir.Value, y: ir.Value, **_: Any) -> bool:
        axes = [*_constants(first), *_constants(second)]
        return y.shape is not None and min(axes, default=-1) >= 0

    def rewrite(self, op: Any, x: ir.Value, first: ir.Value, second: ir.Value, y: ir.Value) -> Any:
        outer = _constants(second)
        free = [axis for axis in range(y.shape.rank() if y.shape else 0) if axis not in outer]
        axes = sorted([*outer, *(free[axis] for axis in _constants(first))])
        return op.Unsqueeze(x, op.Constant(value_ints=axes))


class _SlicedAgain(RewriteRuleClassBase):
    """``Slice`` of a ``Slice`` along other axes."""

    def pattern(self, op: Any, x: Any, s1: Any, e1: Any, a1: Any, t1: Any,
                s2: Any, e2: Any, a2: Any, t2: Any) -> Any:  # fmt: skip
        return op.Slice(op.Slice(x, s1, e1, a1, t1), s2, e2, a2, t2)

    def check(self, context: Any, x: ir.Value, a1: ir.Value, a2: ir.Value, **rest: Any) -> bool:
        axes = [*_constants(a1), *_constants(a2)]
        known = all(value.const_value is not None for value in rest.values())
        return known and min(axes, default=-1) >= 0 and len(set(axes)) == len(axes)

    def rewrite(self, op: Any, x: ir.Value, **rest: ir.Value) -> Any:
        both = [
            op.Constant(value_ints=[*_constants(rest[f"{name}1"]), *_constants(rest[f"{name}2"])])
            for name in "seat"
        ]
        return op.Slice(x, *both)


class _AndTrue(RewriteRuleClassBase):
    """``And`` of a mask and of what is true everywhere."""

    def pattern(self, op: Any, a: Any, b: Any) -> Any:
        return op.And(a, b, _outputs=["y"])

    def check(self, context: Any, a: ir.Value, b: ir.Value, y: ir.Value) -> bool:
        return self._mask(a, b, y) is not None

    def rewrite(self, op: Any, a: ir.Value, b: ir.Value, y: ir.Value) -> Any:
        return op.Identity(self._mask(a, b, y))

    @staticmethod
    def _mask(a: ir.Value, b: ir.Value, y: ir.Value) -> ir.Value | None:
        for true, mask in ((a, b), (b, a)):
            sizes = _dimensions(mask)
            if (
                true.const_value is not None
                and true.const_value.size <= 1
                and true.const_value.numpy().all()
                and sizes is not None
                and sizes == _dimensions(y)
            ):
                return mask
        return None


class _GatheredInOrder(RewriteRuleClassBase):
    """``GatherND`` of the first elements along both axes of a matrix ``x``, in their order.

    So transformers reads which tokens are padding: by the indices of all sequences and all tokens,
    ``[N, 1, 1, L, 2]``.
    """

    def pattern(self, op: Any, x: Any, indices: Any) -> Any:
        return op.GatherND(x, indices, _outputs=["y"])

    def check(self, context: Any, x: ir.Value, indices: ir.Value, y: ir.Value) -> bool:
        node = y.producer()
        plain = node is not None and not node.attributes.get_int("batch_dims", 0)
        return plain and len(_dimensions(x) or ()) == 2 and self._limits(indices, y) is not None

    def rewrite(self, op: Any, x: ir.Value, indices: ir.Value, y: ir.Value) -> Any:
        (rows, *_, columns), before = _dimensions(y) or (), _dimensions(x) or ()
        ends = self._limits(indices, y) or ()
        for axis, (end, size) in enumerate(zip(ends, (rows, columns), strict=True)):
            if size != before[axis]:
                start, along, step = (op.Constant(value_ints=[number]) for number in (0, axis, 1))
                x = op.Slice(x, start, op.Reshape(end, op.Constant(value_ints=[1])), along, step)
        return op.Unsqueeze(x, op.Constant(value_ints=[1, 2]))

    def _limits(self, indices: ir.Value, y: ir.Value) -> list[ir.Value] | None:
        """Returns N and L, if the indices are all pairs of ``range(N)`` and ``range(L)``."""
        join = maker(indices, "Concat")
        if (
            join is None
            or len(join.inputs) != 2
            or join.attributes.get_int("axis", 0) not in (-1, 4)
        ):
            return None
        ends = [self._limit(part, axis, y) for part, axis in zip(join.inputs, (0, 3), strict=True)]
        return [end for end in ends if end is not None] if None not in ends else None

    @staticmethod
    def _limit(value: ir.Value | None, axis: int, y: ir.Value) -> ir.Value | None:
        """Returns the end of a range along an axis that is spread to ``[N, 1, 1, L, 1]``."""
        pair = maker(value, "Unsqueeze")
        wide = None if pair is None else maker(pair.inputs[0], "Expand")
        spread = None if wide is None else maker(wide.inputs[0], "Unsqueeze")
        counts = None if spread is None else maker(spread.inputs[0], "Range")
        if pair is None or wide is None or spread is None or counts is None:
            return None
        in_order = (
            _constants(operand(pair, 1)) in ([4], [-1])
            and _constants(operand(spread, 1)) == [other for other in range(4) if other != axis]
            and _constants(operand(counts, 0)) == [0]
            and _constants(operand(counts, 2)) == [1]
        )
        counted, pairs = _dimensions(spread.outputs[0]), _dimensions(y)
        if not in_order or counted is None or pairs is None or pairs[1:3] != (1, 1):
            return None
        return counts.inputs[1] if counted[axis] == pairs[axis] else None


class _SameType(_Unchanged):
    """``CastLike`` to the type that the tensor has."""

    def pattern(self, op: Any, x: Any, like: Any) -> Any:
        return op.CastLike(x, like)

    def check(self, context: Any, x: ir.Value, like: ir.Value) -> bool:
        return x.dtype is not None and x.dtype == like.dtype


class _OverRoot(RewriteRuleClassBase):
    """``x * (1 / sqrt(v))``, which becomes ``x / sqrt(v)``: a node and a rounding less.

    In this form ONNX Runtime recognises an RMSNorm, and runs it as one node.
    """

    def __init__(self, *, root_first: bool) -> None:
        super().__init__("OverRootFirst" if root_first else "OverRoot")
        self._root_first = root_first

    def pattern(self, op: Any, x: Any, v: Any) -> Any:
        reciprocal = op.Reciprocal(op.Sqrt(v))
        return op.Mul(reciprocal, x) if self._root_first else op.Mul(x, reciprocal)

    def rewrite(self, op: Any, x: ir.Value, v: ir.Value) -> Any:
        root = op.Sqrt(v)
        root.type, root.shape = v.type, v.shape
        return op.Div(x, root)


class _SumBefore(RewriteRuleClassBase):
    """``CumSum`` of integers less each of them: the sum of those before it."""

    def pattern(self, op: Any, x: Any, axis: Any) -> Any:
        return op.Sub(op.CumSum(x, axis, _outputs=["total"]), x)

    def check(self, context: Any, x: ir.Value, total: ir.Value, **_: Any) -> bool:
        plain = not any(_attribute(total, name, 0) for name in ("exclusive", "reverse"))
        return plain and x.dtype in (ir.DataType.INT32, ir.DataType.INT64)

    def rewrite(self, op: Any, x: ir.Value, axis: ir.Value, **_: Any) -> Any:
        return op.CumSum(x, axis, exclusive=1)


class _ShiftedSoftmax(RewriteRuleClassBase):
    """``Softmax`` of numbers less their greatest, which it subtracts itself."""

    def pattern(self, op: Any, x: Any, axes: Any) -> Any:
        greatest = op.ReduceMax(x, axes, _outputs=["greatest"])
        return op.Softmax(op.Sub(x, greatest), _outputs=["y"])

    def check(self, context: Any, x: ir.Value, axes: ir.Value, greatest: ir.Value, y: Any) -> bool:
        rank, known = len(_dimensions(x) or ()), integers(axes)
        if not rank or known is None or not _attribute(greatest, "keepdims", 1):
            return False
        return [axis % rank for axis in known] == [_attribute(y, "axis", -1) % rank]

    def rewrite(self, op: Any, x: ir.Value, y: ir.Value, **_: Any) -> Any:
        return op.Softmax(x, axis=_attribute(y, "axis", -1))


def _attribute(value: ir.Value, name: str, default: int) -> int:
    """Returns an integer attribute of the node that makes a value."""
    node = value.producer()
    return default if node is None else node.attributes.get_int(name, default)


def _dimensions(value: ir.Value) -> tuple[Dimension, ...] | None:
    return None if value.shape is None else dimensions(value)


def _constants(value: ir.Value) -> list[int]:
    """Returns a constant's integers; -1 where it is none."""
    tensor = value.const_value
    return [-1] if tensor is None else [int(item) for item in tensor.numpy().flat]


RULES = [
    _Neutral.rule("Add", 0),
    _Neutral.rule("Add", 0, is_first=True),
    _Neutral.rule("Sub", 0),
    _Neutral.rule("Mul", 1),
    _Neutral.rule("Mul", 1, is_first=True),
    _Neutral.rule("Div", 1),
    _SameShape.rule("Reshape"),
    _SameShape.rule("Expand"),
    _CopiedDimensions.rule(),
    *(_ReshapedAgain.rule(op_type) for op_type in ("Reshape", "Squeeze", "Unsqueeze")),
    _UnsqueezedAgain.rule(remove_nodes=False),
    _SlicedAgain.rule(remove_nodes=False),
    _AndTrue.rule(),
    _GatheredInOrder.rule(remove_nodes=False),
    _NoPadding.rule(),
    _SameType.rule(),
    _OverRoot.rule(root_first=False),
    _OverRoot.rule(root_first=True),
    _SumBefore.rule(),
    _ShiftedSoftmax.rule(),
]
"""The rules, in the order in which they are tried."""
