"""Exporting a checkpoint that is larger than what the export may hold.

    python -m benchmarks.export_checkpoint --gigabytes 8

Makes a checkpoint of the shape of Qwen3-MoE (bfloat16, 128 experts), exports it, and copies it,
in turn, from a cold page cache; measures memory in the process that exports, and removes all of it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks._timing import record

PACKAGES = ("torch", "transformers", "onnx-ir", "onnxscript", "safetensors")
EXPERTS = 128
WIDTH, HIDDEN = 1024, 768
BLOCK = 2**24
# A virtual machine may return freed memory to its host within seconds, and pays for what it gets
# back: an export, which traces first, would otherwise meet other memory than a copy does.
SETTLE_S = 20

EXPORT = """
import json, resource, sys, time
import torch
import onnxscript, transformers.models.qwen3_moe.modeling_qwen3_moe
import dynamo_moe.exporting, dynamo_moe.language_models

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

baseline, started, calls = peak(), time.perf_counter(), []
model = dynamo_moe.open_checkpoint(sys.argv[1])
dynamo_moe.convert(model)
report = dynamo_moe.export_language_model(
    model, sys.argv[2], external_data=True,
    progress=lambda phase, done, total: total and calls.append((time.perf_counter(), done))
)
(first, _), (last, written) = calls[0], calls[-1]
print(json.dumps({
    "baseline_bytes": baseline,
    "peak_bytes": peak(),
    "seconds": time.perf_counter() - started,
    "writing_seconds": last - first,
    "written_bytes": written,
    "nodes": sum(report.nodes.values()),
    "layers": len(report.layers),
}))
"""


def make_checkpoint(folder: Path, gigabytes: float) -> int:
    """Writes a checkpoint of about that size; returns the bytes of its weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    layer_bytes = EXPERTS * 3 * WIDTH * HIDDEN * 2
    config = Qwen3MoeConfig(
        hidden_size=WIDTH, moe_intermediate_size=HIDDEN, intermediate_size=HIDDEN,
        num_hidden_layers=max(1, round(gigabytes * 1e9 / layer_bytes)),
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, vocab_size=32000,
        num_experts=EXPERTS, num_experts_per_tok=8, dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    shapes: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for expert in range(EXPERTS):
                for part in ("gate_proj", "up_proj"):
                    shapes[f"{path}.{expert}.{part}.weight"] = [HIDDEN, WIDTH]
        elif kind == "down_proj":
            for expert in range(EXPERTS):
                shapes[f"{path}.{expert}.{kind}.weight"] = [WIDTH, HIDDEN]
        else:
            shapes[name] = list(parameter.shape)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    values = (torch.randn(BLOCK // 2) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, end, BLOCK):
            file.write(values[: end - begin])
    return end


def forget(path: Path) -> None:
    """Drops a file from the page cache, and waits until the memory has settled."""
    os.sync()
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(SETTLE_S)


def main(
    gigabytes: Annotated[float, typer.Option(help="Weights of the checkpoint.")] = 8,
    turns: Annotated[int, typer.Option(help="Exports, and copies between them.")] = 2,
    folder: Annotated[Path | None, typer.Option(help="A disk to work on.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Where results go.")] = None,
) -> None:
    """Measure the export of a large checkpoint."""
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        needed, free = 2.2 * gigabytes * 1e9, shutil.disk_usage(place).free
        if free < needed:
            console.print(f"skipped: {needed / 1e9:.0f} GB are needed, {free / 1e9:.0f} are free")
            return
        checkpoint, copy = Path(place) / "checkpoint", Path(place) / "copy"
        checkpoint.mkdir()
        console.print(f"Writing a checkpoint of {gigabytes:g} GB ...")
        size = make_checkpoint(checkpoint, gigabytes)
        stored = checkpoint / "model.safetensors"
        exports, copies = [], []
        for turn in range(turns):
            console.print(f"Turn {turn + 1} of {turns}: copying ...")
            forget(stored)
            started = time.perf_counter()
            shutil.copyfile(stored, copy)
            copies.append(size / (time.perf_counter() - started))
            copy.unlink()
            console.print(f"Turn {turn + 1} of {turns}: exporting ...")
            forget(stored)
            command = [sys.executable, "-c", EXPORT, checkpoint, Path(place) / "model.onnx"]
            result = subprocess.run(  # noqa: S603  Our own program.
                command, stdout=subprocess.PIPE, text=True, check=True
            )
            exports.append(json.loads(result.stdout.splitlines()[-1]))
            for file in Path(place).glob("model.onnx*"):
                file.unlink()
    rates = [run["written_bytes"] / run["writing_seconds"] for run in exports]
    above = max(run["peak_bytes"] - run["baseline_bytes"] for run in exports)
    summary = {
        "checkpoint_bytes": size,
        "copy_bytes_per_second": statistics.median(copies),
        "export_bytes_per_second": statistics.median(rates),
        "export_over_copy": statistics.median(rates) / statistics.median(copies),
        "peak_above_baseline_bytes": above,
        "runs": exports,
        "copies": copies,
    }
    console.print(
        f"{size / 1e9:.2f} GB: writes {statistics.median(rates) / 1e6:.0f} MB/s, copy "
        f"{statistics.median(copies) / 1e6:.0f} MB/s; {above / 1e6:.0f} MB above the baseline"
    )
    if output is not None:
        output.write_text(json.dumps({**record(PACKAGES), **summary}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
