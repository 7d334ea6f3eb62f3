"""``dynamo-moe`` in a process that has TensorRT for RTX: a builder may end its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tensorrt_wheels import RTX, environment

__all__ = ["run_command"]


def run_command(
    *arguments: str | Path, timeout: float = 240, **variables: str
) -> tuple[int, str, str]:
    """Returns a command's exit code and what it printed; skips where TensorRT cannot be had."""
    own = {**environment(RTX), "COLUMNS": "160", **variables}
    done = subprocess.run(
        [sys.executable, "-c", "from dynamo_moe.cli import main; main()", *map(str, arguments)],
        env=own,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
