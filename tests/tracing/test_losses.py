"""Cross entropy with smoothed labels or with probabilities, which PyTorch's exporter gets wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.tracing.decompositions import DECOMPOSITIONS

SHAPES = ((5,), (7, 5), (2, 5, 3, 4))


def _target(shape: tuple[int, ...], kind: str) -> Tensor:
    if kind == "probabilities":
        return torch.rand(shape)
    classes, others = (shape[0], ()) if len(shape) == 1 else (shape[1], (shape[0], *shape[2:]))
    target = torch.randint(0, classes, others)
    return torch.full_like(target, 1) if kind == "all ignored" else target


@pytest.mark.parametrize("kind", ["labels", "all ignored", "probabilities"])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_loss_is_pytorchs(
    shape: tuple[int, ...], smoothing: float, weighted: bool, reduction: int, kind: str
) -> None:
    torch.manual_seed(0)
    operator = torch.ops.aten.cross_entropy_loss.default
    weight = torch.rand(shape[min(1, len(shape) - 1)]) if weighted else None
    ignored = -100 if kind == "probabilities" else 1
    call = (torch.randn(shape), _target(shape, kind), weight, reduction, ignored, smoothing)
    result = DECOMPOSITIONS[operator](*call)
    if kind != "probabilities" and not smoothing and len(shape) > 1:
        assert result is NotImplemented
        return
    torch.testing.assert_close(result, operator(*call), equal_nan=True)


class Loss(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, **self.options)


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (Loss(label_smoothing=0.1, ignore_index=0), torch.tensor([0, 1, 2, 3])),
        (Loss(reduction="none"), torch.rand(4, 5)),
    ],
)
def test_files(loss: Loss, target: Tensor, tmp_path: Path) -> None:
    report = dynamo_moe.export(loss, (torch.randn(4, 5), target), tmp_path / "loss.onnx")
    assert report.notes == ()
    inputs = (torch.randn(12, 5), torch.cat([target] * 3))
    assert dynamo_moe.verify(report.path, loss, [inputs]).passed
