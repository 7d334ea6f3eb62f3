"""How much time and memory does it take to export a checkpoint that does not fit in memory?

    python -m benchmarks.export.checkpoint --gigabytes 8

Makes a checkpoint of the shape of Qwen3-MoE (bfloat16, 128 experts), exports it, and copies it,
in turn, from a cold page cache; measures memory in the process that exports, and removes all of it.
"""

from __future__ import annotations

import importlib
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common.report import conditions, parser, write_json
from benchmarks.common.timing import fresh_processes, resident_bytes
from benchmarks.export.models import qwen3_config, safetensors_header, tensor_shapes

PACKAGES = ("torch", "transformers", "onnx-ir", "onnxscript", "safetensors")
MODEL = "transformers.models.qwen3_moe.modeling_qwen3_moe"
EXPERTS = 128
WIDTH, HIDDEN = 1024, 768
BLOCK = 2**24
# A virtual machine may return freed memory to its host within seconds, and getting it back takes
# time. An export traces first and would find less of it than a copy, which begins at once.
SETTLE_S = 20


def make_checkpoint(folder: Path, gigabytes: float) -> int:
    """Writes a checkpoint of about that size; returns the bytes of its weights."""
    layer_bytes = EXPERTS * 3 * WIDTH * HIDDEN * 2
    config = qwen3_config(
        hidden_size=WIDTH, moe_intermediate_size=HIDDEN, intermediate_size=HIDDEN,
        num_hidden_layers=max(1, round(gigabytes * 1e9 / layer_bytes)),
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, vocab_size=32000,
        num_experts=EXPERTS, num_experts_per_tok=8,
    )  # fmt: skip
    config.save_pretrained(folder)
    shapes: dict[str, list[int]] = {}
    for name, shape in tensor_shapes(config).items():
        path, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for expert in range(EXPERTS):
                for part in ("gate_proj", "up_proj"):
                    shapes[f"{path}.{expert}.{part}.weight"] = [HIDDEN, WIDTH]
        elif kind == "down_proj":
            for expert in range(EXPERTS):
                shapes[f"{path}.{expert}.{kind}.weight"] = [WIDTH, HIDDEN]
        else:
            shapes[name] = shape
    header, end = safetensors_header(shapes)
    values = (torch.randn(BLOCK // 2) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        for begin in range(0, end, BLOCK):
            file.write(values[: end - begin].data)
    return end


def forget(path: Path) -> None:
    """Drops a file from the page cache, and waits until the memory has settled."""
    os.sync()
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(SETTLE_S)


def export(checkpoint: Path, file: Path) -> dict[str, float]:
    """Exports in this process, which should be new, and returns what that took."""
    import dynamo_moe

    for name in ("onnxscript", MODEL, "dynamo_moe.exporting", "dynamo_moe.language_models"):
        importlib.import_module(name)
    baseline, started = resident_bytes(peak=True), time.perf_counter()
    calls: list[tuple[float, int]] = []

    def note(_: str, done: int, total: int) -> None:
        if total:
            calls.append((time.perf_counter(), done))

    model = dynamo_moe.open_checkpoint(checkpoint)
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(model, file, external_data=True, progress=note)
    (first, _), (last, written) = calls[0], calls[-1]
    return {
        "baseline_bytes": baseline,
        "peak_bytes": resident_bytes(peak=True),
        "seconds": time.perf_counter() - started,
        "writing_seconds": last - first,
        "written_bytes": written,
        "nodes": sum(report.nodes.values()),
        "layers": len(report.layers),
    }


def main() -> None:
    """Measures the export of a large checkpoint."""
    known = parser(__doc__, "json")
    known.add_argument("--gigabytes", type=float, default=8, help="weights of the checkpoint")
    known.add_argument("--turns", type=int, default=2, help="exports, and copies between them")
    known.add_argument("--folder", type=Path, help="a disk to work on")
    given = known.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder, checkpoint = Path(name), Path(name) / "checkpoint"
        needed, free = 2.2 * given.gigabytes * 1e9, shutil.disk_usage(folder).free
        if free < needed:
            print(f"skipped: {needed / 1e9:.0f} GB are needed, {free / 1e9:.0f} are free")
            return
        checkpoint.mkdir()
        print(f"Writing a checkpoint of {given.gigabytes:g} GB ...", flush=True)
        size = make_checkpoint(checkpoint, given.gigabytes)
        stored = checkpoint / "model.safetensors"
        exports, copies = [], []
        for turn in range(given.turns):
            print(f"Turn {turn + 1} of {given.turns}: copying ...", flush=True)
            forget(stored)
            started = time.perf_counter()
            shutil.copyfile(stored, folder / "copy")
            copies.append(size / (time.perf_counter() - started))
            (folder / "copy").unlink()
            print(f"Turn {turn + 1} of {given.turns}: exporting ...", flush=True)
            forget(stored)
            with fresh_processes() as processes:
                job = processes.submit(export, checkpoint, folder / "model.onnx")
                exports.append(job.result())
            for file in folder.glob("model.onnx*"):
                file.unlink()
    rate = statistics.median(run["written_bytes"] / run["writing_seconds"] for run in exports)
    copy_rate = statistics.median(copies)
    above = max(run["peak_bytes"] - run["baseline_bytes"] for run in exports)
    print(
        f"{size / 1e9:.2f} GB: writes {rate / 1e6:.0f} MB/s, copy {copy_rate / 1e6:.0f} MB/s; "
        f"{above / 1e6:.0f} MB above the baseline"
    )
    found = {
        "checkpoint_bytes": size,
        "copy_bytes_per_second": copy_rate,
        "export_bytes_per_second": rate,
        "export_over_copy": rate / copy_rate,
        "peak_above_baseline_bytes": above,
        "runs": exports,
        "copies": copies,
    }
    write_json(given.json, conditions(PACKAGES) | found)


if __name__ == "__main__":
    main()
