"""Whole numbers that a model computes of its sizes, and the elements that a resized image takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dynamo_moe
from traced_programs import Call

# Where float32 has 0.7 * 90 = 63 and float64 less, 1.05 * 60 = 63, or 9 / 0.6 = 15.
LENGTHS = (1, 2, 3, 10, 14, 17, 49, 60, 63, 90, 91, 117, 340, 676)


def _compare(function: Callable[[Tensor], Tensor], path: Path, rtol: float = 0.0) -> None:
    model = Call(function)
    report = dynamo_moe.export(model, torch.randn(1, 1, 20), path, dynamic_shapes={"x": {2: "n"}})
    assert report.notes == ()
    session = onnxruntime.InferenceSession(path)
    for length in LENGTHS:
        x = torch.arange(float(length)).view(1, 1, length)
        try:
            expected = model(x)
        except RuntimeError:
            continue  # PyTorch makes no image of no pixels.
        [result] = session.run(None, {"x": x.numpy()})
        np.testing.assert_allclose(result, expected.numpy(), rtol, err_msg=str(length))


@pytest.mark.parametrize(
    "whole",
    [
        lambda n: int(0.7 * n),
        lambda n: math.floor(n * 1.05),
        lambda n: math.ceil(n * 0.7) - 1,
        lambda n: round(n * 0.35),
        lambda n: int(n / 3 * 0.7 + 0.1),
        lambda n: int(max(n * 0.7, 2.0)),
        lambda n: int(n**0.5 * 1.1),
        lambda n: -int(-n * 0.7),
    ],
)
def test_whole_numbers_are_those_of_python(whole: Callable[[int], int], tmp_path: Path) -> None:
    _compare(lambda x: x[..., : whole(x.shape[2])], tmp_path / "m.onnx")


def test_real_numbers_stay_float32(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        scale = 0.7 * x.shape[2]
        return x[..., : int(scale)] * (scale / 2)

    _compare(function, tmp_path / "m.onnx", rtol=1e-6)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("factor", [0.6, 0.3, 1.05, 1.7, 0.25, 3.0, 31.0])
def test_resized_by_a_factor(factor: float, mode: str, tmp_path: Path) -> None:
    _compare(lambda x: F.interpolate(x, scale_factor=factor, mode=mode), tmp_path / "m.onnx")


@pytest.mark.parametrize("size", [7, 9, 13])
def test_resized_to_a_size(size: int, tmp_path: Path) -> None:
    _compare(lambda x: F.interpolate(x, size=size), tmp_path / "m.onnx")


def test_resized_to_a_size_of_the_input(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        image = x.unsqueeze(3)
        return F.interpolate(image, size=(x.shape[2] // 3 + 1, 5))

    _compare(function, tmp_path / "m.onnx")


def test_powers_of_two_stay_one_node(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        return F.interpolate(F.interpolate(x, scale_factor=2.0), scale_factor=0.5)

    report = dynamo_moe.export(
        Call(function), torch.randn(1, 1, 20), tmp_path / "m.onnx", dynamic_shapes={"x": {2: "n"}}
    )
    assert report.nodes["Resize"] == 2


@pytest.mark.parametrize(
    "repeat",
    [
        lambda x, n: x.repeat_interleave(n, 1),
        lambda x, n: x.repeat_interleave(n, -1),
        lambda x, n: x.repeat_interleave(n),
    ],
)
def test_repeated_by_a_size(repeat: Callable[[Tensor, int], Tensor], tmp_path: Path) -> None:
    _compare(lambda x: repeat(x[..., :5], x.shape[2]), tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "roll",
    [
        lambda x, n: x.roll(n // 3, -1),
        lambda x, n: x.roll(-n // 3, 2),
        lambda x, n: x.roll((n - 1, n + 2), (2, 2)),
        lambda x, n: x.roll(n // 2),
    ],
)
def test_rolled_by_a_size(roll: Callable[[Tensor, int], Tensor], tmp_path: Path) -> None:
    _compare(lambda x: roll(x, x.shape[2]), tmp_path / "m.onnx")


def test_bounds_that_no_int64_holds(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        torch._check(x.shape[2] <= 2**64 - 4)
        return x * 2

    _compare(function, tmp_path / "m.onnx")


def test_one_hot_of_as_many_classes_as_a_size_says(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        capacity = int(x.shape[2] * 0.7) + 1
        return F.one_hot(x.long().clamp(0, capacity - 1), num_classes=capacity).float()

    _compare(function, tmp_path / "m.onnx")
