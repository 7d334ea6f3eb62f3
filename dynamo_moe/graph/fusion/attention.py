"""Attention as one node, with the cache of keys and values as the node's own.

Legend: B batch, S new tokens, P tokens in the cache, L keys, H heads, G heads of keys and values,
D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from dynamo_moe.graph.fusion.matching import (
    Dimension,
    Writer,
    both_orders,
    dimensions,
    integers,
    is_last_axis,
    maker,
    only_use,
    operand,
    permutation,
    scalar,
    typed,
)
from dynamo_moe.graph.fusion.rotary import HEADS_FIRST, flattened


@dataclass(frozen=True)
class _Attention:
    """``softmax(cap(scale * queries @ keys^T) + mask) @ values``.

    Attributes:
        queries: [B, H, S, D].
        keys: [B, H, L, D]; [B, G, L, D] where the cache's heads are not repeated.
        values: The same, of a width of their own.
        mask: What is added, or where booleans say which keys a token sees; it broadcasts to
            [B, H, S, L].
        scale: A factor.
        softcap: ``softcap * tanh(x / softcap)`` bounds what is scaled; 0 for no bound.
        result: [B, H, S, D].
        past: The keys and values of the tokens in the cache, [B, G, P, D], and what they and the
            new ones make, [B, G, L, D].
    """

    queries: ir.Value
    keys: ir.Value
    values: ir.Value
    mask: ir.Value | None
    scale: float
    softcap: float
    result: ir.Value
    past: tuple[tuple[ir.Value, ir.Value], ...] = ()


def fuse_attention(writer: Writer) -> None:
    """Makes each attention one Attention, which repeats heads and extends the cache itself."""
    for node in list(writer.graph):
        attention = _of_operator(node) or _of_product(node)
        if attention is not None:
            _fuse(writer, node, _with_cache(_without_repeats(attention)))


# --- What is an attention ---


def _of_operator(node: ir.Node) -> _Attention | None:
    """Returns the attention of PyTorch's operator, which the exporter makes an Attention."""
    if node.domain or node.op_type != "Attention" or len(node.outputs) > 1 or len(node.inputs) > 4:
        return None
    queries, keys, values = (operand(node, position) for position in range(3))
    width = dimensions(queries)[-1:]
    if len(dimensions(queries)) != 4 or not width or not isinstance(width[0], int):
        return None
    if node.attributes.get_int("is_causal", 0):
        return None
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    scale = node.attributes.get_float("scale", width[0] ** -0.5)
    softcap = node.attributes.get_float("softcap", 0.0)
    return _Attention(queries, keys, values, mask, scale, softcap, node.outputs[0])


def _of_product(node: ir.Node) -> _Attention | None:
    """Returns the attention that ends with a product, if it is written out."""
    if node.domain or node.op_type != "MatMul" or len(dimensions(node.outputs[0])) != 4:
        return None
    weights, values = operand(node, 0), operand(node, 1)
    softmax = _without_casts(weights, "Softmax")
    if softmax is None or not is_last_axis(softmax.attributes.get_int("axis", -1), weights):
        return None
    scores, mask = operand(softmax, 0), None
    widened = only_use(scores, "Cast")
    scores = scores if widened is None else operand(widened, 0)
    added = only_use(scores, "Add")
    for product, other in both_orders(added):
        if _is_score(product):
            scores, mask = product, other
            break
    scores, softcap = _uncapped(scores)
    product, scale = _unscaled(scores, "MatMul")
    if product is None or (mask is not None and mask.dtype != node.outputs[0].dtype):
        return None
    turned = only_use(product.inputs[1], "Transpose", "Mul")
    factor = 1.0
    if turned is not None and turned.op_type == "Mul":  # Queries and keys by a root each.
        turned, factor = _unscaled(operand(product, 1), "Transpose")
    if permutation(turned) != (0, 1, 3, 2) or turned is None:
        return None
    queries, its = _unscaled_value(operand(product, 0))
    return _Attention(
        queries,
        operand(turned, 0),
        values,
        _seen(mask),
        scale * factor * its,
        softcap,
        node.outputs[0],
    )


def _without_casts(value: ir.Value, op_type: str) -> ir.Node | None:
    rounded = only_use(value, "Cast")
    return only_use(value if rounded is None else rounded.inputs[0], op_type)


def _is_score(value: ir.Value) -> bool:
    uncapped, _ = _uncapped(value)
    return _unscaled(uncapped, "MatMul")[0] is not None


def _uncapped(value: ir.Value) -> tuple[ir.Value, float]:
    """Returns what is bounded, and the bound; the value itself and 0 if it is not bounded."""
    for bounded, cap in both_orders(only_use(value, "Mul")):
        tanh = only_use(bounded, "Tanh")
        softcap = scalar(cap)
        if tanh is None or not softcap:
            continue
        inner, factor = _unscaled_value(operand(tanh, 0))
        if abs(factor * softcap - 1) < 1e-6:  # noqa: PLR2004
            return inner, softcap
    return value, 0.0


def _unscaled(value: ir.Value, op_type: str) -> tuple[ir.Node | None, float]:
    """Returns the node of a kind that makes a value but for a factor, and the factor."""
    inner, factor = _unscaled_value(value)
    return only_use(inner, op_type), factor


def _unscaled_value(value: ir.Value) -> tuple[ir.Value, float]:
    """Returns what a value is but for a constant factor, and the factor."""
    for inner, factor in both_orders(only_use(value, "Mul")):
        number = scalar(factor)
        if number is not None:
            return inner, number
    division = only_use(value, "Div")
    number = None if division is None else scalar(division.inputs[1])
    if division is not None and number:
        return operand(division, 0), 1 / number
    return value, 1.0


def _seen(mask: ir.Value | None) -> ir.Value | None:
    """Returns which keys are seen, if a mask is 0 there and the dtype's least number elsewhere."""
    choice = maker(mask, "Where")
    if choice is None or mask is None or mask.dtype is None:
        return mask
    least = ir.DataType.numpy(mask.dtype) if mask.dtype.is_floating_point() else None
    zero, other = scalar(choice.inputs[1]), scalar(choice.inputs[2])
    if least is None or zero != 0 or other is None:
        return mask
    return choice.inputs[0] if other <= -1e30 or mask.dtype != ir.DataType.FLOAT else mask


# --- Repeated heads and the cache ---


def _without_repeats(attention: _Attention) -> _Attention:
    """Takes keys and values before their heads are repeated."""
    keys, values = _unrepeated(attention.keys), _unrepeated(attention.values)
    if keys is None or values is None or dimensions(keys)[1] != dimensions(values)[1]:
        return attention
    return replace(attention, keys=keys, values=values)


def _unrepeated(value: ir.Value) -> ir.Value | None:
    """Returns [B, G, L, D] of which each head is repeated to [B, H, L, D]."""
    merged = only_use(value, "Reshape")
    wide = None if merged is None else only_use(merged.inputs[0], "Expand")
    narrow = None if wide is None else only_use(wide.inputs[0], "Unsqueeze")
    if narrow is None or wide is None or integers(narrow.inputs[1]) != [2]:
        return None
    source = operand(narrow, 0)
    before, expanded, after = map(dimensions, (source, wide.outputs[0], value))
    if len(before) != 4 or len(expanded) != 5 or len(after) != 4:
        return None
    groups, repeats = before[1], expanded[2]
    if not isinstance(groups, int) or not isinstance(repeats, int):
        return None
    kept = (before[0], groups, repeats, *before[2:]) == expanded
    return source if kept and after == (before[0], groups * repeats, *before[2:]) else None


def _with_cache(attention: _Attention) -> _Attention:
    """Takes new keys and values apart from those in the cache, if both have some."""
    extended = [_extended(attention, value) for value in (attention.keys, attention.values)]
    if None in extended:
        return attention
    (keys_past, keys), (values_past, values) = (pair for pair in extended if pair is not None)
    past = (keys_past, attention.keys), (values_past, attention.values)
    return replace(attention, keys=keys, values=values, past=past)


def _extended(attention: _Attention, value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Returns past and new, if a value is a graph's input with new tokens behind it."""
    join = maker(value, "Concat")
    if join is None or len(join.inputs) != 2 or join.attributes.get_int("axis", 0) not in (2, -2):
        return None
    past, new = operand(join, 0), operand(join, 1)
    return (past, new) if past.is_graph_input() and len(value.uses()) == 1 else None


# --- The node ---


def _fuse(writer: Writer, node: ir.Node, attention: _Attention) -> None:
    queries, keys, values = attention.queries, attention.keys, attention.values
    heads, groups = dimensions(queries)[1], dimensions(keys)[1]
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % groups:
        return
    options: dict[str, Any] = {"scale": attention.scale}
    if attention.softcap:
        options["softcap"] = attention.softcap
    tensors = queries, keys, values
    turned = _turned(node)
    by_token = [_by_token(tensor) for tensor in tensors]
    flat = turned is not None and None not in by_token
    if flat:
        options |= {"q_num_heads": heads, "kv_num_heads": groups}
        inputs = [flattened(writer, node, tensor) for tensor in by_token if tensor is not None]
    else:
        inputs = [*tensors]
    mask = _whole_mask(writer, node, attention)
    past = [before for before, _ in attention.past]
    inputs += [mask, *past] if past else [mask] if mask is not None else []
    new = writer.node(node, "Attention", inputs, options, results=3 if past else 1)
    for (_, old), present in zip(attention.past, new.outputs[1:], strict=True):
        writer.replace(old, present)
    result = attention.result if not flat or turned is None else turned
    writer.replace(result, new.outputs[0])


def _by_token(value: ir.Value) -> ir.Value | None:
    """Returns [B, S, H, D] of a value [B, H, S, D] that is made of it."""
    turn = maker(value, "Transpose")
    sizes = dimensions(value)
    if permutation(turn) != HEADS_FIRST or turn is None:
        return None
    numbers = isinstance(sizes[1], int) and isinstance(sizes[3], int)
    return operand(turn, 0) if numbers else None


def _turned(node: ir.Node) -> ir.Value | None:
    """Returns [B, S, H * D], if that alone is made of a node's result [B, H, S, D]."""
    result = node.outputs[0]
    users = [user for user, _ in result.uses()]
    if len(users) != 1 or result.is_graph_output():
        return None
    turn = maker(users[0].outputs[0], "Transpose")
    if permutation(turn) != HEADS_FIRST or turn is None:
        return None
    users = [user for user, _ in turn.outputs[0].uses()]
    merge = maker(users[0].outputs[0], "Reshape") if len(users) == 1 else None
    if merge is None or turn.outputs[0].is_graph_output():
        return None
    sizes = dimensions(turn.outputs[0])
    merged = _product(sizes[2:])
    return merge.outputs[0] if dimensions(merge.outputs[0]) == (*sizes[:2], merged) else None


def _product(sizes: tuple[Dimension, ...]) -> int:
    heads, width = sizes
    return heads * width if isinstance(heads, int) and isinstance(width, int) else -1


def _whole_mask(writer: Writer, node: ir.Node, attention: _Attention) -> ir.Value | None:
    """Returns the mask with a row for each token: ONNX Runtime 1.31 refuses one row for all."""
    mask, sizes = attention.mask, dimensions(attention.mask)
    if mask is None or len(sizes) < 2 or sizes[-2] != 1 or dimensions(attention.queries)[2] == 1:
        return mask
    tokens = writer.node(node, "Shape", [attention.queries], {"start": 2, "end": 3})
    typed(tokens.outputs[0], writer.ints([1]), [1])
    ones = [writer.ints([1])] * (len(sizes) - 2)
    shape = writer.node(node, "Concat", [*ones, tokens.outputs[0], writer.ints([1])], {"axis": 0})
    typed(shape.outputs[0], writer.ints([1]), [len(sizes)])
    wide = writer.node(node, "Expand", [mask, shape.outputs[0]])
    return typed(wide.outputs[0], mask, (*sizes[:-2], dimensions(attention.queries)[2], sizes[-1]))
