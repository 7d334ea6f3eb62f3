"""The lines that mutants.py breaks, and the tests that should notice, are where it says."""

from __future__ import annotations

from mutants import ROOT, read_mutants

MUTANTS = read_mutants((ROOT / "tests/support/mutants.txt").read_text(encoding="utf-8"))


def test_each_line_is_in_its_file_once() -> None:
    counts = {m.name: (ROOT / m.file).read_text(encoding="utf-8").count(m.line) for m in MUTANTS}
    assert len(counts) == len(MUTANTS)
    assert not {name: count for name, count in counts.items() if count != 1}


def test_the_tests_are_there() -> None:
    for mutant in MUTANTS:
        assert mutant.line != mutant.broken
        for test in mutant.tests:
            file, _, function = test.partition("::")
            text = ROOT / "tests" / file
            assert text.exists(), f"{mutant.name}: {file}"
            assert not function or f"def {function}(" in text.read_text(encoding="utf-8"), test
