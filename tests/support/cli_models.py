"""Models for the command line, the folder that they are in, and what commands print there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dynamo_moe.cli import app
from onnx_files import moe_model, save

MODELS = '''
"""Factories, good and bad."""
import torch
from torch import nn
from dynamo_moe.models import DroplessMoEMlp
from helper_of_models import Branching, Listed, Net, OneRun, Talking, TwoInputs

ready = Net()

def build():
    return Net()

def with_args():
    return Net(), (torch.ones(2, 5, 16),)

def with_a_tensor():
    return Net(), torch.ones(2, 5, 16)

def with_a_list():
    return Net(), [1]

def needs(width, depth=2):
    return Net()

def number():
    return 3

def broken():
    raise RuntimeError("no checkpoint\\nat all")

def exits():
    raise SystemExit(0)

def talks():
    print("made a model")
    return Talking()

def branches():
    return Branching()

def bare():
    return DroplessMoEMlp(16, 24, num_experts=4, top_k=2)

def mixed():
    return nn.Sequential(Net(), Listed())

def two_inputs():
    return TwoInputs()

def one_run():
    return OneRun()

def plain():
    return nn.Linear(16, 16)

def meta():
    with torch.device("meta"):
        return Net()

def program():
    return torch.export.export(nn.Linear(16, 16), (torch.ones(2, 16),)).module()

answer = 42
'''


HELPER = """
import torch
from torch import nn
from dynamo_moe.models import DroplessMoEMlp

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = DroplessMoEMlp(16, 24, num_experts=4, top_k=2)

    def forward(self, x):
        return x + self.mlp(self.norm(x))

class Talking(Net):
    def forward(self, x):
        print("called a model")
        return super().forward(x)

class Branching(Net):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y

class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i, None] * e(x) for i, e in enumerate(self.experts))

class TwoInputs(Net):
    def forward(self, x, mask):
        return super().forward(x) * mask[..., None]

class OneRun(Net):
    # Another function in every process but the one that exported it.
    def forward(self, x):
        y = super().forward(x)
        return y if torch.compiler.is_exporting() else y + 1
"""


@pytest.fixture(scope="module")
def folder_of_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.py").write_text(MODELS)
    (folder / "helper_of_models.py").write_text(HELPER)
    (folder / "imports_nothing.py").write_text("import a_package_that_is_not_there\n")
    (folder / "empty.py").write_text("")
    (folder / "a.svg").mkdir()
    save(moe_model(), folder / "m.onnx")
    return folder


@pytest.fixture
def in_the_folder_of_models(
    folder_of_models: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.chdir(folder_of_models)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in {"models", "helper_of_models", "_model_models"} - before:
        sys.modules.pop(name, None)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def error_of(*arguments: str, code: int) -> str:
    """The one line that a failing command prints."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.stderr
    [line] = lines
    return line.removeprefix("error: ")
