"""A cache in buffers of a fixed size, which the file's nodes write new keys and values into.

ONNX Runtime's GroupQueryAttention writes them in place where a caller gives one buffer as the past
and as the present. The buffers have room for more tokens than there are, so their size says nothing
of the tokens so far: attention_mask does, which has an entry for each of these and of the new ones.
"""

from __future__ import annotations

import onnx_ir as ir

from dynamo_moe.graph.matching import Writer, typed
from dynamo_moe.operators.foreign import ONNXRUNTIME_ATTENTION

TOKENS, SEEN, CACHE = "input_ids", "attention_mask", "past_key_values."


def share_cache(writer: Writer) -> None:
    """Takes the number of tokens in the cache from attention_mask, not from the cache's size.

    Raises:
        ValueError: If a part of the cache is used otherwise than by GroupQueryAttention.
    """
    inputs = {str(value.name): value for value in writer.graph.inputs}
    past = [value for name, value in inputs.items() if name.startswith(CACHE)]
    if not past or TOKENS not in inputs or SEEN not in inputs:
        raise ValueError(
            "a shared cache needs a language model with one: inputs input_ids, attention_mask and "
            f"past_key_values; the file has {', '.join(inputs)}"
        )
    length: ir.Value | None = None
    for value in past:
        for node, _ in list(value.uses()):
            if not _reads_length(node):
                _check_use(value, node)
                continue
            if length is None:
                length = _length(writer, next(iter(writer.graph)), inputs[SEEN], inputs[TOKENS])
            node.outputs[0].replace_all_uses_with(length)


def _reads_length(node: ir.Node) -> bool:
    """Whether a node gives the size of a cache [B, G, P, D] along P, as [1]."""
    ends = [node.attributes.get_int(name, -1) for name in ("start", "end")]
    return not node.domain and node.op_type == "Shape" and ends == [2, 3]


def _check_use(value: ir.Value, node: ir.Node) -> None:
    other_sizes = node.op_type == "Shape" and node.attributes.get_int("end", 9) <= 2
    if node.op_type != ONNXRUNTIME_ATTENTION.op_type and not other_sizes:
        raise ValueError(
            f"the cache cannot be shared: {value.name} is used by {node.op_type} "
            f"({node.name}), which cannot write into it; export without shared_cache"
        )


def _length(writer: Writer, before: ir.Node, seen: ir.Value, tokens: ir.Value) -> ir.Value:
    """Adds nodes that compute the number of tokens in the cache, [1]."""
    one = writer.ints([1])
    sizes = [
        typed(writer.node(before, "Shape", [value], {"start": 1, "end": 2}).outputs[0], one, [1])
        for value in (seen, tokens)
    ]
    return typed(writer.node(before, "Sub", sizes).outputs[0], one, [1])
