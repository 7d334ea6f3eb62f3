"""PyTorch's attention, written out in operators that every runtime has.

From opset 23 on PyTorch's exporter makes an Attention of it, also where that does not take the
operands, and for runtimes that have it in some dtypes alone; before, its keys pass through
matrices of shapes that nobody can read. What is written out here is fused where it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18

# What masks are put together by, whose operands' infinities remain.
_OF_MASKS = (
    *("Add", "Cast", "CastLike", "Concat", "Expand", "Identity", "Max", "Min", "Reshape", "Slice"),
    *("Squeeze", "Transpose", "Trilu", "Unsqueeze", "Where"),
)
_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)

_op: Any = opset18


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,  # A graph for inference drops nothing.
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Translates torch.nn.functional.scaled_dot_product_attention of [B, H, S, D]."""
    if enable_gqa and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = _repeated(key, repeats), _repeated(value, repeats)
    width = query.shape[3]
    # As PyTorch does: at both operands, so that the product stays small.
    if scale is None and not isinstance(width, int):
        factor, wide = 1.0, _op.Cast(_op.Shape(query, start=3, end=4), to=ir.DataType.FLOAT)
        root = _op.CastLike(_op.Pow(wide, _constant(-0.25, ir.DataType.FLOAT)), query)
    else:
        factor = 1 / math.sqrt(width) if scale is None else scale
        root = _constant(math.sqrt(abs(factor)), query.dtype)
    keys = _op.Transpose(key, perm=[0, 1, 3, 2])
    scores = _op.MatMul(_op.Mul(query, root), _op.Mul(keys, root))
    if factor < 0:
        scores = _op.Neg(scores)
    mask = _seen_before(query, key) if is_causal else attn_mask
    if mask is None:
        return _op.MatMul(_op.Softmax(scores, axis=-1), value)
    if not is_causal and mask.dtype != ir.DataType.BOOL:
        added = mask if mask.dtype == query.dtype else _op.CastLike(mask, query)
        result = _op.MatMul(_op.Softmax(_op.Add(scores, added), axis=-1), value)
        if not _may_be_infinite(mask):
            return result
        # Where a row hides all keys, Softmax gives NaN, and PyTorch zeros.
        seen = _op.ReduceMax(mask, _ints(-1), keepdims=1)
        is_blind = _op.Equal(seen, _constant(-math.inf, mask.dtype))
        return _op.Where(is_blind, _constant(0.0, query.dtype), result)
    zero = _constant(0.0, query.dtype)
    # With minus infinity, some runtimes' fused kernels give NaN.
    least = _constant(query.dtype.min, query.dtype)
    weights = _op.Softmax(_op.Add(scores, _op.Where(mask, zero, least)), axis=-1)
    if query.dtype not in _WIDE:  # There a score can take the least number to minus infinity.
        weights = _op.Where(_op.IsNaN(weights), zero, weights)
    result = _op.MatMul(weights, value)
    if is_causal or not _may_hide_rows(mask):
        return result
    # Softmax gives equal weights there, and PyTorch zeros.
    seen = _op.ReduceMax(_op.Cast(mask, to=ir.DataType.INT32), _ints(-1), keepdims=1)
    return _op.Where(_op.Cast(seen, to=ir.DataType.BOOL), result, zero)


def _repeated(tensor: Any, repeats: int) -> Any:
    """Returns [B, G * repeats, L, D] of [B, G, L, D]: each head as often, one beside the other."""
    _, groups, _, width = tensor.shape
    wide = _op.Expand(_op.Unsqueeze(tensor, _ints(2)), _ints(1, 1, repeats, 1, 1))
    batch, length = _op.Shape(tensor, start=0, end=1), _op.Shape(tensor, start=2, end=3)
    last = _ints(width) if isinstance(width, int) else _op.Shape(tensor, start=3, end=4)
    shape = _op.Concat(batch, _ints(groups * repeats), length, last, axis=0)
    return _op.Reshape(wide, shape, allowzero=1)


def _may_be_infinite(mask: Any) -> bool:
    """Whether a mask may hold minus infinity: by a constant in it, or as it is given."""
    waiting, known = [mask], {id(mask)}
    while waiting:
        value = waiting.pop()
        node, constant = value.producer(), ir.convenience.get_const_tensor(value)
        if constant is not None:
            if np.isneginf(constant.numpy()).any():
                return True
        elif node is None:
            return True
        elif node.op_type in _OF_MASKS:
            for operand in node.inputs:
                if operand is None or id(operand) in known:
                    continue
                if operand.dtype is None or operand.dtype.is_floating_point():
                    known.add(id(operand))
                    waiting.append(operand)
    return False


def _may_hide_rows(mask: Any) -> bool:
    """Whether a boolean mask may hide all keys of a token, as far as it is known to a graph.

    Of one that positions decide too, such as a causal one, it is taken to hide them from padding
    alone: such masks keep the form that is fused.
    """
    constant = ir.convenience.get_const_tensor(mask)
    if constant is not None:
        return not np.atleast_1d(constant.numpy()).any(axis=-1).all()
    node = mask.producer()
    if node is None:
        return True
    if node.op_type in {"And", "Or"}:
        return all(map(_may_hide_rows, node.inputs))
    if node.op_type in {"Not", *_OF_MASKS} - {"Where"}:
        return _may_hide_rows(node.inputs[0])
    return _is_given(mask)


def _is_given(value: Any) -> bool:
    """Whether a value is computed from others than sizes and constants; buffers count as given."""
    waiting, known = [value], {id(value)}
    while waiting:
        value = waiting.pop()
        if ir.convenience.get_const_tensor(value) is not None:
            continue
        node = value.producer()
        if node is None:
            return True
        if node.op_type not in {"Shape", "Size"}:
            operands = [x for x in node.inputs if x is not None and id(x) not in known]
            known.update(map(id, operands))
            waiting += operands
    return False


def _seen_before(query: Any, key: Any) -> Any:
    """Returns a mask [S, L] that shows each token the keys up to its own number."""
    tokens, keys = (
        _op.Range(_int(0), _op.Squeeze(_op.Shape(tensor, start=2, end=3)), _int(1))
        for tensor in (query, key)
    )
    return _op.LessOrEqual(keys, _op.Unsqueeze(tokens, _ints(1)))


def _constant(number: float, dtype: ir.DataType) -> Any:
    return _op.Constant(value=ir.tensor(number, dtype=dtype))


def _ints(*numbers: int) -> Any:
    return _op.Constant(value_ints=numbers)


def _int(number: int) -> Any:
    return _op.Constant(value_int=number)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: _attention
}
"""By operator, its translation in place of the exporter's."""
