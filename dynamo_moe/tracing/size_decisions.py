"""What a model decides by sizes that should be symbolic, noted while it is traced.

``int(math.ceil(1.25 * tokens))`` or ``if tokens > 8:`` need a number. PyTorch gives them that of
the example, and notes a condition under which the trace holds. This is the one module that uses
private names to read such conditions; where they are not known, the ranges of the traced program's
sizes are read, without the places in the model.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import sympy
import torch
from torch.export import ExportedProgram

from dynamo_moe.tracing.known_torch import is_known

try:
    from torch._guards import TracingContext, detect_fake_mode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
except ImportError:  # A version of PyTorch that has rearranged its symbolic sizes.
    ShapeEnv = None  # type: ignore[assignment, misc]

__all__ = ["Decision", "decisions_noted", "decisions_of"]

_LOG_GUARD = "_log_guard"
_HERE = Path(__file__).parent
# Where traces begin, and files whose frames are not the model's.
_BEGINNINGS = (str(_HERE / "capture.py"), str(_HERE / "decomposition.py"))
_OTHERS = (
    str(Path(torch.__file__).parent),
    str(_HERE / "tracing_costs.py"),
    __file__,
    "<",
)


class Decision(NamedTuple):
    """A condition on symbolic sizes that the trace depends on.

    Attributes:
        condition: True for the example's sizes.
        place: The line of the model, as ``file:line: source``; empty if unknown.
    """

    condition: Any
    place: str

    def fixes_a_size(self) -> bool:
        """Whether the condition leaves a symbol one value."""
        one, other = (*self.condition.args, None, None)[:2]
        return isinstance(self.condition, sympy.Eq) and (
            (one.is_Symbol and other.is_Integer) or (one.is_Integer and other.is_Symbol)
        )


_noted: ContextVar[list[Decision] | None] = ContextVar("noted", default=None)


class _Watch:
    """Wraps the method that every condition passes, as long as somebody watches."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._watchers = 0
        self._original: Any = None

    def change(self, more: int) -> None:
        patched: Any = ShapeEnv
        with self._lock:
            if not self._watchers:
                self._original = getattr(patched, _LOG_GUARD)
                setattr(patched, _LOG_GUARD, _noting(self._original))
            self._watchers += more
            if not self._watchers:
                setattr(patched, _LOG_GUARD, self._original)


_watch = _Watch()


@contextmanager
def decisions_noted() -> Iterator[list[Decision]]:
    """Notes the decisions of what is traced meanwhile, in this thread."""
    noted: list[Decision] = []
    token = _noted.set(noted)
    known = ShapeEnv is not None and is_known() and hasattr(ShapeEnv, _LOG_GUARD)
    if known:
        _watch.change(1)
    try:
        yield noted
    finally:
        if known:
            _watch.change(-1)
        _noted.reset(token)


def decisions_of(program: ExportedProgram, noted: Sequence[Decision]) -> list[Decision]:
    """Returns the different decisions of a program by its inputs' sizes.

    Args:
        program: The program.
        noted: What was noted as it was traced.
    """
    if not noted:
        noted = [
            Decision(sympy.And(symbol >= values.lower, symbol <= values.upper), "")
            for symbol, values in program.range_constraints.items()
        ]
    mode: Any = detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
    if mode is not None and program.tensor_constants:
        # What is computed of sizes and a tensor made in Python is computed once, unnoticed.
        known = (
            "backed_var_to_val" if hasattr(mode.shape_env, "backed_var_to_val") else "var_to_val"
        )
        sizes = getattr(mode.shape_env, known, {}).items()
        symbols = set(program.range_constraints)
        example = [Decision(sympy.Eq(s, size), "") for s, size in sizes if s in symbols]
        noted = [*noted, *example]
    found: dict[Any, Decision] = {}
    for condition, place in noted:
        # Sizes that turned out to be equal since have one symbol.
        current = condition if mode is None else mode.shape_env.replace(condition)
        found.setdefault(current, Decision(current, place))
    return list(found.values())


def _noting(original: Any) -> Any:
    def noting(environment: Any, prefix: str, condition: Any, *args: Any, **options: Any) -> None:
        noted = _noted.get()
        if noted is not None and "suppressed" not in prefix:
            noted.append(Decision(condition, _place()))
        original(environment, prefix, condition, *args, **options)

    return noting


def _place() -> str:
    """Returns the innermost line that is the model's."""
    for file, line in _stack():
        if file in _BEGINNINGS:
            break
        if not file.startswith(_OTHERS):
            return f"{file}:{line}: {linecache.getline(file, line).strip()}"
    return ""


def _stack() -> Iterator[tuple[str, int]]:
    """Yields files and lines, the innermost first."""
    traced = TracingContext.extract_stack()  # Of code that Dynamo reads and does not run.
    yield from ((entry.filename, entry.lineno or 0) for entry in reversed(traced))
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
