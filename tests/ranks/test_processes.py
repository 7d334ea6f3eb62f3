"""``shard`` in processes of their own, over gloo on the loopback device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


def torchrun(ranks: int, *cases: str) -> subprocess.CompletedProcess[str]:
    paths = [str(SUPPORT), str(SUPPORT.parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(  # noqa: S603  This Python, and our own program.
        [*launcher, "--nproc-per-node", str(ranks), str(SUPPORT / "rank_program.py"), *cases],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, ("families", "training", "compiled")), (4, ("training",))]
)
def test_ranks_compute_the_whole_model(ranks: int, cases: tuple[str, ...]) -> None:
    done = torchrun(ranks, *cases)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == [f"passed {case}" for case in cases]


def test_a_rank_that_fails_ends_the_others() -> None:
    done = torchrun(2, "failing")
    assert done.returncode != 0
    assert "this rank fails" in done.stderr
