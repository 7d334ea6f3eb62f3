"""The marks ``pairwise``, ``each_value``, ``once`` and ``first``: which cases `make test` runs."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from pairs import covering

pytest_plugins = ("pytester",)


def test_every_pair_is_in_one_of_few_rows():
    values = {"path": "abcdef", "activation": "stuvwxy", "dtype": "123", "gated": "yn"}
    rows = [dict(zip(values, row, strict=True)) for row in product(*values.values())]
    chosen = [rows[place] for place in covering(rows)]
    for one, other in combinations(values, 2):
        met = {(row[one], row[other]) for row in chosen}
        assert met == set(product(values[one], values[other]))
    assert 42 <= len(chosen) <= 50 < len(rows)
    assert covering(rows[:1]) == [0]
    once = [rows[place] for place in covering(rows, 1)]
    assert len(once) == 7
    assert all({row[name] for row in once} == set(values[name]) for name in values)


def test_parts_of_a_parameter_are_values_of_their_own(pytester: pytest.Pytester):
    pytester.makeconftest(
        "import pytest\nfrom pairs import mark_the_rest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): mark_the_rest(items)\n"
    )
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.pairwise\n"
        "@pytest.mark.parametrize('form', [{'a': a, 'b': b} for a in (1, 2) for b in (3, 4)])\n"
        "@pytest.mark.parametrize('path', 'xy')\n"
        "def test_form(form, path): pass\n"
        "@pytest.mark.each_value\n"
        "@pytest.mark.parametrize('form', [{'a': 1, 'b': 1}, {'a': 1, 'b': 2}, {'a': 2, 'b': 1}])\n"
        "@pytest.mark.parametrize('path', 'xy')\n"
        "def test_once(form, path): pass\n"
        "@pytest.mark.parametrize('form', [1, 2])\n"
        "@pytest.mark.parametrize('path', 'xy')\n"
        "def test_whole(form, path): pass\n"
        "rare = [pytest.param(name, marks=pytest.mark.once(name)) for name in 'pq']\n"
        "@pytest.mark.pairwise\n"
        "@pytest.mark.parametrize('form', ['r', 's', *rare])\n"
        "@pytest.mark.parametrize('path', 'xy')\n"
        "def test_rare(form, path): pass\n"
        "late = pytest.param(3, marks=pytest.mark.every)\n"
        "@pytest.mark.each_value\n"
        "@pytest.mark.parametrize('path', [late, 1, 2])\n"
        "@pytest.mark.parametrize('form', [late, 1, 2])\n"
        "def test_marked(form, path): pass\n"
        "@pytest.mark.first(2)\n"
        "@pytest.mark.parametrize('model', [late, *'abcd'])\n"
        "def test_models(model): pass\n"
    )
    result = pytester.runpytest_inprocess("-m", "not every", "-W", "ignore")
    result.assert_outcomes(passed=5 + 3 + 4 + 6 + 2 + 2, deselected=3 + 3 + 2 + 7 + 3)
    result = pytester.runpytest_inprocess("-m", "once and not every", "-v", "-W", "ignore")
    result.stdout.fnmatch_lines(["*test_rare[[]x-p[]]*", "*test_rare[[]y-q[]]*"])
