"""What does it take to write the files of several ranks of a checkpoint like Qwen3-235B-A22B?

    python -m benchmarks.export.rank_files --json result.json

The checkpoint has the shape of Qwen3-235B-A22B in bfloat16, and is one hole on disk: no weights
exist. Its experts are stacked, as transformers' models have them, so each rank's file links its own
rows.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.report import conditions, parser, table, write_json
from benchmarks.common.timing import fresh_processes, resident_bytes
from benchmarks.export.cases import Row
from benchmarks.export.models import Checkpoint

PACKAGES = ("torch", "transformers", "onnx-ir", "onnxscript", "safetensors")
LAYERS = 94


def export(checkpoint: Path, ranks: int | None) -> dict[str, Any]:
    """Exports in this process, which should be new, and returns what that took."""
    import onnx

    import dynamo_moe

    started = time.perf_counter()
    model = dynamo_moe.open_checkpoint(checkpoint)
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(
        model, checkpoint / "model.onnx", external_data=True, link_weights=True, ranks=ranks
    )
    figures = {
        "seconds": time.perf_counter() - started,
        "peak bytes": resident_bytes(peak=True),
        "bytes of the files": report.file_bytes,
    }
    linked = []
    for file in (file for file in report.files if file.suffix == ".onnx"):
        tensors = onnx.load(file, load_external_data=False).graph.initializer
        facts = [{e.key: e.value for e in t.external_data} for t in tensors if t.external_data]
        linked.append(sum(int(each["length"]) for each in facts))
    return {**figures, "most bytes of a rank": max(linked), "least bytes of a rank": min(linked)}


def main() -> None:
    """Exports for different numbers of ranks, prints a table, and writes the figures."""
    known = parser(__doc__, "json")
    known.add_argument("--folder", type=Path, help="a disk to work on")
    known.add_argument("--ranks", default="1,2,8", help="numbers of ranks; 1 is one file")
    given = known.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        row = Row("logits", blocks=LAYERS, quick=True)
        checkpoint = Checkpoint(row, tiny=False, width=4096, heads=64)
        checkpoint.prepare("ours", folder)
        for ranks in map(int, given.ranks.split(",")):
            with fresh_processes() as processes:
                job = processes.submit(export, folder, None if ranks == 1 else ranks)
                found[str(ranks)] = job.result()
    columns = ["ranks", *next(iter(found.values()))]
    rows = [[ranks, *figures.values()] for ranks, figures in found.items()]
    print(table(f"Qwen3-235B-A22B's shape, {checkpoint.bytes:,} bytes", columns, rows))
    facts = {"checkpoint bytes": checkpoint.bytes, "ranks": found}
    write_json(given.json, {**conditions(PACKAGES), **facts})


if __name__ == "__main__":
    main()
