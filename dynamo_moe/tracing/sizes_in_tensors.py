"""Decisions by scalars that a model computes of sizes, such as DeepSpeed's capacity of an expert.

A trace has no values of tensors, so it cannot decide by one. Where a scalar is made of sizes and
plain numbers alone, the same arithmetic on the symbolic sizes says what it is, in float64.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dynamo_moe.private.pytorch import change_count

Number: TypeAlias = bool | int | float | torch.SymBool | torch.SymInt | torch.SymFloat

_NUMBERS = (int, float, torch.SymBool, torch.SymInt, torch.SymFloat)
# Of functions' and methods' names without the underscores of operators.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ge", "gt", "le", "lt", "ne")},
    **{name: getattr(operator, name) for name in ("add", "mul", "sub", "truediv")},
    "div": operator.truediv,
    "radd": operator.add,
    "rmul": operator.mul,
    "rsub": lambda x, y: y - x,
    "rdiv": lambda x, y: y / x,
    "ceil": math.ceil,
    "floor": math.floor,
    "maximum": torch.sym_max,
    "minimum": torch.sym_min,
}
# What gives the number itself, in the dtype of the result.
_SAME = frozenset({"as_tensor", "clone", "contiguous", "detach", "float", "int", "long", "tensor"})
_CASTS = frozenset({"to", "type"})
# Keyword arguments that change no number but by the dtype of the result.
_OF_FORM = frozenset({"copy", "device", "dtype", "memory_format", "non_blocking", "requires_grad"})


class SizesInTensors(TorchFunctionMode):
    """Decides by scalars of sizes as by the sizes: the trace then notes a condition."""

    def __init__(self) -> None:
        super().__init__()
        # By identity, with how often each had been changed. The tensors are kept, so that no other
        # one gets the identity of one that is known.
        self._known: dict[int, tuple[Tensor, int, Number]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs a function, and notes which number its result is."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        numbers = [self._number(arg) for arg in args]
        if name == "__bool__" and numbers[0] is not None:
            return bool(numbers[0])
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.ndim == 0 and kwargs.keys() <= _OF_FORM:
            number = _in_dtype(_computed(name.strip("_"), numbers), result.dtype)
            if number is not None:
                self._known[id(result)] = result, change_count(result), number
        return result

    def _number(self, value: Any) -> Number | None:
        """Returns the number that an argument is; None if it is another thing."""
        if not isinstance(value, Tensor):
            return value if isinstance(value, _NUMBERS) else None
        _, changes, number = self._known.get(id(value), (value, -1, None))
        return number if changes == change_count(value) else None


def _computed(name: str, numbers: list[Number | None]) -> Number | None:
    """Returns what a function gives for numbers, if that is known."""
    if name in _CASTS:
        return numbers[0]
    if not numbers or None in numbers:
        return None
    if name in _SAME:
        return numbers[0]
    try:
        return _ARITHMETIC[name](*numbers) if name in _ARITHMETIC else None
    except TypeError:  # With more arguments than operands.
        return None


def _in_dtype(number: Number | None, dtype: torch.dtype) -> Number | None:
    """Returns a number as a tensor of a dtype holds it; None if it may be rounded too much.

    Symbolic ones are not rounded.
    """
    if number is None or dtype.is_complex or (dtype.is_floating_point and dtype.itemsize < 4):
        return None
    if not (dtype.is_floating_point or dtype == torch.bool):
        truncated: int | torch.SymInt = torch.sym_int(number)
        return truncated
    if dtype == torch.float32 and isinstance(number, float):
        return ctypes.c_float(number).value
    return number
