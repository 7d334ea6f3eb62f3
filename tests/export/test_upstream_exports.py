"""The runner of PyTorch's exporter's own tests, on a test of ours, and on a checkout of PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
# Those whose file cannot be compared: they draw random numbers.
RANDOM = {"test_enable_gqa_in_attention_23_with_dropout"}

TESTS = """
import torch
from torch.onnx._internal.exporter import _testing

class Branch(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1.0, lambda x: x - 42.0, [x])

class Drawn(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)

class Decides(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def test_right():
    program = torch.onnx.export(Branch(), (torch.ones(2),), dynamo=True)
    _testing.assert_onnx_program(program)
    _testing.assert_onnx_program(program, args=(-torch.ones(2),))

def test_wrong():
    torch.onnx.export(Drawn(), (torch.ones(2),), dynamo=True)

def test_refused():
    torch.onnx.export(Decides(), (torch.ones(2),), dynamo=True)
"""


def outcomes(tests: Path, report: Path) -> list[dict[str, Any]]:
    command = (sys.executable, "-m", "pytest", "-p", "upstream_exports", "-p", "no:cacheprovider")
    command += ("-c", os.devnull, "--rootdir", str(tests.parent), "--report", str(report))
    environment = os.environ | {"PYTHONPATH": str(SUPPORT)}
    subprocess.run([*command, str(tests)], env=environment, check=False, stdout=subprocess.DEVNULL)
    found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))
    return found


def test_each_export_has_an_outcome(tmp_path: Path) -> None:
    tests = tmp_path / "test_models.py"
    tests.write_text(TESTS, encoding="utf-8")
    found = {each["test"]: each for each in outcomes(tests, tmp_path / "report.json")}
    assert {name: (each["upstream"], each["ours"]) for name, each in found.items()} == {
        "test_right": (True, "right"),
        "test_wrong": (True, "wrong"),
        "test_refused": (False, "refused"),
    }
    assert "differs from the model" in found["test_wrong"]["message"]


@pytest.mark.skipif("PYTORCH_CHECKOUT" not in os.environ, reason="needs PYTORCH_CHECKOUT")
def test_no_file_of_pytorchs_own_models_is_wrong(tmp_path: Path) -> None:
    folder = Path(os.environ["PYTORCH_CHECKOUT"]) / "test" / "onnx" / "exporter"
    found = outcomes(folder / "test_small_models_e2e.py", tmp_path / "report.json")
    assert len(found) > 30
    assert {each["test"] for each in found if each["ours"] == "wrong"} <= RANDOM
