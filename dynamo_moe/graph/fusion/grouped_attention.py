"""ONNX Runtime's GroupQueryAttention: it has sinks, and can write into the cache's buffers.

Legend: B batch, S new tokens, L keys, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from dynamo_moe.graph.fusion.attention_forms import Attention, Cache
from dynamo_moe.graph.fusion.masks import is_causal, with_rows
from dynamo_moe.graph.matching import Dimension, Writer, dimensions, maker, operand, typed
from dynamo_moe.operators.foreign import ONNXRUNTIME_ATTENTION


class Lengths:
    """How long sequences are: one pair of values for all nodes of equal sizes."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._known: dict[tuple[Dimension, Dimension], tuple[ir.Value, ir.Value]] = {}

    def of(self, node: ir.Node, mask: ir.Value, queries: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns sequences' last positions [B] and their length [1], int32: L of a mask.

        Padding counts: the mask hides it. Calls come in the order of the nodes, so the first has
        its nodes before all others'.
        """
        sizes = dimensions(mask)[3], dimensions(queries)[0]
        if sizes not in self._known:
            self._known[sizes] = self._made(node, mask, queries)
        return self._known[sizes]

    def _made(self, node: ir.Node, mask: ir.Value, queries: ir.Value) -> tuple[ir.Value, ir.Value]:
        writer = self._writer
        ints, one = writer.ints([1]), writer.constant(np.array([1], np.int32))
        known = dimensions(mask)[3]
        if isinstance(known, int):  # Of a Cast of its Shape, ONNX Runtime infers the wrong dtype.
            total = writer.constant(np.array([known], np.int32))
        else:
            length = writer.node(node, "Shape", [mask], {"start": 3, "end": 4}).outputs[0]
            narrow = {"to": ir.DataType.INT32}
            total = writer.node(node, "Cast", [typed(length, ints, [1])], narrow).outputs[0]
        last = writer.node(node, "Sub", [typed(total, one, [1]), one]).outputs[0]
        batch = writer.node(node, "Shape", [queries], {"start": 0, "end": 1}).outputs[0]
        parts = [typed(last, one, [1]), typed(batch, ints, [1])]
        lasts = writer.node(node, "Expand", parts).outputs[0]
        return typed(lasts, one, dimensions(queries)[:1]), total


def can_be_grouped(attention: Attention, caches: Sequence[Cache]) -> bool:
    """Whether ONNX Runtime's operator takes it.

    It needs a cache, with keys and values of one width, a mask of four axes, and whole numbers of
    heads.
    """
    widths = {dimensions(cache.past)[-1:] for cache in caches}
    numbers = [*dimensions(attention.queries)[1::2], *dimensions(attention.values)[1::2]]
    known = all(isinstance(number, int) for number in numbers)
    return known and len(widths) == 1 and len(dimensions(attention.mask)) == 4


def grouped_attention(
    writer: Writer,
    node: ir.Node,
    attention: Attention,
    mask: ir.Value,
    tensors: Sequence[ir.Value],
    caches: Sequence[Cache],
    lengths: Lengths,
) -> ir.Node:
    """Adds the operator, before the node that it replaces.

    Args:
        writer: Of the graph.
        node: The node.
        attention: What it computes.
        mask: Its mask.
        tensors: Queries, keys and values [B, S, H * D] of the new tokens.
        caches: The caches of keys and of values.
        lengths: Those of the graph.
    """
    added = with_rows(writer, node, mask, attention.queries)
    past = [cache.past for cache in caches]
    options: dict[str, Any] = {
        **attention.options(),
        "num_heads": dimensions(attention.queries)[1],
        "kv_num_heads": dimensions(attention.keys)[1],
    }
    # It is causal by itself. ONNX Runtime lets one say that it is not since 1.30.
    if not is_causal(mask):
        options["causal"] = 0
    inputs = [*tensors, *past, *lengths.of(node, added, tensors[0]), None, None, None, added]
    if attention.sinks is not None:
        inputs.append(_by_head(writer, node, attention.sinks))
    operator = ONNXRUNTIME_ATTENTION
    return writer.node(node, operator.op_type, inputs, options, results=3, domain=operator.domain)


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
