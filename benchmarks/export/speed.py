"""How long ``dynamo_moe.export`` takes and what it needs, against other ways to an ONNX file.

    python -m benchmarks.export_time --json result.json --plot result.png

The peers: ``dynamo`` is ``torch.onnx.export(dynamo=True)`` with its defaults; ``dynamo, one node a
layer`` is the same after :func:`dynamo_moe.convert`, with our translation table, so that only the
exporter differs; ``TorchScript`` is ``torch.onnx.export(dynamo=False)``; ``transformers`` is its
``OnnxExporter``. Mixtral's own experts can be exported by none of them, so ``batched_mm`` stands
for them. Who fails is listed with the reason.

Each export has a process of its own, in which a tiny export comes first: it imports what is
imported late and fills caches. Then the model is built, and the export is timed until its file is
on disk; :func:`dynamo_moe.convert` counts as ours. All export without gradients: with them,
``dynamo`` fails on T5's attention ("Cannot view a tensor with shape ..."). Memory is the peak of
the resident set over what it is at the start, when the weights are in memory already.

The exports of a case take turns, each round starting with another. The first file of each runs in
ONNX Runtime on inputs of other sizes (other values, where shapes are static) and is compared with
PyTorch. Those of ``dynamo, one node a layer`` cannot run: only our export adds the nodes' bodies.

The case ``checkpoint`` has the shape of Qwen3-30B-A3B: 48 layers of 128 experts. Its safetensors
file has all 61 GB, but is one hole: no block of it is on disk. Its experts are stored as the model
holds them, so that the ONNX file can refer to every weight where it is. Nothing can be computed
with such weights; the ONNX file is checked by onnx, and for whether it refers to every byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks._export_cases import CASES, Case
from benchmarks._export_report import plot, summary, tables, together
from benchmarks._export_runs import Runner, runner
from benchmarks._timing import record

PACKAGES = ("torch", "transformers", "onnxruntime", "onnx", "onnx-ir", "onnxscript")


def measure(
    case: Case, turns: int, *, quick: bool, folder: Path | None, runs: Runner, console: Console
) -> list[dict[str, Any]]:
    """Runs the exports of a case in turn."""
    jobs = [(row, exporter) for row in case.rows for exporter in row.exporters]
    taken: dict[tuple[str, str], list[dict[str, Any]]] = {
        (row.label, exporter): [] for row, exporter in jobs
    }
    for turn in range(turns):
        first = turn % len(jobs)
        for row, exporter in jobs[first:] + jobs[:first]:
            done = taken[row.label, exporter]
            if any("error" in one for one in done):
                continue
            console.print(f"{case.name}, {row.label}: turn {turn + 1} of {turns}, {exporter}")
            one = runs(case.model, row, exporter, quick, not done, folder)
            if "error" in one:
                console.print(f"  {one['error']}", markup=False)
            done.append(one)
    return [
        {
            "label": row.label,
            "blocks": row.blocks,
            "batch": row.batch,
            "length": row.length,
            "dynamic": row.dynamic,
            "exporters": {
                exporter: together(taken[row.label, exporter]) for exporter in row.exporters
            },
        }
        for row in case.rows
    ]


def merged(known: Sequence[Any], new: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The cases of two runs in their usual order, the new ones in place of the known."""
    by_name = {case["name"]: case for case in (*known, *new)}
    return [by_name[case.name] for case in CASES if case.name in by_name]


def main(
    turns: Annotated[int, typer.Option(min=1, help="Processes of each export.")] = 1,
    case: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    folder: Annotated[Path | None, typer.Option(help="Write the files in it.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models, one cold turn.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw results here.")] = None,
) -> None:
    """Times exports to ONNX, ours and others."""
    console = Console(width=160, highlight=False)
    chosen = [one for one in CASES if case.lower() in one.name.lower()]
    if not chosen:
        names = ", ".join(one.name for one in CASES)
        raise typer.BadParameter(f"no case contains {case!r}; there are {names}")
    turns = 1 if quick else turns
    # With --case, the file's other cases stay.
    known: list[Any] = []
    if case and json_file is not None and json_file.exists():
        known = json.loads(json_file.read_text())["cases"]
    new: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    with runner(quick) as runs:
        for one in chosen:
            conditions = record(PACKAGES) | {"turns": turns, "quick": quick}
            size = one.shrunk() if quick else one
            rows = measure(size, turns, quick=quick, folder=folder, runs=runs, console=console)
            new.append({"name": one.name, "run": conditions, "rows": rows})
            result = {"cases": merged(known, new)}
            result["summary"] = summary(result["cases"])
            # After each case: a long run that is broken off is not lost.
            if json_file is not None:
                json_file.write_text(json.dumps(result, indent=2) + "\n")
    console.print(tables(result["cases"]))
    console.print_json(data=result["summary"])
    if plot_file is not None:
        plot(result, plot_file)


if __name__ == "__main__":
    typer.run(main)
