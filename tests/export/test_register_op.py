"""``dynamo_moe.register_op``: any operator as one node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.helper
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnxscript import opset18, script
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.operators import registry
from dynamo_moe.tracing import translate
from registered_operators import (
    DOMAIN,
    LIBRARY,
    OPS,
    OPSET,
    Call,
    attributes,
    call_scaled,
    define,
    exported,
    only,
    other_shapes,
    relu,
    relu_18,
    relu_op,
    scaled,
    scaled_body,
)


def test_one_node_with_the_attributes_of_the_call(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model, proto = exported(path, call_scaled)
    node = only(proto, "Scaled")
    assert node.domain == DOMAIN
    assert attributes(node) == {
        "slope": 0.25,
        "power": 3,
        "flip": 1,
        "mode": b"other",
        "steps": [4, 5],
        "plugin_version": b"1",
        "plugin_namespace": b"",
    }
    assert [function.name for function in proto.functions] == ["Scaled"]
    other_shapes(path, model)


def test_defaults_are_written_and_none_is_left_out(tmp_path: Path) -> None:
    model, proto = exported(tmp_path / "m.onnx", scaled)
    found = attributes(only(proto, "Scaled"))
    assert "steps" not in found
    assert found["slope"] == pytest.approx(0.1)
    assert (found["power"], found["flip"], found["mode"]) == (1, 0, b"plain")
    other_shapes(tmp_path / "m.onnx", model)


@pytest.mark.parametrize("target", ["dense", "onnxruntime"])
def test_other_targets_have_the_body_in_the_nodes_place(tmp_path: Path, target: str) -> None:
    model, proto = exported(tmp_path / "m.onnx", call_scaled, target=target)
    assert not proto.functions
    assert {node.domain for node in proto.graph.node} == {""}
    assert "Where" in {node.op_type for node in proto.graph.node}
    other_shapes(tmp_path / "m.onnx", model)


def test_values_have_the_traced_shapes(tmp_path: Path) -> None:
    _, proto = exported(tmp_path / "m.onnx", call_scaled)
    (output,) = only(proto, "Scaled").output
    (info,) = [info for info in proto.graph.value_info if info.name == output]
    sizes = [d.dim_param or d.dim_value for d in info.type.tensor_type.shape.dim]
    assert sizes == ["batch", "tokens", 8]


def test_torch_onnx_export_makes_the_node_too() -> None:
    program = torch.onnx.export(
        Call(call_scaled).eval(),
        (torch.randn(2, 8),),
        dynamo=True,
        verbose=False,
        custom_translation_table=dynamo_moe.onnx_translation_table(),
    )
    assert "Scaled" in [node.op_type for node in program.model.graph]


def test_exporter_of_pytorch_gives_the_same_node(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("dynamo_moe.private.tracer.KNOWN_VERSIONS", ((2, 0), (2, 1)))
    model, proto = exported(tmp_path / "m.onnx", call_scaled)
    assert attributes(only(proto, "Scaled"))["steps"] == [4, 5]
    other_shapes(tmp_path / "m.onnx", model)


def test_a_symbolic_size_is_no_attribute(tmp_path: Path) -> None:
    with pytest.raises(dynamo_moe.ExportError, match="'steps' is computed by the model"):
        exported(tmp_path / "m.onnx", lambda x: scaled(x, steps=[x.shape[1]]))


# Inputs and outputs.

both = define(
    "both(Tensor x, Tensor? bias, Tensor[] rest, float[] weights=[1.0]) -> (Tensor total, Tensor)",
    lambda x, bias, rest, weights=(1.0,): _both(x, bias, rest, weights),
)


def _both(
    x: Tensor, bias: Tensor | None, rest: list[Tensor], weights: list[float]
) -> tuple[Tensor, Tensor]:
    total = sum(rest, x * sum(weights))
    return (total if bias is None else total + bias), total.sum(-1)


def both_body(node: ir.Node, opset: int, target: str) -> ir.Function:
    """The body for the node's number of tensors."""
    inputs = [ir.Value(name=f"i{place}") for place in range(len(node.inputs))]
    has_bias = node.inputs[1] is not None
    nodes: list[ir.Node] = []

    def record(op_type: str, *operands: ir.Value, **given: Any) -> ir.Value:
        made = ir.node(op_type, operands, given)
        made.outputs[0].name = f"v{len(nodes)}"
        nodes.append(made)
        return made.outputs[0]

    factor = record("Constant", value_float=sum(node.attributes["weights"].as_floats()))
    total = record("Mul", inputs[0], factor)
    for other in inputs[2:]:
        total = record("Add", total, other)
    result = record("Add", total, inputs[1]) if has_bias else record("Identity", total)
    axes = record("Constant", value_ints=[-1])
    reduced = record("ReduceSum", total, axes, keepdims=0)
    function = ir.Function(
        DOMAIN,
        "Both",
        graph=ir.Graph(inputs, [result, reduced], nodes=nodes, opset_imports={"": opset}),
        attributes=[],
    )
    function.overload = f"n{len(inputs)}_bias{has_bias}"
    return function


dynamo_moe.register_op(both, domain=DOMAIN, op_type="Both", body=both_body)


class Several(nn.Module):
    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        first, one = OPS.both(x, None, [x, x + 1], [2.0, 0.5])
        second, two = OPS.both(x, bias, [first])
        return first, one, second, two


@pytest.mark.parametrize("target", ["plugin", "dense"])
def test_optional_inputs_lists_and_several_outputs(tmp_path: Path, target: str) -> None:
    path = tmp_path / "m.onnx"
    model = Several()
    shapes = {"x": {1: "tokens"}, "bias": {0: None}}
    report = dynamo_moe.export(
        model, (torch.randn(2, 3, 8), torch.randn(8)), path, target=target, dynamic_shapes=shapes
    )
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    if target == "plugin":
        nodes = [node for node in proto.graph.node if node.op_type == "Both"]
        assert [len(node.input) for node in nodes] == [4, 3]
        assert nodes[0].input[1] == ""
        assert [node.domain for node in nodes] == [DOMAIN, f"{DOMAIN}.n3_biasTrue"]
        assert any("2 configurations of Both" in note for note in report.notes)
    dynamo_moe.verify(path, model, [(torch.randn(n, 5, 8), torch.randn(8)) for n in (1, 4)])


normed = define(
    "normed(Tensor x, Tensor weight, Tensor? bias=None, Tensor? shift=None) -> Tensor",
    lambda x, weight, bias=None, shift=None: _normed(x, weight, bias, shift),
)


def _normed(x: Tensor, weight: Tensor, bias: Tensor | None, shift: Tensor | None) -> Tensor:
    y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    return sum((t for t in (bias, shift) if t is not None), y * weight)


@script(OPSET)
def normed_body(x, weight, bias, shift):
    return opset18.LayerNormalization(x, weight, bias, axis=-1)


dynamo_moe.register_op(normed, domain=DOMAIN, op_type="Normed", body=normed_body)


class Normed(nn.Module):
    def __init__(self, *, shifted: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))
        self.shifted = shifted

    def forward(self, x: Tensor) -> Tensor:
        if self.shifted:
            return OPS.normed(x, self.weight, None, self.bias)
        return OPS.normed(OPS.normed(x, self.weight), self.weight, self.bias)


@pytest.mark.parametrize("target", ["plugin", "dense"])
def test_a_body_without_the_inputs_that_a_node_leaves_out(tmp_path: Path, target: str) -> None:
    """ONNX Runtime 1.31 crashes on a function that uses an input that its node omits."""
    path, model = tmp_path / "m.onnx", Normed()
    dynamo_moe.export(model, torch.randn(2, 8), path, target=target)
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    assert sorted(len(function.input) for function in proto.functions) == (
        [2, 3] if target == "plugin" else []
    )
    other = [node.domain for node in proto.graph.node if node.op_type == "Normed"]
    assert other == ([DOMAIN, f"{DOMAIN}.without_shift"] if target == "plugin" else [])
    dynamo_moe.verify(path, model, [(torch.randn(n, 8),) for n in (1, 5)])


def test_a_body_that_needs_what_a_node_leaves_out(tmp_path: Path) -> None:
    @script(OPSET)
    def adding(x, weight, bias, shift):
        return opset18.Add(opset18.LayerNormalization(x, weight, bias, axis=-1), shift)

    op = define(
        "needing(Tensor x, Tensor weight, Tensor? bias=None, Tensor? shift=None) -> Tensor",
        lambda x, weight, bias=None, shift=None: _normed(x, weight, bias, shift),
    )
    dynamo_moe.register_op(op, domain=DOMAIN, op_type="Needing", body=adding)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x, x[0])

    with pytest.raises(ValueError, match=r"cannot do without the input 'shift'.*Add needs it"):
        dynamo_moe.export(Model(), torch.randn(2, 8), tmp_path / "m.onnx")


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: OPS.relu(x) + 1, lambda x: OPS.relu(-x), (x,))


@pytest.fixture
def _compiled_anew() -> Iterator[None]:
    """Resets PyTorch's count of compilations, which torch.cond adds to over all tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_compiled_anew")
@pytest.mark.parametrize("target", ["plugin", "dense"])
def test_in_a_branch(tmp_path: Path, target: str) -> None:
    path = tmp_path / "m.onnx"
    dynamo_moe.export(Branches(), torch.randn(2, 8), path, target=target)
    functions = [function.name for function in onnx.load(path).functions]
    assert functions == (["Relu18"] if target == "plugin" else [])
    dynamo_moe.verify(path, Branches(), [(torch.ones(3, 8),), (-torch.ones(1, 8),)])


reordered = define(
    "reordered(Tensor[] parts, Tensor x) -> Tensor", lambda parts, x: sum(parts, x * 2)
)


def test_inputs_give_the_order(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be the last input .* 'parts' is not: give"):
        dynamo_moe.register_op(reordered, domain=DOMAIN, op_type="Reordered")
    with pytest.raises(ValueError, match=r"inputs must be the tensor arguments of .*parts, x"):
        dynamo_moe.register_op(reordered, domain=DOMAIN, op_type="Reordered", inputs=["x"])
    dynamo_moe.register_op(reordered, domain=DOMAIN, op_type="Reordered", inputs=["x", "parts"])
    _, proto = exported(tmp_path / "m.onnx", lambda x: OPS.reordered([x * 3, x * 4], x))
    linear = only(proto, "Reordered").input[0]
    assert [node.op_type for node in proto.graph.node if linear in node.output] == ["Add"]
    assert len(only(proto, "Reordered").input) == 3


fill = define("fill(Tensor x, Tensor? a, Tensor? b) -> Tensor", lambda x, a, b: x + b)


def test_zeros_can_stand_for_an_absent_input(tmp_path: Path) -> None:
    dynamo_moe.register_op(
        fill,
        domain=DOMAIN,
        op_type="Fill",
        fill=lambda name, arguments: ((2, 3), arguments["x"].dtype),
    )
    _, proto = exported(tmp_path / "m.onnx", lambda x: OPS.fill(x, None, x))
    absent = only(proto, "Fill").input[1]
    (zeros,) = [value for value in proto.graph.initializer if value.name == absent]
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(zeros), np.zeros((2, 3), np.float32))


# Operators that PyTorch would decompose or translate in another way.

LIBRARY.define("composite(Tensor x) -> Tensor")
LIBRARY.impl("composite", lambda x: (x * x + 1).sqrt(), "CompositeImplicitAutograd")
dynamo_moe.register_op(OPS.composite, domain=DOMAIN, op_type="Composite")


@pytest.mark.parametrize("steps", [True, False], ids=["own steps", "torch.onnx"])
def test_a_composite_stays_one_node(tmp_path: Path, monkeypatch, steps: bool) -> None:
    if not steps:
        monkeypatch.setattr("dynamo_moe.private.tracer.KNOWN_VERSIONS", ((2, 0), (2, 1)))
    _, proto = exported(tmp_path / "m.onnx", OPS.composite)
    assert only(proto, "Composite")
    assert "Sqrt" not in {node.op_type for node in proto.graph.node}


def test_an_operator_of_pytorch_stays_one_node(tmp_path: Path, monkeypatch) -> None:
    # Other tests need it decomposed.
    monkeypatch.setattr(registry, "_OPERATORS", dict(registry._OPERATORS))
    dynamo_moe.register_op(
        torch.ops.aten.rms_norm,
        domain=DOMAIN,
        op_type="AtenRmsNorm",
        attributes={"eps": "epsilon", "normalized_shape": "shape"},
    )
    _, proto = exported(tmp_path / "m.onnx", nn.RMSNorm(8, eps=0.5))
    found = attributes(only(proto, "AtenRmsNorm"))
    assert (found["shape"], found["epsilon"]) == ([8], 0.5)


def test_without_a_body_the_report_and_verify_say_so(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = Call(OPS.composite).eval()
    report = dynamo_moe.export(model, torch.randn(2, 8), path)
    assert any("registered::Composite has no body" in note for note in report.notes)
    with pytest.raises(ValueError, match=r"cannot run .* registered::Composite has no"):
        dynamo_moe.verify(path, model)


def test_two_declarations() -> None:
    before = len(registry.operators())
    dynamo_moe.register_op(scaled, domain=DOMAIN, op_type="Scaled", body=scaled_body)
    assert len(registry.operators()) == before
    for options in ({"op_type": "Other"}, {"body": None}, {"plugin_version": "2"}):
        declaration = {"op_type": "Scaled", "body": scaled_body, **options}
        with pytest.raises(ValueError, match="is already registered as registered::Scaled"):
            dynamo_moe.register_op(scaled, domain=DOMAIN, **declaration)
    with pytest.raises(ValueError, match="already registered as registered::Scaled"):
        dynamo_moe.register_op(relu, domain=DOMAIN, op_type="Scaled")


def test_an_operator_that_is_defined_anew(tmp_path: Path) -> None:
    def cell(factor: float) -> Any:
        @torch.library.custom_op("registered_anew::cell", mutates_args=())
        def op(x: Tensor) -> Tensor:
            return x * factor

        @op.register_fake
        def _(x):
            return torch.empty_like(x)

        nodes = [
            onnx.helper.make_node("Constant", [], ["c"], value_float=factor),
            onnx.helper.make_node("Mul", ["x", "c"], ["y"]),
        ]
        opsets = [onnx.helper.make_opsetid("", 20)]
        body = onnx.helper.make_function("anew", "Cell", ["x"], ["y"], nodes, opsets)
        dynamo_moe.register_op(op, domain="anew", op_type="Cell", body=body)
        return op

    cell(2.0)
    count = len(registry.operators())
    model, _ = exported(tmp_path / "m.onnx", cell(3.0))
    assert len(registry.operators()) == count
    other_shapes(tmp_path / "m.onnx", model)


def test_operators_registered_after_an_export_are_known(tmp_path: Path) -> None:
    op = relu_op("relu_late")
    with pytest.raises(dynamo_moe.ExportError):
        exported(tmp_path / "m.onnx", op)
    dynamo_moe.register_op(op, domain=DOMAIN, op_type="ReluLate", body=relu_18)
    exported(tmp_path / "m.onnx", op)


def test_translations_of_former_sets_of_operators_are_let_go() -> None:
    own = registry.operators()
    before, _ = translate._registered(18, own)
    after, _ = translate._registered(18, own[:-1])
    assert translate._registered.cache_info().currsize == 1
    dropped = own[-1].torch_op
    assert before.is_registered(dropped)
    assert not after.is_registered(dropped)


def test_empty_batch(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    exported(path, call_scaled)
    session = onnxruntime.InferenceSession(path)
    (result,) = session.run(None, {"x": np.zeros((0, 3, 8), np.float32)})
    assert result.shape == (0, 3, 4)
