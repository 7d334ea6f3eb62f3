"""Norms, rotary embeddings and attention as one node of the standard each.

The operators are those of opset 23. What is matched is what the graph computes, by the form that
PyTorch's trace has after it was simplified; whatever differs stays as it is.
"""

from __future__ import annotations

import onnx_ir as ir

from dynamo_moe.graph.fusion.attention import fuse_attention, give_masks_rows
from dynamo_moe.graph.fusion.norms import fuse_norms
from dynamo_moe.graph.fusion.rotary import fuse_rotary_embeddings
from dynamo_moe.graph.matching import Writer
from dynamo_moe.operators.foreign import ONNXRUNTIME_ATTENTION

FIRST_OPSET = 23
"""The version of the standard that has these operators."""


def fuse(model: ir.Model, *, operators: bool = True, attention: bool = True) -> None:
    """Makes norms, rotary embeddings and attention of the main graph one node each, in place.

    Args:
        model: The model, simplified.
        operators: Whether to. Otherwise only the masks of what is one node already are made such
            that ONNX Runtime takes them.
        attention: Whether attention, too.
    """
    writer = Writer(model.graph)
    if operators:
        fuse_norms(writer)
        fuse_rotary_embeddings(writer)
        if attention:
            fuse_attention(writer)
            if any(node.domain == ONNXRUNTIME_ATTENTION.domain for node in model.graph):
                model.opset_imports.setdefault(ONNXRUNTIME_ATTENTION.domain, 1)
    give_masks_rows(writer)
