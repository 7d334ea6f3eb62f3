"""Whole numbers that a model computes of sizes by way of real ones, such as ``int(0.7 * length)``.

Python computes them in float64, PyTorch's exporter in float32, where 0.7 * 90 is 63 and not just
below it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from onnxscript import DOUBLE, INT64, opset18
from torch import fx

_TO_WHOLE = frozenset({math.ceil, math.floor, math.trunc, round})


def in_float64(module: fx.GraphModule) -> None:
    """Lets whole numbers be computed in float64; what uses real ones keeps those of float32."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            widened: dict[fx.Node, fx.Node] = {}
            for node in [*part.graph.nodes]:
                # Python's round may be asked for digits, and is then no whole number.
                if node.target in _TO_WHOLE and node.args[1:] in {(), (None,)}:
                    node.args = (_widened(node.args[0], widened),)


def _widened(value: Any, widened: dict[fx.Node, fx.Node]) -> Any:
    """Returns a number's twin in float64, and makes it where there is none yet."""
    if not isinstance(value, fx.Node):
        return value
    if value not in widened:
        target: Any = value.target
        args = value.args
        if isinstance(value.meta.get("val"), torch.SymFloat) and target is not torch.sym_float:
            args = tuple(_widened(argument, widened) for argument in args)
            target = _quotient if target is operator.truediv else target
        else:
            target, args = _float64, (value.args[0] if target is torch.sym_float else value,)
        with value.graph.inserting_after(value):
            twin = value.graph.call_function(target, args)
        # The exporter reads a value's type here, and takes a number for a float32.
        twin.meta = {**value.meta, "val": torch.empty((), dtype=torch.float64, device="meta")}
        widened[value] = twin
    return widened[value]


# --- Operators of float64, and their translations ---


def _float64(x: Any) -> Any:
    return torch.sym_float(x)


def _quotient(x: Any, y: Any) -> Any:
    return x / y


# Their annotations are for PyTorch's exporter: it gives constants the dtypes of the parameters.
_op: Any = opset18


def _translated_float64(x: Any) -> Any:
    return _op.Cast(x, to=DOUBLE.dtype)


def _translated_quotient(x: DOUBLE, y: DOUBLE) -> Any:
    return _op.Div(x, y)


def _translated_round(x: DOUBLE) -> Any:
    return _op.Cast(_op.Round(x), to=INT64.dtype)


def _translated_numel(x: Any) -> Any:
    return _op.Size(x)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _float64: _translated_float64,
    _quotient: _translated_quotient,
    round: _translated_round,
    torch.ops.aten.sym_numel.default: _translated_numel,
}
"""By operator, its translation; the exporter has none."""
