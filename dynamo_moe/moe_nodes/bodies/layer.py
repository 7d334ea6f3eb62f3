"""The function that holds a layer: tokens in, result out.

Legend: T tokens, D model width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from dynamo_moe.moe_nodes.bodies import dense, dropless, onnxruntime, tensorrt, unrolled
from dynamo_moe.moe_nodes.bodies.config import MIN_OPSET, BodyConfig
from dynamo_moe.moe_nodes.bodies.ops import Ops
from dynamo_moe.moe_nodes.bodies.router import route
from dynamo_moe.operators.foreign import ONNXRUNTIME_MOE, TRT_MOE

Inputs = Mapping[str, ir.Value]
Layer = Callable[[Ops, BodyConfig, Inputs, ir.Value], ir.Value]
Experts = Callable[[Ops, BodyConfig, Inputs, ir.Value, ir.Value, ir.Value], ir.Value]


def body(config: BodyConfig, opset: int, *, domain: str = "moe") -> ir.Function:
    """The operator as a loop over its active experts; a few slots get copies of their weights.

    Args:
        config: What the node computes.
        opset: Version of the standard operators, which must be the model's; at least 18.
        domain: The node's domain. A function is found by domain and name, so a file with several
            configurations needs several domains.

    Returns:
        A function of ``config.inputs`` and ``config.attributes``.

    Raises:
        ValueError: If the opset is too old.
    """
    return function(config, opset, domain, routed(dropless.experts), beside=True)


def unrolled_body(
    config: BodyConfig, opset: int, *, num_experts: int, domain: str = "moe"
) -> ir.Function:
    """The operator with separate products for each of ``num_experts`` experts; see :func:`body`."""
    layer = routed(functools.partial(unrolled.experts, num_experts=num_experts))
    return function(config, opset, domain, layer, beside=True)


def dense_body(config: BodyConfig, opset: int, *, domain: str = "moe") -> ir.Function:
    """The operator with every expert applied to every token; see :func:`body`."""
    return function(config, opset, domain, routed(dense.experts))


def onnxruntime_body(config: BodyConfig, opset: int, *, domain: str = "moe") -> ir.Function:
    """The operator as ONNX Runtime's ``com.microsoft::MoE``; see :func:`body`."""
    result = function(config, opset, domain, onnxruntime.layer)
    result.opset_imports[ONNXRUNTIME_MOE.domain] = 1
    return result


def tensorrt_body(config: BodyConfig, opset: int, *, domain: str = "moe") -> ir.Function:
    """The operator as TensorRT's ``TRT_MoE``; see :func:`body`."""
    result = function(config, opset, domain, routed(tensorrt.experts))
    result.opset_imports[TRT_MOE.domain] = 1
    return result


def function(
    config: BodyConfig, opset: int, domain: str, layer: Layer, *, beside: bool = False
) -> ir.Function:
    """The operator, given how to compute ``[T, D]`` from ``[T, D]``; see :func:`body`."""
    op = recorder(opset, beside=beside)
    inputs = {name: op.value(name) for name in config.inputs}
    x_TD = tokens(op, config, inputs["x"])
    y = result(op, config, inputs["x"], x_TD, layer(op, config, inputs, x_TD))
    return as_function(op, config, domain, inputs, [y])


def recorder(opset: int, *, beside: bool = False) -> Ops:
    """Returns a recorder of a body's nodes; see :func:`body`."""
    if opset < MIN_OPSET:
        raise ValueError(f"the body needs opset {MIN_OPSET} or later, got {opset}")
    return Ops(opset, beside=beside)


def tokens(op: Ops, config: BodyConfig, x: ir.Value) -> ir.Value:
    """The tokens as rows ``[T, D]``, in the declared dtype."""
    return op.entered(_rows(op, x), config.tokens_dtype, out=f"{x.name}_entered_TD")


def result(op: Ops, config: BodyConfig, x: ir.Value, x_TD: ir.Value, y_TD: ir.Value) -> ir.Value:
    """The operator's result from the experts' ``[T, D]``."""
    if config.options.residual:
        x_wide_TD = op.cast(x_TD, config.tokens_dtype, config.compute_dtype, out="residual_TD")
        y_TD = op.Add(x_wide_TD, y_TD, out="y_residual_TD")
    y_TD = op.cast(y_TD, config.compute_dtype, config.tokens_dtype, out="y_rounded_TD")
    y_TD = op.leaving(y_TD, x, config.tokens_dtype, out="y_leaving_TD")
    return op.Reshape(y_TD, op.Shape(x, out="x_shape"), allowzero=1, out="y")


def as_function(
    op: Ops, config: BodyConfig, domain: str, inputs: Inputs, outputs: Sequence[ir.Value]
) -> ir.Function:
    """The recorded nodes as the operator's function."""
    imports = {"": op.opset}
    graph = ir.Graph(
        list(inputs.values()), outputs, nodes=op.nodes, opset_imports=imports, name=config.overload
    )
    # The attribute type only has to be defined: without a value, just the name is stored.
    attributes = [ir.Attr(name, ir.AttributeType.INT, None) for name in config.attributes]
    return ir.Function(domain, config.op_type, graph=graph, attributes=attributes)


def _rows(op: Ops, x: ir.Value) -> ir.Value:
    """The tokens as rows ``[T, D]``."""
    if op.beside:
        # If x was dequantised, ONNX Runtime 1.31 moves the dequantisation behind a Reshape, and
        # crashes when the rows enter a branch. It does not move it behind Flatten.
        return op.Flatten(x, axis=-1, out=f"{x.name}_TD")
    rows = op.Concat([-1], op.size("in_features"), axis=0, out="TD")
    return op.Reshape(x, rows, out=f"{x.name}_TD")


def routed(experts: Experts) -> Layer:
    """A layer whose router comes before its experts."""

    def layer(op: Ops, config: BodyConfig, inputs: Inputs, x_TD: ir.Value) -> ir.Value:
        return experts(op, config, inputs, x_TD, *route(op, config, inputs, x_TD))

    return layer
