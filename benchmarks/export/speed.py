"""How long does an export take, and how much memory, against other exporters?

    python -m benchmarks.export.speed --json result.json --plot result.png

The peers: ``dynamo`` is ``torch.onnx.export(dynamo=True)`` with its defaults; ``dynamo, one node a
layer`` is the same after :func:`dynamo_moe.convert`, with our translation table, so that only the
exporter differs; ``TorchScript`` is ``torch.onnx.export(dynamo=False)``; ``transformers`` is its
``OnnxExporter``. Mixtral's own experts can be exported by none of them, so ``batched_mm`` stands
for them. Exporters that fail are listed with the reason.

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
with such weights; onnx checks the ONNX file, and the result says how many bytes it refers to.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import conditions, matching_cases, parser, read_cases, write_json
from benchmarks.common.timing import turns
from benchmarks.export.cases import CASES, Case
from benchmarks.export.report import plot, show, summary, together
from benchmarks.export.runs import Runner, runner

PACKAGES = ("torch", "transformers", "onnxruntime", "onnx", "onnx-ir", "onnxscript")


def measure(
    case: Case, rounds: int, runs: Runner, *, quick: bool = False, folder: Path | None = None
) -> list[dict[str, Any]]:
    """Runs the exports of a case in turn."""
    jobs = [(row, exporter) for row in case.rows for exporter in row.exporters]
    taken: dict[tuple[str, str], list[dict[str, Any]]] = {
        (row.label, exporter): [] for row, exporter in jobs
    }
    for number, (row, exporter) in turns(jobs, rounds):
        done = taken[row.label, exporter]
        if any("error" in one for one in done):
            continue
        print(f"{case.name}, {row.label}: turn {number + 1} of {rounds}, {exporter}", flush=True)
        one = runs(case.model, row, exporter, quick, not done, folder)
        if "error" in one:
            print(f"  {one['error']}")
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


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    known = parser(__doc__, "json", "plot")
    known.add_argument("--turns", type=int, default=1, help="processes of each export")
    known.add_argument("--case", default="", help="only cases whose name contains this")
    known.add_argument("--folder", type=Path, help="where to write the files")
    known.add_argument("--quick", action="store_true", help="tiny models, one turn, no warm-up")
    given = known.parse_args()
    given.chosen = matching_cases(known, CASES, given.case)
    return given


def main() -> None:
    """Times exports to ONNX, ours and others."""
    given = arguments()
    rounds = 1 if given.quick else given.turns
    # With --case, the file's other cases stay.
    known = read_cases(given.json if given.case else None)
    new: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    with runner(given.quick) as runs:
        for case in given.chosen:
            run = conditions(PACKAGES) | {"turns": rounds, "quick": given.quick}
            size = case.shrunk() if given.quick else case
            rows = measure(size, rounds, runs, quick=given.quick, folder=given.folder)
            new.append({"name": case.name, "run": run, "rows": rows})
            cases = merged(known, new)
            result = {"cases": cases, "summary": summary(cases)}
            # Written after each case: a long run that is interrupted is not lost.
            write_json(given.json, result)
    show(result["cases"])
    if given.plot:
        plot(result, given.plot)


if __name__ == "__main__":
    main()
