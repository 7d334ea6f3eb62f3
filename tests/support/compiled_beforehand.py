"""Compiles a layer's kernels as the GPU's benchmarks do ahead, then launches the layer.

Run as a program, with TRITON_INTERPRET=0 and an empty folder as Triton's cache: fails if the
launches, on a driver that launches nothing, compile anything more.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from triton.runtime import driver

from benchmarks.cpu.host_cost import NullDriver, NullLauncher
from benchmarks.gpu.compiling import plan_jobs
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.launch import launch
from custom_ops.kernels.launch_waves import launch_in_waves
from custom_ops.kernels.plan import plan
from kernel_runs import call_tensors, layer_of
from moe_cases import make_case

TOKENS = 40


def kernel_count(cache: Path) -> int:
    """Returns the number of kernels in Triton's cache."""
    return sum(1 for _ in cache.glob("*/*.cubin"))


def main() -> None:
    """Compares the cache before the launches and after them, with all experts and with few."""
    driver.set_active(NullDriver())
    on, cache = architecture("sm_90"), Path(os.environ["TRITON_CACHE_DIR"])
    case = make_case("experts", (TOKENS,), width=136, hidden=64, dtype=torch.bfloat16, gated=True)
    for resident in (None, 2):
        layer = replace(layer_of(case), resident_experts=resident)
        for job in dict(plan_jobs(layer, on, [TOKENS])).values():
            job(device="cpu")
        compiled, launched = kernel_count(cache), NullLauncher.launches
        planned, tensors = plan(layer, on), call_tensors(case)
        if resident:
            launch_in_waves(planned, tensors, torch.zeros(planned.state_size, dtype=torch.uint8))
        else:
            launch(planned, tensors)
        assert NullLauncher.launches > launched
        assert kernel_count(cache) == compiled, "a launch compiled a kernel"
    sys.stdout.write("nothing more\n")


if __name__ == "__main__":
    main()
