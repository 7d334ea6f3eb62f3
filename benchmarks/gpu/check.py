"""Are the kernels right and fast on this machine's GPU?

    make gpu-check

Builds the native library, runs the tests that need a GPU, measures both operators beside other
implementations, tunes their block shapes, and measures them again. It runs from a checkout and
needs PyTorch, Triton, pytest, CMake and a C++ compiler. A stage that fails does not keep the later
ones from running; the exit code says so at the end.

What a stage writes, its output too, is in the folder for results as it comes: the machine may be
taken away at any time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common.report import parser

ROOT = Path(__file__).parents[2]
#: In a command, the seconds that it may take.
SECONDS = "{seconds}"
#: The layers that are tuned, and how many candidates of each product and height of tiles there is
#: time for.
TUNED, CANDIDATES = "qwen3,mixtral,gpt-oss,swin", 8

_KERNEL_TESTS = ("tests/ops/test_gpu.py", "tests/trt/test_gpu_launcher.py")
_SESSION_TESTS = "tests/ort/test_gpu_sessions.py"
# Cores that tests and compilations take; each process of the tests holds a context on the GPU.
_MOST_WORKERS = 14
# Seconds of a stage that measures besides its cells.
_RESERVE = 30.0

_DEVICE = """
import platform, shutil, torch, triton
print(platform.python_version(), torch.__version__, triton.__version__)
print(*filter(None, map(shutil.which, ("c++", "cmake", "ninja"))))
print(torch.cuda.get_device_properties(0) if torch.cuda.is_available() else "no CUDA device")
assert torch.cuda.is_available() or {rehearsal}
"""


@dataclass(frozen=True)
class Stage:
    """Commands that run one after another, as long as they succeed."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    seconds: float  # the limit


def stages_of(results: Path, build: Path, *, rehearsal: bool = False) -> list[Stage]:
    """Returns the stages, those that later ones depend on first.

    Args:
        results: The folder for logs, measurements and tuned tables.
        build: The folder for what is built.
        rehearsal: Whether they run on a CPU, at tiny sizes, and for as long as it takes.
    """

    def module(name: str, *arguments: str) -> tuple[str, ...]:
        trial = ("--dry-run", "--tokens", "5") if rehearsal else ()
        return (sys.executable, "-m", f"benchmarks.gpu.{name}", *arguments, *trial)

    def speed(name: str) -> tuple[str, ...]:
        return module("speed", "--json", str(results / f"{name}.json"), "--budget", SECONDS)

    tables = results / "tuned"
    package = build / "package" if rehearsal else ROOT / "custom_ops" / "kernels"
    make = ("mkdir", "-p", str(package))
    asked = ("--limit", "1") if rehearsal else ("--shapes", TUNED, "--limit", str(CANDIDATES))
    tune = module("tune_kernels", "--output", str(tables), *asked, "--budget", SECONDS)
    # Without a device everything else would be skipped, and would seem well.
    device = (sys.executable, "-c", _DEVICE.format(rehearsal=rehearsal))
    stages = [
        Stage("device", (device,), 30),
        Stage("library", _library(build, rehearsal=rehearsal), 90),
        Stage("tests", (_tests(*_KERNEL_TESTS, rehearsal=rehearsal),), 450),
        Stage("sessions", (_tests(_SESSION_TESTS, rehearsal=rehearsal),), 150),
        Stage("baseline", (speed("baseline"),), 260),
        Stage("tune", (tune,), 300),
        Stage("tuned", (make, ("cp", "-r", str(tables), str(package)), speed("tuned")), 260),
    ]
    if rehearsal:
        return [Stage(stage.name, stage.commands, float("inf")) for stage in stages]
    return stages


def _library(build: Path, *, rehearsal: bool) -> tuple[tuple[str, ...], ...]:
    """Builds the native library into the checkout; in a rehearsal, beside it."""
    generator = ("-G", "Ninja") if shutil.which("ninja") else ()
    folder, prefix = str(build / "cmake"), str(build / "installed") if rehearsal else "."
    return (
        ("cmake", *generator, "-DCMAKE_BUILD_TYPE=Release", "-S", ".", "-B", folder),
        ("cmake", "--build", folder, "--parallel", _workers()),
        ("cmake", "--install", folder, "--prefix", prefix),
    )


def _tests(*files: str, rehearsal: bool) -> tuple[str, ...]:
    # Outcomes are in the log as they come, also if the rest is killed.
    pytest = (sys.executable, "-m", "pytest", "-c", "tests/gpu.ini", "--rootdir", ".", "-v")
    if rehearsal:
        # Those of the launcher need the driver.
        return (*pytest, "-p", "gpu_rehearsal", files[0])
    parallel = ("-n", _workers()) if find_spec("xdist") else ()
    return (*pytest, *parallel, *files)


def _workers() -> str:
    return str(min(_MOST_WORKERS, len(os.sched_getaffinity(0))))


def run_stages(stages: Iterable[Stage], results: Path, build: Path, deadline: float) -> list[str]:
    """Runs stages until a time of ``time.monotonic``; returns a line on each."""
    results.mkdir(parents=True, exist_ok=True)
    lines = []
    for stage in stages:
        started = time.monotonic()
        print(f"=== {stage.name}", flush=True)
        result = _run_stage(stage, results, build, min(started + stage.seconds, deadline))
        lines.append(f"{stage.name:<10} {time.monotonic() - started:6.0f} s  {result}")
        print(f"=== {lines[-1]}", flush=True)
        with (results / "summary.txt").open("a") as summary:
            summary.write(lines[-1] + "\n")
    return lines


def _run_stage(stage: Stage, results: Path, build: Path, deadline: float) -> str:
    """Runs a stage, showing its output and keeping it in a file; returns how it ended."""
    log = results / f"{stage.name}.log"
    with subprocess.Popen(["tee", str(log)], stdin=subprocess.PIPE) as tee:
        for command in stage.commands:
            left = deadline - time.monotonic()
            if left <= 0:
                return "FAILED: no time is left"
            budget = str(max(10.0, left - _RESERVE))
            told = [part.replace(SECONDS, budget) for part in command]
            if failure := _run_command(told, tee, build, left):
                return f"FAILED: {failure}"
    return "ok"


def _run_command(
    command: list[str], tee: subprocess.Popen[bytes], build: Path, seconds: float
) -> str:
    """Runs a command; returns why it failed, if it did."""
    paths = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(build / "triton-cache"),
    }
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdout=tee.stdin,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    try:
        code = process.wait(seconds if seconds < float("inf") else None)
    except BaseException as end:  # Whatever ends this process, its children would hold the GPU.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(end, subprocess.TimeoutExpired):
            return f"not done after {seconds:.0f} s"
        raise
    return f"exit code {code}" if code else ""


def main() -> None:
    """Runs the stages on this machine's GPU."""
    command_line = parser(__doc__)
    command_line.add_argument(
        "--output", type=Path, default=ROOT / "build", help="folder for results, in gpu_check"
    )
    command_line.add_argument(
        "--work", type=Path, default=ROOT / "build" / "gpu", help="folder for what is built"
    )
    command_line.add_argument(
        "--only", default="", help="stages, such as library,tests; default: all"
    )
    command_line.add_argument("--budget", type=float, default=1800, help="seconds for all of them")
    command_line.add_argument(
        "--rehearse", action="store_true", help="try each stage without a GPU, at tiny sizes"
    )
    arguments = command_line.parse_args()
    results, build = arguments.output.absolute() / "gpu_check", arguments.work.absolute()
    stages = stages_of(results, build, rehearsal=arguments.rehearse)
    names = [stage.name for stage in stages]
    wanted = arguments.only.split(",") if arguments.only else names
    if unknown := set(wanted) - set(names):
        command_line.error(f"stages are {', '.join(names)}; got {', '.join(sorted(unknown))}")
    # As Ctrl-C does, so that what runs ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    deadline = float("inf") if arguments.rehearse else time.monotonic() + arguments.budget
    chosen = [stage for stage in stages if stage.name in wanted]
    lines = run_stages(chosen, results, build, deadline)
    print("\n=== summary", *lines, f"results are in {results}", sep="\n")
    if any("FAILED" in line for line in lines):
        sys.exit(1)


if __name__ == "__main__":
    main()
