"""Small hand-built ONNX models for the tests of inspection, drawing and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64


def weight(name: str, *shape: int, dtype: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.zeros(shape, dtype), name)


def sizes(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def value(name: str, shape: Sequence[int | str | None] | None, dtype: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    initializers: Sequence[onnx.TensorProto] = (),
    *,
    inputs: Sequence[Any] = (),
    outputs: Sequence[Any] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    opsets: dict[str, int] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    imports = [helper.make_opsetid(*item) for item in ({"": 20, "moe": 1} | (opsets or {})).items()]
    return helper.make_model(
        graph, opset_imports=imports, functions=functions, producer_name="by hand", ir_version=10
    )


def moe_model(experts_dtype: type = np.float32) -> onnx.ModelProto:
    """Two residual MoE layers of width 4, hidden width 6 and 3 experts.

    The second layer is gated and has its router outside. Each layer has the function for its
    configuration.
    """
    nodes = [
        helper.make_node("LayerNormalization", ["x", "norm"], ["n"], axis=-1),
        helper.make_node(
            "DroplessMoE",
            ["n", "b.0.mlp.router.weight", "b.0.mlp.w1", "b.0.mlp.w2", "", "b.0.mlp.b1"],
            ["y0"],
            "b.0.mlp/DroplessMoE",
            domain="moe",
            top_k=2,
            num_experts=3,
            in_features=4,
            hidden_features=6,
            activation="gelu",
            gated=0,
            activation_alpha=1.702,
            scoring="softmax",
            plugin_version="1",
            plugin_namespace="",
        ),
        helper.make_node("Add", ["x", "y0"], ["x1"]),
        helper.make_node("Softmax", ["x1"], ["scores"]),
        helper.make_node("TopK", ["scores", "two"], ["weights", "ids"]),
        helper.make_node(
            "DroplessMoEExperts",
            ["x1", "ids", "weights", "b.1.experts.w1", "b.1.experts.w2"],
            ["y1"],
            domain="moe.silu_gated",
            top_k=2,
            num_experts=3,
            in_features=4,
            hidden_features=6,
            activation="silu",
            gated=1,
        ),
        helper.make_node("Add", ["x1", "y1"], ["y"]),
    ]
    weights = [
        weight("norm", 4),
        weight("b.0.mlp.router.weight", 3, 4),
        weight("b.0.mlp.w1", 3, 6, 4, dtype=experts_dtype),
        weight("b.0.mlp.w2", 3, 4, 6, dtype=experts_dtype),
        weight("b.0.mlp.b1", 3, 6, dtype=experts_dtype),
        weight("b.1.experts.w1", 3, 12, 4, dtype=experts_dtype),
        weight("b.1.experts.w2", 3, 4, 6, dtype=experts_dtype),
        sizes("two", 2),
    ]
    functions = [
        helper.make_function(
            domain, name, inputs, ["y"], [body], [helper.make_opsetid("", 20)], attributes=[]
        )
        for domain, name, inputs, body in (
            ("moe", "DroplessMoE", ["x", "r"], helper.make_node("Identity", ["x"], ["y"])),
            ("moe.silu_gated", "DroplessMoEExperts", ["x"], helper.make_node("Abs", ["x"], ["y"])),
        )
    ]
    return model(
        nodes,
        weights,
        inputs=[value("x", ["batch", None, 4])],
        outputs=[value("y", ["batch", None, 4])],
        functions=functions,
        opsets={"moe.silu_gated": 1},
    )


def dense_moe_nodes(x: str, y: str, prefix: str = "") -> list[onnx.NodeProto]:
    """11 nodes that form an MoE layer: a softmax router, and every expert on every token.

    They read ``router [4, 3]``, ``w1 [3, 4, 6]``, ``w2 [3, 6, 4]``, ``tokens`` and ``two``.
    """

    def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
        shared = {x, y, "router", "w1", "w2", "two", "tokens", "last"}
        names = [
            [name if name in shared else prefix + name for name in names.split()]
            for names in (inputs, outputs)
        ]
        return helper.make_node(op, *names, **attributes)

    return [
        node("Reshape", f"{x} tokens", "x_TD"),
        node("MatMul", "x_TD router", "logits"),
        node("Softmax", "logits", "scores"),
        node("TopK", "scores two", "top ids"),
        node("Shape", "scores", "shape"),
        node("ConstantOfShape", "shape", "zeros"),
        node("ScatterElements", "zeros ids top", "weights", axis=1),
        node("MatMul", "x_TD w1", "h"),
        node("MatMul", "h w2", "results"),
        node("Mul", "results weights", "weighted"),
        node("ReduceSum", "weighted last", y, keepdims=0),
    ]


def dense_model() -> onnx.ModelProto:
    """A residual MoE layer in standard operators."""
    nodes = [
        helper.make_node("LayerNormalization", ["x", "norm"], ["n"], axis=-1),
        *dense_moe_nodes("n", "m"),
        helper.make_node("Add", ["x", "m"], ["y"]),
    ]
    weights = [
        weight("norm", 4),
        weight("router", 4, 3),
        weight("w1", 3, 4, 6),
        weight("w2", 3, 6, 4),
        sizes("tokens", -1, 4),
        sizes("two", 2),
        sizes("last", 0),
    ]
    return model(nodes, weights, inputs=[value("x", ["T", 4])], outputs=[value("y", ["T", 4])])


def crashing_file(path: Path) -> Path:
    """Crashes ONNX Runtime 1.31: a branch reads the Reshape of a dequantised value."""
    scale = numpy_helper.from_array(np.ones((), np.float32), "scale")
    zero = numpy_helper.from_array(np.zeros((), np.uint8), "zero")
    flat = sizes("flat", -1)
    branches = {
        name: helper.make_graph(
            [helper.make_node(op_type, ["rows"], [name])], name, [], [value(name, ["n"])]
        )
        for name, op_type in (("then_branch", "Abs"), ("else_branch", "Neg"))
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["dq"]),
        helper.make_node("Reshape", ["dq", "flat"], ["rows"]),
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Greater", ["most", "scale"], ["many"]),
        helper.make_node("If", ["many"], ["y"], **branches),
    ]
    x, y = value("x", ["batch", 3]), value("y", ["n"])
    proto = model(nodes, [scale, zero, flat], inputs=[x], outputs=[y])
    return save(proto, path)


def save(proto: onnx.ModelProto, path: Path, *, external: bool = False) -> Path:
    onnx.save(
        proto,
        path,
        save_as_external_data=external,
        location=f"{path.name}.data",
        size_threshold=0,
    )
    return path
