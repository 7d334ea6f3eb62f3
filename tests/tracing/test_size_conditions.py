"""Conditions on sizes: Python answers as sympy does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sympy
from torch.utils._sympy import functions as sizes

from dynamo_moe.tracing.size_conditions import compiled

_S, _T = sympy.symbols("s77 s9", integer=True, positive=True)


@pytest.mark.parametrize(
    "condition",
    [
        sympy.Eq(sizes.Mod(_S + _T, 4), 0),
        sympy.Ne(2 * sizes.Mod(_T - _S + 12, 5) - _S, 1),
        sympy.Eq(sympy.Mod(_S, _T), 0),
        sizes.PythonMod(_S - 7, 3) > 0,
        sympy.Eq(sizes.ModularIndexing(_S + _T, 2, 3), 1),
        sizes.FloorDiv(_S + _T, 4) + 4 - _S > 2 * sizes.FloorDiv(_T - _S, 3),
        sympy.Eq(sizes.CeilDiv(_S, 3), _T),
        sizes.Max(1, _S - _T) < sizes.Min(_S, 5),
        (_S > 2) & (_T < 4) | sympy.Not(sympy.Eq(_S, 7)),
        sympy.Piecewise((_S > 3, _T > 2), (_S < 8, True)),
        _T / 3 + sympy.Rational(1, 3) < _S / 3,
        sympy.Eq(sympy.sqrt(_S) * sympy.sqrt(_T), 6),
        abs(_S - _T) > 2,
        sizes.PowByNatural(_S, 2) < 20,
        # Python has none of these.
        sizes.TruncToInt(sizes.IntTrueDiv(_S, 3)) > 1,
        sizes.FloorToInt(sizes.FloatTrueDiv(sizes.ToFloat(_S), 3.0)) > sizes.ToFloat(_T),
    ],
    ids=str,
)
def test_conditions_as_functions_are_sympys(condition: Any) -> None:
    symbols, function = compiled(condition)
    answers = [
        (function(*map({_S: s, _T: t}.get, symbols)), condition.subs({_S: s, _T: t}))
        for s, t in itertools.product(range(1, 13), repeat=2)
    ]
    assert all(type(answer) is bool and answer == bool(right) for answer, right in answers)
    assert len({answer for answer, _ in answers}) == 2
    assert function(*[None] * len(symbols)) is None


def test_a_part_that_has_no_answer() -> None:
    """It may be of no importance, and so may a size that is not known."""
    symbols, function = compiled((_T <= 3) | sympy.Eq(sizes.Mod(_S, _T - 3), 0))
    assert symbols == [_S, _T]
    assert [function(7, 3), function(7, 5), function(8, 5), function(None, 2)] == [
        True,
        False,
        True,
        True,
    ]


def test_a_condition_that_has_no_answer() -> None:
    symbols, function = compiled(sympy.Eq(sizes.Mod(_S, _T - 3), 0))
    assert [function(*map({_S: 6, _T: t}.get, symbols)) for t in (3, 4, 5, 7)] == [
        None,
        True,
        True,
        False,
    ]
