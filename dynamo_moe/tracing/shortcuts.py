"""Work that PyTorch's tracer repeats for every operator, done once: a third of a capture's time.

A program of 24 transformer blocks formats a stack trace for each node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import fx

from dynamo_moe.private import tracer
from dynamo_moe.process_state import Change, ProcessState, replaced
from dynamo_moe.tracing import remembered_operators, remembered_sizes
from dynamo_moe.tracing.decompositions import COMPOSITES, DECOMPOSITIONS

__all__ = ["capturing", "composites", "decomposing", "savings"]


def savings() -> dict[str, list[Change]]:
    """Returns changes to the tracer by the work that they save.

    ``benchmarks.export.savings`` measures each.
    """
    return {
        "results of operators": tracer.operators_replaced(remembered_operators.remembered),
        "arithmetic of sizes": tracer.sizes_replaced(
            remembered_sizes.remembered,
            remembered_sizes.integers_made_once,
            remembered_sizes.symbols_known,
            remembered_sizes.truths_known,
        ),
        "orders in memory": tracer.orders_in_memory_unasked(),
    }


@contextlib.contextmanager
def _tracing_made_cheap() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for changes in savings().values() if tracer.missing() is None else ():
            for change in changes:
                stack.enter_context(change())
        config = getattr(fx, "config", None)  # From PyTorch 2.12 on.
        if hasattr(config, "do_not_emit_stack_traces"):
            stack.enter_context(replaced(config, "do_not_emit_stack_traces", lambda _: True))
        yield


# A state of its own: captures and decompositions that overlap share one.
_cheap_tracing = ProcessState(_tracing_made_cheap)

composites = ProcessState(
    *(tracer.composite_computed(operator, DECOMPOSITIONS[operator]) for operator in COMPOSITES)
)
"""Computes composites by our own functions wherever PyTorch traces them."""

capturing = ProcessState(
    _cheap_tracing,
    composites,
    tracer.unfused_transformers,
    tracer.sizes_of_one,
    tracer.fractions_unknown,
    tracer.failures_unsaid,
)
"""How PyTorch traces a model for ONNX."""

decomposing = ProcessState(
    _cheap_tracing, composites, tracer.sizes_of_one, tracer.fractions_unknown
)
"""How PyTorch traces single operators of a traced program."""
