"""Tables and pictures of the benchmark of exports."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.plots import panels, ratio_bars
from benchmarks.common.report import table
from benchmarks.export.cases import DYNAMO, ONE_NODE, OURS, TORCHSCRIPT, TRANSFORMERS
from benchmarks.export.runs import OWN_STEPS

COLORS = {
    OURS: "#0b6e4f",
    DYNAMO: "#c2570c",
    ONE_NODE: "#f2a65a",
    TORCHSCRIPT: "#3b5bdb",
    TRANSFORMERS: "#9c36b5",
}
MAX_ERROR = 1e-3
# The limits for an export of the case "checkpoint".
GOAL_SECONDS, GOAL_BYTES = 60, 2e9

_PER_TURN = ("seconds", "cpu seconds", "peak bytes", "first export s")


def together(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns medians of an exporter's turns, each turn's value, and what its first turn found."""
    for one in turns:
        if "error" in one:
            return {"error": one["error"]}
    result = {name: value for name, value in turns[0].items() if name not in _PER_TURN}
    for name in _PER_TURN:
        values = [one[name] for one in turns if name in one]
        if values:
            result[name] = {"median": statistics.median(values), "turns": values}
    return result


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns ratios to ours, and how much times of ours spread."""
    result: dict[str, Any] = {"time / ours": {}, "memory / ours": {}}
    for case in cases:
        for row in case["rows"]:
            for key, title in (("seconds", "time / ours"), ("peak bytes", "memory / ours")):
                peers = ratios(row, key)
                if peers:
                    result[title][f"{case['name']}, {row['label']}"] = peers
        ours = _ours(case)
        if case["name"] == "example size" and ours:
            sizes = result["example size"] = {}
            for title, key in (("time", "seconds"), ("memory", "peak bytes")):
                between = spread([_median(one, key) for one in ours])
                sizes[f"{title} between sizes, percent"] = between
                sizes[f"{title} between turns of a size, percent"] = statistics.median(
                    spread(one[key]["turns"]) for one in ours
                )
        if case["name"] == "checkpoint" and ours:
            result["checkpoint"] = {
                "seconds": max(_median(one, "seconds") for one in ours),
                "peak bytes": max(_median(one, "peak bytes") for one in ours),
                "goal": {"seconds": GOAL_SECONDS, "peak bytes": GOAL_BYTES},
            }
    return result


def _ours(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = (row["exporters"][OURS] for row in case["rows"])
    return [one for one in found if "error" not in one]


def _median(found: Mapping[str, Any], key: str) -> float:
    return float(found[key]["median"])


def ratios(row: Mapping[str, Any], key: str) -> dict[str, float]:
    """The peers' medians over ours."""
    found = row["exporters"]
    if "error" in found[OURS]:
        return {}
    ours = _median(found[OURS], key)
    if not ours:  # Memory, in a quick run: an earlier export left enough.
        return {}
    return {
        name: _median(one, key) / ours
        for name, one in found.items()
        if name != OURS and "error" not in one
    }


def spread(values: Sequence[float]) -> float:
    """From the least to the largest, in percent of the median."""
    middle = statistics.median(values)
    return 100 * (max(values) - min(values)) / middle if middle else 0.0


def show(cases: Sequence[Mapping[str, Any]]) -> None:
    """Prints all results, a row an exporter."""
    rows = []
    for case in cases:
        for row in case["rows"]:
            label = f"{case['name']}, {row['label']}"
            times, memory = ratios(row, "seconds"), ratios(row, "peak bytes")
            for name, one in row["exporters"].items():
                if "error" in one:
                    print(f"{label}, {name} failed: {one['error']}")
                    continue
                error = one.get("max relative error")
                rows.append([
                    label,
                    name,
                    f"{_median(one, 'seconds'):.1f}",
                    f"{times[name]:.2f}" if name in times else None,
                    f"{_median(one, 'cpu seconds'):.1f}",
                    f"{_median(one, 'peak bytes') / 1e6:.0f}",
                    f"{memory[name]:.2f}" if name in memory else None,
                    one.get("nodes"),
                    None if error is None else f"{error:.0e}",
                    remarks(one),
                ])  # fmt: skip
    numbers = ["time, s", "x ours", "CPU, s", "memory, MB", "x ours", "nodes", "error"]
    print(table("exports", ["case", "exporter", *numbers, "remarks"], rows))


def remarks(found: Mapping[str, Any]) -> str:
    """Returns what a reader of an exporter's times should know."""
    parts = []
    if "check failed" in found:
        parts.append(f"the file fails: {found['check failed']}")
    if found.get("max relative error", 0) > MAX_ERROR:
        parts.append("the file's results are wrong")
    if found.get("way", OWN_STEPS) != OWN_STEPS:
        parts.append(found["way"])
    if "linked bytes" in found:
        linked, weights = found["linked bytes"], found["weights bytes"]
        parts.append(f"{linked / 1e9:.2f} of {weights / 1e9:.2f} GB linked")
    return "; ".join(parts)


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws what ``--json`` writes: ratios of time and memory, growth, and example sizes."""
    cases = {case["name"]: case for case in result["cases"]}
    compared = [
        {**row, "label": f"{case['name']}, {row['label']}"}
        for case in result["cases"]
        for row in _rows(case)
        if ratios(row, "seconds") and ratios(row, "peak bytes")
    ]
    drawn = [
        (draw, rows)
        for draw, rows in (
            (_draw_times, compared),
            (_draw_memory, compared),
            (_draw_growth, _rows(cases.get("Llama"))),
            (_draw_sizes, _rows(cases.get("example size"))),
        )
        if rows
    ]
    with panels(path, len(drawn), 2, (7.5, 4.8), _title(result["cases"])) as axes:
        for panel, (draw, rows) in zip(axes, drawn, strict=True):
            draw(panel, rows)


def _title(cases: Sequence[Mapping[str, Any]]) -> str:
    if not cases:
        return ""
    one = cases[-1]["run"]
    versions = one["versions"]
    turns = sorted({case["run"]["turns"] for case in cases})
    return (
        f"PyTorch {versions['torch']}, onnxscript {versions['onnxscript']}, transformers "
        f"{versions['transformers']}; {one['cpu']}, {one['cores']} cores, "
        f"medians of {turns[0]} to {turns[-1]} turns, "
        f"{one['date'][:10]}{', quick' * one['quick']}"
    )


def _rows(case: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    rows = case["rows"] if case else []
    return [row for row in rows if "error" not in row["exporters"][OURS]]


def _groups(
    rows: Sequence[Mapping[str, Any]], key: str, ours: str, unit: float = 1
) -> list[tuple[str, dict[str, float]]]:
    return [
        (
            f"{row['label']}\nours: {ours.format(_median(row['exporters'][OURS], key) * unit)}",
            ratios(row, key),
        )
        for row in rows
    ]


def _draw_times(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    ratio_bars(panel, _groups(rows, "seconds", "{:.3g} s"), COLORS)
    panel.set_title("export time / ours (right: slower than ours)")


def _draw_memory(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    ratio_bars(panel, _groups(rows, "peak bytes", "{:.0f} MB", 1e-6), COLORS)
    panel.set_title("peak memory over the start / ours")


def _draw_growth(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for name, color in COLORS.items():
        points = [
            (row["blocks"], _median(row["exporters"][name], "seconds"))
            for row in rows
            if "error" not in row["exporters"].get(name, {"error": ""})
        ]
        if points:
            panel.plot(*zip(*points, strict=True), "o-", color=color, label=name)
    ticks = [row["blocks"] for row in rows]
    panel.set(title="Llama: export time", xlabel="blocks", ylabel="s")
    panel.set_xticks(ticks, map(str, ticks))
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=7.5)


def _draw_sizes(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for key, line in (("seconds", "-"), ("peak bytes", "--")):
        every = [_median(row["exporters"][OURS], key) for row in rows]
        middle = statistics.median(every)
        name = f"{middle:.1f} s" if key == "seconds" else f"{middle / 1e6:.0f} MB"
        for batch, color in zip(
            sorted({row["batch"] for row in rows}), COLORS.values(), strict=False
        ):
            points = [
                (row["length"], 100 * _median(row["exporters"][OURS], key) / middle)
                for row in rows
                if row["batch"] == batch
            ]
            label = f"{'time' if key == 'seconds' else 'memory'}, batch {batch} (100 % = {name})"
            panel.plot(*zip(*points, strict=True), f"o{line}", color=color, label=label)
    panel.set(
        title="ours, T5-small: the example's size",
        xlabel="length of the example",
        ylabel="% of the median of all",
        xscale="log",
        ylim=(0, 150),
    )
    ticks = sorted({row["length"] for row in rows})
    panel.set_xticks(ticks, map(str, ticks))
    panel.minorticks_off()
    panel.legend(fontsize=7.5)
