"""Sizes in bundles: expressions have the values that Python gives them; the workspace grows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trt_plugin
from custom_ops.kernels import expressions
from random_programs import steps
from small_bundles import (
    SMALL,
    sized,
)
from trt_plugin import Bundle
from trt_plugin.bundle import (
    Buffer,
    Expression,
    Range,
    records,
)
from trt_plugin.compiling.packing import stored_expression
from trt_plugin.launcher import LauncherError, OpenProgram

MOST_TOKENS = 2**31 - 1
ALIGNMENT = 256


SIZES = {"T": 7, "E": 8, "K": 2, "D": 96, "H": 384}


def test_an_expression_is_evaluated_as_in_the_plan() -> None:
    T, K, E = expressions.T, expressions.K, expressions.E
    for value in (
        T * K - 3,
        expressions.cdiv(T * K + 1, 4),
        expressions.minimum(E, T) // 2,
        expressions.maximum(E + 1, expressions.D * expressions.H),
    ):
        stored = stored_expression(value)
        assert stored.evaluate(SIZES) == value.evaluate(SIZES)
        assert str(stored) == str(value) == str(read_back(stored))


def read_back(expression: Expression) -> Expression:
    """The expression after a bundle's writing and reading."""
    (read,) = trt_plugin.read(Bundle((sized(expression),)).data).programs
    return read.ranges[0].buffers[0].size


def tree(stored: Expression) -> expressions.Expression:
    """The plan's expression that is stored like this."""
    stack: list[expressions.Expression] = []
    for opcode, value in stored.instructions:
        operation = expressions.OPERATIONS[opcode]
        if operation == "const":
            stack.append(expressions.Expression.of(value))
        elif operation == "symbol":
            stack.append(expressions.Expression("symbol", value=records.SYMBOLS[value]))
        else:
            b, a = stack.pop(), stack.pop()
            stack.append(expressions.Expression(operation, (a, b)))
    return stack[0]


def fits(value: expressions.Expression, sizes: dict[str, int]) -> bool:
    """Whether each step has a value of 64 bits."""
    try:
        return all(-(2**63) <= step.evaluate(sizes) < 2**63 for step in value.postfix())
    except ZeroDivisionError:
        return False


def check_value(stored: Expression, sizes: dict[str, int]) -> None:
    """Compares with Python's numbers, which have any size."""
    value = tree(stored)
    if fits(value, sizes):
        assert stored.evaluate(sizes) == value.evaluate(sizes)
    else:
        with pytest.raises(ArithmeticError, match="overflows 64 bits or divides by less than 1"):
            stored.evaluate(sizes)


@settings(max_examples=300, deadline=None)
@given(steps, st.integers(1, MOST_TOKENS))
def test_any_expression_has_the_value_that_python_gives_it(stored: Expression, tokens: int) -> None:
    check_value(stored, {**SIZES, "T": tokens, "wave": 3})
    assert str(read_back(stored)) == str(tree(stored))


# Random trees hardly ever come near the ends of 64 bits.
EDGES = (-(2**63), -(2**63) + 1, -7, -1, 0, 1, 2, 7, 2**31, 2**62, 2**63 - 1)


@pytest.mark.parametrize("opcode", range(2, 9))
def test_the_ends_of_64_bits(opcode: int) -> None:
    for a, b in product(EDGES, EDGES):
        check_value(Expression(((0, a), (0, b), (opcode, 0))), SIZES)


def test_as_many_operands_as_the_stack_holds() -> None:
    full = Expression(((0, 1),) * 16 + ((2, 0),) * 15)
    assert full.evaluate(SIZES) == 16
    with pytest.raises(ArithmeticError, match="instruction 16: the stack must not pass 16 values"):
        Expression(((0, 1),) * 17 + ((2, 0),) * 16).evaluate(SIZES)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, MOST_TOKENS), min_size=2, max_size=6).map(sorted))
def test_the_workspace_grows_with_the_tokens(tokens: list[int]) -> None:
    several = replace(
        SMALL.programs[0],
        ranges=(
            # The workspace of few tokens is the larger one.
            Range(1, 9, (Buffer("few", Expression(((0, 100_000),))),), ()),
            replace(SMALL.programs[0].ranges[1], first=10, launches=()),
        ),
    )
    with OpenProgram(several.data) as opened:
        sizes = [opened.workspace_size(each) for each in tokens]
    assert sizes == sorted(sizes)
    many = {t: sum(-(-size // 256) * 256 for size in (-(-t // 8), t)) for t in tokens if t > 9}
    assert sizes == [max(100_096, many.get(each, 0)) for each in tokens]


def test_a_workspace_that_shrinks_is_refused() -> None:
    # 1000 - T
    shrinking = sized(Expression(((0, 1000), (1, 0), (3, 0))), last=900)
    with OpenProgram(shrinking.data) as opened:
        assert opened.workspace_size(1) == opened.workspace_size(200) == 1024
        with pytest.raises(LauncherError) as caught:
            opened.workspace_size(900)
    assert str(caught.value) == (
        "invalid bundle: program: the workspace must not shrink as tokens grow, has 1024 bytes for "
        "1 tokens and 256 for 900 tokens"
    )
