"""`make gpu-check` without a GPU: its stages, what they leave, and a rehearsal."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.check import SECONDS, Stage, run_stages, stages_of

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "how-to" / "check_on_a_gpu.md").read_text()


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def run(tmp_path: Path, *stages: Stage, deadline: float = math.inf) -> list[str]:
    """Returns how the stages ended."""
    lines = run_stages(stages, tmp_path / "results", tmp_path / "build", deadline)
    return [line.split(" s  ")[1] for line in lines]


def test_a_failing_stage_does_not_hide_the_next(tmp_path):
    ends = run(
        tmp_path,
        Stage("a", (python("import sys; print('no'); sys.exit(3)"), python("print(1)")), math.inf),
        Stage("b", (python("import time; time.sleep(6000)"),), 0.1),
        Stage("c", (python("import benchmarks, moe_cases; print('yes')"),), math.inf),
        Stage("d", (("no-such-program",),), math.inf),
        Stage("e", (python("print('late')"),), 0),
    )
    assert ends == [
        "FAILED: exit code 3",
        "FAILED: not done after 0 s",
        "ok",
        "FAILED: no-such-program: No such file or directory",
        "FAILED: no time is left",
    ]
    results = tmp_path / "results"
    assert [(results / f"{name}.log").read_text() for name in "ace"] == ["no\n", "yes\n", ""]
    assert len((results / "summary.txt").read_text().splitlines()) == 5


@pytest.mark.parametrize(("limit", "deadline"), [(1e6, math.inf), (math.inf, 1e6)])
def test_a_command_is_told_its_seconds(tmp_path, limit, deadline):
    told = python("import sys; print(sys.argv[1])")
    deadline += time.monotonic()
    assert run(tmp_path, Stage("a", ((*told, SECONDS),), limit), deadline=deadline) == ["ok"]
    assert 0.99e6 < float((tmp_path / "results" / "a.log").read_text()) < 1e6


def test_a_check_that_is_ended_takes_its_stage_with_it(tmp_path):
    stage = (
        "import os, pathlib, subprocess, time; child = subprocess.Popen(['sleep', '6000'])\n"
        f"pathlib.Path({str(tmp_path / 'new')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'ids')!r}); time.sleep(6000)"
    )
    code = (
        "import sys; from pathlib import Path; from benchmarks.gpu import check\n"
        f"slow = check.Stage('slow', ((sys.executable, '-c', {stage!r}),), 6000)\n"
        "check.stages_of = lambda *_, **__: [slow]\n"
        f"sys.argv[1:] = ['--output', {str(tmp_path)!r}, '--work', {str(tmp_path)!r}]\n"
        "check.main()"
    )
    process = subprocess.Popen(python(code), cwd=ROOT)
    while not (tmp_path / "ids").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    for stage_process in (tmp_path / "ids").read_text().split():
        while is_running(stage_process):
            time.sleep(0.05)


def is_running(process: str) -> bool:
    """Whether a process has not ended, be its exit code read or not."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_stages_fit_the_window(tmp_path):
    limits = {stage.name: stage.seconds for stage in stages_of(tmp_path, tmp_path)}
    assert sum(limits.values()) <= 1800
    # The guide names them all, in this order, and what a command of ten minutes may take.
    table = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", GUIDE, re.MULTILINE))
    assert {name: float(seconds) for name, seconds in table.items()} == limits
    commands = [names.split(",") for names in re.findall(r"make gpu-check ONLY=(\S+)", GUIDE)]
    assert [name for command in commands for name in command] == list(limits)
    assert max(sum(limits[name] for name in command) for command in commands) <= 580


def test_ninja_builds_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Ninja" not in stages_of(tmp_path, tmp_path)[1].commands[0]
    (tmp_path / "ninja").write_text("")
    (tmp_path / "ninja").chmod(0o755)
    assert "Ninja" in stages_of(tmp_path, tmp_path)[1].commands[0]


def test_an_unknown_stage_is_refused():
    command = [sys.executable, "-m", "benchmarks.gpu.check", "--only", "tests,sleep"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    names = "device, library, tests, sessions, baseline, tune, tuned"
    assert f"stages are {names}; got sleep" in found.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would run it instead")
@pytest.mark.skipif(
    version("triton").startswith("3.6."),
    reason="Triton 3.6's interpreter fails unrepaired, as in a process of its own",
)
@pytest.mark.every
@pytest.mark.parametrize("stages", [["device", "tests", "tune", "tuned"], ["device", "sessions"]])
def test_a_rehearsal(stages, tmp_path):
    """Neither the library, which `make package-test` builds, nor the baseline, as `tuned`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.check",
        "--rehearse",
        "--only",
        ",".join(stages),
    ]
    command += ["--work", str(tmp_path / "work"), "--output", str(tmp_path)]
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr
    results = tmp_path / "gpu_check"
    summary = (results / "summary.txt").read_text()
    assert re.findall(r"^(\w+) .*  ok$", summary, re.MULTILINE) == stages
    if "sessions" in stages:
        assert " 3 passed, " in (results / "sessions.log").read_text()
        return
    assert re.search(r"\n=+ [3-9]\d passed, \d+ deselected", (results / "tests.log").read_text())
    cells = json.loads((results / "tuned.json").read_text())["cells"]
    (cell,) = [cell for cell in cells if cell["routing"] == "uniform"]
    assert set(cell["cold us"]) == {"ours", "grouped_mm", "fused_moe"}
    assert not cell["wrong"]
    assert (tmp_path / "work" / "package" / "tuned" / "sm_80.json").is_file()
