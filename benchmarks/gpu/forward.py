"""Runs a layer's forward pass once, for a profiler.

ncu python -m benchmarks.gpu.forward qwen3:1024
"""

from __future__ import annotations

import torch

from benchmarks.common.report import parser
from benchmarks.gpu.layers import SHAPES, call_tensors, parameters_of
from benchmarks.gpu.speed import Device
from custom_ops.kernels.launch import launch
from custom_ops.kernels.plan import plan


@torch.inference_mode()
def main() -> None:
    """Runs it."""
    known = parser(__doc__)
    known.add_argument("cell", help="layer and number of tokens, or of images, such as qwen3:1024")
    known.add_argument("--dry-run", action="store_true", help="try it without a GPU")
    given = known.parse_args()
    name, _, count = given.cell.partition(":")
    if name not in SHAPES or not count.isdecimal():
        known.error(f"needs a layer of {', '.join(SHAPES)} and a count; got {given.cell!r}")
    shape, device = SHAPES[name], Device.chosen(given.dry_run)
    dtype = torch.float32 if given.dry_run else torch.bfloat16
    tensors = call_tensors(parameters_of(shape, dtype, device.name), int(count) * shape.per_image)
    launch(plan(shape.layer(dtype), device.architecture), tensors)
    print(f"{given.cell}: {float(tensors['y'].float().square().mean()):.3g}")


if __name__ == "__main__":
    main()
