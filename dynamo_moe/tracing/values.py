"""What is compared of the values in a trace, and attributes that are changed for its time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.private import attributes_of, modes_unasked
from dynamo_moe.tracing import private

SIMPLE = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.SymInt),
    }
)
"""Types whose values are known by what they show."""

_ABSENT = object()


def place_of(value: Any, among: Sequence[Any]) -> int | None:
    """Returns the place of an object itself; values such as numbers have none."""
    if type(value) in SIMPLE:
        return None
    return next((place for place, each in enumerate(among) if each is value), None)


def are_equal(value: Any, other: Any) -> bool:
    """Whether two values are of one simple type and show the same."""
    simple = type(value) in SIMPLE and type(value) is type(other)
    return simple and repr(value) == repr(other)


def sizes_of(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what operators see of a tensor without values."""
    with modes_unasked():
        sizes = *tensor.shape, *tensor.stride(), tensor.storage_offset()
        facts = tensor.dtype, tensor.device, tensor.requires_grad
    return type(tensor), tuple(map(private.expression_of, sizes)), facts


def begins_later(tensor: Tensor) -> bool:
    """Whether a tensor begins after its storage does, or may."""
    with modes_unasked():
        return bool(private.expression_of(tensor.storage_offset()) != 0)


@contextlib.contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives a class or an object an attribute of its own until the context ends."""
    own = attributes_of(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
