"""Are the kernels right and fast on this machine's GPU?

    make gpu-check

Builds, tests, measures and tunes, in stages. It runs from a checkout and needs PyTorch, Triton,
pytest, CMake and a C++ compiler; where they are installed it takes Ninja, pytest-xdist, matplotlib,
compute-sanitizer and ncu. A stage that fails does not keep the later ones from running; the exit
code says so at the end.

Everything that stages write, their output too, is kept in one archive that is always whole and
never much older than the results: the machine may be taken away at any time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.report import parser
from benchmarks.gpu.stages import ROOT, SECONDS, Stage, Window

#: The archive's name, in the folder for results.
ARCHIVE = "gpu_check.tar.gz"
# Seconds between two archives, and those of a stage that measures besides its cells.
_REFRESH = 10.0
_RESERVE = 30.0


@dataclass(frozen=True)
class Check:
    """Runs stages, and keeps what they write."""

    window: Window
    archive: Path
    refresh: float = _REFRESH

    def run(self, stages: Iterable[Stage], deadline: float) -> list[str]:
        """Runs stages until a time of ``time.monotonic``; returns a line on each."""
        self.window.results.mkdir(parents=True, exist_ok=True)
        lines = []
        for stage in stages:
            started = time.monotonic()
            print(f"=== {stage.name}", flush=True)
            left = min(stage.seconds, deadline - started)
            result = self.run_stage(stage, left) if left > 0 else "FAILED: no time is left"
            lines.append(f"{stage.name:<10} {time.monotonic() - started:6.0f} s  {result}")
            print(f"=== {lines[-1]}", flush=True)
            with (self.window.results / "summary.txt").open("a") as summary:
                summary.write(lines[-1] + "\n")
            self.save()
        return lines

    def run_stage(self, stage: Stage, seconds: float) -> str:
        """Runs a stage, showing its output and keeping it in a file; returns how it ended."""
        if stage.missing:
            return f"skipped: {stage.missing}"
        deadline = time.monotonic() + seconds
        log = self.window.results / f"{stage.name}.log"
        with subprocess.Popen(["tee", str(log)], stdin=subprocess.PIPE) as tee:
            for command in stage.commands:
                result = self._run_command(command, stage, tee, deadline)
                if result != "ok":
                    break
        return result if result == "ok" else f"FAILED: {result}"

    def _run_command(
        self, command: tuple[str, ...], stage: Stage, tee: subprocess.Popen[bytes], deadline: float
    ) -> str:
        seconds = deadline - time.monotonic()
        budget = str(max(10.0, seconds - _RESERVE))
        try:
            process = subprocess.Popen(
                [part.replace(SECONDS, budget) for part in command],
                cwd=ROOT,
                env={**os.environ, **self._environment(), **stage.environment},
                stdout=tee.stdin,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
        while (left := deadline - time.monotonic()) > 0:
            try:
                code = process.wait(min(self.refresh, left))
            except subprocess.TimeoutExpired:
                self.save()
            else:
                return f"exit code {code}" if code else "ok"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"not done after {max(0.0, seconds):.0f} s"

    def _environment(self) -> dict[str, str]:
        paths = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "TRITON_CACHE_DIR": str(self.window.build / "triton-cache"),
        }

    def save(self) -> None:
        """Writes the archive anew, beside the last one, which it then replaces."""
        self.archive.parent.mkdir(parents=True, exist_ok=True)
        beside = self.archive.with_name(f".{self.archive.name}")
        # What a stage writes beside a file and renames may vanish; then the last one stays.
        with suppress(FileNotFoundError):
            with tarfile.open(beside, "w:gz", compresslevel=1) as archive:
                archive.add(self.window.results, "gpu_check")
            beside.replace(self.archive)


def main() -> None:
    """Runs the stages on this machine's GPU."""
    known = parser(__doc__)
    known.add_argument("--output", type=Path, default=ROOT / "build", help=f"folder for {ARCHIVE}")
    known.add_argument(
        "--work", type=Path, default=ROOT / "build" / "gpu", help="folder that stages share"
    )
    known.add_argument("--compiled", type=Path, help="archive of benchmarks.gpu.precompile")
    known.add_argument("--only", default="", help="stages, such as library,tests; default: all")
    known.add_argument("--budget", type=float, default=2700, help="seconds for all of them")
    known.add_argument(
        "--rehearse", action="store_true", help="try each stage without a GPU, at tiny sizes"
    )
    given = known.parse_args()
    deadline = time.monotonic() + given.budget
    work = given.work.absolute()
    compiled = given.compiled and given.compiled.absolute()
    window = Window(work, work / "results", compiled, given.rehearse)
    stages = list(window.stages())
    names = [stage.name for stage in stages]
    wanted = given.only.split(",") if given.only else names
    if unknown := set(wanted) - set(names):
        known.error(f"stages are {', '.join(names)}; got {', '.join(sorted(unknown))}")
    check = Check(window, given.output.absolute() / ARCHIVE)
    lines = check.run([stage for stage in stages if stage.name in wanted], deadline)
    print("\n=== summary", *lines, f"results are in {check.archive}", sep="\n")
    if any("FAILED" in line for line in lines):
        sys.exit(1)


if __name__ == "__main__":
    main()
