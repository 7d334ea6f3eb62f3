"""Nested containers of tensors as flat lists, and back.

PyTorch has this in ``torch.utils._pytree``, which is private but knows the classes that users and
other packages have registered, such as the outputs and caches of transformers. Where the module
has moved, lists, tuples, named tuples and dictionaries are taken apart here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]


class _Container(NamedTuple):
    """A container's class, the keys of a mapping, and its items: containers, or None for leaves."""

    kind: type
    keys: tuple[Any, ...] | None
    items: tuple[Any, ...]


def _flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    if (is_leaf is not None and is_leaf(tree)) or not isinstance(tree, (list, tuple, dict)):
        return [tree], None
    keys = tuple(tree) if isinstance(tree, dict) else None
    items = tree.values() if isinstance(tree, dict) else tree
    parts = [_flatten(part, is_leaf) for part in items]
    leaves = [leaf for part_leaves, _ in parts for leaf in part_leaves]
    return leaves, _Container(type(tree), keys, tuple(structure for _, structure in parts))


def _unflatten(leaves: Any, structure: Any) -> Any:
    remaining = iter(leaves)

    def build(part: Any) -> Any:
        if part is None:
            return next(remaining)
        items = [build(item) for item in part.items]
        if part.keys is not None:
            return part.kind(zip(part.keys, items, strict=True))
        # Named tuples take their items one by one.
        return part.kind(*items) if hasattr(part.kind, "_fields") else part.kind(items)

    return build(structure)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    leaves, structure = _flatten(tree)
    return _unflatten(map(function, leaves), structure)


def _map_only(kinds: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    return _map(lambda leaf: function(leaf) if isinstance(leaf, kinds) else leaf, tree)


PYTHON_ONLY: Mapping[str, Callable[..., Any]] = {
    "tree_flatten": _flatten,
    "tree_leaves": lambda tree, is_leaf=None: _flatten(tree, is_leaf)[0],
    "tree_map": _map,
    "tree_map_only": _map_only,
    "tree_unflatten": _unflatten,
}
"""The functions for containers of Python alone."""

try:
    from torch.utils._pytree import (
        tree_flatten,
        tree_leaves,
        tree_map,
        tree_map_only,
        tree_unflatten,
    )
except ImportError:
    globals().update(PYTHON_ONLY)
