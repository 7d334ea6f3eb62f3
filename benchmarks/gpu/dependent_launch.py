"""Is a layer faster when each kernel may start before the one ahead of it ends?

    python -m benchmarks.gpu.dependent_launch --shapes qwen3 --json result.json

Both plans of a layer take turns, in CUDA graphs with a cold L2 cache.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.common.report import table, write_json
from benchmarks.gpu.compiling import compile_jobs, plan_jobs
from benchmarks.gpu.layers import Shape, call_tensors, parameters_of
from benchmarks.gpu.speed import Device, cells_of, gpu_parser, parsed
from benchmarks.gpu.timing import release
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.launch import launch
from custom_ops.kernels.plan import plan


def without_dependent_launch(on: Architecture) -> Architecture:
    """Returns the architecture as one whose kernels wait for those ahead of them."""
    return replace(on, has_dependent_launch=False)


def measure(shape: Shape, tokens: int, device: Device, dtype: torch.dtype) -> dict[str, Any]:
    """Returns microseconds of a layer with dependent launch and without it, or why there are none.

    ``same`` says whether the results are the same to the bit, as they must be.
    """
    layer, tensors = (
        shape.layer(dtype),
        call_tensors(parameters_of(shape, dtype, device.name), tokens),
    )
    calls, results = {}, {}
    for name, on in (
        ("with", device.architecture),
        ("without", without_dependent_launch(device.architecture)),
    ):
        planned = plan(layer, on)
        results[name] = torch.full_like(tensors["x"], float("nan"))
        size = planned.workspace_size(tokens)
        workspace = torch.empty(size, dtype=torch.uint8, device=device.name)
        calls[name] = partial(launch, planned, tensors | {"y": results[name]}, workspace)
    timed = device.timer(calls)
    return {
        "shape": shape.name,
        "tokens": tokens,
        "us": {name: times.median for name, times in timed.times.items()},
        "failed": timed.failed,
        "same": torch.equal(results["with"], results["without"]),
    }


@torch.inference_mode()
def main() -> None:
    """Measures on this machine's GPU."""
    known = gpu_parser(__doc__, 120, "json")
    given = parsed(known, known.parse_args())
    deadline = time.monotonic() + given.budget
    device = Device.chosen(given.dry_run)
    cells = list(cells_of(given.shapes, given.tokens, ["uniform"]))
    if not given.dry_run:
        compile_jobs(
            {
                (on.has_dependent_launch, key): job
                for cell in cells
                for on in (device.architecture, without_dependent_launch(device.architecture))
                for key, job in plan_jobs(cell.shape.layer(given.dtype), on, [cell.tokens])
            }
        )
    found: list[dict[str, Any]] = []
    for cell in cells:
        if time.monotonic() < deadline:
            found.append(measure(cell.shape, cell.tokens, device, given.dtype))
            write_json(given.json, device.conditions() | {"layers": found})
            release()
    columns = ["layer", "T", "with, us", "without, us", "same bits", "failed"]
    rows = [
        [
            *(each["shape"], each["tokens"], each["us"].get("with"), each["us"].get("without")),
            each["same"],
            "; ".join(f"{name}: {why}" for name, why in each["failed"].items()),
        ]
        for each in found
    ]
    print(table("Dependent launch", columns, rows))
    if not all(each["same"] and not each["failed"] for each in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
