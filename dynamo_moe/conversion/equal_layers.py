"""Layers that look like one that was proved, and so are tried with fewer tokens.

What Python code reads cannot be told from outside: a closure, a global or a hook may differ where
the keys of two layers are equal. So such layers are tried too, only in fewer ways.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Tensor, nn

from dynamo_moe.private.pytorch import modules_by_path, own_parts
from dynamo_moe.weights.lazy_tensors import LazyTensor

_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
# The most numbers of a tensor whose values are compared: such as a capacity, or factors.
_FEW_NUMBERS = 4096


def layer_key(module: nn.Module, drawn: Collection[str]) -> Hashable:
    """Returns a key of a layer's visible properties: equal for layers that look alike.

    That is, of each of its modules: the class, the layout of parameters and buffers, the values of
    small tensors, numbers, strings and tuples of them, and functions.

    Args:
        module: The layer.
        drawn: The names of parameters whose values may differ, since trials have random ones.
    """
    return tuple(
        (
            path,
            type(part),
            *_tensors(part, f"{path}." if path else "", drawn),
            *((name, plain) for name, value in vars(part).items() for plain in _plain(value)),
        )
        for path, part in modules_by_path(module)
    )


def _tensors(part: nn.Module, prefix: str, drawn: Collection[str]) -> Iterator[tuple[Any, ...]]:
    """Yields the layout of a module's own tensors, with the values that must be equal."""
    parameters, buffers, _ = own_parts(part)
    for name, tensor in (*parameters.items(), *buffers.items()):
        if tensor is None:
            continue
        layout = name, type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
        is_drawn = name in parameters and f"{prefix}{name}" in drawn
        yield (*layout, None if is_drawn else _values(tensor))


def _values(tensor: Tensor) -> Hashable:
    """Returns a small tensor's values; of one without values, a key that equals nothing else."""
    if tensor.is_meta or isinstance(tensor, LazyTensor):
        return object()
    return repr(tensor.tolist()) if tensor.numel() <= _FEW_NUMBERS else None


def _plain(value: Any) -> Iterator[Hashable]:
    """Yields the compared part of an attribute: a plain value with its types, or a function."""
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        yield type(value), repr(value)  # A NaN is like another.
    elif isinstance(value, tuple):
        yield type(value), tuple(tuple(_plain(item)) for item in value)
    elif isinstance(value, _FUNCTIONS):
        yield id(value)
