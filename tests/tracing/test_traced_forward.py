"""A model whose code was run without an entry in ``sys.modules`` is traced as any other."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dynamo_moe
from dynamo_moe.tracing.traced_forward import code_importable

# A share of the tokens looks at itself: PyTorch reads the code, since the share is a number.
CODE = """
import torch
from torch import nn

class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        count = max(1, int(0.5 * x.shape[1]))
        mask = torch.ones(count, count, dtype=torch.bool).triu(1)
        x = x[:, :count]
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
"""


def _chosen(folder: Path) -> nn.Module:
    (folder / "chosen.py").write_text(CODE)
    model: nn.Module = runpy.run_path(str(folder / "chosen.py"))["Chosen"]()
    return model.eval()


def test_a_model_of_a_script(tmp_path: Path) -> None:
    model = _chosen(tmp_path)
    shapes = {"x": {1: "length"}}
    report = dynamo_moe.export(
        model, torch.randn(2, 12, 16), tmp_path / "m.onnx", dynamic_shapes=shapes
    )
    inputs = [(torch.randn(2, length, 16),) for length in (12, 1, 7)]
    assert dynamo_moe.verify(report.path, model, inputs).passed


def test_scripts_of_one_name_are_not_mixed_up(tmp_path: Path) -> None:
    """``runpy`` gives all of them one; Dynamo would read the variables of the first."""
    scripts = []
    for scale in (2, 3):
        (tmp_path / "script.py").write_text(
            f"from torch import nn\nSCALE = {scale}\n"
            "class Scaled(nn.Module):\n"
            "    def forward(self, x):\n"
            "        return x[:, :max(1, int(0.5 * x.shape[1]))] * SCALE\n"
        )
        scripts.append(runpy.run_path(str(tmp_path / "script.py"))["Scaled"]())
    model = nn.Sequential(*scripts)
    with (
        pytest.raises(ImportError, match="is not of the module <run_path>"),
        code_importable(model),
    ):
        pass
    report = dynamo_moe.export(model, torch.ones(2, 12), tmp_path / "m.onnx")
    assert dynamo_moe.verify(report.path, model).passed


def test_modules_are_there_for_the_trace_alone(tmp_path: Path) -> None:
    model, before = _chosen(tmp_path), {*sys.modules}
    name = type(model).__module__
    assert name not in sys.modules
    with code_importable(model):
        assert sys.modules[name].Chosen is type(model)
    assert {*sys.modules} == before
