"""Runs every kernel once on small sizes under compute-sanitizer, as part of `make gpu-check`."""

from __future__ import annotations

import sys

import torch

from gpu_cases import PATHS, architecture, gpu_case, launch_poisoned, plan_of
from moe_cases import OPS

TOKENS = (1, 3, 40, 300)


def main() -> int:
    """Launches the kernels; other tests check their results."""
    runs = 0
    for op in OPS:
        for width in (56, 136):
            for tokens in TOKENS:
                case = gpu_case(op, tokens, width=width, dtype=torch.bfloat16)
                launch_poisoned(plan_of(case), case)
                runs += 1
    case = gpu_case("dropless", 70, width=120, dtype=torch.float16, activation="silu", gated=True)
    for name, ranges in PATHS.items():
        if name != "tensor-maps" or architecture().has_tensor_maps:
            launch_poisoned(plan_of(case, ranges), case)
            runs += 1
    torch.cuda.synchronize()
    sys.stdout.write(f"{runs} forward passes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
