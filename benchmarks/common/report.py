"""Command lines, tables, and JSON that says where and with what a number was measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar


def parser(doc: str | None, *outputs: str) -> argparse.ArgumentParser:
    """Returns a parser, described by a docstring's first line, with an option for each output."""
    made = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for output in outputs:
        made.add_argument(f"--{output}", type=Path, help="write results to this file")
    if "plot" in outputs:
        made.add_argument(
            "--redraw", action="store_true", help="measure nothing; draw --plot from --json"
        )
    return made


Result = Mapping[str, Any]


def parse(
    command: argparse.ArgumentParser, plot: Callable[[Result, Path], None]
) -> argparse.Namespace:
    """Reads the command line; where it asks only for the plot, draws it and ends the command."""
    given = command.parse_args()
    if given.redraw:
        if given.json is None or given.plot is None:
            command.error("--redraw needs --json, the results, and --plot, the picture to draw")
        plot(json.loads(given.json.read_text()), given.plot)
        command.exit()
    return given


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
    command: argparse.ArgumentParser, cases: Sequence[CaseT], text: str
) -> list[CaseT]:
    """Returns the cases whose name contains a text; ends the command where there are none."""
    found = [case for case in cases if text.lower() in case.name.lower()]
    if not found:
        names = ", ".join(case.name for case in cases)
        command.error(f"no case contains {text!r}; there are {names}")
    return found


def merged(
    new: Iterable[Result], cases: Iterable[Named], given: argparse.Namespace
) -> list[Result]:
    """Returns results in the order of the cases; with ``--case``, the file's other ones stay."""
    known = []
    if given.case and given.json and given.json.exists():
        known = json.loads(given.json.read_text())["cases"]
    by_name = {result["name"]: result for result in (*known, *new)}
    return [by_name[case.name] for case in cases if case.name in by_name]


def write_json(path: Path | None, result: Result) -> None:
    """Writes results, where a file is asked for, beside it and renamed: the file is whole."""
    if path is not None:
        beside = path.with_name(f".{path.name}")
        beside.write_text(json.dumps(result, indent=2) + "\n")
        beside.replace(path)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table; columns of numbers are aligned to the right, None is empty."""

    def text(cell: object) -> str:
        return "" if cell is None else digits(cell) if isinstance(cell, float) else str(cell)

    body = [[text(cell) for cell in row] for row in rows]
    forms = []
    for cells in zip(columns, *body, strict=True):
        numeric = all(cell[:1] in "-0123456789" for cell in cells[1:])
        forms.append((">" if numeric else "<", max(3, *map(len, cells))))
    rule = ["-" * (width - 1) + (":" if align == ">" else "-") for align, width in forms]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            f"{cell:{align}{width}}" for cell, (align, width) in zip(cells, forms, strict=True)
        ]
        return f"| {' | '.join(aligned)} |"

    return "\n".join([title, "", *map(line, [columns, rule, *body]), ""])


def digits(value: float) -> str:
    """Returns a number with three digits, or all of those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
