"""What a model returns beside tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import dynamo_moe


class Returns(nn.Module):
    """Has equal blocks, and returns what a function makes of their result."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.function(x)


@pytest.mark.parametrize("repeated_blocks", ["auto", "off"])
def test_constants_are_left_out_and_named(tmp_path: Path, repeated_blocks: str) -> None:
    def results(x: Tensor) -> Any:
        return 0.0, x * 2, None, {"name": "a", "loss": x.sum(), "number": 3}, True

    model, path = Returns(results).eval(), tmp_path / "m.onnx"
    report = dynamo_moe.export(
        model,
        torch.randn(2, 4),
        path,
        dynamic_shapes={"x": {0: "n"}},
        output_names=["y", "loss"],
        repeated_blocks=repeated_blocks,
    )
    assert report.notes == (
        "results that are no tensors are not in the file: 0.0, None, 'a', 3, True",
    )
    assert bool(report.blocks) == (repeated_blocks == "auto")
    names = [value.name for value in onnxruntime.InferenceSession(path).get_outputs()]
    assert names == ["y", "loss"]
    assert dynamo_moe.verify(path, model).passed


def test_sizes_are_results(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    report = dynamo_moe.export(
        Returns(lambda x: (x.shape[0], x)), torch.randn(2, 4), path, dynamic_shapes={"x": {0: "n"}}
    )
    assert report.notes == ()
    size, _ = onnxruntime.InferenceSession(path).run(None, {"x": torch.randn(5, 4).numpy()})
    assert size == 5


def test_constant_tensors_are_results(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model, x = Returns(lambda x: torch.max(x.sum(), 0)), torch.randn(2, 4)
    dynamo_moe.export(model, x, path)
    greatest, place = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    assert float(greatest) == pytest.approx(float(model(x)[0].detach()), rel=1e-5)
    assert place == 0


def test_nothing_but_constants(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with pytest.raises(dynamo_moe.ExportError, match="the model returns no tensor, but 3, None"):
        dynamo_moe.export(Returns(lambda _: (3, None)), torch.randn(2, 4), path)
    assert not path.exists()


class Passes(nn.Module):
    """Returns an input as it is, twice, beside what it makes of it."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return y, x + y, y


@pytest.mark.parametrize("names", [["same", "sum", "again"], None])
def test_inputs_are_results(tmp_path: Path, names: list[str] | None) -> None:
    path = tmp_path / "m.onnx"
    dynamo_moe.export(Passes(), (torch.ones(2, 3), torch.zeros(2, 3)), path, output_names=names)
    session = onnxruntime.InferenceSession(path)
    assert [value.name for value in session.get_inputs()] == ["x", "y"]
    found = [value.name for value in session.get_outputs()]
    assert found == (names or ["output", "output_2", "output_3"])
    assert dynamo_moe.verify(path, Passes()).passed
