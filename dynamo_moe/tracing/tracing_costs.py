"""What PyTorch's tracer does again for every operator, done once: a third of a capture's time.

A program with symbolic sizes of 24 transformer blocks asks for the same thousand sums, products
and comparisons of sizes some sixty times each. This is the one module that uses private names of
PyTorch's symbolic sizes; where they are not known, tracing only takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch.fx

from dynamo_moe.tracing.known_torch import is_known

try:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.fx.experimental.sym_node import SymNode
except ImportError:  # A version of PyTorch that has rearranged its symbolic sizes.
    SymNode = None  # type: ignore[assignment, misc]

__all__ = ["cheap_tracing"]

_OPERATIONS = ("_add", "_mul", "_sub", "_sym_max", "_eq", "_ne", "_ge", "_gt", "_le", "_lt")
_STACK_TRACES_OFF = "do_not_emit_stack_traces"

# Whoever changes PyTorch's classes restores them: nobody else does meanwhile.
_changed = Lock()

Operation = Callable[[Any, Any], Any]


@contextmanager
def cheap_tracing() -> Iterator[None]:
    """Lets what is traced meanwhile remember its size arithmetic, and keep no stack traces.

    The graphs are the same, but for the stack traces of their nodes. While one thread traces so,
    another traces as PyTorch does by itself.
    """
    if not _changed.acquire(blocking=False):
        yield
        return
    config: Any = getattr(torch.fx, "config", None)
    traced = getattr(config, _STACK_TRACES_OFF, None)
    originals: dict[str, Operation] = {}
    try:
        if SymNode is not None and is_known():
            originals = {name: getattr(SymNode, name) for name in _OPERATIONS}
        if traced is not None:
            setattr(config, _STACK_TRACES_OFF, True)
        for name, original in originals.items():
            setattr(SymNode, name, _remembered(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(SymNode, name, original)
        if traced is not None:
            setattr(config, _STACK_TRACES_OFF, traced)
        _changed.release()


def _remembered(operation: Operation) -> Operation:
    """Returns the operation of two symbolic sizes, computed once per pair of expressions.

    A result depends on both expressions, their types and what has been found out about the
    symbols since: the environment counts that. While sizes themselves are traced, each operation
    must be seen.
    """
    results: dict[Any, Any] = {}

    def remembering(size: Any, other: Any) -> Any:
        environment = size.shape_env
        # PyTorch 2.11 does not count what it finds out.
        found_out = getattr(environment, "_replacements_version_counter", None)
        if found_out is None or get_proxy_mode() is not None:
            return operation(size, other)
        key = (
            environment,
            found_out,
            size._expr, size.pytype, other._expr, other.pytype,
        )  # fmt: skip
        result = results.get(key)
        if result is None:
            result = results[key] = operation(size, other)
        return result

    return remembering
