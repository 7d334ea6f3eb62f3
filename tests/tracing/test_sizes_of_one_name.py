"""Sizes that are given one name are one size from the start of a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from dynamo_moe.tracing import dynamic_shapes
from dynamo_moe.tracing.capture import capture
from dynamo_moe.tracing.fixed_sizes import SizeTrials
from dynamo_moe.tracing.size_decisions import Decision, decisions_noted


class Decisions(SizeTrials):
    """Tries nothing, and keeps what was decided by several sizes."""

    def check_trace(self, program: ExportedProgram, decisions: Sequence[Decision]) -> None:
        self.found = [each for each in decisions if len(each.condition.free_symbols) > 1]


class Apart(nn.Module):
    """Never combines its inputs."""

    def forward(self, first: Tensor, second: Tensor | None = None, *, others: Any = None) -> Any:
        return first * 2, second, others


def shapes_of(
    args: tuple[Tensor, ...], requested: Any, kwargs: Mapping[str, Any] | None = None
) -> list[list[str]]:
    """The shapes of a traced model's inputs, with its symbols; no two of them are compared."""
    model = Apart().eval()
    example = dynamic_shapes.resolve(model, args, dict(kwargs or {}), requested)
    before = vars(model).copy()
    decisions = Decisions(model, example)
    program = capture(model, example, decisions)
    assert vars(model) == before
    assert not decisions.found
    return [
        [str(size) for size in node.meta["val"].shape]
        for node in program.graph.nodes
        if node.op == "placeholder"
    ]


def test_sizes_of_one_name_have_one_symbol() -> None:
    one, other = shapes_of(
        (torch.randn(4, 6), torch.randn(6, 4)),
        {"first": {0: "rows", 1: "columns"}, "second": {0: "columns", 1: torch.export.Dim("rows")}},
    )
    assert one == other[::-1]
    assert len(set(one)) == 2


def test_sizes_in_containers_of_keyword_arguments_are_among_them() -> None:
    first, one, other = shapes_of(
        (torch.randn(4, 6),),
        {"first": ["rows", None], "others": {"b": {1: "rows"}, "a": {0: "rows"}}},
        {"others": {"b": torch.randn(3, 4), "a": torch.randn(4, 3)}},
    )
    assert first[0] == one[1] == other[0]


@pytest.mark.parametrize(
    ("shape", "requested"),
    [
        # The first dimension of a mask may have the batch's size by chance.
        ((4, 6), "batch"),
        ((4, 6), {"first": {1: "width"}}),
        ((4, 6), {"first": {0: "rows"}, "second": {0: "other"}}),
        ((5, 6), {"first": {0: "rows"}, "second": {0: "rows"}}),
    ],
)
def test_other_sizes_have_their_own(shape: tuple[int, int], requested: Any) -> None:
    one, other = shapes_of((torch.randn(4, 6), torch.randn(shape)), requested)
    assert one[0] != other[0]


def test_of_three_sizes_of_one_name_the_equal_ones_are_one() -> None:
    rows = {0: "rows"}
    first, second, third = shapes_of(
        (torch.randn(4, 6), torch.randn(5, 6)),
        {"first": rows, "second": rows, "others": rows},
        {"others": torch.randn(4, 6)},
    )
    assert first[0] == third[0] != second[0]


def test_the_line_that_decides_is_the_models() -> None:
    class Watched(nn.Module):
        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return first + second  # here

    sizes = ({0: torch.export.Dim.DYNAMIC},) * 2
    with decisions_noted() as noted:
        torch.export.export(Watched(), (torch.randn(4, 6), torch.randn(4, 6)), dynamic_shapes=sizes)
    assert noted
    assert all(decision.line.endswith("return first + second  # here") for decision in noted)
