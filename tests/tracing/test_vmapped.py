"""What a model computes under ``torch.vmap`` is the same, without a second trace of the program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import dynamo_moe
from dynamo_moe.private import tracer
from dynamo_moe.tracing import vmapped
from dynamo_moe.tracing.vmapped import flatten_vmaps


class Computed(nn.Module):
    """A function of a tensor and a weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 20).reshape(4, 5))
        self.function = function

    def forward(self, x: Tensor) -> Any:
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


def whole_changed_row_by_row(x: Tensor, weight: Tensor) -> Tensor:
    y = x.clone()
    torch.vmap(lambda row: row.mul_(2))(y)
    return y @ weight


def gradients_of_each_row(x: Tensor, weight: Tensor) -> Tensor:
    loss = torch.func.grad(lambda row: (row @ weight).square().sum())
    return torch.vmap(loss)(x)


def nothing_uses_it(x: Tensor, weight: Tensor) -> Tensor:
    torch.vmap(torch.neg)(x)
    return x @ weight


def several_outputs(x: Tensor, weight: Tensor) -> Any:
    return torch.vmap(torch.neg)(x), torch.vmap(lambda row: row)(x), x @ weight


def one_output_twice(x: Tensor, weight: Tensor) -> Any:
    y = torch.vmap(torch.neg)(x)
    return y, y, x @ weight


def twice_and_several_results(x: Tensor, weight: Tensor) -> Tensor:
    least, greatest = torch.vmap(lambda row: (row.min(), row.max()))(x)
    first = torch.stack([least, greatest], 1)
    return first @ torch.vmap(torch.neg)(weight)[:2]


known = pytest.mark.skipif(
    tracer.missing() is not None, reason="needs a version of PyTorch that is known"
)


@known
@pytest.mark.parametrize(
    "function",
    [
        rows,
        a_weight_for_each,
        pairs_as_a_mask_has_them,
        changed_in_place,
        whole_changed_row_by_row,
        nothing_uses_it,
        several_outputs,
        one_output_twice,
        twice_and_several_results,
    ],
)
def test_the_same_at_every_size(function: Callable[[Tensor, Tensor], Any], tmp_path: Path) -> None:
    model = Computed(function).eval()
    report = dynamo_moe.export(model, torch.randn(6, 4), tmp_path / "model.onnx")
    assert report.notes == ()
    assert dynamo_moe.verify(report.path, model).passed


@known
def test_the_signature_names_what_is_returned() -> None:
    program = torch.export.export(Computed(one_output_twice), (torch.randn(6, 4),))
    flatten_vmaps(program)
    [returned] = program.graph.output_node().args
    names = [spec.arg.name for spec in program.graph_signature.output_specs]
    assert names == [node.name for node in returned]


@known
def test_what_cannot_be_flattened_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error under it leaves no batch dimension behind."""

    def fails(node: fx.Node) -> bool:
        raise NotImplementedError(node.name)

    with monkeypatch.context() as patched:
        patched.setattr(vmapped, "writes", fails)
        model = Computed(rows).eval()
        report = dynamo_moe.export(model, torch.randn(6, 4), tmp_path / "model.onnx")
    assert any("traced the whole program again" in note for note in report.notes)
    assert dynamo_moe.verify(report.path, model).passed
    program = torch.export.export(model, (torch.randn(6, 4),))
    (begin,) = program.graph.find_nodes(op="call_function", target=tracer.VMAP_BEGINS)
    with begin.graph.inserting_after(begin):
        begin.graph.call_function(fails, (begin,))
    flatten_vmaps(program)
    assert begin in program.graph.nodes
    assert torch.vmap(torch.neg)(torch.ones(3, 2)).shape == (3, 2)
    torch.randn(2)  # Which PyTorch refuses within one.


def test_what_pytorch_cannot_trace_leaves_nothing_behind(tmp_path: Path) -> None:
    model = Computed(gradients_of_each_row).eval()
    # The second is PyTorch 2.11's and 2.12's.
    message = "'Tensor' object has no attribute 'constant'|Expected FakeTensor"
    with pytest.raises(dynamo_moe.ExportError, match=message):
        dynamo_moe.export(model, torch.randn(6, 4), tmp_path / "model.onnx")
    torch.randn(2)


def test_without_its_names_pytorch_traces_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer, "VMAP_BEGINS", None)
    model = Computed(rows).eval()
    report = dynamo_moe.export(model, torch.randn(6, 4), tmp_path / "model.onnx")
    assert any("traced the whole program again" in note for note in report.notes)
    assert dynamo_moe.verify(report.path, model).passed
