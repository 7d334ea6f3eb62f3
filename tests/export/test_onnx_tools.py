"""ONNX tools on exported files, as described in docs/how-to/choose_a_target.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
import onnx_tools
from small_models import OpLayer, OwnRouter, op_model
from standin import ROOT

FORMS = {
    "loop": {},
    "unrolled": {"body": "unrolled"},
    "dense": {"target": "dense"},
    "onnxruntime": {"target": "onnxruntime"},
}
PAGE = ROOT / "docs" / "how-to" / "choose_a_target.md"
# A tool's name in backquotes, then a cell for each form.
ROW = re.compile(r"^\| `([^|]+)` \|(.*)\|$", re.MULTILINE)
SECTION = PAGE.read_text(encoding="utf-8").partition("## Other tools\n")[2].partition("\n## ")[0]
ROWS = dict(ROW.findall(SECTION))


class Model(nn.Module):
    """Both MoE operators, between layers that tools change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 8)
        self.layers = op_model(OpLayer(activation="silu"), OwnRouter(activation="silu"))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.first(x)))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("tools")
    torch.manual_seed(0)
    model = Model().eval()
    shapes = {"x": {1: "tokens"}}
    for form, options in FORMS.items():
        dynamo_moe.export(
            model, torch.randn(2, 5, 16), folder / f"{form}.onnx", dynamic_shapes=shapes, **options
        )
    command = [sys.executable, onnx_tools.__file__, *(folder / f"{form}.onnx" for form in FORMS)]
    done = subprocess.run(command, check=True, capture_output=True, cwd=Path(folder))
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("tool", onnx_tools.TOOLS)
@pytest.mark.every
def test_a_tool_does_what_the_table_says(outcomes: dict[str, dict[str, str]], tool: str) -> None:
    documented = {name: [cell.strip() for cell in cells.split("|")] for name, cells in ROWS.items()}
    words = {"the same": "yes", "inlined": "inlined"}
    assert dict(zip(FORMS, documented[tool], strict=True)) == {
        form: words.get(outcome, "no") for form, outcome in outcomes[tool].items()
    }, outcomes[tool]


def test_the_table_has_every_tool() -> None:
    assert list(ROWS) == list(onnx_tools.TOOLS)
