"""The declarations of kernels: expressions, layers, architectures, specs and plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from custom_ops import ExpertOptions, RouterOptions
from custom_ops.kernels.architectures import ARCHITECTURES, architecture, nearest_architecture
from custom_ops.kernels.arguments import kernel_of
from custom_ops.kernels.expressions import (
    D,
    E,
    Expression,
    H,
    K,
    T,
    cdiv,
    maximum,
    minimum,
)
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import (
    MAX_TOKENS,
    Buffer,
    Constant,
    ForwardPlan,
    KernelSpec,
    Scalar,
    TensorPointer,
    TokenRange,
    WorkspacePointer,
)
from custom_ops.layer_shape import LayerShape
from custom_ops.weight_formats import plain_format
from layer_changes import changed

bounded = settings(derandomize=True, deadline=None, max_examples=200, database=None)

SIZES = {"T": 7, "E": 8, "K": 2, "D": 96, "H": 384}
FLOAT = torch.float32
ONE = Expression.of(1)

# --- Expressions ---

PYTHON = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "cdiv": lambda a, b: -(-a // b),
    "min": min,
    "max": max,
}
BUILD = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "cdiv": cdiv,
    "min": minimum,
    "max": maximum,
}

trees = st.recursive(
    st.sampled_from("TEKDH") | st.integers(-3, 2**33),
    lambda parts: st.tuples(st.sampled_from(list(PYTHON)), parts, parts),
    max_leaves=8,
)


def build(tree: Any) -> Any:
    """Builds an expression from the tree; a leaf is an integer."""
    if isinstance(tree, tuple):
        operation, a, b = tree
        return BUILD[operation](Expression.of(build(a)), build(b))
    return Expression("symbol", value=tree) if isinstance(tree, str) else tree


def compute(tree: Any) -> int:
    if isinstance(tree, tuple):
        operation, a, b = tree
        a, b = compute(a), compute(b)
        if operation in ("floordiv", "cdiv") and b < 1:
            raise ZeroDivisionError
        return PYTHON[operation](a, b)
    return SIZES[tree] if isinstance(tree, str) else tree


def compute_postfix(expression: Expression) -> int:
    stack: list[int] = []
    for part in expression.postfix():
        if part.operation == "const":
            stack.append(int(part.value))
        elif part.operation == "symbol":
            stack.append(SIZES[str(part.value)])
        else:
            b, a = stack.pop(), stack.pop()
            stack.append(PYTHON[part.operation](a, b))
    (result,) = stack
    return result


@bounded
@given(trees)
def test_expressions_are_pythons_integers(tree):
    try:
        expected = compute(tree)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError, match="divisor of at least 1"):
            Expression.of(build(tree)).evaluate(SIZES)
        return
    expression = Expression.of(build(tree))
    assert expression.evaluate(SIZES) == expected
    assert compute_postfix(expression) == expected


def test_integers_on_either_side():
    assert (3 + T).evaluate(SIZES) == 10
    assert (30 - T).evaluate(SIZES) == 23
    assert (3 * T).evaluate(SIZES) == 21


def test_constants_are_folded():
    assert cdiv(7, 2) == Expression("const", value=4)
    assert Expression.of(T) is T


def test_equal_expressions_are_equal_and_hash_alike():
    assert cdiv(T * K, 64) == cdiv(T * K, 64) != cdiv(T * K, 32)
    assert len({cdiv(T * K, 64), cdiv(T * K, 64)}) == 1


def test_expressions_read_as_they_were_written():
    assert str(minimum(E, T * K) + (D - H) // 16) == "(min(E, T * K) + ((D - H) // 16))"
    assert str(cdiv(T + 1, 64)) == "cdiv((T + 1), 64)"


def test_an_unknown_operation_is_refused():
    with pytest.raises(ValueError, match="unknown operation 'pow'"):
        Expression("pow", (T, K)).evaluate(SIZES)


# --- Layers ---


def layer_of(**changes: Any) -> Layer:
    return changed(Layer(LayerShape(8, 96, 384, 2, FLOAT, plain_format(FLOAT))), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 0}, "experts in 1..1024, got 0"),
        ({"experts": 1025}, "experts in 1..1024, got 1025"),
        ({"top_k": 0}, "top_k in 1..32, got 0"),
        ({"top_k": 33}, "top_k in 1..32, got 33"),
        ({"width": 0}, "D, the model width, to be a multiple of 8, got 0"),
        ({"width": 100}, "D, the model width, to be a multiple of 8, got 100"),
        ({"hidden": 12}, "H, the hidden width, to be a multiple of 8, got 12"),
        ({"router": RouterOptions(3), "routing_dtype": FLOAT}, r"the router's \(3\)"),
        ({"router": RouterOptions(9), "top_k": 9, "routing_dtype": FLOAT}, r"in 1..8 .+, got 9"),
    ],
)
def test_sizes_without_kernels_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        layer_of(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_dtype": torch.float64}, "tokens_dtype to be one of float32, float16, bfloat16"),
        ({"tokens_dtype": torch.int8}, "tokens_dtype must be one of .* float64; got int8"),
        ({"experts_dtype": torch.float64}, "weight_format to be one of .*; got float64"),
        ({"experts_dtype": torch.int8}, "weights must be one of .*; got int8"),
        ({"routing_dtype": torch.int16}, "routing_dtype must be one of int32, int64"),
        ({"weights_dtype": torch.float64}, "need weights_dtype to be one of float32"),
        ({"weights_dtype": None}, "weights_dtype"),
        ({"router": RouterOptions(2)}, "routing_dtype must be one of float32"),
        (
            {"router": RouterOptions(2), "routing_dtype": FLOAT, "weights_dtype": torch.int32},
            "weights_dtype .* none; got",
        ),
    ],
)
def test_dtypes_without_kernels_are_refused(changes, message):
    with pytest.raises(TypeError, match=message):
        layer_of(**changes)


def test_more_choices_than_experts_where_routing_comes_from_outside():
    assert layer_of(experts=1, top_k=2).shape.sizes == {"E": 1, "K": 2, "D": 96, "H": 384}


def test_rows_of_the_first_matrix():
    assert layer_of().shape.rows == 384
    assert layer_of(options=ExpertOptions("silu", gated=True)).shape.rows == 768


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"options": ExpertOptions(alpha=3.0, limit=1.0)}, {}),
        ({"tf32": True, "experts_dtype": torch.float16}, {"experts_dtype": torch.float16}),
        (
            {"router": RouterOptions(2, "topk_softmax", False), "routing_dtype": FLOAT},
            {"router": RouterOptions(2, "topk_softmax"), "routing_dtype": FLOAT},
        ),
    ],
)
def test_what_has_no_effect_makes_no_other_layer(one, other):
    assert layer_of(**one).canonical() == layer_of(**other).canonical()


@pytest.mark.parametrize(
    "changes",
    [
        {"options": ExpertOptions("clamped_swiglu", gated=True, alpha=3.0)},
        {"options": ExpertOptions("clamped_swiglu", gated=True, limit=3.0)},
        {"options": ExpertOptions("clamped_silu", gated=True, limit=3.0)},
        {"options": ExpertOptions("softcapped_silu", gated=True, alpha=3.0)},
        {"options": ExpertOptions("softcapped_silu", gated=True, limit=3.0)},
        {"options": ExpertOptions("silu")},
        {"tf32": True},
        {"router": RouterOptions(2, renormalize=False), "routing_dtype": FLOAT},
    ],
)
def test_what_has_an_effect_stays(changes):
    assert layer_of(**changes).canonical() == layer_of(**changes)


# --- Architectures ---


@pytest.mark.parametrize("name", ["sm_90", "90", 90])
def test_an_architecture_by_name(name):
    assert architecture(name).name == "sm_90"


@pytest.mark.parametrize("name", ["sm_70", "sm_", "hopper", 0, "sm_90a", "²"])
def test_an_unknown_architecture_is_refused(name):
    with pytest.raises(ValueError, match=r"must be one of sm_75, .*, sm_121; got"):
        architecture(name)


@pytest.mark.parametrize(
    ("major", "minor", "expected"),
    [(7, 5, 75), (8, 0, 80), (8, 8, 87), (9, 0, 90), (10, 1, 100), (12, 1, 121), (15, 0, 121)],
)
def test_the_nearest_architecture(major, minor, expected):
    assert nearest_architecture(major, minor).capability == expected


def test_dependent_launch_can_be_forbidden(monkeypatch):
    monkeypatch.setenv("DYNAMO_MOE_DEPENDENT_LAUNCH", "0")
    forbidden = nearest_architecture(9, 0)
    assert forbidden == replace(architecture("sm_90"), has_dependent_launch=False)
    for value in ("1", ""):
        monkeypatch.setenv("DYNAMO_MOE_DEPENDENT_LAUNCH", value)
        assert nearest_architecture(9, 0) == architecture("sm_90")


def test_a_device_older_than_all_is_refused():
    with pytest.raises(ValueError, match=r"need compute capability 7\.5 .* has 7\.0"):
        nearest_architecture(7, 0)


def test_features_never_go_away_with_newer_architectures():
    for feature in ("has_tensor_cores", "has_tensor_maps", "has_dependent_launch"):
        values = [getattr(known, feature) for known in ARCHITECTURES.values()]
        assert values == sorted(values)
    assert list(ARCHITECTURES) == sorted(ARCHITECTURES)


# --- Specs and plans ---


@triton.jit
def fill_kernel(x_ptr, y_ptr, tokens, VALUE: tl.constexpr):
    tl.store(y_ptr + tl.program_id(0), tokens + VALUE)


ARGUMENTS = {
    "x_ptr": TensorPointer("x", FLOAT),
    "y_ptr": WorkspacePointer("rows", torch.int32),
    "tokens": Scalar(T),
    "VALUE": Constant(3),
}


def test_a_spec_tells_constants_from_parameters():
    spec = KernelSpec(fill_kernel, ARGUMENTS, (T, ONE, ONE))
    assert spec.name == "fill_kernel"
    assert spec.constants == {"VALUE": 3}
    assert list(spec.parameters) == ["x_ptr", "y_ptr", "tokens"]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {name: ARGUMENTS[name] for name in reversed(ARGUMENTS)},
        {**ARGUMENTS, "more": Constant(1)},
    ],
)
def test_arguments_are_the_kernels_in_its_order(arguments):
    with pytest.raises(ValueError, match="fill_kernel takes the arguments x_ptr, y_ptr, tokens"):
        KernelSpec(fill_kernel, arguments, (T, ONE, ONE))


@pytest.mark.parametrize("own", [{}, {"VALUE": 3, "SIZE": 1}])
def test_arguments_that_are_not_the_kernels_are_refused(own):
    layer, target = layer_of(), architecture(90)
    grid, launch = (T,), {"num_warps": 4}
    spec = kernel_of(fill_kernel, layer, target, grid, launch, VALUE=3)
    assert spec.constants == {"VALUE": 3}
    with pytest.raises(ValueError, match="fill_kernel takes the arguments x_ptr, y_ptr, tokens"):
        kernel_of(fill_kernel, layer, target, grid, launch, **own)


def plan_of(*spans: tuple[int, int], buffers: tuple[Buffer, ...] = ()) -> ForwardPlan:
    ranges = tuple(TokenRange(first, last, buffers, ()) for first, last in spans)
    return ForwardPlan(layer_of(), architecture(90), ranges)


def test_a_plan_finds_the_range_of_a_number_of_tokens():
    plan = plan_of((1, 4), (5, 5), (6, MAX_TOKENS))
    for tokens, first in ((1, 1), (4, 1), (5, 5), (6, 6), (MAX_TOKENS, 6)):
        assert plan.at(tokens).first == first
    for tokens in (0, MAX_TOKENS + 1):
        with pytest.raises(ValueError, match=f"in 1..{MAX_TOKENS}, got {tokens}"):
            plan.at(tokens)


@pytest.mark.parametrize("spans", [[(2, 3)], [(1, 4), (6, 7)], [(1, 4), (4, 7)], [(0, 4)]])
def test_ranges_follow_one_another(spans):
    with pytest.raises(ValueError, match="must follow one another"):
        plan_of(*spans)


def test_buffers_are_aligned_and_do_not_overlap():
    buffers = (
        Buffer("a", torch.int32, T * K),
        Buffer("b", torch.float16, T * H),
        Buffer("c", torch.int32, ONE),
    )
    span = TokenRange(1, 9, buffers, ())
    assert span.offsets(SIZES) == {"a": 0, "b": 256, "c": 256 + 5376, "": 256 + 5376 + 256}
    assert span.offsets(SIZES | {"T": 64})["b"] == 512


def test_the_workspace_suffices_for_every_smaller_number_of_tokens():
    wide = (Buffer("a", FLOAT, T * H),)
    narrow = (Buffer("a", FLOAT, T),)
    ranges = (TokenRange(1, 10, wide, ()), TokenRange(11, MAX_TOKENS, narrow, ()))
    plan = replace(plan_of((1, MAX_TOKENS)), ranges=ranges)
    needed = [
        plan.at(tokens).offsets({**plan.layer.shape.sizes, "T": tokens})[""]
        for tokens in range(1, 40)
    ]
    sizes = [plan.workspace_size(tokens) for tokens in range(40)]
    assert sizes == [0, *(max(needed[: n + 1]) for n in range(39))]
