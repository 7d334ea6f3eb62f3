"""The function bodies of training's nodes in ONNX Runtime against the PyTorch operators.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor

from dynamo_moe.graph import lowering
from dynamo_moe.moe_nodes import translation  # noqa: F401  Registers the operators.
from dynamo_moe.moe_nodes.targets.plugin import PLUGIN
from dynamo_moe.operators.registry import operators
from moe_cases import (
    DTYPES,
    EXPERT_FORMS,
    GROUP_FORMS,
    NORM_FORMS,
    OPS,
    ROUNDING_FORMS,
    ROUTER_FORMS,
    Case,
    assert_matches,
    in_steps,
    make_case,
)
from random_layers import bounded, cases

Call = tuple[Any, dict[str, Any]]

_WIDE = {True: ir.DataType.DOUBLE, False: ir.DataType.INT64}


def routed_call(case: Case) -> Call:
    """The call of ``dropless_routed`` that a layer in training makes."""
    return torch.ops.moe.dropless_routed.default, {**case.arguments, **case.options}


def backward_call(case: Case, *, parameters: bool = True) -> Call:
    """The call of the backward that follows it."""
    a = case.arguments
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(a["x"].shape, generator=generator).to(a["x"].dtype)
    given = {"dy": dy, **{name: a[name] for name in a if name not in ("top_k", "selection_bias")}}
    if case.op == "experts":
        overload = torch.ops.moe.experts_backward.default
    else:
        overload = torch.ops.moe.dropless_backward.default
        call, arguments = routed_call(case)
        _, given["expert_ids"], given["expert_weights"] = call(**arguments)
    return overload, {**given, "parameters": parameters, **case.options}


def to_model(overload: Any, arguments: dict[str, Any], opset: int = 20) -> ir.Model:
    """One node with its body; floats enter and leave in float64, tokens are any number."""
    (operator,) = (known for known in operators() if known.torch_op == overload)
    inputs, nodes, values = [], [], {}
    free = {"dy", "x", "expert_ids", "expert_weights"}
    for name, tensor in arguments.items():
        if not isinstance(tensor, Tensor):
            values[name] = tensor
            continue
        shape = [*tensor.shape]
        if name in free:
            shape[:-1] = [f"T{axis}" for axis in range(len(shape) - 1)]
        dtype = from_torch_dtype(tensor.dtype)
        inputs.append(ir.val(name, _WIDE[tensor.is_floating_point()], shape))
        cast = ir.val(f"{name}_cast", dtype, shape)
        nodes.append(ir.node("Cast", [inputs[-1]], {"to": dtype}, outputs=[cast]))
        values[name] = cast
    defaults = {each.name: each.default_value for each in overload._schema.arguments}
    values = defaults | values
    attributes = {**operator.attributes(values), **operator.fixed}
    given = [values[formal.name] for formal in operator.schema.inputs]
    while given[-1] is None:
        given.pop()
    for place, formal in enumerate(list(operator.schema.inputs)[: len(given)]):
        if given[place] is None and operator.fill is not None:
            sizes, dtype, *_ = operator.fill(formal.name, values)
            zeros = ir.tensor(np.zeros(sizes, dtype.numpy()))
            nodes.append(ir.node("Constant", [], {"value": zeros}))
            (given[place],) = nodes[-1].outputs
    results = [ir.val(formal.name) for formal in operator.schema.outputs]
    node = ir.node(
        operator.schema.name,
        given,
        {k: int(v) if isinstance(v, bool) else v for k, v in attributes.items()},
        domain=operator.schema.domain,
        outputs=results,
        name="layer",
    )
    nodes.append(node)
    outputs = []
    for result, tensor in zip(results, overload(**arguments), strict=True):
        outputs.append(ir.val(f"{result.name}_wide", ir.DataType.DOUBLE, [None] * tensor.ndim))
        to = {"to": ir.DataType.DOUBLE}
        nodes.append(ir.node("Cast", [result], to, outputs=[outputs[-1]]))
    graph = ir.Graph(
        inputs, outputs, nodes=nodes, opset_imports={"": opset, "moe": 1}, name="model"
    )
    model = ir.Model(graph, ir_version=10)
    lowering.lower(model, PLUGIN)
    return model


def to_session(model: ir.Model) -> Callable[[dict[str, Any]], list[Tensor]]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    proto = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(proto, options)

    def run(arguments: dict[str, Any]) -> list[Tensor]:
        feed = {
            value.name: arguments[value.name].to(
                torch.float64 if arguments[value.name].is_floating_point() else torch.int64
            )
            for value in session.get_inputs()
        }
        found = session.run(None, {name: value.numpy() for name, value in feed.items()})
        return [torch.from_numpy(np.array(value)) for value in found]

    return run


def check(call: Call, run: Callable[[dict[str, Any]], list[Tensor]] | None = None) -> None:
    overload, arguments = call
    expected = overload(**arguments)
    tensors = [arguments[name] for name in ("x", "w1")]
    found = (run or to_session(to_model(*call)))(arguments)
    dtypes = {tensor.dtype for tensor in tensors}
    for place, (own, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_matches(own, theirs.double(), dtypes, f"result {place}")


both = pytest.mark.parametrize("op", OPS)


@pytest.mark.pairwise
@both
@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("options", EXPERT_FORMS)
def test_gradients_of_every_activation(
    op: str, options: dict[str, Any], weight_on_input: bool
) -> None:
    check(backward_call(make_case(op, weight_on_input=weight_on_input, **options)))


@both
@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("options", NORM_FORMS)
def test_gradients_around_the_experts(
    op: str, options: dict[str, Any], weight_on_input: bool
) -> None:
    check(backward_call(make_case(op, weight_on_input=weight_on_input, **options)))


@pytest.mark.pairwise
@pytest.mark.parametrize("options", [*ROUTER_FORMS, *GROUP_FORMS])
def test_routing_and_its_gradients(options: dict[str, Any]) -> None:
    case = make_case("dropless", experts=6, selection_bias=True, **options)
    check(routed_call(case))
    check(backward_call(case))


@pytest.mark.parametrize("options", ROUNDING_FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_routers_that_round(dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = make_case("dropless", x_dtype=dtype, **options)
    case = case.changed(**in_steps(case.arguments))
    check(routed_call(case))
    check(backward_call(case))


@both
@pytest.mark.parametrize(("x_dtype", "dtype"), DTYPES)
def test_every_dtype(op: str, x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    case = make_case(op, dtype=dtype, x_dtype=x_dtype, pre_norm="rms")
    if op == "dropless":
        check(routed_call(case))
    check(backward_call(case))


def test_a_router_in_half_precision() -> None:
    case = make_case("dropless")
    halves = {name: case.arguments[name].bfloat16() for name in ("router_weight", "router_bias")}
    call = backward_call(case.changed(**halves))
    _, arguments = call
    assert arguments["expert_weights"].dtype == torch.float32
    found = to_session(to_model(*call))(arguments)
    expected = call[0](**arguments)
    for own, theirs in zip(found, expected, strict=True):
        assert_matches(own, theirs.double(), {torch.bfloat16})


@both
@pytest.mark.parametrize("absent", [("b1",), ("b2",), ("b1", "b2")])
@pytest.mark.parametrize("parameters", [False, True])
def test_absent_biases_and_frozen_experts(
    op: str, absent: tuple[str, ...], parameters: bool
) -> None:
    case = make_case(op).changed(**dict.fromkeys(absent))
    call = backward_call(case, parameters=parameters)
    check(call)
    if op == "dropless":
        check(backward_call(case.changed(router_bias=None), parameters=parameters))


@both
def test_any_number_of_tokens(op: str) -> None:
    sizes = (7, 0, 1, 33)
    for options in ({}, {"weight_on_input": True, "pre_norm": "rms", "residual": True}):
        calls = [backward_call(make_case(op, (tokens,), **options)) for tokens in sizes]
        run = to_session(to_model(*calls[0]))
        for call in calls:
            check(call, run)
    calls = [routed_call(make_case("dropless", (tokens, 3))) for tokens in sizes]
    run = to_session(to_model(*calls[0]))
    for call in calls:
        check(call, run)


@pytest.mark.parametrize("weight_on_input", [False, True])
def test_no_expert_and_one_expert_twice(weight_on_input: bool) -> None:
    case = make_case("experts", (5,), weight_on_input=weight_on_input, pre_norm="rms")
    ids = torch.tensor([[-1, -1], [-1, 2], [2, -1], [4, 4], [0, 0]], dtype=torch.int32)
    weights = case.arguments["expert_weights"].clone()
    weights[0] = torch.nan
    check(backward_call(case.changed(expert_ids=ids, expert_weights=weights)))


@both
def test_leading_dimensions(op: str) -> None:
    check(backward_call(make_case(op, (2, 3, 4))))


@both
def test_the_same_bits_in_every_run(op: str) -> None:
    call = backward_call(make_case(op, (50,), experts=16, top_k=4))
    run = to_session(to_model(*call))
    for first, second in zip(run(call[1]), run(call[1]), strict=True):
        assert torch.equal(first, second)


@bounded
@given(cases())
def test_random_layers(case: Case) -> None:
    if case.op == "dropless":
        check(routed_call(case))
        if case.arguments["top_k"] == 1 and case.options["renormalize"]:
            return  # The weight is 1 whatever the logits, and their gradient a rounding error.
    check(backward_call(case))


@both
@pytest.mark.parametrize("opset", [18, 20, 23])
def test_the_checker_and_shape_inference(op: str, opset: int) -> None:
    call = backward_call(make_case(op, (2, 3), biases=False))
    calls = [call, routed_call(make_case("dropless", (2, 3)))]
    for overload, arguments in calls:
        model = to_model(overload, arguments, opset)
        proto = ir.to_proto(model)
        onnx.checker.check_model(proto, full_check=True)
        inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
        known = {value.name: value.type.tensor_type for value in inferred.graph.value_info}
        expected = overload(**arguments)
        (node,) = (node for node in model.graph if node.name == "layer")
        for value, tensor in zip(node.outputs, expected, strict=True):
            found = known[value.name]
            assert found.elem_type == from_torch_dtype(tensor.dtype)
            sizes = [size.dim_value for size in found.shape.dim]
            assert len(sizes) == tensor.ndim
            fixed = zip(sizes, tensor.shape, strict=True)
            assert all(size in (0, own) for size, own in fixed)
            assert sizes[-1] == tensor.shape[-1]
