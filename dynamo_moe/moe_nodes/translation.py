"""From the PyTorch operators to the ONNX operators, for ``torch.onnx.export(dynamo=True)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

import custom_ops  # noqa: F401  Registers torch.ops.moe.
from custom_ops.options import EXPERT_OPTIONS, ROUTER_OPTIONS, SIZES
from custom_ops.packed_weights import ENCODINGS, WHOLE, Encoding
from custom_ops.weight_formats import GLOBAL_SCALES, ZERO_POINTS
from dynamo_moe.moe_nodes.bodies import rms_norm_body
from dynamo_moe.moe_nodes.bodies.of_node import training_body
from dynamo_moe.moe_nodes.bodies.ranks import sum_over_ranks_body
from dynamo_moe.moe_nodes.nodes import (
    BLOCK_ROWS,
    BLOCK_SIZE,
    DOMAIN,
    DROPLESS,
    DROPLESS_GRAD,
    DROPLESS_PACKED,
    DROPLESS_ROUTED,
    EXPERTS,
    EXPERTS_GRAD,
    EXPERTS_PACKED,
    KERNELS,
    SUM_OVER_RANKS,
    TENSORRT_ATTRIBUTES,
    TRAIN_PARAMETERS,
    WEIGHT_FORMAT,
    plugin_version,
)
from dynamo_moe.moe_nodes.schemas import SCHEMAS
from dynamo_moe.moe_nodes.targets import registry
from dynamo_moe.operators.registration import register_op
from dynamo_moe.operators.registry import Arguments, Filling, operators


def onnx_translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns the translations of all registered operators for ``torch.onnx.export``.

    These are ``torch.ops.moe`` and what :func:`register_op` has registered. Each becomes one node.
    :func:`dynamo_moe.export` uses this table and adds to the file what runtimes without the
    operator need.

    Example:
        >>> import torch
        >>> from dynamo_moe.models import DroplessMoEMlp
        >>> import dynamo_moe
        >>> model = torch.nn.Sequential(DroplessMoEMlp(8, 16, num_experts=4, top_k=2)).eval()
        >>> report = dynamo_moe.convert(model)
        >>> program = torch.onnx.export(
        ...     model, (torch.randn(2, 8),), dynamo=True, verbose=False,
        ...     custom_translation_table=dynamo_moe.onnx_translation_table(),
        ... )
        >>> [node.op_type for node in program.model.graph if node.domain == "moe"]
        ['DroplessMoE']
    """
    return {operator.torch_op: operator.translation() for operator in operators()}


def _attributes(arguments: Arguments) -> dict[str, Any]:
    has_router = "router_weight" in arguments
    is_routed = "expert_ids" in arguments
    top_k = _sizes(arguments["expert_ids"])[-1] if is_routed else arguments["top_k"]
    experts, width, hidden = _sizes(arguments["w2"])
    storage = {}
    if WEIGHT_FORMAT in arguments:
        encoding = ENCODINGS[arguments[WEIGHT_FORMAT]]
        hidden *= encoding.per_byte
        storage = {WEIGHT_FORMAT: encoding.name, **_block(encoding, arguments, width, hidden)}
    sizes = {"experts": experts, "top_k": top_k, "width": width, "hidden": hidden}
    options = (*EXPERT_OPTIONS, *(ROUTER_OPTIONS if has_router else ()))
    is_rare = any(option.rare and arguments[option.name] != option.default for option in options)
    return {
        **{size.attribute: sizes[size.name] for size in SIZES},
        **storage,
        **{
            option.attribute: arguments[option.name]
            for option in options
            if is_rare or not option.rare
        },
        **({"plugin_version": plugin_version(offloaded=False, rare=True)} if is_rare else {}),
    }


def _block(encoding: Encoding, arguments: Arguments, width: int, hidden: int) -> dict[str, int]:
    """Returns the attributes that say which rows and columns share a scale in both weights."""
    _, rows, _ = _sizes(arguments["w1"])
    first = encoding.blocks(rows, width, _sizes(arguments["w1_scales"])[1:])
    second = encoding.blocks(width, hidden, _sizes(arguments["w2_scales"])[1:])
    block = next(block for block in first if block in second)
    block_rows, block_size = (0 if size == WHOLE else size for size in block)
    return {BLOCK_SIZE: block_size, BLOCK_ROWS: block_rows}


def _gradient_attributes(arguments: Arguments) -> dict[str, Any]:
    return {**_attributes(arguments), TRAIN_PARAMETERS: arguments["parameters"]}


def _fill(name: str, arguments: Arguments) -> Filling:
    """Returns what stands for an optional input where it is absent.

    TensorRT for RTX 1.7 refuses an empty name in place of an input.
    """
    if name.endswith(ZERO_POINTS):
        return (_sizes(arguments["w1"])[0], 1, 1), ir.DataType.INT8, 8
    if name.endswith(GLOBAL_SCALES):
        return (_sizes(arguments["w1"])[0], 1, 1), ir.DataType.FLOAT, 1
    experts, rows, _ = _sizes(arguments["w1"])
    width = _sizes(arguments["w2"])[1]
    of_router = {"router_bias": (experts,), "selection_bias": (experts,)}
    of_experts = "x" if WEIGHT_FORMAT in arguments else "w1"
    like = arguments["router_weight" if name in of_router else of_experts]
    shape = {**of_router, "b1": (experts, rows), "b2": (experts, width)}[name]
    return shape, like.dtype, 0


def _sizes(value: ir.Value) -> tuple[int, ...]:
    """Returns the static sizes of a parameter; only expert_ids may have others before its last."""
    if value.shape is None:
        raise ValueError(f"{value.name!r} must have a known shape")
    sizes = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    if sizes[-1] < 1:
        raise ValueError(f"{value.name!r} must have a static last dimension, got {value.shape}")
    return sizes


def _layer_body(node: ir.Node, opset: int, target: str) -> ir.Function:
    return registry.TARGETS[target].layer_body(node, opset)


def _training_body(node: ir.Node, opset: int, target: str) -> ir.Function:
    return training_body(node, opset)


def _rms_norm_body(node: ir.Node, opset: int, target: str) -> ir.Function:
    return rms_norm_body(node, opset, beside=registry.TARGETS[target].keeps_nodes)


def _sum_over_ranks_body(node: ir.Node, opset: int, target: str) -> ir.Function:
    return sum_over_ranks_body(node, opset, registry.TARGETS[target].collective)


for _op, _op_type in (
    (torch.ops.moe.dropless, DROPLESS),
    (torch.ops.moe.experts, EXPERTS),
    (torch.ops.moe.dropless_packed, DROPLESS_PACKED),
    (torch.ops.moe.experts_packed, EXPERTS_PACKED),
):
    register_op(
        _op,
        domain=DOMAIN,
        op_type=_op_type,
        schema=SCHEMAS[_op_type],
        attributes=_attributes,
        constants={KERNELS: TENSORRT_ATTRIBUTES[KERNELS]},
        body=_layer_body,
        fill=_fill,
    )

register_op(
    torch.ops.moe.dropless_routed,
    domain=DOMAIN,
    op_type=DROPLESS_ROUTED,
    schema=SCHEMAS[DROPLESS_ROUTED],
    attributes=_attributes,
    body=_training_body,
    fill=_fill,
)

for _op, _op_type in (
    (torch.ops.moe.dropless_backward, DROPLESS_GRAD),
    (torch.ops.moe.experts_backward, EXPERTS_GRAD),
):
    register_op(
        _op,
        domain=DOMAIN,
        op_type=_op_type,
        schema=SCHEMAS[_op_type],
        attributes=_gradient_attributes,
        body=_training_body,
    )

register_op(
    torch.ops.moe.rms_norm,
    domain=DOMAIN,
    op_type="RMSNorm",
    attributes={"eps": "epsilon"},
    shape_inference="like:x",
    body=_rms_norm_body,
    doc="Root mean square normalisation over the last dimension.",
)

register_op(
    torch.ops.moe.sum_over_ranks,
    domain=DOMAIN,
    op_type=SUM_OVER_RANKS,
    schema=SCHEMAS[SUM_OVER_RANKS],
    attributes=lambda arguments: {"ranks": arguments["ranks"]},
    body=_sum_over_ranks_body,
)
