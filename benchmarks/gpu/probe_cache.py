"""Does Triton find the kernels that were compiled elsewhere?

    python -m benchmarks.gpu.probe_cache build/sm_90.tar.xz

Unpacks what `benchmarks.gpu.precompile` wrote into Triton's cache, and compiles what the benchmark
needs. What it finds there takes no time; the rest is in the cache afterwards.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import torch
import triton

from benchmarks.common.report import parser
from benchmarks.gpu.compiling import compile_jobs
from benchmarks.gpu.kernel_archive import kernel_count, unpack
from benchmarks.gpu.layers import matching
from benchmarks.gpu.precompile import pretend
from benchmarks.gpu.speed import Device, cells_of, measuring_jobs
from custom_ops.kernels.architectures import architecture


def main() -> None:
    """Unpacks and counts."""
    known = parser(__doc__)
    known.add_argument("archive", type=Path, help="what benchmarks.gpu.precompile wrote")
    known.add_argument("--shapes", default="", help="beginnings of layers' names; default: all")
    known.add_argument("--budget", type=float, help="seconds to compile; default: no limit")
    known.add_argument("--dry-run", action="store_true", help="try it without a GPU")
    given = known.parse_args()
    cache = Path(triton.knobs.cache.dir)
    unpack(given.archive, cache)
    before, started = kernel_count(cache), time.monotonic()
    on = architecture(90) if given.dry_run else Device.chosen(dry_run=False).architecture
    shapes = matching("tiny" if given.dry_run and not given.shapes else given.shapes)
    cells = list(cells_of(shapes, (), ["uniform"]))
    jobs = measuring_jobs(cells, on, torch.bfloat16)
    prepare = None
    if given.dry_run:
        os.environ["TRITON_INTERPRET"] = "0"
        jobs = {name: partial(job, device="cpu") for name, job in jobs.items()}
        prepare = partial(pretend, on.capability)
    failed = compile_jobs(jobs, seconds=given.budget, prepare=prepare)
    compiled, seconds = kernel_count(cache) - before, time.monotonic() - started
    print(f"{before} kernels unpacked; {len(jobs)} jobs compiled {compiled} more: {seconds:.1f} s")
    for name, why in failed.items():
        print(f"not compiled: {name}: {why}")


if __name__ == "__main__":
    main()
