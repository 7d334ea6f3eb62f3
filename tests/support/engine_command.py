"""``dynamo-moe`` commands in a process that has TensorRT for RTX: a builder may end its process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tensorrt_wheels import RTX, environment

_SCRIPT = """
import json, sys
from typer.testing import CliRunner
from dynamo_moe.cli import app

done = [CliRunner().invoke(app, command) for command in json.loads(sys.argv[1])]
print(json.dumps([[each.exit_code, each.stdout, each.stderr] for each in done]))
"""


class Done(NamedTuple):
    """A command that ended.

    Attributes:
        code: Its exit code.
        out: What it printed to stdout.
        error: What it printed to stderr.
    """

    code: int
    out: str
    error: str


def run_commands(*commands: Sequence[str | Path], **variables: str) -> list[Done]:
    """Runs commands, one after the other; skips the test where TensorRT cannot be had.

    Args:
        commands: Arguments of ``dynamo-moe``.
        variables: More environment variables. No command sees a GPU.
    """
    # Each process imports PyTorch and loads TensorRT, which takes longer than to build an engine.
    listed = json.dumps([[str(each) for each in command] for command in commands])
    own = {**environment(RTX), "COLUMNS": "160", "CUDA_VISIBLE_DEVICES": "", **variables}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, listed],
        env=own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Done(*each) for each in json.loads(done.stdout.splitlines()[-1])]
