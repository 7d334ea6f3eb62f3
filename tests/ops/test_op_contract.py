"""PyTorch's requirements for both operators: gradients, strides, schemas, opcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import custom_ops
from moe_cases import EXPERT_FORMS, OPS, ROUTER_FORMS, Case, assert_matches, make_case

both_ops = pytest.mark.parametrize("op", OPS)


def _small(op: str, **options: Any) -> Case:
    return make_case(
        op, (4,), width=3, hidden=2, experts=3, dtype=torch.float64, **options
    ).with_grad()


# Derivatives


@pytest.mark.pairwise
@pytest.mark.parametrize("form", EXPERT_FORMS)
@pytest.mark.parametrize("weight_on_input", [False, True], ids=["on output", "on input"])
@both_ops
def test_gradcheck_of_experts(op: str, weight_on_input: bool, form: dict[str, Any]) -> None:
    case = _small(op, weight_on_input=weight_on_input, **form)
    assert torch.autograd.gradcheck(case.function, tuple(case.floats.values()))


@pytest.mark.pairwise
@pytest.mark.parametrize("router", ROUTER_FORMS)
@pytest.mark.parametrize("biases", [True, False], ids=["biases", "no biases"])
def test_gradcheck_of_routers(biases: bool, router: dict[str, Any]) -> None:
    case = _small("dropless", biases=biases, **router)
    assert torch.autograd.gradcheck(case.function, tuple(case.floats.values()))


@both_ops
def test_a_second_derivative_is_refused(op: str) -> None:
    case = _small(op)
    (dx,) = torch.autograd.grad(case().sum(), case.arguments["x"], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once only"):
        dx.sum().backward()


@pytest.mark.parametrize("weight_on_input", [False, True], ids=["on output", "on input"])
@both_ops
def test_each_gradient_is_the_same_alone(op: str, weight_on_input: bool) -> None:
    case = make_case(op, weight_on_input=weight_on_input)
    dy = torch.ones(11, 12)
    together = case.with_grad()
    together().backward(dy)
    for name, tensor in case.floats.items():
        leaf = tensor.clone().requires_grad_()
        alone = case.changed(**{name: leaf})
        alone().backward(dy)
        assert torch.equal(leaf.grad, together.arguments[name].grad), name


@both_ops
def test_frozen_experts_allocate_no_gradients(op: str) -> None:
    case = make_case(op)
    case.arguments["x"].requires_grad_()
    result = case()
    with torch.profiler.profile(record_shapes=True) as profile:
        result.sum().backward()
    parameters = {tuple(case.arguments[name].shape) for name in ("w1", "w2")}
    made = {
        tuple(event.input_shapes[0]) for event in profile.events() if event.name == "aten::zero_"
    }
    assert made
    assert not made & parameters


# Tensors of every layout


@both_ops
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 3), (0, 4), (0,), (1,)])
def test_any_leading_dimensions(op: str, shape: tuple[int, ...]) -> None:
    case = make_case(op, shape)
    result = case()
    assert result.shape == (*shape, 12)
    assert result.is_contiguous()
    assert_matches(result, case.oracle(), case.dtypes)
    expected = case.gradients(Case.oracle)
    for name, gradient in case.gradients().items():
        assert_matches(gradient, expected[name], case.dtypes, name)


@both_ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_strides(op: str, dtype: torch.dtype) -> None:
    case = make_case(op, (3, 7), dtype=dtype, gated=True)
    views = {
        name: t.mT.contiguous().mT if t.ndim > 1 else t.repeat_interleave(2)[::2]
        for name, t in case.floats.items()
    }
    assert not any(view.is_contiguous() for view in views.values())
    if op == "experts":
        views["expert_ids"] = case.arguments["expert_ids"].mT.contiguous().mT
    strided = case.changed(**views)
    assert strided().is_contiguous()
    assert_matches(strided(), case.oracle(), case.dtypes)
    expected = case.gradients(Case.oracle)
    for name, gradient in strided.gradients().items():
        assert_matches(gradient, expected[name], case.dtypes, name)


@both_ops
def test_a_gradient_of_any_strides(op: str) -> None:
    case = make_case(op, (3, 7)).with_grad()
    floats = list(case.floats.values())
    dy = torch.randn(12, 7, 3).permute(2, 1, 0)
    expected = torch.autograd.grad(case(), floats, dy.contiguous())
    for gradient, other in zip(torch.autograd.grad(case(), floats, dy), expected, strict=True):
        assert torch.equal(gradient, other)
    for gradient in torch.autograd.grad(case().sum(), floats):  # expanded from a scalar
        assert gradient.isfinite().all()


@both_ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_same_call_gives_the_same_bits(op: str, dtype: torch.dtype) -> None:
    case = make_case(op, (257,), width=40, hidden=56, experts=8, top_k=3, dtype=dtype)
    result, gradients = case(), case.gradients()
    for _ in range(4):
        assert torch.equal(case(), result)
        for name, gradient in case.gradients().items():
            assert torch.equal(gradient, gradients[name]), name


@both_ops
def test_the_default_device_changes_nothing(op: str) -> None:
    case = make_case(op)
    with torch.device("meta"):
        result = case()
    assert torch.equal(result, case())


# The schema


@pytest.mark.pairwise
@both_ops
@pytest.mark.parametrize("form", EXPERT_FORMS)
def test_the_python_function_is_the_operator(op: str, form: dict[str, Any]) -> None:
    case = make_case(op, weight_on_input=True, **form)
    function = getattr(custom_ops, op)
    assert torch.equal(function(**case.arguments, **case.options), case())


@both_ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"biases": False}, {"activation": "silu", "gated": True, "weight_on_input": True}]
)
def test_opcheck(op: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    x_dtype = torch.float32 if op == "dropless" else dtype
    case = make_case(op, (2, 3), dtype=dtype, x_dtype=x_dtype, **options).with_grad()
    results = torch.library.opcheck(case.overload, tuple(case.arguments.values()), case.options)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float64])
def test_opcheck_of_what_training_calls(x_dtype: torch.dtype) -> None:
    case = make_case("dropless", (2, 3), x_dtype=x_dtype).with_grad()
    routed = torch.ops.moe.dropless_routed.default
    results = torch.library.opcheck(routed, tuple(case.arguments.values()), case.options)
    assert set(results.values()) == {"SUCCESS"}


def test_opcheck_of_a_choice_of_groups() -> None:
    groups = {"group_scoring": "max", "n_group": 5, "topk_group": 3}
    case = make_case("dropless", (2, 3), selection_bias=True, **groups).with_grad()
    results = torch.library.opcheck(case.overload, tuple(case.arguments.values()), case.options)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("parameters", [False, True])
def test_opcheck_of_the_backward(parameters: bool, transposed: bool) -> None:
    case = make_case("experts", (2, 3), activation="silu")
    if transposed:
        views = {name: case.arguments[name].mT.contiguous().mT for name in ("w1", "w2")}
        case = case.changed(**views)
    arguments = (torch.randn(2, 3, 12), *case.arguments.values(), parameters)
    backward = torch.ops.moe.experts_backward.default
    results = torch.library.opcheck(backward, arguments, case.options)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_opcheck_of_the_backward_with_a_router(parameters: bool, biases: bool) -> None:
    case = make_case("dropless", (2, 3), biases=biases, activation="silu", scoring="sigmoid")
    a = case.arguments
    _, *choice = torch.ops.moe.dropless_routed(*a.values(), **case.options)
    layer = [a[name] for name in ("router_weight", "w1", "b1", "w2", "b2", "router_bias")]
    arguments = (torch.randn(2, 3, 12), a["x"], *choice, *layer, parameters)
    backward = torch.ops.moe.dropless_backward.default
    results = torch.library.opcheck(backward, arguments, case.options)
    assert set(results.values()) == {"SUCCESS"}
