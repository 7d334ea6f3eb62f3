"""Questions about symbolic sizes that a trace repeats for every operator, answered once.

A program with symbolic sizes of 24 transformer blocks asks for the same thousand sums, products and
comparisons of sizes some sixty times each. Each function here takes what PyTorch calls, and returns
what takes its place; ``dynamo_moe.tracing.shortcuts`` puts it there for the time of a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

try:
    from torch.fx.experimental import proxy_tensor
except ImportError:  # As tracer.missing() says; then nothing is replaced.
    proxy_tensor = None  # type: ignore[assignment]


def remembered(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns the operation of two symbolic sizes, computed once for each pair of expressions.

    A result depends on both expressions, their types, and what has been found out about the
    symbols since: the environment counts that. While sizes themselves are traced, each operation
    must be seen.
    """
    results: dict[Any, Any] = {}

    def remembering(size: Any, other: Any) -> Any:
        environment = size.shape_env
        # PyTorch 2.11 does not count what it finds out.
        found_out = getattr(environment, "_replacements_version_counter", None)
        if found_out is None or proxy_tensor.get_proxy_mode() is not None:
            return operation(size, other)
        key = (environment, found_out, size._expr, size.pytype, other._expr, other.pytype)
        result = results.get(key)
        if result is None:
            result = results[key] = operation(size, other)
        return result

    return remembering


def integers_made_once(original: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """Returns one constant for each integer that a size is compared or computed with."""
    constants: dict[Any, Any] = {}

    def wrap_int(size: Any, number: int) -> Any:
        key = size.shape_env, number, type(number)
        if (constant := constants.get(key)) is None:
            constant = constants[key] = original(size, number)
        return constant

    return wrap_int


def symbols_known(original: Callable[[Any], int | None]) -> Callable[[Any], int | None]:
    """Asks a size once whether it is a number; again when more is known about the symbols."""

    def maybe_as_int(size: Any) -> int | None:
        found_out = getattr(size.shape_env, "_replacements_version_counter", None)
        if found_out is None:
            return original(size)
        if size.__dict__.get("no_number_at") == found_out:
            return None
        number = original(size)
        if number is None:
            size.no_number_at = found_out
        return number

    return maybe_as_int


def truths_known(original: Callable[..., bool]) -> Callable[..., bool]:
    """Answers a condition that is true for all sizes; it needs neither a guard nor an assert."""

    def is_true(condition: Any, file: str, line: int) -> bool:
        return condition._expr is sympy.true or original(condition, file, line)

    return is_true
