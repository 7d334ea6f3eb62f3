"""Attention as one node, which repeats heads and extends the cache of keys and values itself.

Legend: B batch, S new tokens, H heads, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from dynamo_moe.graph.fusion.attention_forms import (
    Attention,
    Cache,
    attention_of,
    caches_of,
    without_repeats,
)
from dynamo_moe.graph.fusion.grouped_attention import Lengths, can_be_grouped, grouped_attention
from dynamo_moe.graph.fusion.masks import above_least, seen_keys, with_rows
from dynamo_moe.graph.fusion.rotary import HEADS_FIRST, flattened
from dynamo_moe.graph.matching import (
    Writer,
    dimensions,
    maker,
    only_user,
    operand,
    permutation,
    typed,
)


def fuse_attention(writer: Writer, *, grouped: bool = False) -> None:
    """Makes each attention one node: Attention, or ONNX Runtime's own where it has sinks.

    Args:
        writer: Of the graph.
        grouped: Whether ONNX Runtime's own everywhere: it can write new keys and values into the
            buffers that hold the cache.
    """
    lengths = Lengths(writer)
    for node in list(writer.graph):
        attention = attention_of(writer, node)
        if attention is not None:
            _fuse(writer, node, without_repeats(attention), lengths, grouped=grouped)


def _fuse(
    writer: Writer, node: ir.Node, attention: Attention, lengths: Lengths, *, grouped: bool
) -> None:
    heads, groups = dimensions(attention.queries)[1], dimensions(attention.keys)[1]
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % groups:
        return
    caches = caches_of(node, attention)
    new = [cache.new for cache in caches] or [attention.keys, attention.values]
    tensors = [attention.queries, *new]
    replaced, by_token = _merged_result(node), _by_token(tensors)
    wants_own = grouped or attention.sinks is not None
    if wants_own and attention.mask is not None and can_be_grouped(attention, caches):
        flat = [_flat(writer, node, tensor) for tensor in tensors]
        fused = grouped_attention(writer, node, attention, attention.mask, flat, caches, lengths)
        result = fused.outputs[0]
        if replaced is None:
            replaced, result = node.outputs[0], _by_heads(writer, node, result)
    elif attention.sinks is not None:
        return
    else:
        counts = {}
        if replaced is not None and by_token is not None:  # Heads stay side by side.
            tensors = [flattened(writer, node, value) for value in by_token]
            counts = {"q_num_heads": heads, "kv_num_heads": groups}
        else:
            replaced = node.outputs[0]
        fused = _standard(writer, node, attention, tensors, caches, counts)
        result = fused.outputs[0]
    for cache, present in zip(caches, fused.outputs[1:], strict=True):
        writer.replace(cache.present, present)
    writer.replace(replaced, result)


def _flat(writer: Writer, before: ir.Node, value: ir.Value) -> ir.Value:
    """Returns [B, H, S, D] as [B, S, H * D]."""
    by_token = _by_token([value])
    if by_token is not None:
        return flattened(writer, before, by_token[0])
    batch, heads, tokens, width = dimensions(value)
    turned = writer.node(before, "Transpose", [value], {"perm": HEADS_FIRST}).outputs[0]
    return flattened(writer, before, typed(turned, value, (batch, tokens, heads, width)))


def _by_heads(writer: Writer, before: ir.Node, value: ir.Value) -> ir.Value:
    """Returns [B, S, H * D] as a node's result [B, H, S, D]."""
    like = before.outputs[0]
    batch, heads, tokens, width = dimensions(like)
    counts = [size for size in (heads, width) if isinstance(size, int)]
    typed(value, like, (batch, tokens, math.prod(counts)))
    sizes = writer.ints([0, 0, *counts])
    split = writer.node(before, "Reshape", [value, sizes]).outputs[0]
    typed(split, like, (batch, tokens, heads, width))
    return writer.node(before, "Transpose", [split], {"perm": HEADS_FIRST}).outputs[0]


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


def _merged_result(node: ir.Node) -> ir.Value | None:
    """Returns [B, S, H * D], if that alone is made of a node's result [B, H, S, D]."""
    turn = only_user(node.outputs[0], "Transpose")
    merge = None if turn is None else only_user(turn.outputs[0], "Reshape")
    if turn is None or merge is None or permutation(turn) != HEADS_FIRST:
        return None
    match dimensions(turn.outputs[0]), dimensions(merge.outputs[0]):
        case (batch, tokens, int(heads), int(width)), merged:
            return merge.outputs[0] if merged == (batch, tokens, heads * width) else None
    return None


def _standard(
    writer: Writer,
    node: ir.Node,
    attention: Attention,
    tensors: Sequence[ir.Value],
    caches: Sequence[Cache],
    counts: dict[str, int],
) -> ir.Node:
    """Adds the standard's Attention of queries, keys and values, before the node it replaces."""
    mask = attention.mask
    if mask is not None:
        mask = seen_keys(mask) if attention.gives_zeros else above_least(writer, node, mask)
        mask = with_rows(writer, node, mask, attention.queries)
    inputs = [*tensors, mask, *(cache.past for cache in caches)]
    while inputs[-1] is None:
        inputs.pop()
    options = {**attention.options(), **counts}
    return writer.node(node, "Attention", inputs, options, results=1 + len(caches))
