"""What the optimised graph says about sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import pytest
import torch
import torch.nn.functional as F

import dynamo_moe
from dynamo_moe.graph import passes

RESHAPED = """<ir_version: 10, opset_import: ["" : 20]>
model (float[n, 4] x, int64[2] sizes) => (float[a, b] y) {
  reshaped = Reshape(x, sizes)
  y = Relu(reshaped)
}"""


def test_unknown_sizes_have_no_names() -> None:
    # Counted names would be another one's in each of the blocks that are otherwise equal.
    model = ir.from_proto(onnx.parser.parse_model(RESHAPED))
    passes.optimize(model)
    (reshaped,) = (node for node in model.graph if node.op_type == "Reshape")
    assert reshaped.outputs[0].shape == ir.Shape([None, None])


FOLDED = """<ir_version: 10, opset_import: ["" : 20]>
model (float[n] x) => (float[n] y) {
  zero = Constant <value = float[1] {0}> ()
  two = Constant <value = int64[1] {2}> ()
  no_number = Log(zero)
  no_shape = Reshape(zero, two)
  y = Add(x, no_number)
}"""


def test_folding_says_nothing(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    model = ir.from_proto(onnx.parser.parse_model(FOLDED))
    passes.optimize(model)
    assert [node.op_type for node in model.graph] == ["Add"]
    assert not caplog.records
    assert not recwarn.list


def merged(*nodes: ir.Node) -> int:
    """How many of the nodes are merged with others; all results are used."""
    used = [ir.node("Identity", node.outputs) for node in nodes]
    graph = ir.Graph([], [node.outputs[0] for node in used], nodes=[*nodes, *used])
    passes._merge_constants(graph)
    assert all(node.inputs[0].graph is graph for node in used)
    return sum(node.graph is None for node in nodes)


def constant(**attributes: Any) -> ir.Node:
    return ir.node("Constant", [], attributes)


def test_equal_constants_are_merged_with_what_is_made_of_them() -> None:
    sizes = [constant(value_ints=[2, 3]) for _ in range(2)]
    numbers = [constant(value=ir.tensor(np.arange(6.0))) for _ in range(2)]
    pairs = zip(numbers, sizes, strict=True)
    shaped = [ir.node("Reshape", [*number.outputs, *size.outputs]) for number, size in pairs]
    cast = [ir.node("Cast", node.outputs, {"to": 1}) for node in shaped]
    assert merged(*sizes, *numbers, *shaped, *cast) == 4


@pytest.mark.parametrize(
    "nodes",
    [
        lambda: (constant(value_float=0.0), constant(value_float=-0.0)),
        lambda: (constant(value_int=1), constant(value_float=1.0)),
        lambda: (constant(value=ir.tensor(np.ones(1))), constant(value=ir.tensor(np.ones(())))),
        lambda: (
            constant(value=ir.tensor(np.zeros(1, np.int64))),
            constant(value=ir.tensor(np.zeros(1))),
        ),
        lambda: [ir.node("RandomNormal", [], {"shape": [2]}) for _ in range(2)],
        lambda: [ir.node("Cast", [ir.Value()], {"to": 1}) for _ in range(2)],
    ],
)
def test_others_are_not(nodes: Any) -> None:
    assert merged(*nodes()) == 0


def test_large_tensors_are_not_compared() -> None:
    # Their elements are what a summary of them leaves out.
    tensors = [np.zeros(5000, np.float32) for _ in range(2)]
    tensors[1][2500] = 1
    assert merged(*(constant(value=ir.tensor(tensor)) for tensor in tensors)) == 0


def inferred(text: str, numbers: int, infer: Any) -> list[Any]:
    """Types and shapes of a model's values, where ``numbers`` is one of its initializers."""
    model = ir.from_proto(onnx.parser.parse_model(text))
    sizes = ir.tensor(np.arange(1, numbers + 1), name="sizes")
    model.graph.register_initializer(ir.Value(name="sizes", const_value=sizes))
    infer(model)
    values = [value for node in model.graph.all_nodes() for value in node.outputs]
    return [(value.name, value.type, value.shape) for value in values]


INFERRED = {
    "sizes of constants": """<ir_version: 10, opset_import: ["" : 20]>
model (float[n] x, int64[2] i) => (float[a, b] y) <int64[2] chosen = {1, 4}> {
  shape = Gather(sizes, chosen)
  expanded = Expand(x, shape)
  y = Relu(expanded)
}""",
    "wrong dtype": """<ir_version: 10, opset_import: ["" : 20]>
model (float[n, 4] x, int64[2] i) => (float[a, b] y) <float[n, 4] cast> {
  cast = Cast <to = 10> (x)
  y = Relu(cast)
}""",
    "branches": """<ir_version: 10, opset_import: ["" : 20]>
model (float[n, 4] x, bool c) => (float[a, b] y) {
  y = If (c) <
    then_branch = t () => (float[a, b] one) { one = Relu(x) },
    else_branch = e () => (float[a, b] two) { two = Neg(x) }
  >
}""",
    "unknown operator": """<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
model (float[n, 4] x) => (float[a, b] y) {
  z = own.Unknown(x)
  y = Relu(x)
}""",
}


@pytest.mark.parametrize("numbers", [8, 40, 130])
@pytest.mark.parametrize("name", INFERRED)
def test_inferred_shapes_are_those_of_the_pass(name: str, numbers: int) -> None:
    own = inferred(INFERRED[name], numbers, passes._infer_by_onnx)
    assert own == inferred(INFERRED[name], numbers, common_passes.ShapeInferencePass())


def test_values_without_a_name_are_left_without_a_shape() -> None:
    model = ir.from_proto(onnx.parser.parse_model(RESHAPED))
    model.graph[0].outputs[0].name = None
    passes._infer_by_onnx(model)
    assert model.graph[0].outputs[0].shape is None


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.max_pool2d(x, 3, 2),
        lambda x: F.max_pool2d(x, 3, 2, padding=1),
        lambda x: F.max_pool1d(x[0].double(), 3, 2).float(),
        lambda x: F.avg_pool2d(x, 3, 2, padding=1, count_include_pad=False),
    ],
)
def test_zeros_around_negative_numbers_are_seen_by_pools(tmp_path: Path, pool: Any) -> None:
    class Padded(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return pool(F.pad(x, [0, 1, 0, 1]))

    path = tmp_path / "m.onnx"
    x = torch.randn(2, 3, 8, 8) - 3
    dynamo_moe.export(Padded(), (x,), path)
    dynamo_moe.verify(path, Padded(), [(x,)])
