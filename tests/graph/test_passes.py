"""What the optimised graph says about sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

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
