"""Norms, rotary embeddings and attention as one node of the standard each.

The operators are those of opset 23. What is matched is what the graph computes, by the form that
PyTorch's trace has after it was simplified; whatever differs stays as it is.
"""

from __future__ import annotations

import onnx_ir as ir

from dynamo_moe.graph.fusion.attention import fuse_attention
from dynamo_moe.graph.fusion.matching import Writer
from dynamo_moe.graph.fusion.norms import fuse_norms
from dynamo_moe.graph.fusion.rotary import fuse_rotary_embeddings

FIRST_OPSET = 23
"""The version of the standard that has these operators."""


def fuse(graph: ir.Graph, *, attention: bool) -> None:
    """Makes each norm, rotary embedding and, if wanted, attention of a graph one node, in place."""
    writer = Writer(graph)
    fuse_norms(writer)
    fuse_rotary_embeddings(writer)
    if attention:
        fuse_attention(writer)
