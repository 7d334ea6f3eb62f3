"""``shard`` in processes of their own, over gloo on the loopback device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nccl_standin import nccl_standin

SUPPORT = Path(__file__).parents[1] / "support"
PROGRAM = str(SUPPORT / "rank_program.py")


PAGE = Path(__file__).parents[2] / "docs/how-to/experts_over_ranks.md"


def started(*program: str) -> subprocess.CompletedProcess[str]:
    paths = [str(SUPPORT), str(SUPPORT.parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment["LD_LIBRARY_PATH"] = str(nccl_standin().parent)
    return subprocess.run(
        [sys.executable, *program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def torchrun(ranks: int, *program: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    return started(*launcher, "--nproc-per-node", str(ranks), *program)


TWO = [
    "families",
    "heads",
    "training",
    "split_tokens",
    "opened",
    "idle",
    "compiled",
    "verified",
    "broken",
    "communicator",
    "unjoined",
]
FOUR = ["idle", "grouped"]


def test_ranks_compute_the_whole_model() -> None:
    done = started(PROGRAM, "2", *TWO, "4", *FOUR)
    assert done.returncode == 0, done.stderr[-3000:]
    passed = [*((case, 2) for case in TWO), *((case, 4) for case in FOUR)]
    assert done.stdout.split("\n")[:-1] == [f"passed {case} on {ranks}" for case, ranks in passed]


@pytest.mark.every
def test_a_rank_that_fails_ends_the_others() -> None:
    done = started(PROGRAM, "2", "failing")
    assert done.returncode != 0
    assert "this rank fails" in done.stderr


@pytest.mark.every
def test_the_page_shows_what_its_program_prints(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    program = re.search(r"```python\n(# run\.py\n.*?)```", page, re.DOTALL)
    shown = re.search(r"\$ torchrun .* run\.py\n(.*?)```", page, re.DOTALL)
    assert program is not None
    assert shown is not None
    (tmp_path / "run.py").write_text(program[1], encoding="utf-8")
    # Each rank's output apart: of what two print at once, parts may come between each other.
    apart = ("--redirects", "1", "--log-dir", str(tmp_path / "logs"))
    done = torchrun(2, *apart, str(tmp_path / "run.py"))
    printed = [path.read_text() for path in sorted((tmp_path / "logs").rglob("stdout.log"))]
    assert "".join(printed) == shown[1], done.stderr[-3000:]
