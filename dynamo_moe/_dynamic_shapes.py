"""Which dimensions of the example stay symbolic, and an example that lets them.

torch.export treats a dimension of size 0 or 1 as a constant, so examples of batch 1 are repeated.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["BATCH", "Example", "resolve"]

BATCH = "batch"

Example = tuple[tuple[Any, ...], dict[str, Any]]


def resolve(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    requested: Mapping[str, Any] | str | None,
) -> tuple[Example, dict[str, Any] | None]:
    """Returns the example to trace and the ``dynamic_shapes`` for ``torch.export``.

    Args:
        model: Its forward's signature names the arguments.
        args: Positional example arguments.
        kwargs: Keyword example arguments.
        requested: ``"batch"``: dimension 0 of every tensor; a mapping from argument to
            ``{dimension: name}`` adds to that, and ``{0: None}`` takes the batch away; None: all
            static.

    Raises:
        ValueError: If ``requested`` names an unknown argument or dimension.
    """
    if requested is None:
        return (args, kwargs), None
    if isinstance(requested, str):
        if requested != BATCH:
            raise ValueError(
                f"dynamic_shapes must be 'batch', a mapping or None; got {requested!r}"
            )
        requested = {}
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    unknown = sorted(set(requested) - set(arguments))
    if unknown:
        known = ", ".join(arguments)
        raise ValueError(f"dynamic_shapes names {unknown[0]!r}; the example's arguments: {known}")

    batched = _has_batch(arguments)
    shapes = {
        name: _dimensions(name, value, requested.get(name, {}), batched)
        for name, value in arguments.items()
    }
    grown = _grow((args, kwargs), arguments, shapes)
    return grown, shapes


def _has_batch(arguments: Mapping[str, Any]) -> bool:
    """Whether the example's batch exceeds 1, so that a first dimension of 1 only broadcasts."""
    tensors = [leaf for leaf in pytree.tree_leaves(dict(arguments)) if isinstance(leaf, Tensor)]
    return any(tensor.ndim and tensor.shape[0] > 1 for tensor in tensors)


def _dimensions(name: str, value: Any, requested: Any, batched: bool) -> Any:
    """Returns the argument's entry of ``dynamic_shapes``."""
    if not isinstance(value, Tensor):
        if requested:
            return requested
        return pytree.tree_map(lambda leaf: _dimensions(name, leaf, {}, batched), value) or None
    default = {0: BATCH} if value.ndim and not (batched and value.shape[0] == 1) else {}
    if not isinstance(requested, Mapping):
        requested = dict(enumerate(requested))
    for dimension in requested:
        if not 0 <= dimension < value.ndim:
            raise ValueError(
                f"dynamic_shapes names dimension {dimension} of {name!r}, whose example has "
                f"{value.ndim} dimensions"
            )
    return {dim: label for dim, label in {**default, **requested}.items() if label} or None


def _grow(example: Example, arguments: Mapping[str, Any], shapes: Mapping[str, Any]) -> Example:
    replacements: dict[int, Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            replacements[id(value)] = _grow_tensor(value, shapes[name])
        else:
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] < 2:
                    replacements[id(leaf)] = _grow_tensor(leaf, {0: BATCH})
    grown: Example = pytree.tree_map(lambda leaf: replacements.get(id(leaf), leaf), example)
    return grown


def _grow_tensor(tensor: Tensor, dimensions: Mapping[int, Any] | None) -> Tensor:
    for dimension in dimensions or {}:
        size = tensor.shape[dimension]
        if size < 2:
            shape = list(tensor.shape)
            shape[dimension] = 2
            tensor = tensor.expand(shape).contiguous() if size else tensor.new_zeros(shape)
    return tensor
