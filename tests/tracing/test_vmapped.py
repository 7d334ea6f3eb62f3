"""What a model computes under ``torch.vmap`` is the same, without a second trace of the program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.private import tracer


class Computed(nn.Module):
    """A function of a tensor and a weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 20).reshape(4, 5))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def rows(x: Tensor, weight: Tensor) -> Tensor:
    return torch.vmap(lambda row: F.softmax(row @ weight, dim=0).cumsum(0))(x)


def a_weight_for_each(x: Tensor, weight: Tensor) -> Tensor:
    shifts = torch.arange(x.shape[0], dtype=x.dtype)
    return torch.vmap(lambda row, shift: torch.where(row > shift, row, shift))(x, shifts) @ weight


def pairs_as_a_mask_has_them(x: Tensor, weight: Tensor) -> Tensor:
    places = torch.arange(x.shape[0])

    def sees(one: Tensor, other: Tensor) -> Tensor:
        return (one >= other) & (one - other < 3)

    mask = torch.vmap(torch.vmap(sees, in_dims=(None, 0)), in_dims=(0, None))(places, places)
    return mask.to(x.dtype) @ x @ weight


def changed_in_place(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = torch.vmap(lambda row: row.clone().add_(1).relu())(x)[:, 1:]
    return y @ weight


def twice_and_several_results(x: Tensor, weight: Tensor) -> Tensor:
    least, greatest = torch.vmap(lambda row: (row.min(), row.max()))(x)
    first = torch.stack([least, greatest], 1)
    return first @ torch.vmap(torch.neg)(weight)[:2]


@pytest.mark.skipif(tracer.missing() is not None, reason="needs a version of PyTorch that is known")
@pytest.mark.parametrize(
    "function",
    [
        rows,
        a_weight_for_each,
        pairs_as_a_mask_has_them,
        changed_in_place,
        twice_and_several_results,
    ],
)
def test_the_same_at_every_size(
    function: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    model = Computed(function).eval()
    report = dynamo_moe.export(model, torch.randn(6, 4), tmp_path / "model.onnx")
    assert report.notes == ()
    assert dynamo_moe.verify(report.path, model).passed


def test_without_its_names_pytorch_traces_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer, "VMAP_BEGINS", None)
    model = Computed(rows).eval()
    report = dynamo_moe.export(model, torch.randn(6, 4), tmp_path / "model.onnx")
    assert any("traced the whole program again" in note for note in report.notes)
    assert dynamo_moe.verify(report.path, model).passed
