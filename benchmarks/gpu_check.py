"""Builds, tests and measures everything that needs a GPU, on a machine that has one.

    make gpu-check

It runs from a checkout, with nothing installed but PyTorch, Triton, CMake, a C++ compiler, pytest
with pytest-xdist, hypothesis and matplotlib. A step that fails does not keep the later ones from
running; the exit code says so at the end. Each step's output is also in a file of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "gpu"
# Cores that tests and compilations take; each process of the tests holds a context on the GPU.
MOST_WORKERS = 14
# Seconds of the measurement besides its cells: start, compilation, the last cell.
MEASURE_RESERVE = 45


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: By which ``--only`` knows it.
        commands: Run one after another, as long as they succeed.
        seconds: After which it is ended; what a step leaves is for the later ones.
        environment: Added to the process's.
        missing: Why it is skipped; empty where it is not.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    seconds: float
    environment: tuple[tuple[str, str], ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a step ended."""

    name: str
    result: str
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether it did not end well."""
        return not self.result.startswith(("ok", "skipped"))


def steps(output: Path, budget: float) -> list[Step]:
    """Returns what is run.

    Args:
        output: Folder for results.
        budget: Seconds for all of it.
    """
    python = sys.executable
    workers = str(min(MOST_WORKERS, len(os.sched_getaffinity(0))))
    pytest = (python, "-m", "pytest", "-c", "tests/gpu.ini", "--rootdir", ".", "-q")
    sanitizer = shutil.which("compute-sanitizer")
    missing = "" if sanitizer else "no compute-sanitizer here"
    small = (python, "tests/support/gpu_sanitized.py")
    # The allocator's cache would hide accesses beyond a tensor's end.
    uncached = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)

    def sanitized(tool: str) -> tuple[str, ...]:
        return (str(sanitizer), "--tool", tool, "--error-exitcode", "9", *small)

    said = "import torch; print(torch.__version__, torch.cuda.get_device_name())"
    return [
        # Without a device the tests would be skipped, and all seem well.
        Step("device", ((python, "-c", f"{said}; import triton; print(triton.__version__)"),), 40),
        Step(
            "library",
            (
                ("cmake", "-S", ".", "-B", str(BUILD)),
                ("cmake", "--build", str(BUILD), "--parallel", workers),
                ("cmake", "--install", str(BUILD), "--prefix", "."),
            ),
            60,
        ),
        Step("bundle", ((python, "-m", "benchmarks._gpu_bundle", str(BUILD / "check.moek")),), 60),
        Step(
            "tests",
            (
                (
                    *(*pytest, "-n", workers, "--durations", "5"),
                    *("tests/ops/test_gpu.py", "tests/trt/test_gpu_launcher.py"),
                ),
            ),
            0.4 * budget,
        ),
        # The first run compiles, which the tools would slow down.
        Step("memcheck", (small, sanitized("memcheck")), 80, uncached, missing),
        Step("racecheck", (sanitized("racecheck"),), 60, uncached, missing),
        Step(
            "measure",
            (
                (
                    *(python, "-m", "benchmarks.gpu_moe"),
                    *("--json", str(output / "gpu_moe.json")),
                    *("--plot", str(output / "gpu_moe.png")),
                    *("--breakdown", "qwen3:16", "--breakdown", "qwen3:1024"),
                    *("--breakdown", "mixtral:4096", "--breakdown", "swin1:64"),
                    "--budget",
                ),
            ),
            float("inf"),
        ),
    ]


def run(step: Step, seconds: float, log: Path) -> Outcome:
    """Runs a step, showing what it says and keeping it in a file."""
    if step.missing:
        return Outcome(step.name, f"skipped: {step.missing}", 0.0)
    started = time.monotonic()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        **dict(step.environment),
    }
    with log.open("w") as file:
        for command in step.commands:
            left = seconds - (time.monotonic() - started)
            result = _run(command, left, environment, file)
            if result:
                return Outcome(step.name, result, time.monotonic() - started)
    return Outcome(step.name, "ok", time.monotonic() - started)


def _run(command: Sequence[str], seconds: float, environment: dict[str, str], file: object) -> str:
    """Runs a command; returns what went wrong, or nothing."""
    try:
        process = subprocess.Popen(  # noqa: S603
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return f"FAILED: {command[0]}: {error.strerror}"
    killed = False

    def end(*_: object) -> None:
        nonlocal killed
        killed = True
        os.killpg(process.pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            print(line, end="", file=file)  # type: ignore[call-overload]
        process.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if killed:
        return f"FAILED: not done after {seconds:.0f} s"
    return f"FAILED: exit code {process.returncode}" if process.returncode else ""


def main(
    output: Annotated[Path, typer.Option(help="Folder for JSON and pictures.")] = (
        ROOT / "docs" / "benchmarks"
    ),
    logs: Annotated[Path, typer.Option(help="Folder for each step's output.")] = BUILD,
    only: Annotated[str, typer.Option(help="Steps, such as library,tests. Default: all.")] = "",
    budget: Annotated[float, typer.Option(help="Seconds for all of it.")] = 560,
) -> None:
    """Builds, tests and measures on this machine's GPU."""
    deadline = time.monotonic() + budget
    output.mkdir(parents=True, exist_ok=True)
    logs.mkdir(parents=True, exist_ok=True)
    output, logs = output.absolute(), logs.absolute()
    planned = steps(output, budget)
    known = [step.name for step in planned]
    names = only.split(",") if only else known
    if unknown := set(names) - set(known):
        raise typer.BadParameter(f"steps are {', '.join(known)}; got {', '.join(sorted(unknown))}")
    outcomes = []
    for step in planned:
        if step.name not in names:
            continue
        left = deadline - time.monotonic()
        chosen = step
        if step.name == "measure":
            chosen = Step(
                step.name,
                ((*step.commands[0], str(max(20.0, left - MEASURE_RESERVE))),),
                step.seconds,
            )
        print(f"=== {step.name}", flush=True)
        outcomes.append(run(chosen, min(step.seconds, left), logs / f"{step.name}.log"))
        print(f"=== {step.name}: {outcomes[-1].result}, {outcomes[-1].seconds:.0f} s", flush=True)
    print("\n=== summary")
    for outcome in outcomes:
        print(f"{outcome.name:<10} {outcome.seconds:6.0f} s  {outcome.result}")
    if any(outcome.failed for outcome in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
