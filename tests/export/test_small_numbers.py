"""Numbers near 0 and 1 in a model: none is taken for its neighbour."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import dynamo_moe


def logarithm(epsilon: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.log(x + epsilon)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"logarithm, {epsilon}": logarithm(epsilon) for epsilon in (1e-6, 1e-8, 1e-12, 1e-30)},
    "quotient": lambda x: x / (x.sum(-1, keepdim=True) + 1e-20),
    "root": lambda x: torch.rsqrt(1e-12 + x),
    "difference": lambda x: torch.log(x - -1e-9),
    "integers": lambda x: torch.log(x.long() + 1e-9),
    "nearly 1": lambda x: (x + 1) * (1 + 1e-6) - (x + 1),
    "divided by nearly 1": lambda x: (x + 1) / (1 + 1e-6) - (x + 1),
    "layer norm": lambda x: nn.functional.layer_norm(x, (4,), eps=1e-12),
}


class Applies(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.each_value
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_at_zero(name: str, opset: int, tmp_path: Path) -> None:
    model, x = Applies(FUNCTIONS[name]), torch.zeros(3, 4)
    x[1] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    path = tmp_path / "m.onnx"
    dynamo_moe.export(model, x, path, dynamic_shapes={"x": {0: "n"}}, opset=opset)
    [found] = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    expected = model(x).numpy()
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)
