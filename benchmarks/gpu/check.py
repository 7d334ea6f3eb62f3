"""Are the kernels right and fast on this machine's GPU?

    make gpu-check

Builds, tests and measures. It runs from a checkout and needs PyTorch, Triton, pytest, CMake and a
C++ compiler; it takes pytest-xdist and matplotlib where they are installed. A step that fails does
not keep the later ones from running; the exit code says so at the end. Each step's output is also
in a file of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common.report import parser

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "gpu"
# Cores that tests and compilations take; each process of the tests holds a context on the GPU.
MOST_WORKERS = 14
# Seconds of the measurement besides its cells: start, compilation, the last cell.
MEASURE_RESERVE = 45

DEVICE = """
import torch, triton
print(torch.__version__, torch.cuda.get_device_name(), triton.__version__)
"""
# Compiles as a deployment would.
BUNDLE = """
import sys, torch, trt_plugin
from benchmarks.gpu.layers import SHAPES
from custom_ops.kernels.architectures import nearest_architecture
device = nearest_architecture(*torch.cuda.get_device_capability())
layers = [SHAPES[name].layer(torch.bfloat16) for name in ("swin1", "swin3", "qwen3")]
trt_plugin.compile(layers, [device.name], sys.argv[1], progress=False)
"""


@dataclass(frozen=True)
class Step:
    """Commands that run one after another, as long as they succeed."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    seconds: float  # the limit; time that a step leaves goes to the later ones
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the process's
    missing: str = ""  # why it is skipped, if it is


def steps(output: Path, budget: float) -> list[Step]:
    """Returns what writes results to a folder, in a budget of seconds for all of it."""
    python = sys.executable
    workers = str(min(MOST_WORKERS, len(os.sched_getaffinity(0))))
    pytest = [python, "-m", "pytest", "-c", "tests/gpu.ini", "--rootdir", ".", "-q"]
    parallel = ["-n", workers] if find_spec("xdist") else []
    tests = ["--durations", "5", "tests/ops/test_gpu.py", "tests/trt/test_gpu_launcher.py"]
    sanitizer = shutil.which("compute-sanitizer")
    missing = "" if sanitizer else "no compute-sanitizer here"
    small = (python, "tests/support/gpu_sanitized.py")
    # The allocator's cache would hide accesses beyond a tensor's end.
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def sanitized(tool: str) -> tuple[str, ...]:
        return (str(sanitizer), "--tool", tool, "--error-exitcode", "9", *small)

    measure = [python, "-m", "benchmarks.gpu.speed"]
    measure += ["--json", str(output / "gpu_moe.json"), "--plot", str(output / "gpu_moe.png")]
    for cell in ("qwen3:16", "qwen3:1024", "mixtral:4096", "swin1:64"):
        measure += ["--breakdown", cell]
    return [
        # Without a device the tests would be skipped, and everything would seem well.
        Step("device", ((python, "-c", DEVICE),), 40),
        Step(
            "library",
            (
                ("cmake", "-S", ".", "-B", str(BUILD)),
                ("cmake", "--build", str(BUILD), "--parallel", workers),
                ("cmake", "--install", str(BUILD), "--prefix", "."),
            ),
            60,
        ),
        Step("bundle", ((python, "-c", BUNDLE, str(BUILD / "check.moek")),), 60),
        Step("tests", ((*pytest, *parallel, *tests),), 0.4 * budget),
        # The first run compiles: under the tools, compiling would be slow.
        Step("memcheck", (small, sanitized("memcheck")), 80, uncached, missing),
        Step("racecheck", (sanitized("racecheck"),), 60, uncached, missing),
        Step("measure", ((*measure, "--budget"),), float("inf")),
    ]


def run(step: Step, seconds: float, log: Path) -> str:
    """Runs a step, showing its output and keeping it in a file; returns how it ended."""
    started = time.monotonic()
    result = f"skipped: {step.missing}" if step.missing else "ok"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(["tee", str(log)], stdin=subprocess.PIPE) as tee:
        for command in step.commands if result == "ok" else ():
            try:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, **environment, **step.environment},
                    stdout=tee.stdin,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                code = process.wait(max(1.0, seconds - (time.monotonic() - started)))
            except OSError as error:
                result = f"FAILED: {command[0]}: {error.strerror}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                result = f"FAILED: not done after {seconds:.0f} s"
            else:
                result = f"FAILED: exit code {code}" if code else "ok"
            if result != "ok":
                break
    return result


def main() -> None:
    """Builds, tests and measures on this machine's GPU."""
    known = parser(__doc__)
    known.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "benchmarks", help="folder for results"
    )
    known.add_argument("--only", default="", help="steps, such as library,tests; default: all")
    known.add_argument("--budget", type=float, default=560, help="seconds for all of it")
    given = known.parse_args()
    deadline = time.monotonic() + given.budget
    output = given.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    planned = steps(output, given.budget)
    names = [step.name for step in planned]
    wanted = given.only.split(",") if given.only else names
    if unknown := set(wanted) - set(names):
        known.error(f"steps are {', '.join(names)}; got {', '.join(sorted(unknown))}")
    results = []
    for step in planned:
        if step.name not in wanted:
            continue
        started = time.monotonic()
        left = deadline - started
        commands = step.commands
        if step.name == "measure":
            budget = str(max(20.0, left - MEASURE_RESERVE))
            commands = ((*commands[0], budget),)
        limited = replace(step, commands=commands)
        print(f"=== {step.name}", flush=True)
        result = run(limited, min(step.seconds, left), BUILD / f"{step.name}.log")
        results.append(f"{step.name:<10} {time.monotonic() - started:6.0f} s  {result}")
        print(f"=== {results[-1]}", flush=True)
    print("\n=== summary", *results, sep="\n")
    if any("FAILED" in result for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
