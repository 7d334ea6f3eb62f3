"""LSTMs whose states are projected are LSTMs of ONNX, at every length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_moe


class Projected(nn.Module):
    """Returns all that an LSTM returns, from states of its own or from zeros."""

    def __init__(self, *, states: bool, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, proj_size=3, **options)
        sides = self.lstm.num_layers * (2 if self.lstm.bidirectional else 1)
        self.hidden = nn.Parameter(torch.randn(sides, 1, 3)) if states else None
        self.cells = nn.Parameter(torch.randn(sides, 1, 5)) if states else None

    def forward(self, x: Tensor) -> Any:
        if self.hidden is None or self.cells is None:
            return self.lstm(x)
        batch = x.shape[0] if self.lstm.batch_first else x.shape[1]
        states = self.hidden.expand(-1, batch, -1), self.cells.expand(-1, batch, -1)
        return self.lstm(x, tuple(state.contiguous() for state in states))


@pytest.mark.parametrize(
    "options",
    [
        {"states": True},
        {"states": False, "bidirectional": True, "batch_first": True},
        {"states": True, "bidirectional": True, "num_layers": 2, "bias": False},
    ],
)
def test_results_and_last_states(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Projected(**options).eval()
    shapes = ({0: "batch", 1: "length"},)
    report = dynamo_moe.export(
        model, torch.randn(2, 4, 6), tmp_path / "lstm.onnx", dynamic_shapes=shapes
    )
    assert report.nodes["LSTM"] == model.lstm.num_layers * (1 + model.lstm.bidirectional)
    assert report.notes == ()
    inputs = [(torch.randn(size, length, 6),) for size, length in ((2, 4), (1, 1), (3, 7))]
    assert dynamo_moe.verify(report.path, model, inputs).passed
