"""Conditions on symbolic sizes that a trace has asked for without knowing them.

PyTorch answers most of what it asks from the expressions of sizes. For the rest it takes a default:
whether a size is one, say, which then is not. What follows from a default stays right as long as
nothing that a model has found out about its sizes since says otherwise.

:func:`defaults_noted` and :func:`unknown_noted` take what PyTorch calls, and return what takes its
place; ``dynamo_moe.tracing.shortcuts`` puts it there for the time of a trace.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

Questions = dict[tuple[Any, bool | None], Any]
"""Conditions, by their expression and the default: None where not knowing was the answer."""


class _Asking(threading.local):
    questions: Questions | None = None


_asking = _Asking()


def defaults_noted(original: Callable[[Any, bool], bool]) -> Callable[[Any, bool], bool]:
    """Returns PyTorch's answer to a condition or a default, which is noted."""

    def guard_or(condition: Any, default: bool) -> bool:
        with _Collecting(None) as questions:
            answer = original(condition, default)
        # Another answer than the default is known, and stays.
        if questions is not None and answer is default and isinstance(condition, torch.SymBool):
            questions[condition.node.expr, default] = condition
        return answer

    return guard_or


def unknown_noted(original: Callable[[Any], bool | None]) -> Callable[[Any], bool | None]:
    """Returns PyTorch's answer to a condition, which is noted if it is unknown."""

    def evaluate(condition: Any) -> bool | None:
        answer = original(condition)
        if answer is None and _asking.questions is not None:
            _asking.questions[condition.node.expr, None] = condition
        return answer

    return evaluate


class _Collecting(contextlib.AbstractContextManager[Any]):
    """Notes this thread's questions elsewhere; gives where they were noted before."""

    def __init__(self, questions: Questions | None) -> None:
        self._questions = questions

    def __enter__(self) -> Any:
        self._before, _asking.questions = _asking.questions, self._questions
        return self._before

    def __exit__(self, *_: object) -> None:
        _asking.questions = self._before


@contextlib.contextmanager
def questions_noted() -> Iterator[Questions]:
    """Collects what this thread asks in the context; whoever else collects has asked it, too."""
    questions: Questions = {}
    with _Collecting(questions):
        yield questions
    ask_again(questions)


def ask_again(questions: Questions) -> None:
    """Notes questions whose answers are used once more."""
    if _asking.questions is not None:
        _asking.questions.update(questions)


class Answers:
    """The present answers to open questions, each looked for once in each state of a trace."""

    def __init__(self, evaluate: Callable[[Any], bool | None]) -> None:
        """Takes PyTorch's answer to a condition: None if it is unknown."""
        self._evaluate = evaluate
        # Together, since threads that trace side by side have their own states.
        self._known: tuple[Hashable, dict[Any, bool | None]] = (None, {})

    def are_defaults(self, questions: Questions, state: Hashable) -> bool:
        """Whether no question has another answer by now than the default."""
        known = self._known
        if known[0] != state:
            known = self._known = (state, {})
        return all(
            self._answer(expression, condition, known[1]) in (None, default)
            for (expression, default), condition in questions.items()
        )

    def _answer(
        self, expression: Any, condition: Any, known: dict[Any, bool | None]
    ) -> bool | None:
        if expression not in known:
            with _Collecting(None):
                known[expression] = self._evaluate(condition)
        return known[expression]
