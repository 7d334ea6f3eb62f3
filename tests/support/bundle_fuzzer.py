"""Fuzzes the native reader of bundles: ``bundle_fuzzer.py SECONDS [BUNDLE ...]``.

With libFuzzer where clang has it; else tests/native/fuzz_driver.cc mutates bundles, under g++'s
sanitizers. An input that fails is kept by libFuzzer as a file; the driver repeats it by its seed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from standin import ROOT, SOURCES, build, sanitizing

_NATIVE = ROOT / "tests" / "native"
# What the reader and the launcher need; no runtime's interface is among it.
_BESIDE = ("kernels", "node", "onnxruntime", "plugin")
_SOURCES = [path for path in SOURCES if path.parent.name not in _BESIDE]
_SANITIZERS = "address,undefined"


def seed_bundles() -> list[bytes]:
    """Returns small bundles: two with every kind of record, and those of real layers' plans."""
    from custom_ops.kernels.architectures import architecture
    from custom_ops.kernels.plan import plan
    from interpreted_gpu import uncompiled_program
    from small_bundles import OFFLOADED, SMALL
    from trt_plugin import Bundle, parse_spec
    from trt_plugin.compiling import limit_tokens

    layer = parse_spec("experts=4,top_k=2,width=136,hidden=72,dtype=fp16,op=experts,gated,b1")
    packed = parse_spec(
        "experts=4,top_k=2,width=128,hidden=64,dtype=fp16,gated,b1,weight_format=int4,block_size=32,"
        "zero_points=scales"
    )
    two_scales = parse_spec("experts=4,top_k=2,width=64,hidden=64,dtype=fp16,weight_format=nvfp4")
    layers = (layer, replace(layer, resident_experts=2), packed, two_scales)
    plans = (
        limit_tokens(plan(each, architecture(name)), 50)
        for each in layers
        for name in ("sm_80", "sm_90")
    )
    return [
        SMALL.data,
        OFFLOADED.data,
        *(Bundle((uncompiled_program(each),)).data for each in plans),
    ]


def fuzz(
    seconds: int, seeds: Sequence[Path], seed: int = 1, *, guided: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs the fuzzer; it fails where a sanitizer or a check of the target does.

    Args:
        seconds: For so long.
        seeds: Files of bundles that are mutated.
        seed: Of the mutations that are not guided.
        guided: By libFuzzer. Its clang compiles for half a minute what g++ has compiled for others.
    """
    cuda = build(
        "libcuda.so.1",
        [_NATIVE / "standin.cc"],
        *("-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"),
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(cuda.parent)}
    sources = [*_SOURCES, _NATIVE / "fuzz_bundle.cc"]
    with tempfile.TemporaryDirectory(prefix="dynamo-moe-fuzz-") as corpus:
        if guided:
            flags = (*sanitizing(f"fuzzer,{_SANITIZERS}"), "-ldl")
            program = build("fuzz_bundle", sources, *flags, compiler="clang++")
            for at, path in enumerate(seeds):
                shutil.copy(path, Path(corpus) / str(at))
            # An allocation is limited. The process's peak is not: Linux counts that of the Python
            # process which starts it, too.
            limits = ("-malloc_limit_mb=2048", "-rss_limit_mb=0")
            command = [program, f"-max_total_time={seconds}", "-max_len=65536", *limits, corpus]
        else:
            flags = (*sanitizing(_SANITIZERS), "-ldl")
            program = build("fuzz_bundle", [*sources, _NATIVE / "fuzz_driver.cc"], *flags)
            command = [program, str(seconds), str(seed), *seeds]
        return subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


def _has_libfuzzer() -> bool:
    """Whether clang++ is installed with libFuzzer's library."""
    if shutil.which("clang++") is None:
        return False
    target = (
        'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) {return 0;}'
    )
    command = ["clang++", f"-fsanitize=fuzzer,{_SANITIZERS}", "-x", "c++", "-", "-o", os.devnull]
    return (
        subprocess.run(
            command, input=target, text=True, capture_output=True, check=False
        ).returncode
        == 0
    )


def main() -> int:
    """Runs it from the command line; returns its exit code."""
    seconds, *files = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="dynamo-moe-fuzz-") as folder:
        seeds = [Path(file) for file in files]
        for at, content in enumerate(seed_bundles()):
            seeds.append(Path(folder) / f"{at}.moek")
            seeds[-1].write_bytes(content)
        done = fuzz(int(seconds), seeds, guided=_has_libfuzzer())
    sys.stdout.write(done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
