"""Command lines, tables, and JSON that says where and with what a number was measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar


def parser(doc: str | None, *outputs: str) -> argparse.ArgumentParser:
    """Returns a parser with an option for each output.

    Args:
        doc: A module's docstring; its first line describes the command.
        outputs: Options that take a file to write, such as ``json`` and ``plot``.
    """
    made = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for output in outputs:
        made.add_argument(f"--{output}", type=Path, help="write results to this file")
    return made


def conditions(packages: Iterable[str]) -> dict[str, Any]:
    """Returns the date, the machine, and the versions of Python and of packages."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
    }


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Named(Protocol):
    """A benchmark's case."""

    @property
    def name(self) -> str:
        """The text that ``--case`` searches."""


CaseT = TypeVar("CaseT", bound=Named)


def matching_cases(
    command: argparse.ArgumentParser, cases: Iterable[CaseT], text: str
) -> list[CaseT]:
    """Returns the cases whose name contains a text; ends the command where there are none."""
    cases = list(cases)
    found = [case for case in cases if text.lower() in case.name.lower()]
    if not found:
        names = ", ".join(case.name for case in cases)
        command.error(f"no case contains {text!r}; there are {names}")
    return found


def read_cases(path: Path | None) -> list[dict[str, Any]]:
    """Returns the cases of an earlier run's results, where there are any."""
    if path is None or not path.exists():
        return []
    cases: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    return cases


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Writes results, where a file is asked for."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table; columns of numbers are aligned to the right.

    Args:
        title: The line above it.
        columns: The columns' titles.
        rows: A cell for each column; None is an empty one.
    """
    body = [["" if cell is None else str(cell) for cell in row] for row in rows]
    by_column = list(zip(columns, *body, strict=True))
    widths = [max(3, *map(len, cells)) for cells in by_column]
    numeric = [all(cell[:1] in "-0123456789" for cell in cells[1:]) for cells in by_column]
    rule = [
        "-" * (width - 1) + ("-", ":")[right] for width, right in zip(widths, numeric, strict=True)
    ]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return f"| {' | '.join(aligned)} |"

    return "\n".join([title, "", line(columns), line(rule), *map(line, body), ""])


def digits(value: float) -> str:
    """Returns a number with three digits, or all of those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
