"""Weights are never held twice, and an export above 2 GB needs no options."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch

GIGABYTES = 2.2

# Runs in a separate process and reports its peak memory; `small` warms everything up first.
SCRIPT = """
import json, resource, sys
from pathlib import Path
import torch
from torch import nn
import dynamo_moe
from dynamo_moe.models import DroplessMoEMlp

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def export(layers, width, hidden, path):
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(layers):
        model.append(DroplessMoEMlp(width, hidden, 16, 2))
        # As many weights again, which take convert no time.
        model.append(nn.Linear(width, 16 * hidden)).append(nn.Linear(16 * hidden, width))
    model.eval()
    dynamo_moe.convert(model)
    return model, dynamo_moe.export(model, torch.randn(2, width), path)

folder = Path(sys.argv[1])
export(1, 8, 8, folder / "small.onnx")
before = peak()
model, report = export(2, 1024, 4096, folder / "large.onnx")
x = torch.randn(3, 1024)
torch.save((x, model(x).detach()), folder / "case.pt")
print(json.dumps({
    "peak": peak() - before,
    "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
    "files": [file.name for file in report.files],
    "bytes": report.file_bytes,
}))
"""


@pytest.mark.slow
@pytest.mark.every
def test_more_than_two_gigabytes(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 3 * GIGABYTES * 1e9:
        pytest.skip(f"needs {3 * GIGABYTES:.0f} GB of free disk")
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, capture_output=True, text=True
    ).stdout
    result = json.loads(output.splitlines()[-1])
    assert result["weights"] > 2**31
    assert result["files"] == ["large.onnx", "large.onnx.data"]
    assert result["bytes"] < 1.01 * result["weights"]
    assert result["peak"] < 1.3 * result["weights"]

    onnx.checker.check_model(tmp_path / "large.onnx")
    x, expected = torch.load(tmp_path / "case.pt")
    session = onnxruntime.InferenceSession(str(tmp_path / "large.onnx"))
    result = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)
