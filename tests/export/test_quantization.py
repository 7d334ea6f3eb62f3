"""ONNX Runtime's static quantisation of an operator written out, and as one node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from torch import Tensor, nn

import custom_ops
import dynamo_moe
from standin import ROOT, build

WIDTH = 16
CPU = Path("/proc/cpuinfo")


class WrittenOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class OneNode(WrittenOut):
    def forward(self, x: Tensor) -> Tensor:
        return custom_ops.rms_norm(x, self.weight)


class Batches(CalibrationDataReader):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches = iter([torch.randn(4, 3, WIDTH, generator=generator) for _ in range(8)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        batch = next(self.batches, None)
        return None if batch is None else {"input": batch.numpy()}


def quantized(
    folder: Path, norm: type[nn.Module], types: list[str] | None
) -> tuple[Counter, float]:
    """Returns the quantised file's operators, and the error of its result."""
    torch.manual_seed(0)
    model = nn.Sequential(
        norm(), nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, 8, bias=False)
    ).eval()
    path, int8 = folder / f"{norm.__name__}.onnx", folder / f"{norm.__name__}_int8.onnx"
    dynamo_moe.export(model, torch.randn(2, 3, WIDTH), path)
    # Without VNNI, the sum of two 8-bit products overflows AVX2's 16 bits.
    quantize_static(path, int8, Batches(), op_types_to_quantize=types, reduce_range=True)
    x = torch.randn(5, 3, WIDTH)
    (y,) = onnxruntime.InferenceSession(int8).run(None, {"input": x.numpy()})
    with torch.no_grad():
        expected = model(x)
    error = (torch.from_numpy(y) - expected).norm() / expected.norm()
    return Counter(node.op_type for node in onnx.load(int8).graph.node), float(error)


def test_one_node_needs_fewer_pairs(tmp_path: Path) -> None:
    many, many_error = quantized(tmp_path, WrittenOut, None)
    one, one_error = quantized(tmp_path, OneNode, None)
    assert one["RMSNorm"] == 1
    assert "ReduceMean" not in one
    # Before the first product, between the two, and after the second.
    assert one["QuantizeLinear"] == 3
    assert many["QuantizeLinear"] >= 2 * one["QuantizeLinear"]
    assert many["DequantizeLinear"] > one["DequantizeLinear"]
    assert one_error < 0.05
    assert many_error < 0.1


def test_the_node_itself_can_be_quantised(tmp_path: Path) -> None:
    ops, error = quantized(tmp_path, OneNode, ["MatMul", "RMSNorm"])
    # Also before the node, and its weight.
    assert ops["QuantizeLinear"] >= 4
    assert error < 0.05


@pytest.mark.skipif(
    not CPU.exists() or "cpuid_fault" not in CPU.read_text() or "LD_PRELOAD" in os.environ,
    reason="this CPU cannot hide its instructions",
)
@pytest.mark.every
def test_a_cpu_without_vnni() -> None:
    limit = build(
        "avx2.so", [ROOT / "tests" / "native" / "avx2.cc"], "-O1", "-fPIC", "-shared", "-ldl"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "one_node or itself", __file__],
        check=False,
        env={**os.environ, "LD_PRELOAD": str(limit)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
