"""Views whose sizes and strides follow from those of their tensor, without any question about them.

With symbolic sizes PyTorch finds them by way of several operators, which takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Layout = tuple[Sequence[Any], Sequence[Any]]
"""Sizes and strides."""


def _transposed(layout: Layout, first: int, second: int) -> Layout:
    def swapped(numbers: Sequence[Any]) -> list[Any]:
        result = [*numbers]
        result[first], result[second] = numbers[second], numbers[first]
        return result

    shape, strides = layout
    return swapped(shape), swapped(strides)


def _matrix_transposed(layout: Layout) -> Layout | None:
    rank = len(layout[0])
    return _transposed(layout, 0, rank - 1) if 1 <= rank <= 2 else None


def _unsqueezed(layout: Layout, dimension: int) -> Layout:
    shape, strides = layout
    axis = range(len(shape) + 1)[dimension]
    stride = shape[axis] * strides[axis] if axis < len(shape) else 1
    return (
        [*shape[:axis], 1, *shape[axis:]],
        [*strides[:axis], stride, *strides[axis:]],
    )


_RULES: Mapping[Any, Callable[..., Layout | None]] = {
    torch.ops.aten.t.default: _matrix_transposed,
    torch.ops.aten.transpose.int: _transposed,
    torch.ops.aten.unsqueeze.default: _unsqueezed,
}


def layout_of(operator: Any, arguments: Sequence[Any], layout: Layout) -> Layout | None:
    """Returns the layout of a view; None where it is no plain one, or an error.

    Args:
        operator: An operator that may make a view.
        arguments: Its arguments besides its tensor.
        layout: That tensor's.
    """
    rule = _RULES.get(operator)
    if rule is None:
        return None
    try:
        return rule(layout, *arguments)
    except (IndexError, TypeError):  # PyTorch says it better.
        return None
