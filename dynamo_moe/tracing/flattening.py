"""Nested arguments as flat lists, as PyTorch flattens those of each operator that it traces.

Its own function defines another one in each call, whose memory only the garbage collector frees: a
quarter of the objects that a trace leaves to it. :mod:`dynamo_moe.tracing.private` puts the one
made here in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    from torch.utils import _pytree
except ImportError:  # As private.missing() says; then nothing is replaced.
    _pytree = None  # type: ignore[assignment]


def defined_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns PyTorch's ``tree_flatten`` without the function that it defines in each call."""

    def tree_flatten(
        tree: Any, is_leaf: Callable[[Any], bool] | None = None
    ) -> tuple[list[Any], Any]:
        if torch.compiler.is_dynamo_compiling():  # Dynamo knows the original.
            flattened: tuple[list[Any], Any] = original(tree, is_leaf)
            return flattened
        leaves: list[Any] = []
        return leaves, _flatten(tree, leaves, is_leaf)

    return tree_flatten


def _flatten(tree: Any, leaves: list[Any], is_leaf: Callable[[Any], bool] | None) -> Any:
    """Adds a tree's leaves to those found; returns what describes its structure."""
    kind: Any = type(tree)
    if issubclass(kind, tuple):
        kind = _pytree._get_node_type(tree)  # One for all classes of named tuples.
    node = _pytree.SUPPORTED_NODES.get(kind)
    if (is_leaf is not None and is_leaf(tree)) or node is None:
        leaves.append(tree)
        return _pytree._LEAF_SPEC
    children, context = node.flatten_fn(tree)
    structures = [_flatten(child, leaves, is_leaf) for child in children]
    return _pytree.TreeSpec(kind, context, structures)
