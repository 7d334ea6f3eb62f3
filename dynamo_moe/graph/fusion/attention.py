"""Attention as one node, which repeats heads and extends the cache of keys and values itself.

Legend: B batch, S new tokens, P tokens in the cache, L keys, H heads, G heads of keys and values,
D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from dynamo_moe.graph.fusion.attention_forms import Attention, attention_of
from dynamo_moe.graph.fusion.rotary import HEADS_FIRST, flattened
from dynamo_moe.graph.matching import (
    Writer,
    dimensions,
    integers,
    maker,
    operand,
    permutation,
    scalar,
    typed,
)
from dynamo_moe.operators.foreign import ONNXRUNTIME_ATTENTION

_LEAST = -1e30
"""A number that no score makes up for: what is added to the score of a key that is not seen."""

_MOST_NODES = 100
"""More nodes than an attention has."""


def fuse_attention(writer: Writer, *, grouped: bool = False) -> None:
    """Makes each attention one node: Attention, or ONNX Runtime's own where it has sinks.

    Args:
        writer: Of the graph.
        grouped: Whether ONNX Runtime's own everywhere: it can write new keys and values into the
            buffers that hold the cache.
    """
    for node in list(writer.graph):
        attention = attention_of(node)
        if attention is not None:
            _fuse(writer, node, _without_repeats(attention), grouped=grouped)


def give_masks_rows(writer: Writer) -> None:
    """Gives masks of Attention a row for each token: ONNX Runtime 1.31 refuses one row for all."""
    for node in list(writer.graph):
        attention = attention_of(node) if node.op_type == "Attention" else None
        if attention is not None and attention.mask is not None:
            node.replace_input_with(3, _with_rows(writer, node, attention.mask, attention.queries))


# --- Repeated heads and the cache ---


def _without_repeats(attention: Attention) -> Attention:
    """Takes keys and values before their heads are repeated."""
    keys, values = _unrepeated(attention.keys), _unrepeated(attention.values)
    if keys is None or values is None or dimensions(keys)[1] != dimensions(values)[1]:
        return attention
    return replace(attention, keys=keys, values=values)


def _unrepeated(value: ir.Value) -> ir.Value | None:
    """Returns [B, G, L, D] of which each head is repeated to [B, H, L, D]."""
    merged = maker(value, "Reshape")
    wide = None if merged is None else maker(merged.inputs[0], "Expand")
    narrow = None if wide is None else maker(wide.inputs[0], "Unsqueeze")
    if narrow is None or wide is None or integers(narrow.inputs[1]) != [2]:
        return None
    source = operand(narrow, 0)
    match dimensions(source), dimensions(wide.outputs[0]):
        case (batch, int(groups), *rest), (_, _, int(repeats), *_) as repeated:
            is_repeat = repeated == (batch, groups, repeats, *rest)
            fits = dimensions(value) == (batch, groups * repeats, *rest)
            return source if is_repeat and fits else None
    return None


class _Cache(NamedTuple):
    """Keys or values of the tokens so far, of the new ones, and of all: [B, G, P | S | L, D]."""

    past: ir.Value
    new: ir.Value
    present: ir.Value


def _caches(node: ir.Node, attention: Attention) -> list[_Cache]:
    """Returns the caches of keys and of values, if inputs of the graph hold them.

    The attention that a node ends must be the only one to use them: it is what makes them then.
    """
    caches = []
    for value in (attention.keys, attention.values):
        join = maker(value, "Concat")
        if join is None or len(join.inputs) != 2 or len(value.uses()) != 1:
            return []
        past, new = operand(join, 0), operand(join, 1)
        if not past.is_graph_input() or join.attributes.get_int("axis", 0) not in (2, -2):
            return []
        caches.append(_Cache(past, new, value))
    return caches


def _leads_only_to(value: ir.Value, end: ir.Node) -> bool:
    """Whether all that is computed of a value is a node's operand, but for graph outputs of it."""
    seen: set[ir.Node] = set()
    left = [value]
    while left:
        users = {user for user, _ in left.pop().uses()} - seen - {end}
        seen |= users
        outputs = [output for user in users for output in user.outputs]
        if len(seen) > _MOST_NODES or any(output.is_graph_output() for output in outputs):
            return False
        left += outputs
    return True


# --- The nodes ---


def _fuse(writer: Writer, node: ir.Node, attention: Attention, *, grouped: bool) -> None:
    heads, groups = dimensions(attention.queries)[1], dimensions(attention.keys)[1]
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % groups:
        return
    caches = _caches(node, attention)
    new = [cache.new for cache in caches] or [attention.keys, attention.values]
    by_token = _by_token([attention.queries, *new])
    result = _result_by_token(node)
    grouped = grouped and by_token is not None and result is not None
    grouped = grouped and _can_be_grouped(attention, caches)
    if attention.sinks is not None or grouped:
        if by_token is None or result is None or not _can_be_grouped(attention, caches):
            return
        fused = _grouped(writer, node, attention, by_token, caches)
    elif by_token is None or result is None:
        result = node.outputs[0]
        fused = _standard(writer, node, attention, [attention.queries, *new], caches, {})
    else:
        flat = [flattened(writer, node, value) for value in by_token]
        counts = {"q_num_heads": heads, "kv_num_heads": groups}
        fused = _standard(writer, node, attention, flat, caches, counts)
    for cache, present in zip(caches, fused.outputs[1:], strict=True):
        writer.replace(cache.present, present)
    writer.replace(result, fused.outputs[0])


def _by_token(values: Sequence[ir.Value]) -> list[ir.Value] | None:
    """Returns [B, S, H, D] of values [B, H, S, D], if all are made of that by turning axes."""
    turned = []
    for value in values:
        turn, sizes = maker(value, "Transpose"), dimensions(value)
        if turn is None or permutation(turn) != HEADS_FIRST:
            return None
        if not isinstance(sizes[1], int) or not isinstance(sizes[3], int):
            return None
        turned.append(operand(turn, 0))
    return turned


def _result_by_token(node: ir.Node) -> ir.Value | None:
    """Returns [B, S, H * D], if that alone is made of a node's result [B, H, S, D]."""
    turn = _only_user(node.outputs[0], "Transpose")
    merge = None if turn is None else _only_user(turn.outputs[0], "Reshape")
    if turn is None or merge is None or permutation(turn) != HEADS_FIRST:
        return None
    match dimensions(turn.outputs[0]), dimensions(merge.outputs[0]):
        case (batch, tokens, int(heads), int(width)), merged:
            return merge.outputs[0] if merged == (batch, tokens, heads * width) else None
    return None


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """Returns the one node that uses a value, if it is of this operator."""
    users = [user for user, _ in value.uses()]
    if len(users) != 1 or value.is_graph_output():
        return None
    return users[0] if not users[0].domain and users[0].op_type == op_type else None


def _options(attention: Attention) -> dict[str, Any]:
    capped = {"softcap": attention.softcap} if attention.softcap else {}
    return {"scale": attention.scale, **capped}


def _standard(
    writer: Writer,
    node: ir.Node,
    attention: Attention,
    tensors: Sequence[ir.Value],
    caches: Sequence[_Cache],
    counts: dict[str, int],
) -> ir.Node:
    """Adds the standard's Attention of queries, keys and values, before the node it replaces."""
    mask = attention.mask
    if mask is not None:
        mask = _with_rows(writer, node, _seen(mask), attention.queries)
    inputs = [*tensors, mask, *(cache.past for cache in caches)]
    while inputs[-1] is None:
        inputs.pop()
    options = {**_options(attention), **counts}
    return writer.node(node, "Attention", inputs, options, results=1 + len(caches))


def _seen(mask: ir.Value) -> ir.Value:
    """Returns which keys are seen, if a mask is 0 there and a least number elsewhere."""
    choice = maker(mask, "Where")
    if choice is None or scalar(choice.inputs[1]) != 0:
        return mask
    other = scalar(choice.inputs[2])
    lowest = _LEAST if mask.dtype != ir.DataType.FLOAT16 else float(np.finfo(np.float16).min)
    return operand(choice, 0) if other is not None and other <= lowest else mask


def _with_rows(writer: Writer, node: ir.Node, mask: ir.Value, queries: ir.Value) -> ir.Value:
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


# --- ONNX Runtime's own ---


def _can_be_grouped(attention: Attention, caches: Sequence[_Cache]) -> bool:
    """Whether ONNX Runtime's operator takes it.

    It needs a cache, with keys and values of one width, and a mask of four axes.
    """
    widths = {dimensions(cache.past)[-1:] for cache in caches}
    return len(widths) == 1 and len(dimensions(attention.mask)) == 4


def _grouped(
    writer: Writer,
    node: ir.Node,
    attention: Attention,
    by_token: Sequence[ir.Value],
    caches: Sequence[_Cache],
) -> ir.Node:
    """Adds ONNX Runtime's GroupQueryAttention, of which the mask says what is seen."""
    queries, keys, values = (flattened(writer, node, value) for value in by_token)
    if attention.mask is None:
        raise ValueError(f"{node.name!r} has no mask")
    mask = _added(writer, node, attention.mask, attention.queries)
    past = [cache.past for cache in caches]
    lengths = _lengths(writer, node, mask, queries)
    options = {
        **_options(attention),
        "num_heads": dimensions(attention.queries)[1],
        "kv_num_heads": dimensions(attention.keys)[1],
        "causal": 0,
    }
    inputs = [queries, keys, values, *past, *lengths, None, None, None, mask]
    if attention.sinks is not None:
        inputs.append(_by_head(writer, node, attention.sinks))
    operator = ONNXRUNTIME_ATTENTION
    return writer.node(node, operator.op_type, inputs, options, results=3, domain=operator.domain)


def _added(writer: Writer, node: ir.Node, mask: ir.Value, queries: ir.Value) -> ir.Value:
    """Returns a mask that is added to scores, with a row for each token, of one that is or says."""
    mask = _with_rows(writer, node, mask, queries)
    if mask.dtype != ir.DataType.BOOL or queries.dtype is None:
        return mask
    zero = np.zeros((), queries.dtype.numpy())
    least = np.asarray(queries.dtype.min, zero.dtype)
    choices = writer.constant(zero), writer.constant(least)
    added = writer.node(node, "Where", [mask, *choices]).outputs[0]
    return typed(added, queries, dimensions(mask))


def _lengths(
    writer: Writer, node: ir.Node, mask: ir.Value, queries: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Returns each sequence's last position [B] and their length, int32: L of a mask's last axis.

    Padding counts: the mask hides it.
    """
    ints, one = writer.ints([1]), writer.constant(np.array([1], np.int32))
    length = writer.node(node, "Shape", [mask], {"start": 3, "end": 4}).outputs[0]
    narrow = {"to": ir.DataType.INT32}
    total = writer.node(node, "Cast", [typed(length, ints, [1])], narrow).outputs[0]
    last = writer.node(node, "Sub", [typed(total, one, [1]), one]).outputs[0]
    batch = writer.node(node, "Shape", [queries], {"start": 0, "end": 1}).outputs[0]
    lasts = writer.node(node, "Expand", [typed(last, one, [1]), typed(batch, ints, [1])]).outputs[0]
    scalar_total = writer.node(node, "Squeeze", [total]).outputs[0]
    return typed(lasts, one, dimensions(queries)[:1]), typed(scalar_total, one, [])


def _by_head(writer: Writer, before: ir.Node, sinks: ir.Value) -> ir.Value:
    """Returns sinks [1, H, 1, 1] as [H]."""
    heads = dimensions(sinks)[1]
    shaped = maker(sinks, "Reshape")
    if shaped is not None and dimensions(shaped.inputs[0]) == (heads,):
        return operand(shaped, 0)
    if sinks.is_initializer() and sinks.const_value is not None:
        return writer.constant(sinks.const_value.numpy().reshape(-1))
    flat = writer.node(before, "Reshape", [sinks, writer.ints([-1])]).outputs[0]
    return typed(flat, sinks, [heads])
