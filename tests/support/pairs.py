"""Few cases of a product: the marks ``pairwise``, ``each_value``, ``once`` and ``first``.

Most defects are of one value, or of two that meet. A full product of seven activations, six paths
and nine pairs of dtypes repeats each such meeting dozens of times. With ``pairwise`` a test's cases
hold every pair of values, with ``each_value`` every value; `make test-all` runs the others too.

A value with the mark ``once(name)`` meets nothing: it is in one case of each test. So an activation
that is a function of one number costs one case, and not one for each path and dtype.

Of a test with ``first(count)``, whose cases are many of a kind, such as models, the first are run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations_with_replacement
from typing import Any

import pytest

# How many values of a test's cases meet.
_STRENGTHS = {"each_value": 1, "pairwise": 2}


def covering(rows: Sequence[Mapping[str, str]], strength: int = 2) -> list[int]:
    """Returns the places of rows that hold every pair of two columns' values that any row holds.

    Greedy, and the same every time: the next is the first of those that add the most pairs.

    Args:
        rows: Each with the same columns.
        strength: 2 for pairs, 1 for single values.
    """
    pairs = [set(combinations_with_replacement(row.items(), strength)) for row in rows]
    missing = set().union(*pairs)
    places = []
    while missing:
        place = max(range(len(rows)), key=lambda index: len(pairs[index] & missing))
        missing -= pairs[place]
        places.append(place)
    return sorted(places)


def mark_the_rest(items: Sequence[pytest.Item]) -> None:
    """Marks cases of tests with these marks as ``every`` that add nothing."""
    for alike in _marked_once(items).values():
        for number, cases in enumerate(alike.values()):
            # Spread over the other values: another path or dtype for each name.
            chosen = number * len(cases) // len(alike)
            for place, case in enumerate(cases):
                if place != chosen:
                    case.add_marker(pytest.mark.every)
    seen: Counter[object] = Counter()
    for item in items:
        first = item.get_closest_marker("first")
        if first and isinstance(item, pytest.Function) and not item.get_closest_marker("every"):
            seen[item.function] += 1
            if seen[item.function] > first.args[0]:
                item.add_marker(pytest.mark.every)
    for mark, strength in _STRENGTHS.items():
        tests: dict[object, list[pytest.Function]] = {}
        for item in items:
            if (
                isinstance(item, pytest.Function)
                and item.get_closest_marker(mark)
                and not item.get_closest_marker("once")
                and not item.get_closest_marker("every")
            ):
                tests.setdefault(item.function, []).append(item)
        for cases in tests.values():
            rows = [_columns(case.callspec.params, parts=strength > 1) for case in cases]
            names = sorted(set().union(*rows))
            full = [{name: row.get(name, "") for name in names} for row in rows]
            for place in set(range(len(cases))) - set(covering(full, strength)):
                cases[place].add_marker(pytest.mark.every)


def _marked_once(items: Sequence[pytest.Item]) -> dict[object, dict[str, list[pytest.Function]]]:
    """Returns the cases with the mark ``once``, by test and name."""
    tests: dict[object, dict[str, list[pytest.Function]]] = {}
    for item in items:
        mark = item.get_closest_marker("once")
        if mark and isinstance(item, pytest.Function):
            tests.setdefault(item.function, {}).setdefault(mark.args[0], []).append(item)
    return tests


def _columns(parameters: Mapping[str, Any], *, parts: bool) -> dict[str, str]:
    """Returns a case's parameters; with ``parts``, mappings and dataclasses by their parts."""
    row: dict[str, str] = {}
    for name, value in parameters.items():
        values: Mapping[str, Any] = {"": value}
        if parts and isinstance(value, Mapping):
            values = value
        elif parts and is_dataclass(value):
            values = {field.name: getattr(value, field.name) for field in fields(value)}
        row |= {f"{name}.{part}": repr(item) for part, item in values.items()}
    return row
