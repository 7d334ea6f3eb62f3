"""What does it take to export a checkpoint whose experts are packed, as large as gpt-oss-20b?

    python -m benchmarks.export.packed_checkpoint --json result.json

The checkpoint has the shape of gpt-oss-20b in MXFP4, and is one hole on disk: no weights exist. The
file that is written beside it is whole, 13.8 GB; with links it has what the checkpoint lacks.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.report import conditions, parser, table, write_json
from benchmarks.common.timing import fresh_processes, resident_bytes
from benchmarks.export.models import safetensors_header

PACKAGES = ("torch", "transformers", "onnx-ir", "onnxscript", "safetensors")
LAYERS, EXPERTS = 24, 32


def make_checkpoint(folder: Path) -> int:
    """Writes a checkpoint without weights; returns the bytes that they would have."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.for_model(
        "gpt_oss", num_hidden_layers=LAYERS, num_local_experts=EXPERTS, dtype="bfloat16",
        architectures=["GptOssForCausalLM"],
    )  # fmt: skip
    load: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = load(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            shapes[f"{name}_blocks"] = (experts, rows, columns // 32, 16)
            shapes[f"{name}_scales"] = (experts, rows, columns // 32)
        else:
            shapes[name] = tuple(tensor.shape)
    packed = {name for name in shapes if name.endswith(("_blocks", "_scales"))}
    header, end = safetensors_header(shapes, packed)
    stored = folder / "model.safetensors"
    stored.write_bytes(header)
    os.truncate(stored, len(header) + end)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    said = config.to_dict() | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(said))
    return end


def export(checkpoint: Path, file: Path, link: bool) -> dict[str, float]:
    """Exports in this process, which should be new, and returns what that took."""
    import dynamo_moe

    started = time.perf_counter()
    model = dynamo_moe.open_checkpoint(checkpoint)
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(model, file, external_data=True, link_weights=link)
    return {
        "seconds": time.perf_counter() - started,
        "peak bytes": resident_bytes(peak=True),
        "layers": len(report.layers),
    }


def main() -> None:
    """Exports in both ways, prints a table, and writes the figures."""
    known = parser(__doc__, "json")
    known.add_argument("--folder", type=Path, help="a disk to work on")
    given = known.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        checkpoint = Path(name)
        size = make_checkpoint(checkpoint)
        free = shutil.disk_usage(checkpoint).free
        ways = {"linked": True, "written": False}
        if free < 1.1 * size:
            print(f"only linked: {size / 1e9:.0f} GB are needed, {free / 1e9:.0f} are free")
            del ways["written"]
        for way, link in ways.items():
            before = {path.name for path in checkpoint.iterdir()}
            with fresh_processes() as processes:
                job = processes.submit(export, checkpoint, checkpoint / "model.onnx", link)
                found[way] = job.result()
            new = [path for path in checkpoint.iterdir() if path.name not in before]
            found[way]["bytes of the files"] = sum(path.stat().st_size for path in new)
            for path in new:
                path.unlink()
    columns = ["file", *next(iter(found.values()))]
    rows = [[way, *figures.values()] for way, figures in found.items()]
    print(table(f"gpt-oss-20b's shape, {size:,} bytes", columns, rows))
    write_json(given.json, {**conditions(PACKAGES), "checkpoint bytes": size, "files": found})


if __name__ == "__main__":
    main()
