"""Rewrite rules for what PyTorch's exporter leaves where shapes are symbolic.

A dimension that stays symbolic is a name here, or an expression of names. Two that read alike are
alike in every run, as the tracer has named them.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import RewriteRuleClassBase, RewriteRuleSet

__all__ = ["RULES"]


class _SameShape(RewriteRuleClassBase):
    """``Reshape`` or ``Expand`` to the shape that the tensor has."""

    def __init__(self, op_type: str) -> None:
        super().__init__(f"{op_type}ToSameShape")
        self._op_type = op_type

    def pattern(self, op: Any, x: Any, shape: Any) -> Any:
        return getattr(op, self._op_type)(x, shape, _outputs=["y"])

    def check(self, context: Any, x: ir.Value, y: ir.Value, **_: Any) -> bool:
        dimensions = _dimensions(x)
        return dimensions is not None and dimensions == _dimensions(y)

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> Any:
        return op.Identity(x)


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
        symbols = [place for place, size in enumerate(after) if not isinstance(size, int)]
        # One alone becomes -1 by a rule of onnxscript.
        return len(symbols) > 1 and all(before[p : p + 1] == after[p : p + 1] for p in symbols)

    def rewrite(self, op: Any, x: ir.Value, y: ir.Value, **_: Any) -> Any:
        sizes = [size if isinstance(size, int) else 0 for size in _dimensions(y) or ()]
        return op.Reshape(x, op.Constant(value_ints=sizes))


class _SwappedMatrices(RewriteRuleClassBase):
    """``Transpose`` of a stack of matrices that is flattened for it, and then restored.

    So the exporter transposes the keys of an attention with symbolic sizes.
    """

    def pattern(self, op: Any, x: Any, flat: Any, full: Any) -> Any:
        matrices = op.Reshape(x, flat, _outputs=["matrices"])
        return op.Reshape(op.Transpose(matrices, perm=[0, 2, 1]), full, _outputs=["y"])

    def check(self, context: Any, x: ir.Value, matrices: ir.Value, y: ir.Value, **_: Any) -> bool:
        before, flat, after = _dimensions(x), _dimensions(matrices), _dimensions(y)
        if before is None or flat is None or len(before) < 3:
            return False
        *stack, rows, columns = before
        return flat[-2:] == (rows, columns) and after == (*stack, columns, rows)

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> Any:
        rank = len(_dimensions(x) or ())
        return op.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


class _NoPadding(RewriteRuleClassBase):
    """``Pad`` by nothing."""

    def pattern(self, op: Any, x: Any, pads: Any) -> Any:
        return op.Pad(x, pads, _allow_other_inputs=True)

    def check(self, context: Any, x: ir.Value, pads: ir.Value) -> bool:
        return pads.const_value is not None and not pads.const_value.numpy().any()

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> Any:
        return op.Identity(x)


class _SameType(RewriteRuleClassBase):
    """``CastLike`` to the type that the tensor has."""

    def pattern(self, op: Any, x: Any, like: Any) -> Any:
        return op.CastLike(x, like)

    def check(self, context: Any, x: ir.Value, like: ir.Value) -> bool:
        return x.dtype is not None and x.dtype == like.dtype

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> Any:
        return op.Identity(x)


def _dimensions(value: ir.Value) -> tuple[int | str, ...] | None:
    """Returns sizes and names; None where there is one without a name."""
    if value.shape is None:
        return None
    sizes = [size if isinstance(size, int) else size.value for size in value.shape]
    return None if None in sizes else tuple(size for size in sizes if size is not None)


RULES = RewriteRuleSet(
    [
        _SameShape.rule("Reshape"),
        _SameShape.rule("Expand"),
        _SwappedMatrices.rule(),
        _CopiedDimensions.rule(),
        _NoPadding.rule(),
        _SameType.rule(),
    ]
).rules
"""The rules, in the order in which they are tried."""
