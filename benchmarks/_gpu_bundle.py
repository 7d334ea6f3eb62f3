"""Compiles a bundle for this machine's GPU, as a deployment would.

python -m benchmarks._gpu_bundle FILE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import trt_plugin
from benchmarks._gpu_shapes import SHAPES
from custom_ops.kernels.architectures import nearest_architecture

__all__ = ["main"]


def main(path: Path) -> None:
    """Writes the bundle and says what is in it."""
    device = nearest_architecture(*torch.cuda.get_device_capability())
    started = time.monotonic()
    layers = [SHAPES[name].layer(torch.bfloat16) for name in ("swin1", "swin3", "qwen3")]
    trt_plugin.compile(layers, [device.name], path, progress=False)
    bundle = trt_plugin.read(path)
    kernels = sum(len(program.kernels) for program in bundle.programs)
    print(
        f"{len(bundle.programs)} programs with {kernels} kernels for {device.name}, "
        f"{path.stat().st_size / 1e6:.1f} MB, in {time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
