"""Shared by the files of the ops: the library ``moe``, the options' derivatives and autocast."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from custom_ops.options import Option, list_options

LIBRARY = torch.library.Library("moe", "FRAGMENT")

#: A context in which an operator's own kernel is called, not that for autograd; None where this
#: torch has none. It is not public API.
below_autograd: Callable[[], AbstractContextManager[None]] | None = getattr(
    torch._C, "_AutoDispatchBelowAutograd", None
)

#: From a process group's name to the group; None where this torch has none. It is not public API.
group_of_name: Callable[[str], Any] | None = getattr(
    getattr(torch.distributed, "distributed_c10d", None), "_resolve_process_group", None
)

_F = TypeVar("_F", bound=Callable[..., Any])


def schema_of(options: tuple[Option, ...]) -> str:
    """Returns the options as the dispatcher's schema language declares keyword arguments.

    Example:
        >>> from custom_ops.options import ROUTER_OPTIONS
        >>> schema_of(ROUTER_OPTIONS[:3])
        'str scoring="softmax", bool renormalize=True, float routed_scaling=1.0'
    """

    def default(option: Option) -> str:
        return json.dumps(option.default) if option.type is str else repr(option.default)

    return ", ".join(f"{o.type.__name__} {o.name}={default(o)}" for o in options)


def with_options(options: tuple[Option, ...]) -> Callable[[_F], _F]:
    """Gives a function that takes ``**options`` the signature and docstring that name them all.

    So ``help``, documentation and notebooks show each option with its default; type checkers read
    the keywords' :class:`typing.TypedDict`.
    """
    keywords = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=option.type.__name__,
        )
        for option in options
    ]

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        *positional, _ = signature.parameters.values()
        described: Any = function
        described.__signature__ = signature.replace(parameters=[*positional, *keywords])
        described.__doc__ = list_options(function.__doc__, options)
        described.__keywords__ = frozenset(row.name for row in options)
        return function

    return decorate


def check_keywords(function: Any, options: dict[str, Any]) -> None:
    """Checks the keywords of a function made by :func:`with_options`, as Python does.

    Raises:
        TypeError: If there is no such option.
    """
    for name in options:
        if name not in function.__keywords__:
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")


def rows_of(tensor: Tensor) -> Tensor:
    """Returns ``[..., D]`` as ``[T, D]``."""
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1])


def differentiable_once(backward: str) -> None:
    """Refuses to differentiate a backward operator, whose results would pass no gradient on."""

    def refuse(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError("torch.ops.moe.experts and dropless are differentiable once only")

    torch.library.register_autograd(f"moe::{backward}", refuse, lib=LIBRARY)


def register_autocast(op: str, parameters: slice) -> None:
    """Casts the experts' parameters, which the slice of the op's arguments holds, under autocast.

    Tokens and router keep their dtype, so that autocast never changes which experts are chosen.
    float64 parameters stay, as in PyTorch's own autocast rules.
    """
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        LIBRARY.impl(op, _autocast(op, parameters, device_type), key)


def _autocast(op: str, parameters: slice, device_type: str) -> Callable[..., Tensor]:
    def with_autocast(*arguments: Any, **options: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        cast = list(arguments)
        cast[parameters] = [
            p if p is None or p.dtype == torch.float64 else p.to(dtype) for p in cast[parameters]
        ]
        with torch.autocast(device_type, enabled=False):
            result: Tensor = getattr(torch.ops.moe, op)(*cast, **options)
        return result

    return with_autocast
