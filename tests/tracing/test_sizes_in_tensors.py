"""Decisions by scalars that are made of sizes, as a capacity of DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import dynamo_moe
from dynamo_moe.tracing.sizes_in_tensors import SizesInTensors

COUNT = 4


def capacity_of(tokens: int, factor: float, least: int) -> Tensor:
    capacity = torch.ceil((tokens / COUNT) * torch.tensor(factor)).to(torch.int64)
    return torch.tensor(least) if capacity < least else capacity


class Kept(nn.Module):
    """The first rows up to a capacity; of the others, nothing."""

    def __init__(self, factor: float, least: int) -> None:
        super().__init__()
        self.factor, self.least = factor, least

    def forward(self, x: Tensor) -> Tensor:
        capacity = capacity_of(x.shape[0], self.factor, self.least)
        capacity = min(capacity, torch.tensor(x.shape[0]))
        return x * (torch.arange(x.shape[0]) < capacity)[:, None]


def check(model: nn.Module, path: Path, sizes: range) -> None:
    session = ort.InferenceSession(path)
    for rows in sizes:
        x = torch.randn(rows, 3)
        (result,) = session.run(None, {"x": x.numpy()})
        np.testing.assert_array_equal(result, model(x).numpy())


@pytest.mark.parametrize("factor", [0.5, 1.25, 4.0])
def test_a_decision_that_is_the_same_at_all_sizes(factor: float, tmp_path: Path) -> None:
    model, path = Kept(factor, least=0), tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(10, 3), path, dynamic_shapes={"x": {0: "rows"}})
    check(model, path, range(1, 40))


def test_a_decision_that_is_another_at_some_sizes(tmp_path: Path) -> None:
    model, path = Kept(1.0, least=5), tmp_path / "m.onnx"
    line = r"return torch.tensor\(least\) if capacity < least else capacity was decided for"
    with pytest.raises(dynamo_moe.ExportError, match=line):
        dynamo_moe.export(model, torch.randn(40, 3), path, dynamic_shapes={"x": {0: "rows"}})
    shapes = {"x": {0: Dim("rows", min=20)}}
    dynamo_moe.export(model, torch.randn(40, 3), path, dynamic_shapes=shapes)
    check(model, path, range(20, 60))


class ByValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() * x.shape[0] > 0 else x


def test_a_decision_by_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dynamo_moe.ExportError, match="decides by the values of a tensor"):
        dynamo_moe.export(ByValues(), torch.randn(10, 3), tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "computed",
    [
        pytest.param(lambda n, t: n * t(3) > 40, id="mul"),
        pytest.param(lambda n, t: t(3) * n >= 40, id="mul-tensor"),
        pytest.param(lambda n, t: n - t(7) < 4, id="rsub"),
        pytest.param(lambda n, t: t(7) - n < -4, id="sub"),
        pytest.param(lambda n, t: n + t(7) + n == 27, id="add"),
        pytest.param(lambda n, t: n / t(4) != 5, id="rtruediv"),
        pytest.param(lambda n, t: t(40).div(n) <= 4, id="div"),
        pytest.param(lambda n, t: torch.floor(t(n) / 4) > 4, id="floor"),
        pytest.param(lambda n, t: (t(n) / 4).ceil().to(torch.int64) > 4, id="ceil"),
        pytest.param(lambda n, t: (t(n) * t(0.3)).long() > 4, id="truncated"),
        pytest.param(lambda n, t: (t(n) * 0.3).to(torch.int32).float() > 4, id="casts"),
        pytest.param(lambda n, t: torch.maximum(t(n), t(9)) > 9, id="maximum"),
        pytest.param(lambda n, t: torch.minimum(t(n), t(9)).clone().detach() < 9, id="minimum"),
        pytest.param(lambda n, t: max(t(n), t(9)) > min(t(n), t(12)), id="python"),
        pytest.param(lambda n, t: t(n), id="truth"),
        pytest.param(lambda n, t: t(0.1) * 10 > 1, id="float32"),
        pytest.param(lambda n, t: t(0.1, dtype=torch.float64) * n >= 0.7, id="float64"),
    ],
)
def test_decisions_are_those_of_the_tensors(
    computed: Callable[[int, Callable[..., Tensor]], Tensor],
) -> None:
    for size in range(1, 60):
        expected = bool(computed(size, torch.tensor))
        with SizesInTensors() as mode:
            result = computed(size, torch.tensor)
            assert mode._number(result) is not None
            assert bool(result) == expected


def changed(tensor: Tensor, *changes: Callable[[Tensor], object]) -> Tensor:
    for change in changes:
        change(tensor)
    return tensor


@pytest.mark.parametrize(
    "computed",
    [
        pytest.param(lambda t: changed(t, lambda t: t.fill_(1)), id="fill_"),
        pytest.param(lambda t: changed(t, lambda t: t.pow_(2)), id="pow_"),
        pytest.param(lambda t: changed(t, lambda t: t.__setitem__(..., 1)), id="setitem"),
        pytest.param(lambda t: changed(t, lambda t: t.detach().zero_()), id="alias"),
        pytest.param(lambda t: torch.div(t, 2, rounding_mode="floor"), id="rounding_mode"),
        pytest.param(lambda t: torch.add(t, 2, alpha=3), id="alpha"),
        pytest.param(lambda t: torch.add(t, 2, out=torch.empty(())), id="out"),
        pytest.param(lambda t: t.to(torch.float16), id="float16"),
        pytest.param(lambda t: t.to(torch.complex64), id="complex"),
    ],
)
def test_what_changes_a_number_otherwise_is_not_followed(
    computed: Callable[[Tensor], Tensor],
) -> None:
    with SizesInTensors() as mode:
        scalar = torch.tensor(9.0)
        assert mode._number(scalar) == 9
        assert mode._number(computed(scalar)) is None


def test_changes_in_place_are_followed() -> None:
    with SizesInTensors() as mode:
        scalar = torch.tensor(9.0).add_(1)
        scalar *= 2
        assert mode._number(scalar) == 20
        assert isinstance(torch.tensor(9.0).bool(), Tensor)


def test_other_tensors_are_no_sizes() -> None:
    with SizesInTensors() as mode:
        x, scale = torch.randn(4, 4), torch.tensor(2.0)
        for result in (x.sum(), x.sum() * scale, scale.sin(), torch.max(x.sum(), scale), x * 2):
            assert mode._number(result) is None
