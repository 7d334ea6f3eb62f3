"""``examples/train_from_onnx``: it learns, and neither PyTorch nor dynamo_moe is there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("sklearn")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_from_onnx"

# As train.py is started, and what it must not have imported.
RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    assert not {"torch", "dynamo_moe"} & set(sys.modules)
"""


def started(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train")
    exported = started(EXAMPLE / "export.py", path)
    assert exported.returncode == 0, exported.stderr
    return path


@pytest.mark.every
def test_a_layer_is_one_node_for_each_direction(folder: Path) -> None:
    nodes = onnx.load(folder / "digits.onnx").graph.node
    operators = Counter(node.op_type for node in nodes if node.domain.startswith("moe"))
    assert operators == {"DroplessMoERouted": 2, "DroplessMoEGrad": 2}


def test_it_learns(folder: Path) -> None:
    train = (EXAMPLE / "train.py", folder, "--epochs")
    result = started("-c", RUN, *train, 4, "--minimum", 0.6)
    assert result.returncode == 0, result.stdout + result.stderr
    epochs = result.stdout.splitlines()
    assert [line.split(":")[0] for line in epochs[:4]] == [f"epoch  {n} of 4" for n in range(1, 5)]
    assert epochs[4].endswith("% of the test images are right after 4 epochs")
    first, trained = np.load(folder / "digits.npz"), np.load(folder / "trained.npz")
    assert not np.array_equal(first["head.weight"], trained["head.weight"])


def test_too_little_accuracy_is_a_failure(folder: Path) -> None:
    result = started("-c", RUN, EXAMPLE / "train.py", folder, "--epochs", 1, "-q")
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.count("\n") == 1
