"""Shapes and dtypes that onnx infers for registered operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnx.defs
import onnx.helper
import pytest
import torch
from onnx import TensorProto

import dynamo_moe
from registered_operators import (
    DOMAIN,
    LIBRARY,
    define,
)

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
