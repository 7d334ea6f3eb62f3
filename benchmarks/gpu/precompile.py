"""Compiles the kernels of `make gpu-check` without a GPU, into one file to carry to one.

    python -m benchmarks.gpu.precompile --arch sm_90 --output build/sm_90.tar.xz

It fills a cache of Triton as that machine would, under a driver that only names the architecture.
The machine must have the same version of Triton. Its wheel for another version of Python compiles
the same code, but has other keys in the cache: ``--triton-key-from`` takes them from that wheel.
"""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import parser
from benchmarks.gpu import accuracy
from benchmarks.gpu.compiling import Compilation, compile_jobs, plan_jobs
from benchmarks.gpu.dependent_launch import without_dependent_launch
from benchmarks.gpu.kernel_archive import kernel_count, pack
from benchmarks.gpu.layers import ROUTINGS, Shape, matching
from benchmarks.gpu.speed import cells_of, measuring_jobs
from benchmarks.gpu.stages import CANDIDATES, OFFLOADED, TUNED
from benchmarks.gpu.tune_kernels import TOKENS, tuning_jobs
from benchmarks.residency.simulate import slots
from custom_ops.kernels.architectures import Architecture, architecture

_LIBRARY = "triton/_C/libtriton.so"


def window_jobs(
    shapes: Sequence[Shape],
    tuned: Sequence[Shape],
    offloaded: Sequence[Shape],
    on: Architecture,
    limit: int,
) -> Iterator[tuple[object, Compilation]]:
    """Yields compilations of the bfloat16 layers, those that are needed first first.

    They are what is measured and compared, the same without dependent launch, what runs where
    experts lie in host memory, and up to ``limit`` candidates of each product and height of tiles
    for the layers that are tuned.
    """
    dtype = torch.bfloat16
    cells = list(cells_of(shapes, (), ROUTINGS))
    yield from measuring_jobs(cells, on, dtype).items()
    for shape in shapes:
        yield from plan_jobs(shape.layer(dtype), on, accuracy.TOKENS)
    for cell in cells:
        if cell.routes:
            layer = cell.shape.layer(dtype)
            yield from plan_jobs(layer, without_dependent_launch(on), [cell.tokens])
    for shape in offloaded:
        for resident in slots(shape.experts):
            layer = replace(shape.layer(dtype, router=False), resident_experts=resident)
            yield from plan_jobs(layer, on, [1])
    for shape in tuned if limit else ():
        yield from tuning_jobs(shape.layer(dtype).canonical(), on, TOKENS, limit).items()


def key_of_wheel(wheel: Path) -> str:
    """Returns the part of Triton's keys that stands for Triton itself, of another wheel.

    Raises:
        ValueError: If it differs from the Triton that is installed by more than its library.
    """
    import triton
    from triton.runtime.cache import triton_key

    installed = Path(triton.__file__).parents[1]
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.startswith("triton/") and name.endswith(".py"):
                here = installed / name
                if not here.is_file() or here.read_bytes() != files.read(name):
                    raise ValueError(f"{wheel.name} has another {name} than Triton's here")
        theirs = hashlib.sha256(files.read(_LIBRARY)).hexdigest()
    ours = hashlib.sha256((installed / _LIBRARY).read_bytes()).hexdigest()
    key: str = triton_key()
    if ours not in key:
        raise ValueError(f"Triton {triton.__version__} makes its keys in another way")
    return key.replace(ours, theirs)


class _NamedDriver:
    """What compiling asks of Triton's driver."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def pretend(capability: int, key: str = "") -> None:
    """Lets Triton compile here for a GPU that is elsewhere, with the key of the Triton there."""
    import triton.runtime.cache
    from triton.runtime.driver import driver

    driver.set_active(_NamedDriver(capability))
    if key:
        vars(triton.runtime.cache)["triton_key"] = lambda: key


def main() -> None:
    """Compiles for a GPU elsewhere."""
    known = parser(__doc__)
    known.add_argument("--arch", default="sm_90", help="the GPU's architecture")
    known.add_argument("--output", type=Path, required=True, help="archive to write")
    known.add_argument("--cache", type=Path, help="folder to compile into; default: beside output")
    known.add_argument("--shapes", default="", help="beginnings of layers' names; default: all")
    known.add_argument("--limit", type=int, default=CANDIDATES, help="candidates of the tuner")
    known.add_argument("--budget", type=float, help="seconds to take; default: no limit")
    known.add_argument("--triton-key-from", type=Path, help="the GPU machine's wheel of Triton")
    given = known.parse_args()
    on, started = architecture(given.arch), time.monotonic()
    key = key_of_wheel(given.triton_key_from) if given.triton_key_from else ""
    cache = (given.cache or given.output.with_suffix("").with_suffix(".cache")).absolute()
    # Of the processes that compile; in this one kernels are interpreted.
    os.environ |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    os.environ["TRITON_STORE_BINARY_ONLY"] = "1"
    shapes = matching(given.shapes)
    tuned, offloaded = (
        [shape for shape in matching(names) if shape in shapes] for names in (TUNED, OFFLOADED)
    )
    wanted = window_jobs(shapes, tuned, offloaded, on, given.limit)
    jobs = {name: partial(job, device="cpu") for name, job in wanted}
    failed = compile_jobs(jobs, seconds=given.budget, prepare=partial(pretend, on.capability, key))
    for name, why in failed.items():
        print(f"not compiled: {name}: {why}")
    pack(cache, given.output)
    size, seconds = given.output.stat().st_size / 1e6, time.monotonic() - started
    print(f"{kernel_count(cache)} kernels, {size:.1f} MB, {seconds:.0f} s: {given.output}")


if __name__ == "__main__":
    main()
