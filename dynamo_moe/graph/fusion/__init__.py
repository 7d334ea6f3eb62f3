"""Norms, rotary embeddings and attention as one node each.

The operators are those of opset 23, and ONNX Runtime's own. What is matched is what the graph
computes, by the form that PyTorch's trace has after it was simplified; whatever differs stays.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import onnx_ir as ir

from dynamo_moe.graph import passes
from dynamo_moe.graph.fusion.activations import fuse_silu
from dynamo_moe.graph.fusion.attention import fuse_attention
from dynamo_moe.graph.fusion.lengths import use_whole_masks
from dynamo_moe.graph.fusion.masks import fuse_masks
from dynamo_moe.graph.fusion.moe_shapes import keep_moe_shapes
from dynamo_moe.graph.fusion.norms import fuse_norms
from dynamo_moe.graph.fusion.rotary import fuse_rotary_embeddings
from dynamo_moe.graph.fusion.shared_cache import share_cache
from dynamo_moe.graph.fusion.skip_norms import fuse_skip_norms
from dynamo_moe.graph.matching import Writer
from dynamo_moe.operators.foreign import ONNXRUNTIME_DOMAIN

FIRST_OPSET = 23
"""The version of the standard that has these operators."""


class Fusion(NamedTuple):
    """How far to go.

    Attributes:
        operators: Whether norms and rotary embeddings become one node each.
        attention: Whether attention does, too, and what else ONNX Runtime has one for.
        shared_cache: Whether attention writes new keys and values into the cache's own buffers.
        sums: Whether a sum and its norm become one node, also where one block's last sum is
            normed by the next.
    """

    operators: bool = True
    attention: bool = True
    shared_cache: bool = False
    sums: bool = False


def fuse(model: ir.Model, fusion: Fusion, ends: Collection[str] = ()) -> None:
    """Makes norms, rotary embeddings and attention of the main graph one node each, in place.

    Args:
        model: The model, simplified.
        fusion: How far to go.
        ends: The names of values that end a block.

    Raises:
        ValueError: If the cache cannot be shared.
    """
    writer = Writer(model.graph, "fused")
    if fusion.operators:
        fuse_norms(writer)
        fuse_rotary_embeddings(writer)
    if fusion.operators and fusion.attention:
        use_whole_masks(writer)
        fuse_attention(writer, grouped=fusion.shared_cache)
        fuse_masks(writer)
        fuse_silu(writer)
        keep_moe_shapes(writer)
    passes.tidy(model)
    if fusion.operators and fusion.sums:
        fuse_skip_norms(writer, ends)
        passes.tidy(model)
    if any(node.domain == ONNXRUNTIME_DOMAIN for node in model.graph):
        model.opset_imports.setdefault(ONNXRUNTIME_DOMAIN, 1)
    if fusion.shared_cache:
        share_cache(writer)
        passes.tidy(model)
