"""Integers beyond 2^53, such as hashes: files reduce, divide and compare them as PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dynamo_moe
from traced_programs import Call

LARGE = 2**62

FUNCTIONS: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "sum": lambda x: (x.sum(), x.sum(-1), x.sum((0, 2), keepdim=True), x.nansum(1)),
    "hash": lambda x: ((x % 300 * 1000000007 ** torch.arange(5)).sum(-1) % 30000,),
    "sum in int32": lambda x: (x.sum(-1, dtype=torch.int32), x.int().sum(1, dtype=torch.int32)),
    "product": lambda x: (x.prod(), x.prod(-1), x.prod(1, keepdim=True), x.int().prod(2)),
    "products so far": lambda x: x.cumprod(-1),
    "sums so far": lambda x: x.cumsum(1),
    "mean": lambda x: (
        (x % 7).mean(-1, dtype=torch.float32),
        (x % 7).mean((0, 1), dtype=torch.float64),
    ),
    "extremes": lambda x: (x.amax(-1), x.amin((0, 1)), x.max(), *x.min(1), x.argmax(-1)),
    "extremes so far": lambda x: (*x.cummax(-1), *x.cummin(1), *(x % 3).cummax(2)),
    "quotients": lambda x: (
        torch.div(x, 7, rounding_mode="trunc"),
        torch.div(x, -7, rounding_mode="floor"),
        torch.div(x, x.flip(-1) | 1, rounding_mode="trunc"),
        torch.div(x[0].int(), x[:, :1] // 3 | 1, rounding_mode="floor"),
    ),
    "remainders": lambda x: (x.fmod(7), x.fmod(x.flip(-1) | 1), x % -7),
}


def numbers(*sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-LARGE, LARGE, sizes, generator=generator)


def outputs(path: Path, x: Tensor) -> list[Tensor]:
    session = onnxruntime.InferenceSession(path)
    return [torch.from_numpy(np.asarray(array)) for array in session.run(None, {"x": x.numpy()})]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_pytorch(name: str, tmp_path: Path) -> None:
    model, x = Call(FUNCTIONS[name]), numbers(2, 3, 5)
    x[0, 1] = torch.tensor([LARGE - 1, LARGE - 1, 3 - LARGE, LARGE - 9, LARGE - 2])
    dynamo_moe.export(model, x, tmp_path / "m.onnx", dynamic_shapes=None)
    expected = model(x)
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    actual = outputs(tmp_path / "m.onnx", x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_symbolic_sizes(tmp_path: Path) -> None:
    model = Call(lambda x: (x.sum(), x.sum(1), x.sum((0, 2)), x.prod(2)))
    shapes = {"x": {0: "rows", 1: "columns"}}
    dynamo_moe.export(model, numbers(2, 4, 3), tmp_path / "m.onnx", dynamic_shapes=shapes)
    for sizes in ((2, 4, 3), (1, 7, 3), (3, 0, 3), (0, 2, 3)):
        x = numbers(*sizes)
        torch.testing.assert_close(outputs(tmp_path / "m.onnx", x), list(model(x)), rtol=0, atol=0)


def test_sums_that_are_small_stay_one_node(tmp_path: Path) -> None:
    model = Call(
        lambda x: (
            (x > 0).sum(-1),
            F.one_hot(x % 4, 4).sum(0),
            torch.where(x > 0, 3, -1).sum(),
            x.to(torch.int16).sum(1),
            (x > 0).transpose(0, 1).long().prod(1),
        )
    )
    shapes = {"x": {0: "rows"}}
    dynamo_moe.export(model, numbers(2, 3), tmp_path / "m.onnx", dynamic_shapes=shapes)
    operators = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert sum(operator.startswith("Reduce") for operator in operators) == 5
    assert "CumSum" not in operators
    x = numbers(7, 3)
    torch.testing.assert_close(outputs(tmp_path / "m.onnx", x), list(model(x)), rtol=0, atol=0)
