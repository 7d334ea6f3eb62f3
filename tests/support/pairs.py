"""Few cases of a product that hold every pair of its values: the mark ``pairwise``.

Most defects are of one value, or of two that meet. A full product of seven activations, six paths
and nine pairs of dtypes repeats each such meeting dozens of times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations_with_replacement
from typing import Any

import pytest


def covering(rows: Sequence[Mapping[str, str]]) -> list[int]:
    """Returns the places of rows that hold every pair of two columns' values that any row holds.

    Greedy, and the same every time: the next is the first of those that add the most pairs.

    Args:
        rows: Each with the same columns.
    """
    pairs = [set(combinations_with_replacement(row.items(), 2)) for row in rows]
    missing = set().union(*pairs)
    places = []
    while missing:
        place = max(range(len(rows)), key=lambda index: len(pairs[index] & missing))
        missing -= pairs[place]
        places.append(place)
    return sorted(places)


def mark_the_rest(items: Sequence[pytest.Item]) -> None:
    """Marks those cases of tests with the mark ``pairwise`` as ``every`` that add no pair."""
    tests: dict[object, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairwise"):
            tests.setdefault(item.function, []).append(item)
    for cases in tests.values():
        rows = [_columns(case.callspec.params) for case in cases]
        names = sorted(set().union(*rows))
        needed = covering([{name: row.get(name, "") for name in names} for row in rows])
        for place in set(range(len(cases))) - set(needed):
            cases[place].add_marker(pytest.mark.every)


def _columns(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns a case's parameters; those that are mappings or dataclasses by their parts."""
    row = {}
    for name, value in parameters.items():
        parts: Mapping[str, Any] = {"": value}
        if isinstance(value, Mapping):
            parts = value
        elif is_dataclass(value):
            parts = {field.name: getattr(value, field.name) for field in fields(value)}
        row |= {f"{name}.{part}": repr(item) for part, item in parts.items()}
    return row
