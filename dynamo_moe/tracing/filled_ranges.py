"""Tensors that a program fills range by range: without writing, their parts joined.

Rotary embeddings of multi-head latent attention are put together so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from dynamo_moe.tracing.nodes import add_call

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


def overwrites_one_range(write: fx.Node, views: Sequence[fx.Node]) -> bool:
    """Whether a node overwrites one range of a tensor, all of its bounds known, or all of it."""
    if write.target not in _OVERWRITE or any(v.target is not _aten.slice.Tensor for v in views):
        return False
    # A slice of a slice is not one range of the whole.
    parts = [view for view in views if not _cut(view).is_whole]
    return not parts or (len(parts) == 1 and _bounds(parts[0]) is not None)


def with_range(
    graph: fx.Graph, write: fx.Node, views: Sequence[fx.Node], whole: fx.Node, value: fx.Node
) -> fx.Node:
    """Adds what is left of a tensor by a write that :func:`overwrites_one_range`, or all of it.

    Args:
        graph: The new graph.
        write: The write, a node of the old graph.
        views: The slices, of the old graph, that lead from the tensor to what is overwritten.
        whole: The tensor from before the write, a node of the new graph.
        value: What is written, another.
    """
    parts = [view for view in views if not _cut(view).is_whole]
    bounds = _bounds(parts[0]) if parts else None
    if bounds is None:
        return value
    dimension, start, end, size = bounds
    joined = [
        *_rest(graph, write, whole, (dimension, 0, start)),
        value,
        *_rest(graph, write, whole, (dimension, end, size)),
    ]
    return add_call(graph, write, _aten.cat.default, joined, dimension)


def _rest(
    graph: fx.Graph, write: fx.Node, whole: fx.Node, reach: tuple[int, int, int]
) -> list[Any]:
    """Returns nodes that make up a range of a dimension: the parts that were joined, if it can."""
    dimension, start, end = reach
    if start >= end:
        return []
    if whole.target is _aten.cat.default and _joined_along(whole) == dimension:
        joined: Any = whole.args[0]
        sizes = [part.meta["val"].shape[dimension] for part in joined]
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        starts = [0, *ends]
        if start in starts and end in ends:
            return list(joined[starts.index(start) : ends.index(end) + 1])
    return [add_call(graph, write, _aten.slice.Tensor, whole, dimension, start, end)]


def _joined_along(cat: Any) -> int:
    """Returns the dimension that a concatenation joins its parts along."""
    dimension: int = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    rank: int = cat.meta["val"].ndim
    return dimension % rank


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
