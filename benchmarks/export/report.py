"""Tables and pictures of the export benchmark."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks._export_cases import DYNAMO, ONE_NODE, OURS, TORCHSCRIPT, TRANSFORMERS
from benchmarks._export_runs import OWN_STEPS

COLORS = {
    OURS: "#0b6e4f",
    DYNAMO: "#c2570c",
    ONE_NODE: "#f2a65a",
    TORCHSCRIPT: "#3b5bdb",
    TRANSFORMERS: "#9c36b5",
}
MAX_ERROR = 1e-3
# What an export of the case "checkpoint" is to stay below.
GOAL_SECONDS, GOAL_BYTES = 60, 2e9


_PER_TURN = ("seconds", "cpu seconds", "peak bytes", "first export s")


def together(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of an exporter's turns, with each turn's value, and what its first turn found."""
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
    """What the cases come to: ratios, spreads, growth."""
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


def tables(cases: Sequence[Mapping[str, Any]]) -> Table:
    """All of it, a row an exporter."""
    numbers = ("time, s", "x ours", "CPU, s", "memory, MB", "x ours", "nodes", "error")
    table = Table("case", "exporter")
    for title in numbers:
        table.add_column(title, justify="right")
    table.add_column("remarks", overflow="fold")
    for case in cases:
        for row in case["rows"]:
            times, memory = ratios(row, "seconds"), ratios(row, "peak bytes")
            for place, (name, one) in enumerate(row["exporters"].items()):
                head = (f"{case['name']}, {row['label']}" if place == 0 else "", name)
                if "error" in one:
                    table.add_row(*head, *[""] * len(numbers), escape(f"failed: {one['error']}"))
                    continue
                table.add_row(
                    *head,
                    f"{_median(one, 'seconds'):.1f}",
                    f"{times[name]:.2f}" if name in times else "",
                    f"{_median(one, 'cpu seconds'):.1f}",
                    f"{_median(one, 'peak bytes') / 1e6:.0f}",
                    f"{memory[name]:.2f}" if name in memory else "",
                    str(one.get("nodes", "")),
                    f"{one['max relative error']:.0e}" if "max relative error" in one else "",
                    escape(remarks(one)),
                )
    return table


def remarks(found: Mapping[str, Any]) -> str:
    """What a reader of an exporter's times should know."""
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
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    cases = {case["name"]: case for case in result["cases"]}
    drawn = [
        (draw, chosen)
        for draw, chosen in (
            (_draw_times, [row for case in result["cases"] for row in _compared(case)]),
            (_draw_memory, [row for case in result["cases"] for row in _compared(case)]),
            (_draw_growth, _rows(cases.get("Llama"))),
            (_draw_sizes, _rows(cases.get("example size"))),
        )
        if chosen
    ]
    columns = min(2, len(drawn)) or 1
    lines = math.ceil(len(drawn) / columns) or 1
    figure, panels = plt.subplots(
        lines, columns, figsize=(7.5 * columns, 4.8 * lines), layout="constrained", squeeze=False
    )
    for panel in panels.flat[len(drawn) :]:
        panel.set_visible(False)
    for panel, (draw, chosen) in zip(panels.flat, drawn, strict=False):
        draw(panel, chosen)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(result["cases"]), fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


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


def _compared(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows that have peers, labelled with their case."""
    return [
        {**row, "label": f"{case['name']}, {row['label']}"}
        for row in _rows(case)
        if ratios(row, "seconds") and ratios(row, "peak bytes")
    ]


def _draw_times(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    _bars(panel, rows, "seconds", "{:.3g} s", "export time / ours (right: slower than ours)")


def _draw_memory(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    _bars(panel, rows, "peak bytes", "{:.0f} MB", "peak memory over the start / ours", 1e-6)


def _bars(
    panel: Any, rows: Sequence[Mapping[str, Any]], key: str, ours: str, title: str, unit: float = 1
) -> None:
    labels, place, seen = {}, 0.0, set()
    for row in rows:
        found = ratios(row, key)
        middle = place + (len(found) - 1) / 2
        labels[middle] = f"{row['label']}\nours: " + ours.format(
            _median(row["exporters"][OURS], key) * unit
        )
        for name, ratio in found.items():
            label = None if name in seen else name
            seen.add(name)
            # From ours at 1: a bar to the right is more than ours.
            panel.barh(place, ratio - 1, 0.85, left=1, color=COLORS[name], label=label)
            panel.annotate(
                f"{ratio:.2g}",
                (ratio, place),
                (3 if ratio >= 1 else -3, 0),
                textcoords="offset points",
                ha="left" if ratio >= 1 else "right",
                va="center",
                fontsize=7.5,
            )
            place += 1
        place += 0.8
    panel.axvline(1, color=COLORS[OURS], linewidth=2, label="ours")
    panel.set(xscale="log", title=title)
    panel.margins(x=0.12)
    low, high = panel.get_xlim()
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_yticks(list(labels), list(labels.values()), fontsize=7.5)
    panel.invert_yaxis()
    panel.legend(fontsize=7.5)


_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


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
