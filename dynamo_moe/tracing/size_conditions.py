"""Conditions on symbolic sizes as functions of numbers, to ask whether they hold for many sizes."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import sympy
from sympy.printing.lambdarepr import LambdaPrinter

# What PyTorch's functions of sizes are in Python, by their names.
_IN_PYTHON: dict[str, Callable[..., Any]] = {
    "CeilDiv": lambda a, b: -(-a // b),
    "CleanDiv": operator.floordiv,
    "FloorDiv": operator.floordiv,
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "ModularIndexing": lambda base, divisor, modulus: base // divisor % modulus,
    "PythonMod": operator.mod,
}


class _Printer(LambdaPrinter):  # type: ignore[misc]
    """Prints sizes as Python."""

    def _print_Mod(self, expr: Any) -> str:  # noqa: N802  The printer looks for it.
        """Returns a call: sympy's ``%`` is without brackets around PyTorch's remainders."""
        return "Mod({}, {})".format(*map(self.doprint, expr.args))


_PRINTER = _Printer({"allow_unknown_functions": True})


def compiled(condition: Any) -> tuple[list[Any], Callable[..., bool | None]]:
    """Returns a condition's symbols, and a function of their sizes: None if it cannot be told.

    Half of the export of DeepSeek-V4 with its cache was sympy's own substitution, which simplifies
    what it has put in. It answers where Python has no such function.
    """
    symbols = sorted(condition.free_symbols, key=str)
    # Python would round what is no integer.
    is_exact = all(number.is_Integer for number in condition.atoms(sympy.Rational))
    is_exact &= all(power.exp.is_nonnegative for power in condition.atoms(sympy.Pow))
    function: Callable[..., Any] | None = None
    with contextlib.suppress(Exception):  # sympy's printer raises errors of several kinds.
        function = sympy.lambdify(symbols, condition, [_IN_PYTHON, "math"], _PRINTER)

    def holds(*sizes: int | None) -> bool | None:
        if function is not None and is_exact:
            # A size or a function is unknown, or a remainder by 0 is of no importance.
            with contextlib.suppress(NameError, TypeError, ArithmeticError, ValueError):
                return bool(function(*sizes))
        known = {s: size for s, size in zip(symbols, sizes, strict=True) if size is not None}
        try:
            value = condition.subs(known)
        except (ArithmeticError, ValueError, AssertionError):
            return None
        return {sympy.true: True, sympy.false: False}.get(value)

    return symbols, holds
