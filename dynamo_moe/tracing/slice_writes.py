"""Tensors that a program fills slice by slice: without writing, their parts joined.

Rotary embeddings of multi-head latent attention are put together so.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import fx

__all__ = ["join", "only_written", "written_whole"]

_aten = torch.ops.aten

# Operators whose result does not depend on what they overwrite, beyond its shape.
_OVERWRITE = frozenset(
    {_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
)


class _Cut(NamedTuple):
    """The arguments of a slice."""

    dimension: int = 0
    start: Any = None
    end: Any = None
    step: Any = 1

    @property
    def is_whole(self) -> bool:
        """Whether it reaches from the first element to the last, whatever the size."""
        return self.start in (None, 0) and self.end in (None, sys.maxsize) and self.step == 1


def written_whole(write: fx.Node) -> Any:
    """Returns the tensor one of whose slices a node overwrites, if they serve nothing else."""
    if write.target not in _OVERWRITE or write.users:
        return None
    views = _views(write)
    # Of a slice of a slice, the part is no range of the whole.
    parts = [view for view in views if not _cut(view).is_whole]
    return views[-1].args[0] if views and len(parts) <= 1 else None


def only_written(node: Any) -> bool:
    """Whether a node is a slice, of known bounds, that serves to be overwritten."""
    return (
        isinstance(node, fx.Node)
        and node.target is _aten.slice.Tensor
        and all(
            user.args[0] is node and (user.target in _OVERWRITE or only_written(user))
            for user in node.users
        )
        and (_cut(node).is_whole or _bounds(node) is not None)
    )


def join(graph: fx.Graph, write: fx.Node, whole: fx.Node, value: fx.Node) -> fx.Node:
    """Adds the tensor that a write leaves behind.

    Args:
        graph: Where to add it.
        write: A node with a :func:`written_whole`.
        whole: That tensor before the write, in ``graph``.
        value: What has been written, in ``graph``.
    """
    parts = [view for view in _views(write) if not _cut(view).is_whole]
    bounds = _bounds(parts[0]) if parts else None
    if bounds is None:
        return value
    dimension, start, end, size = bounds
    joined = [
        *_parts(graph, write, whole, (dimension, 0, start)),
        value,
        *_parts(graph, write, whole, (dimension, end, size)),
    ]
    return _call(graph, write, _aten.cat.default, joined, dimension)


def _parts(
    graph: fx.Graph, write: fx.Node, whole: fx.Node, reach: tuple[int, int, int]
) -> list[Any]:
    """Returns what makes up a range of a dimension; the parts that were joined, where it can."""
    dimension, start, end = reach
    if start >= end:
        return []
    if whole.target is _aten.cat.default and _joined_along(whole) == dimension:
        joined: Any = whole.args[0]
        sizes = [part.meta["val"].shape[dimension] for part in joined]
        ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
        starts = [0, *ends]
        if start in starts and end in ends:
            return list(joined[starts.index(start) : ends.index(end) + 1])
    return [_call(graph, write, _aten.slice.Tensor, whole, dimension, start, end)]


def _joined_along(cat: Any) -> int:
    """Returns the dimension that a concatenation joins its parts along."""
    dimension: int = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    rank: int = cat.meta["val"].ndim
    return dimension % rank


def _call(graph: fx.Graph, write: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Adds a call on behalf of a write."""
    node = graph.call_function(target, args)
    values: Any = fx.map_arg(args, lambda argument: argument.meta["val"])
    node.meta = {**write.meta, "val": target(*values)}
    return node


def _views(write: fx.Node) -> list[Any]:
    """Returns the slices that lead to what a node overwrites, the last one first."""
    views: list[Any] = []
    view: Any = write.args[0]
    while only_written(view):
        views.append(view)
        view = view.args[0]
    return views


def _cut(view: Any) -> _Cut:
    return _Cut(*view.args[1:])


def _bounds(view: Any) -> tuple[int, int, int, int] | None:
    """Returns dimension, start, end and size, none of them negative; None: they are symbolic."""
    dimension, start, end, step = _cut(view)
    size = view.args[0].meta["val"].shape[dimension]
    known = all(isinstance(number, int) for number in (size, start or 0, end or 0))
    if not known or step != 1:
        return None
    start, end, _ = slice(start, end).indices(size)
    return dimension % view.meta["val"].ndim, start, max(start, end), size
