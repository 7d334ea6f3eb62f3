"""What a trace asks about its sizes without an answer, and whether it would still get none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental import symbolic_shapes

from dynamo_moe.private import tracer
from dynamo_moe.tracing.open_questions import (
    Answers,
    Questions,
    ask_again,
    defaults_noted,
    questions_noted,
    unknown_noted,
)

pytestmark = pytest.mark.skipif(
    tracer.missing() is not None,
    reason="needs a known version of PyTorch",
)


class Asks(nn.Module):
    """Asks whether its input has more than four rows, before and after it has decided so."""

    def __init__(self, asked: list[Questions], answers: list[bool]) -> None:
        super().__init__()
        self.asked, self.answers = asked, answers

    def forward(self, x: Tensor) -> Tensor:
        rows: Any = x.shape[0]
        guard_or = defaults_noted(symbolic_shapes._guard_or)
        evaluate = unknown_noted(symbolic_shapes._static_eval_sym_bool)
        known = Answers(symbolic_shapes._static_eval_sym_bool)
        with questions_noted() as outer:
            with questions_noted() as inner:
                assert guard_or(rows > 4, False) is False
                assert guard_or(rows >= 0, False) is True  # Known, so no question.
            assert evaluate(rows > 3) is None
            with questions_noted() as again:
                ask_again(inner)
        self.asked += [inner, again, outer]
        for questions in (inner, outer):
            self.answers.append(known.are_defaults(questions, "before"))
        if rows > 4:
            x = x + 1
        assert guard_or(rows > 4, False) is True
        for questions, state in ((inner, "before"), (inner, "after"), (outer, "after"), ({}, "x")):
            self.answers.append(known.are_defaults(questions, state))
        return x


def test_answers_are_looked_for_anew_where_more_is_known() -> None:
    asked: list[Questions] = []
    answers: list[bool] = []
    with tracer.sizes_of_one():
        torch.export.export(
            Asks(asked, answers), (torch.randn(6, 2),), dynamic_shapes=({0: Dim.DYNAMIC},)
        )
    inner, again, outer = asked
    assert [default for _, default in inner] == [False]
    assert again == inner
    assert sorted(map(str, (default for _, default in outer))) == ["False", "None"]
    assert answers == [True, True, True, False, False, True]


def test_threads_have_answers_of_their_own() -> None:
    """One that comes between another's questions has another state."""

    def evaluate(condition: Any) -> bool:
        if condition == "first":
            assert not answers.are_defaults({("other", False): "of another state"}, "another")
        return condition == "of another state"

    answers = Answers(evaluate)
    questions: Questions = {("size", False): "first", ("other", False): "second"}
    assert answers.are_defaults(questions, "state")


def test_nothing_is_noted_outside() -> None:
    ask_again({(None, True): None})
    with questions_noted() as questions:
        pass
    assert not questions
