"""From the PyTorch operators to the ONNX operators, for ``torch.onnx.export(dynamo=True)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

import custom_ops  # noqa: F401  Registers torch.ops.moe.
from dynamo_moe.moe_nodes import schemas
from dynamo_moe.moe_nodes.bodies import rms_norm_body
from dynamo_moe.moe_nodes.bodies.of_node import moe_body
from dynamo_moe.operators.registration import register_op
from dynamo_moe.operators.registry import Arguments, operators
from dynamo_moe.operators.schemas import scalar_arguments

__all__ = ["onnx_translation_table"]

Value = ir.Value


def onnx_translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns the translations of all registered operators for ``torch.onnx.export``.

    These are ``torch.ops.moe`` and what :func:`register_op` has been told. Each becomes one node.
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


def _dropless_attributes(arguments: Arguments) -> dict[str, Any]:
    own = ("scoring", "renormalize", "routed_scaling")
    return {
        **_attributes(
            arguments["w1"], arguments["w2"], arguments["top_k"], **_expert_options(arguments)
        ),
        **{name: arguments[name] for name in own},
    }


def _experts_attributes(arguments: Arguments) -> dict[str, Any]:
    top_k = _sizes(arguments["expert_ids"])[-1]
    return _attributes(arguments["w1"], arguments["w2"], top_k, **_expert_options(arguments))


def _expert_options(arguments: Arguments) -> dict[str, Any]:
    # moe::experts has no other arguments but tensors.
    names = scalar_arguments(torch.ops.moe.experts.default)
    return {name: arguments[name] for name in names}


def _attributes(
    w1: Value,
    w2: Value,
    top_k: int,
    *,
    activation: str = "gelu",
    gated: bool = False,
    interleaved: bool = False,
    weight_on_input: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    pre_norm: str = "none",
    norm_eps: float = 1e-6,
    residual: bool = False,
) -> dict[str, int | float | str]:
    experts, _, width = _sizes(w1)
    return {
        "top_k": top_k,
        "num_experts": experts,
        "in_features": width,
        "hidden_features": _sizes(w2)[2],
        "activation": activation,
        "gated": int(gated),
        "interleaved": int(interleaved),
        "weight_on_input": int(weight_on_input),
        "activation_alpha": float(alpha),
        "activation_limit": float(limit),
        "pre_norm": pre_norm,
        "norm_eps": float(norm_eps),
        "residual": int(residual),
    }


def _fill(name: str, arguments: Arguments) -> tuple[tuple[int, ...], ir.DataType | None]:
    """Returns sizes and dtype of an optional input, whose zeros stand for it where it is absent.

    TensorRT's handling of an omitted input in the middle is unverified.
    """
    experts, rows, width = _sizes(arguments["w1"])
    like = arguments["router_weight" if name == "router_bias" else "w1"]
    shape = {"router_bias": (experts,), "b1": (experts, rows), "b2": (experts, width)}[name]
    return shape, like.dtype


def _sizes(value: Value) -> tuple[int, ...]:
    """Returns the static sizes of a parameter; only expert_ids may have others before its last."""
    if value.shape is None:
        raise ValueError(f"{value.name!r} must have a known shape")
    sizes = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    if sizes[-1] < 1:
        raise ValueError(f"{value.name!r} must have a static last dimension, got {value.shape}")
    return sizes


for _op, _op_type, _compute in (
    (torch.ops.moe.dropless, schemas.DROPLESS, _dropless_attributes),
    (torch.ops.moe.experts, schemas.EXPERTS, _experts_attributes),
):
    register_op(
        _op,
        domain=schemas.DOMAIN,
        op_type=_op_type,
        schema=schemas.SCHEMAS[_op_type],
        attributes=_compute,
        body=moe_body,
        fill=_fill,
    )

register_op(
    torch.ops.moe.rms_norm,
    domain=schemas.DOMAIN,
    op_type="RMSNorm",
    attributes={"eps": "epsilon"},
    shape_inference="like:x",
    body=rms_norm_body,
    doc="Root mean square normalisation over the last dimension.",
)
