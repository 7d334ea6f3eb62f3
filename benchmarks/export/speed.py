"""How long does an export take, and how much memory, against other exporters?

    python -m benchmarks.export.speed --json result.json --plot result.png

The peers: ``dynamo`` is ``torch.onnx.export(dynamo=True)`` with its defaults; ``dynamo, one node a
layer`` is the same after :func:`dynamo_moe.convert`, with our translation table, so that only the
exporter differs; ``TorchScript`` is ``torch.onnx.export(dynamo=False)``; ``transformers`` is its
``OnnxExporter``. Mixtral's own experts can be exported by none of them, so ``batched_mm`` stands
for them. Exporters that fail are listed with the reason.

Each export has a process of its own, in which a tiny export comes first: it imports what is
imported late and fills caches. Rows named "first of the process" do without, and count what the
export imports, ``dynamo_moe`` itself included. Then the model is built, and the export is timed
until its file is on disk; :func:`dynamo_moe.convert` counts as ours.
Writing weights is part of that time, and stands beside it for ours. A peer's export is left out
where its time for fewer blocks makes one of more than ``--limit`` seconds likely. All export
without gradients: with them, ``dynamo`` fails on T5's attention ("Cannot view a tensor with shape
..."). Memory is the peak of the resident set over what it is at the start, when the weights are in
memory already.

The exports of a case take turns, each round starting with another. The first file of each runs in
ONNX Runtime on inputs of other sizes (other values, where shapes are static) and is compared with
PyTorch. Those of ``dynamo, one node a layer`` cannot run: only our export adds the nodes' bodies.

The case ``checkpoint`` has the shape of Qwen3-30B-A3B: 48 layers of 128 experts, and the next one
that of Qwen3-235B-A22B: 94 layers. The safetensors file has all 61 or 470 GB, but is one hole: no
block of it is on disk. Its experts are stored as the model
holds them, so that the ONNX file can refer to every weight where it is. Nothing can be computed
with such weights; onnx checks the ONNX file, and the result says how many bytes it refers to.

A whole run takes twenty minutes on two cores. ``--case`` runs one case and keeps the others
of ``--json``, so that a run can be split. How times grow with the blocks shows best in several
``--turns`` of our export ``--alone``, which leaves language models' weights linked in more rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.common.onnx_files import PACKAGES
from benchmarks.common.plots import SMALL, panels, ratio_bars
from benchmarks.common.timing import turns
from benchmarks.export.cases import CASES, COLORS, OURS, Case, Row
from benchmarks.export.runs import OWN_STEPS, Runner, runner

MAX_ERROR = 1e-3
# The limits for exports of large checkpoints: seconds and bytes.
GOALS = {"checkpoint": (60, 2e9), "Qwen3-235B-A22B": (15, 2e9)}
# The limit for a deep model's time over that of the shallowest.
GOAL_GROWTH = 1.6
BY_DEPTH = ("Llama", "Mixtral", "Qwen3-MoE", "Swin-MoE")

_PER_TURN = ("seconds", "cpu seconds", "peak bytes", "first export s", "writing s")


def measure(
    case: Case,
    rounds: int,
    runs: Runner,
    *,
    quick: bool = False,
    folder: Path | None = None,
    limit: float = math.inf,
) -> list[dict[str, Any]]:
    """Runs the exports of a case in turn, but none of a peer's that would take over ``limit`` s."""
    jobs = [(row, exporter) for row in case.rows for exporter in row.exporters]
    taken: dict[tuple[Row, str], list[dict[str, Any]]] = {job: [] for job in jobs}
    for number, (row, exporter) in turns(jobs, rounds):
        done = taken[row, exporter]
        if any("error" in one for one in done):
            continue
        print(f"{case.name}, {row.label}: turn {number + 1} of {rounds}, {exporter}", flush=True)
        shallower = {
            other.blocks: taken[other, exporter][0].get("seconds", 0.0)
            for other in case.rows
            if other.blocks < row.blocks and taken.get((other, exporter))
        }
        expected = expected_seconds(row.blocks, shallower)
        if exporter != OURS and expected > limit:
            one = {"error": f"not run: {expected:.0f} s are expected, more than {limit:g}"}
        else:
            one = runs(case.model, row, exporter, quick, not done, folder)
        if "error" in one:
            print(f"  {one['error']}")
        done.append(one)
    return [
        {key: getattr(row, key) for key in ("label", "blocks", "batch", "length", "dynamic")}
        | {"exporters": {exporter: together(taken[row, exporter]) for exporter in row.exporters}}
        for row in case.rows
    ]


def expected_seconds(blocks: int, shallower: Mapping[int, float]) -> float:
    """Returns how long a model may take, given the times of others with fewer blocks."""
    return max((seconds * blocks / fewer for fewer, seconds in shallower.items()), default=0.0)


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
    """Returns ratios to ours, and how much times of ours grow and spread."""
    result: dict[str, Any] = {
        "time / ours": {},
        "memory / ours": {},
        "growth": {"goal": GOAL_GROWTH},
    }
    for case in cases:
        for row in case["rows"]:
            for key, title in (("seconds", "time / ours"), ("peak bytes", "memory / ours")):
                if peers := ratios(row, key):
                    result[title][f"{case['name']}, {row['label']}"] = peers
        ours = [row["exporters"][OURS] for row in _rows(case)]
        if case["name"] == "example size" and ours:
            sizes = result["example size"] = {}
            for title, key in (("time", "seconds"), ("memory", "peak bytes")):
                between = spread([_median(one, key) for one in ours])
                sizes[f"{title} between sizes, percent"] = between
                sizes[f"{title} between turns of a size, percent"] = statistics.median(
                    spread(one[key]["turns"]) for one in ours
                )
        if case["name"] in GOALS and ours:
            seconds, peak = GOALS[case["name"]]
            result[case["name"]] = {
                "seconds": max(_median(one, "seconds") for one in ours),
                "peak bytes": max(_median(one, "peak bytes") for one in ours),
                "goal": {"seconds": seconds, "peak bytes": peak},
            }
        if case["name"] in BY_DEPTH:
            result["growth"] |= growth(case)
    return result


def growth(case: Mapping[str, Any]) -> dict[str, float]:
    """Returns times of ours over that of the model with the fewest blocks, without writing."""
    found: dict[str, float] = {}
    least: dict[str, float] = {}
    for row in _rows(case):
        kind, comma, depth = row["label"].rpartition(", ")
        if not depth.endswith("blocks"):
            continue
        seconds = _without_writing(row["exporters"][OURS])
        first = least.setdefault(kind, seconds)
        if first != seconds:
            found[f"{case['name']}, {kind}{comma}{depth}"] = seconds / first
    return found


def _without_writing(found: Mapping[str, Any]) -> float:
    turns = zip(found["seconds"]["turns"], found["writing s"]["turns"], strict=True)
    return float(statistics.median(seconds - writing for seconds, writing in turns))


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
            slower, memory = ratios(row, "seconds"), ratios(row, "peak bytes")
            for name, one in row["exporters"].items():
                if "error" in one:
                    print(f"{label}, {name} failed: {one['error']}")
                    continue
                error = one.get("max relative error")
                rows.append([
                    label,
                    name,
                    f"{_median(one, 'seconds'):.1f}",
                    f"{_median(one, 'writing s'):.1f}" if "writing s" in one else None,
                    f"{slower[name]:.2f}" if name in slower else None,
                    f"{_median(one, 'cpu seconds'):.1f}",
                    f"{_median(one, 'peak bytes') / 1e6:.0f}",
                    f"{memory[name]:.2f}" if name in memory else None,
                    one.get("nodes"),
                    None if error is None else f"{error:.0e}",
                    remarks(one),
                ])  # fmt: skip
    numbers = [
        "time, s",
        "writing, s",
        "x ours",
        "CPU, s",
        "memory, MB",
        "x ours",
        "nodes",
        "error",
    ]
    print(report.table("exports", ["case", "exporter", *numbers, "remarks"], rows))


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
        for row in case["rows"]
        if ratios(row, "seconds") and ratios(row, "peak bytes")
    ]
    wanted: list[tuple[Callable[..., None], Sequence[Mapping[str, Any]]]] = [
        (partial(_draw_ratios, key="seconds"), compared),
        (partial(_draw_ratios, key="peak bytes"), compared),
        *((partial(_draw_growth, title=name), _by_depth(cases.get(name))) for name in BY_DEPTH),
        (_draw_sizes, _rows(cases.get("example size"))),
    ]
    drawn = [(draw, rows) for draw, rows in wanted if rows]
    bars = sum(len(ratios(row, "seconds")) + 1 for row in compared)
    height = max(4.8, 0.09 * bars)  # The two panels of ratios stand side by side.
    with panels(path, len(drawn), 2, (7.5, height), _title(result["cases"])) as axes:
        for panel, (draw, rows) in zip(axes, drawn, strict=True):
            draw(panel, rows)
            panel.legend(fontsize=SMALL)


def _title(cases: Sequence[Mapping[str, Any]]) -> str:
    if not cases:
        return ""
    one = cases[-1]["run"]
    versions = one["versions"]
    machines = sorted({f"{case['run']['cpu']}, {case['run']['cores']} cores" for case in cases})
    turns = sorted({case["run"]["turns"] for case in cases})
    return (
        f"PyTorch {versions['torch']}, onnxscript {versions['onnxscript']}, transformers "
        f"{versions['transformers']}; {' or '.join(machines)}; turns: "
        f"{' or '.join(map(str, turns))}; {one['date'][:10]}{', quick' * one['quick']}"
    )


def _rows(case: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The rows of which ours did not fail."""
    rows = case["rows"] if case else []
    return [row for row in rows if "error" not in row["exporters"][OURS]]


def _draw_ratios(panel: Any, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    groups = []
    for row in rows:
        median = _median(row["exporters"][OURS], key)
        ours = f"{median:.3g} s" if key == "seconds" else f"{median / 1e6:.0f} MB"
        groups.append((f"{row['label']} (ours: {ours})", ratios(row, key)))
    ratio_bars(panel, groups, COLORS)
    titles = {
        "seconds": "export time / ours (right: slower than ours)",
        "peak bytes": "peak memory over the start / ours",
    }
    panel.set_title(titles[key])


def _by_depth(case: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The rows that differ in depth alone, of which a model of several stages has one kind."""
    rows = [row for row in _rows(case) if row["label"].endswith("blocks")]
    return [row for row in rows if ", " not in row["label"] or row["label"].startswith("stage 3")]


def _draw_growth(panel: Any, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    from matplotlib.ticker import LogLocator

    for name, color in COLORS.items():
        points = [
            (row["blocks"], _median(row["exporters"][name], "seconds"))
            for row in rows
            if "error" not in row["exporters"].get(name, {"error": ""})
        ]
        if points:
            panel.plot(*zip(*points, strict=True), "o-", color=color, label=name)
    points = [(row["blocks"], _without_writing(row["exporters"][OURS])) for row in rows]
    label = f"{OURS}, without writing weights"
    panel.plot(*zip(*points, strict=True), "--", color=COLORS[OURS], label=label)
    ticks = [row["blocks"] for row in rows]
    panel.set(
        title=f"{title}: export time", xlabel="blocks", ylabel="s", xscale="log", yscale="log"
    )
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.set_xticks(ticks, map(str, ticks))
    panel.minorticks_off()


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


def main() -> None:
    """Times exports to ONNX, ours and others."""
    known = report.parser(__doc__, "json", "plot")
    known.add_argument(
        "--limit",
        type=float,
        default=60,
        help="seconds that a peer's export may be expected to take",
    )
    known.add_argument("--turns", type=int, default=1, help="processes of each export")
    known.add_argument("--case", default="", help="only cases whose name contains this")
    known.add_argument("--alone", action="store_true", help="our export only")
    known.add_argument("--folder", type=Path, help="where to write the files")
    known.add_argument("--quick", action="store_true", help="tiny models, one turn, no warm-up")
    given = report.parse(known, plot)
    chosen = report.matching_cases(known, CASES, given.case)
    rounds = 1 if given.quick else given.turns
    new: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    with runner(given.quick) as runs:
        for case in chosen:
            run = report.conditions(PACKAGES) | {"turns": rounds, "quick": given.quick}
            size = case.shrunk() if given.quick else case
            size = size.alone() if given.alone else size
            rows = measure(
                size, rounds, runs, quick=given.quick, folder=given.folder, limit=given.limit
            )
            new.append({"name": case.name, "run": run, "rows": rows})
            cases = report.merged(new, CASES, given)
            result = {"cases": cases, "summary": summary(cases)}
            # Written after each case: a long run that is interrupted is not lost.
            report.write_json(given.json, result)
    show(result["cases"])
    if given.plot:
        plot(result, given.plot)


if __name__ == "__main__":
    main()
