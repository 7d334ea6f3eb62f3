"""Decisions of a model by sizes that should be symbolic, noted while it is traced.

``int(math.ceil(1.25 * tokens))`` or ``if tokens > 8:`` need a number. PyTorch gives them that of
the example, and notes a condition under which the trace holds. Where such conditions cannot be
read, the ranges of the traced program's sizes are, which do not name the lines of the model.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import sympy
import torch
from torch.export import ExportedProgram

from dynamo_moe.private import tracer

_HERE = Path(__file__).parent
# Where traces begin, and files whose frames are not the model's.
_BEGINNINGS = tuple(str(_HERE / f"{name}.py") for name in ("capture", "decomposition", "nodes"))
_OURS = (Path(tracer.__file__).parent, _HERE, _HERE.parent / "conversion")
_OTHERS = (str(Path(torch.__file__).parent), *map(str, _OURS), "<")


class Decision(NamedTuple):
    """A condition on symbolic sizes that the trace depends on.

    Attributes:
        condition: True for the example's sizes.
        line: The line of the model, as ``file:line: source``; empty if unknown.
    """

    condition: Any
    line: str

    def fixes_a_size(self) -> bool:
        """Whether the condition leaves a symbol one value."""
        sides = self.condition.args
        return isinstance(self.condition, sympy.Eq) and any(
            one.is_Symbol and other.is_Integer for one, other in (sides, sides[::-1])
        )


_noted: ContextVar[list[Decision] | None] = ContextVar("noted", default=None)


def _note(condition: Any, kind: str) -> None:
    noted = _noted.get()
    if noted is not None and "suppressed" not in kind:
        noted.append(Decision(condition, line_of_model()))


_watched = tracer.sizes_watched(_note)


@contextmanager
def decisions_noted() -> Iterator[list[Decision]]:
    """Collects the decisions of what this thread traces inside the context."""
    noted: list[Decision] = []
    token = _noted.set(noted)
    try:
        with _watched() if tracer.missing() is None else nullcontext():
            yield noted
    finally:
        _noted.reset(token)


def decisions_of(program: ExportedProgram, noted: Sequence[Decision]) -> list[Decision]:
    """Returns the different decisions of a program by its inputs' sizes, noted as it was traced."""
    if not noted:
        noted = [
            Decision(sympy.And(symbol >= values.lower, symbol <= values.upper), "")
            for symbol, values in program.range_constraints.items()
        ]
    mode = tracer.fake_mode(program)
    if mode is not None and program.graph_signature.lifted_tensor_constants:
        # What is computed of sizes and a tensor made in the forward is computed once, unnoticed.
        # A model's own buffers are no such tensors, though ``tensor_constants`` has some of them.
        sizes = mode.shape_env.backed_var_to_val
        symbols = [symbol for symbol in sizes if symbol in program.range_constraints]
        noted = [*noted, *(Decision(sympy.Eq(symbol, sizes[symbol]), "") for symbol in symbols)]
    decisions: dict[Any, Decision] = {}
    for condition, line in noted:
        # Sizes that turned out to be equal since have one symbol.
        current = condition if mode is None else mode.shape_env.replace(condition)
        decisions.setdefault(current, Decision(current, line))
    return list(decisions.values())


def line_of_model() -> str:
    """Returns the innermost line that is the model's."""
    for file, line in tracer.stack():
        if file in _BEGINNINGS:
            break
        if not file.startswith(_OTHERS):
            return f"{file}:{line}: {linecache.getline(file, line).strip()}"
    return ""
