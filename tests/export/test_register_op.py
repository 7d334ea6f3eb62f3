"""``dynamo_moe.register_op``: any operator as one node, and the errors for invalid ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.helper
import onnx_ir as ir
import onnxruntime
import onnxscript
import pytest
import torch
from onnx import TensorProto
from onnxscript import opset18, opset20, opset22, script
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.operators import registry
from dynamo_moe.tracing import translate

LIBRARY = torch.library.Library("registered", "FRAGMENT")
DOMAIN = "registered"
OPS = torch.ops.registered

_opset = onnxscript.values.Opset(DOMAIN, 1)


def define(schema: str, function: Callable[..., Any] | None = None) -> Any:
    """Defines an operator whose kernel is also its fake kernel."""
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    if function is not None:
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(OPS, name)


class Call(nn.Module):
    """A linear layer, an operator applied to its result, and another layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.after(self.function(self.before(x)))


def exported(
    path: Path, function: Callable[..., Any], **options: Any
) -> tuple[Call, onnx.ModelProto]:
    torch.manual_seed(0)
    model = Call(function).eval()
    shapes = {"x": {1: "tokens"}}
    dynamo_moe.export(model, torch.randn(2, 3, 8), path, dynamic_shapes=shapes, **options)
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    return model, proto


def only(proto: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    (node,) = [node for node in proto.graph.node if node.op_type == op_type]
    return node


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def other_shapes(path: Path, model: nn.Module) -> None:
    cases = [(torch.randn(*shape, 8),) for shape in ((1, 1), (5, 2), (3, 17))]
    dynamo_moe.verify(path, model, cases)


# One operator with attributes of every kind.


@torch.library.custom_op("registered::scaled", mutates_args=())
def scaled(
    x: Tensor,
    slope: float = 0.1,
    power: int = 1,
    flip: bool = False,
    mode: str = "plain",
    steps: list[int] | None = None,
) -> Tensor:
    y = torch.where(x > 0, x, x * slope) * power
    return -y if flip else y


@scaled.register_fake
def _(x, slope=0.1, power=1, flip=False, mode="plain", steps=None):
    return torch.empty_like(x)


@script(_opset)
def scaled_body(x, slope: float, power: int, flip: int):
    wide = opset18.CastLike(opset18.Constant(value_float=slope), x)
    factor = opset18.CastLike(opset18.Constant(value_int=power), x)
    zero = opset18.CastLike(0.0, x)
    y = opset18.Mul(opset18.Where(opset18.Greater(x, zero), x, opset18.Mul(x, wide)), factor)
    sign = opset18.CastLike(opset18.Constant(value_int=flip), x)
    two = opset18.CastLike(2.0, x)
    return opset18.Sub(y, opset18.Mul(opset18.Mul(two, sign), y))


dynamo_moe.register_op(scaled, domain=DOMAIN, op_type="Scaled", body=scaled_body)


def call_scaled(x: Tensor) -> Tensor:
    return scaled(x, 0.25, 3, True, "other", [4, 5])


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
    monkeypatch.setattr("dynamo_moe.tracing.private.KNOWN_VERSIONS", ((2, 0), (2, 1)))
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


@script(_opset)
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
    @script(_opset)
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


relu = define("relu(Tensor x) -> Tensor", torch.relu)


@script(_opset)
def relu_18(x):
    return opset18.Relu(opset18.Cast(opset18.Cast(x, to=1), to=1))


dynamo_moe.register_op(relu, domain=DOMAIN, op_type="Relu18", body=relu_18)


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
        monkeypatch.setattr("dynamo_moe.tracing.private.KNOWN_VERSIONS", ((2, 0), (2, 1)))
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


# Shape inference.

SHAPES: dict[str, tuple[str, Callable[..., Any]]] = {
    "rows": (
        "shape_rows(Tensor x, int k) -> Tensor",
        lambda x, k: x.new_empty((*x.shape[:-1], k)),
    ),
    "like": ("shape_like(Tensor x) -> Tensor", torch.empty_like),
    "double": ("shape_double(Tensor x) -> Tensor", lambda x: torch.cat([x, x])),
    "sum": ("shape_sum(Tensor x, Tensor y) -> Tensor", lambda x, y: x + y),
    "squeeze": ("shape_squeeze(Tensor x) -> Tensor", lambda x: x.clone().squeeze(0).clone()),
    "decides": (
        "shape_decides(Tensor x) -> Tensor",
        lambda x: x.new_empty(3) if x.shape[0] > 10 else x.new_empty(x.shape),
    ),
    "at_one": (
        "shape_at_one(Tensor x) -> Tensor",
        lambda x: x.new_empty(7) if x.shape[0] == 1 else x.new_empty(x.shape),
    ),
    "types": (
        "shape_types(Tensor x) -> (Tensor, Tensor)",
        lambda x: (x > 0, torch.empty_like(x, dtype=torch.int8)),
    ),
}
for _name, (_schema, _function) in SHAPES.items():
    _op = define(_schema, _function)
    dynamo_moe.register_op(_op, domain=DOMAIN, op_type=f"Shape_{_name}")


def inferred(op_type: str, *inputs: list[int | str | None], **given: Any) -> list[Any]:
    """Returns element types and sizes that onnx infers; None if it infers no shape."""
    names = [f"x{place}" for place in range(len(inputs))]
    schema = onnx.defs.get_schema(op_type, domain=DOMAIN)
    outputs = [f"y{place}" for place in range(len(schema.outputs))]
    node = onnx.helper.make_node(op_type, names, outputs, domain=DOMAIN, **given)
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [
            onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in zip(names, inputs, strict=True)
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs],
    )
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid(DOMAIN, 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets)
    found = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    types = [value.type.tensor_type for value in found.graph.output]
    return [
        (t.elem_type, [_size(d) for d in t.shape.dim]) if t.HasField("shape") else None
        for t in types
    ]


def _size(size: Any) -> int | str | None:
    # onnx invents the names unk__ itself.
    return None if size.dim_param.startswith("unk__") else size.dim_param or size.dim_value or None


F = TensorProto.FLOAT


@pytest.mark.parametrize(
    ("op_type", "inputs", "expected"),
    [
        ("like", [[2, 3]], [2, 3]),
        ("like", [["b", None, 4]], ["b", None, 4]),
        ("like", [["b", "b", 4]], ["b", "b", 4]),
        ("double", [[2, 3]], [4, 3]),
        ("double", [["b", 3]], [None, 3]),
        ("sum", [[2, 1], [1, 3]], [2, 3]),
        ("sum", [["b", 3], ["b", 3]], ["b", 3]),
        ("sum", [["b", 3], ["c", 3]], "nothing"),
        ("squeeze", [[1, 3]], [3]),
        ("squeeze", [["b", 3]], "nothing"),
        ("decides", [[11]], [3]),
        ("decides", [["b"]], "nothing"),
        ("at_one", [["b"]], "nothing"),
        ("at_one", [[1]], [7]),
    ],
)
def test_the_fake_kernel_infers_what_holds_for_all_sizes(op_type, inputs, expected) -> None:
    (found,) = inferred(f"Shape_{op_type}", *inputs)
    assert found == (None if expected == "nothing" else (F, expected))


def test_inference_reads_attributes_and_gives_dtypes() -> None:
    assert inferred("Shape_rows", ["b", 3], k=9) == [(F, ["b", 9])]
    assert inferred("Shape_types", ["b"]) == [(TensorProto.BOOL, ["b"]), (TensorProto.INT8, ["b"])]


def test_like_and_own_inference() -> None:
    op = define("inferred_like(Tensor x, Tensor y) -> Tensor", lambda x, y: y.clone())
    dynamo_moe.register_op(op, domain=DOMAIN, op_type="InferredLike", shape_inference="like:y")
    assert inferred("InferredLike", [1], ["n", 4]) == [(F, ["n", 4])]

    def rule(context: Any) -> None:
        context.set_output_type(0, onnx.helper.make_tensor_type_proto(TensorProto.INT64, [5]))

    op = define("inferred_own(Tensor x) -> Tensor", lambda x: x.clone())
    dynamo_moe.register_op(op, domain=DOMAIN, op_type="InferredOwn", shape_inference=rule)
    assert inferred("InferredOwn", [1]) == [(TensorProto.INT64, [5])]
    op = define("inferred_none(Tensor x) -> Tensor", lambda x: x.clone())
    dynamo_moe.register_op(op, domain=DOMAIN, op_type="InferredNone", shape_inference=None)
    assert inferred("InferredNone", [1]) == [None]


def test_a_size_that_inputs_do_not_tell_is_not_that_of_an_input() -> None:
    op = define("nonzero_count(Tensor x) -> Tensor")
    LIBRARY.impl("nonzero_count", lambda x: x[x != 0], "CPU")
    torch.library.register_fake("registered::nonzero_count")(
        lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size())
    )
    dynamo_moe.register_op(op, domain=DOMAIN, op_type="NonzeroCount")
    # PyTorch's name for such a size, and a name that its exporter writes.
    assert inferred("NonzeroCount", ["u0"]) == [(F, [None])]


# Bodies.


@script(_opset)
def relu_22(x):
    return opset22.Relu(x)


def relu_op(name: str) -> Any:
    return define(f"{name}(Tensor x) -> Tensor", torch.relu)


@pytest.mark.parametrize("form", ["onnx", "ir"])
def test_bodies_of_onnx_and_onnx_ir(tmp_path: Path, form: str) -> None:
    op = relu_op(f"relu_{form}")
    proto = relu_18.to_function_proto()
    body = proto if form == "onnx" else ir.from_proto(proto)
    dynamo_moe.register_op(op, domain=DOMAIN, op_type=f"Relu_{form}", body=body)
    model, found = exported(tmp_path / "m.onnx", op)
    # Written for opset 18 and converted to the file's opset.
    assert {o.domain: o.version for o in found.functions[0].opset_import} == {"": 20}
    other_shapes(tmp_path / "m.onnx", model)


def test_a_body_newer_than_the_file(tmp_path: Path) -> None:
    op = relu_op("relu_new")
    dynamo_moe.register_op(op, domain=DOMAIN, op_type="ReluNew", body=relu_22)
    with pytest.raises(ValueError, match="opset 22, the file has 20: export with opset=22"):
        exported(tmp_path / "m.onnx", op)
    model, _ = exported(tmp_path / "m.onnx", op, opset=22)
    other_shapes(tmp_path / "m.onnx", model)


def test_bodies_that_do_not_fit() -> None:
    @script(_opset)
    def two(x, y):
        return opset20.Add(x, y)

    @script(_opset)
    def foreign(x, slope: float):
        return opset20.Elu(x, alpha=slope)

    @script(_opset)
    def helper(x):
        return opset20.Relu(x)

    @script(_opset)
    def calling(x):
        return helper(x)

    def refused(body: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            dynamo_moe.register_op(relu, domain=DOMAIN, op_type="Relu_", body=body)

    @script(_opset)
    def nested(x):
        return _opset.Scaled(x)

    refused(nested, ValueError, "uses registered::Scaled, which is not an ONNX operator")
    refused(two, ValueError, r"must have 1 inputs \(x\), got 2 \(x, y\)")
    refused(foreign, ValueError, "the attribute 'slope', which the operator does not have")
    refused(calling, ValueError, "uses registered::helper, which is not an ONNX operator")
    for node, message in (
        (onnx.helper.make_node("Relu", ["q"], ["y"]), "not a valid ONNX function: .*input 'q'"),
        (
            onnx.helper.make_node("Relu", ["x"], ["y"], a=1),
            "not a valid .*Unrecognized attribute: a",
        ),
        (onnx.helper.make_node("Relu", ["x"], ["z"]), "computes no output 'y'"),
    ):
        opsets = [onnx.helper.make_opsetid("", 20)]
        invalid = onnx.helper.make_function(DOMAIN, "Relu_", ["x"], ["y"], [node], opsets)
        refused(invalid, ValueError, message)
    refused("Relu", TypeError, "body must be an onnxscript function.*got str")


def test_a_fixed_body_for_any_number_of_tensors() -> None:
    op = define("any_number(Tensor[] xs) -> Tensor", lambda xs: sum(xs[1:], xs[0] * 1))
    with pytest.raises(ValueError, match="a fixed number of inputs, but 'xs' is a list"):
        dynamo_moe.register_op(op, domain=DOMAIN, op_type="AnyNumber", body=relu_18)


# Bodies of individual nodes, and what must not be merged.


def test_bodies_that_name_no_overload_are_told_apart(tmp_path: Path) -> None:
    op = define("times(Tensor x, int n) -> Tensor", lambda x, n: x * n)

    def body(node: ir.Node, opset: int, target: str) -> ir.Function:
        factor = float(node.attributes["n"].as_int())
        nodes = [
            onnx.helper.make_node("Constant", [], ["c"], value_float=factor),
            onnx.helper.make_node("Mul", ["x", "c"], ["y"]),
        ]
        opsets = [onnx.helper.make_opsetid("", opset)]
        proto = onnx.helper.make_function(DOMAIN, "Times", ["x"], ["y"], nodes, opsets)
        return ir.serde.deserialize_function(proto)

    dynamo_moe.register_op(op, domain=DOMAIN, op_type="Times", body=body)
    for target in ("plugin", "dense"):
        path = tmp_path / f"{target}.onnx"
        model, proto = exported(path, lambda x: op(x, 2) + op(x, 3) + op(x + 1, 2), target=target)
        other_shapes(path, model)
        if target == "plugin":
            domains = [node.domain for node in proto.graph.node if node.op_type == "Times"]
            assert domains == [DOMAIN, f"{DOMAIN}.body_2", DOMAIN]


def test_a_body_and_the_attributes_that_a_node_leaves_out(tmp_path: Path) -> None:
    op = define(
        "bent(Tensor x, float? slope=None, float? scale=None) -> Tensor",
        lambda x, slope=None, scale=None: (
            torch.nn.functional.elu(x, 1.0 if slope is None else slope) * (scale or 1)
        ),
    )

    @script(_opset)
    def body(x, slope: float, scale: float):
        factor = opset18.CastLike(opset18.Constant(value_float=scale), x)
        return opset18.Mul(opset18.Elu(x, alpha=slope), factor)

    dynamo_moe.register_op(op, domain=DOMAIN, op_type="Bent", body=body)
    for target in ("plugin", "dense"):
        path = tmp_path / f"{target}.onnx"
        # Elu has a default; a constant has none.
        model, _ = exported(path, lambda x: op(x, None, 2.0), target=target)
        other_shapes(path, model)
        with pytest.raises(ValueError, match=r"attribute 'scale', which .*: Constant needs it"):
            exported(path, lambda x: op(x, 0.5), target=target)


def test_equal_calls_of_an_untagged_random_operator_stay_two(tmp_path: Path) -> None:
    op = define("noise(Tensor x) -> Tensor", torch.rand_like)
    dynamo_moe.register_op(op, domain=DOMAIN, op_type="Noise")
    _, proto = exported(tmp_path / "m.onnx", lambda x: op(x) - op(x))
    first, second = [node for node in proto.graph.node if node.op_type == "Noise"]
    assert first.output != second.output
    assert all(node.overload == "" for node in (first, second))


# Invalid declarations.

REFUSED: dict[str, tuple[str, str, str]] = {
    "no fake kernel": (
        "refused_fake(Tensor x) -> Tensor",
        "",
        r"has no fake kernel.*register_fake\(\"registered::refused_fake\"\)",
    ),
    "argument type": (
        "refused_dtype(Tensor x, ScalarType to) -> Tensor",
        "impl",
        "argument 'to' has the type ScalarType, which is neither",
    ),
    "optional device": (
        "refused_device(Tensor x, Device? on=None) -> Tensor",
        "impl",
        r"argument 'on' has the type Device\?",
    ),
    "optional tensors": (
        "refused_tensors(Tensor?[] xs) -> Tensor",
        "impl",
        r"argument 'xs' has the type Tensor\?\[\]",
    ),
    "mutable": (
        "refused_mutable(Tensor(a!) x) -> ()",
        "impl",
        "changes its argument 'x'",
    ),
    "aliasing": ("refused_view(Tensor(a) x) -> Tensor(a)", "impl", "shares the memory of 'x'"),
    "list of results": (
        "refused_list(Tensor x) -> Tensor[]",
        "impl",
        r"result 0 has the type Tensor\[\]",
    ),
    "number": ("refused_number(Tensor x) -> int", "impl", "result 0 has the type int"),
    "no result": ("refused_none(Tensor x) -> ()", "impl", "has no result"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_operators_that_are_refused(case: str) -> None:
    schema, kernel, message = REFUSED[case]
    name = schema.partition("(")[0]
    if not hasattr(OPS, name):
        define(schema, (lambda x, *rest: x) if kernel else None)
    with pytest.raises((TypeError, ValueError), match=message):
        dynamo_moe.register_op(getattr(OPS, name), domain=DOMAIN, op_type="Refused")
    assert not onnx.defs.has("Refused", DOMAIN)


def test_a_custom_op_without_a_fake_kernel() -> None:
    @torch.library.custom_op("registered::no_fake", mutates_args=())
    def no_fake(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(ValueError, match="has no fake kernel"):
        dynamo_moe.register_op(no_fake, domain=DOMAIN, op_type="NoFake")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op_type": "Relu"}, "Relu is a standard ONNX operator"),
        ({"op_type": "no name"}, "op_type must be letters"),
        ({"domain": ""}, "domain must be letters"),
        ({"domain": "ai.onnx"}, "'ai.onnx' is not yours"),
        ({"domain": "com.microsoft"}, "'com.microsoft' is not yours"),
        ({"domain": "moe"}, "'moe' is dynamo_moe's own"),
        ({"attributes": {"slop": "alpha"}}, "names 'slop', but only these arguments of .*: none"),
        ({"attributes": lambda arguments: {}}, "pass both or neither"),
        ({"outputs": ["a", "b"]}, "outputs must name the 1 results"),
        ({"shape_inference": "like:z"}, "'like:z' needs one result and a Tensor argument 'z'"),
        ({"outputs": [""]}, "results need names, got ''"),
        ({"inputs": "x"}, "inputs must be a list of names, got 'x'"),
        ({"outputs": "y"}, "outputs must be a list of names, got 'y'"),
        ({"version": 0}, "version must be at least 1, got 0"),
        ({"constants": {"k": None}}, r"constants\['k'\] must be an int.*got None"),
        ({"constants": {"k": []}}, r"constants\['k'\] must be an int.*got \[\]"),
        ({"constants": {"k": torch.ones(2)}}, r"constants\['k'\] must be an int.*got tensor"),
        ({"shape_inference": "static"}, "shape_inference must be \"fake\".*'static'"),
    ],
)
def test_declarations_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        dynamo_moe.register_op(relu, **{"domain": DOMAIN, "op_type": "Mine", **options})


def own_schema(
    name: str = "Mine", domain: str = DOMAIN, inputs: str = "x", outputs: int = 1
) -> onnx.defs.OpSchema:
    formal = onnx.defs.OpSchema.FormalParameter
    plugin = ("plugin_version", "1"), ("plugin_namespace", "")
    return onnx.defs.OpSchema(
        name,
        domain,
        1,
        inputs=[formal(name, "T") for name in inputs],
        outputs=[formal(f"y{place}", "T") for place in range(outputs)],
        type_constraints=[("T", ["tensor(float)"], "")],
        attributes=[
            onnx.defs.OpSchema.Attribute(name, onnx.helper.make_attribute(name, value))
            for name, value in plugin
        ],
    )


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        ({"name": "Relu"}, {}, "has the name 'Relu', it must be 'Mine'"),
        ({"domain": "com.microsoft"}, {}, "has the domain 'com.microsoft', it must be 'registered"),
        ({}, {"version": 7}, "has the since_version 1, it must be 7"),
        ({"inputs": "a"}, {}, r"tensor arguments .*: x \(single\); got a \(single\)"),
        ({"outputs": 2}, {}, "as many outputs as .* has results, 1; got 2"),
        ({}, {"inputs": ["x"]}, r"inputs and schema: .* got inputs=\['x'\]"),
        ({}, {"outputs": ["q"]}, "outputs and schema"),
        ({}, {"shape_inference": "like:x"}, "shape_inference and schema"),
        ({}, {"doc": "Text."}, "doc and schema"),
    ],
)
def test_schemas_that_are_refused(
    schema: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dynamo_moe.register_op(
            relu,
            domain=DOMAIN,
            op_type="Mine",
            schema=own_schema(**schema),
            attributes=lambda arguments: {},
            **options,
        )


def test_an_attribute_that_the_schema_does_not_declare(tmp_path: Path) -> None:
    op = relu_op("relu_undeclared")
    dynamo_moe.register_op(
        op,
        domain=DOMAIN,
        op_type="Undeclared",
        schema=own_schema("Undeclared"),
        attributes=lambda arguments: {"width": 8},
    )
    with pytest.raises(dynamo_moe.ExportError, match=r"'width', which the schema of .*Undeclared"):
        exported(tmp_path / "m.onnx", op)


def test_random_numbers() -> None:
    with pytest.raises(ValueError, match=r"aten\.bernoulli\.default draws random numbers"):
        dynamo_moe.register_op(torch.ops.aten.bernoulli.default, domain=DOMAIN, op_type="Random")


def test_what_is_no_operator() -> None:
    with pytest.raises(TypeError, match=r"torch_op must be an operator.*got function"):
        dynamo_moe.register_op(lambda x: x, domain=DOMAIN, op_type="Mine")
    with pytest.raises(ValueError, match=r"has several overloads, name one: aten\.relu"):
        dynamo_moe.register_op(torch.ops.aten.relu, domain=DOMAIN, op_type="Mine")


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
