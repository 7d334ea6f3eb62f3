"""Runs tests/native/run_cases.cc in this process, on the stand-in for a driver and its GPU.

    python tests/support/standin_cases.py --write FOLDER
    python tests/support/standin_cases.py --tool memcheck PROGRAM FOLDER

The first writes a few cases. The second takes a command line of compute-sanitizer, so that this
can stand in for it too; what PROGRAM was compiled from runs here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

import interpreter
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.spec import ForwardPlan
from interpreted_gpu import InterpretedGpu, uncompiled_program
from launcher_cases import make_cases, write_cases
from moe_cases import Case
from standin import ROOT, Standin, build, standin
from trt_plugin.native import library_path

ON = architecture("sm_90")
# Interpreted, others take long.
_MOST_TOKENS, _EVERY = 40, 7


def few_cases() -> list[tuple[ForwardPlan, Case]]:
    """Some of the cases of launcher_cases, among them one of an offloaded layer."""
    cases = [each for each in make_cases(ON) if len(each[1].arguments["x"]) <= _MOST_TOKENS]
    offloaded = next(each for each in cases if each[0].layer.resident_experts)
    return [*(each for each in cases[::_EVERY] if each is not offloaded), offloaded]


def write(folder: Path, cases: list[tuple[ForwardPlan, Case]]) -> None:
    """Writes cases whose kernels are not compiled."""
    write_cases(folder, cases, lambda plans: [uncompiled_program(each) for each in plans])


def run(driver: Standin, cases: list[tuple[ForwardPlan, Case]], *arguments: str) -> int:
    """Returns the exit code of the program for written cases."""
    gpu = InterpretedGpu()
    driver.on_launch(gpu)
    driver.add_device(ON.capability)
    for planned in dict.fromkeys(planned for planned, _ in cases):
        program = uncompiled_program(planned)
        gpu.register(planned, program)
        for kernel in program.kernels:
            driver.add_image(kernel.image)
    package = library_path().parent
    linked = (f"-L{package}", "-ldynamo_moe", f"-Wl,-rpath,{package}", "-ldl")
    source = ROOT / "tests" / "native" / "run_cases.cc"
    library = ctypes.CDLL(str(build("librun_cases.so", [source], "-fPIC", "-shared", *linked)))
    given = [b"run_cases", *(each.encode() for each in arguments)]
    code = library.main(len(given), (ctypes.c_char_p * len(given))(*given))
    for error in driver.errors:
        sys.stderr.write(f"{error}\n")
    return code


def main() -> int:
    """Runs what the command line asks for."""
    if sys.argv[1] == "--write":
        write(Path(sys.argv[2]), few_cases())
        return 0
    with pytest.MonkeyPatch.context() as patch:
        interpreter.repair(patch)
        folder = next(at for at, each in enumerate(sys.argv) if Path(each, "cases").is_file())
        return run(standin(), few_cases(), *sys.argv[folder:])


if __name__ == "__main__":
    sys.exit(main())
