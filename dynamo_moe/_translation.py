"""From the PyTorch operators to the ONNX operators, for ``torch.onnx.export(dynamo=True)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript
import torch
from onnxscript.onnx_opset import opset18

import custom_ops  # noqa: F401  Registers torch.ops.moe.
from dynamo_moe import _schemas

__all__ = ["onnx_translation_table"]

# What the exporter passes are onnx_ir values; it warns about functions annotated so.
Value = Any

_moe = onnxscript.values.Opset(_schemas.DOMAIN, _schemas.VERSION)


def onnx_translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns the translations of ``torch.ops.moe`` for ``torch.onnx.export``.

    Each operator becomes one node of domain ``moe``. :func:`dynamo_moe.export` uses this table
    and adds to the file what runtimes without the operator need.

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
    return {
        torch.ops.moe.dropless.default: _dropless,
        torch.ops.moe.experts.default: _experts,
    }


def _dropless(
    x: Value,
    router_weight: Value,
    w1: Value,
    b1: Value | None,
    w2: Value,
    b2: Value | None,
    top_k: int,
    router_bias: Value | None = None,
    scoring: str = "softmax",
    renormalize: bool = True,
    routed_scaling: float = 1.0,
    **expert_options: Any,
) -> Value:
    experts, width = _sizes(router_weight)
    rows = _sizes(w1)[1]
    optional = _fill_holes(
        (router_bias, (experts,), router_weight),
        (b1, (experts, rows), w1),
        (b2, (experts, width), w1),
    )
    return _moe.DroplessMoE(
        x, router_weight, w1, w2, *optional,
        **_attributes(w1, w2, top_k, **expert_options),
        scoring=scoring,
        renormalize=int(renormalize),
        routed_scaling=float(routed_scaling),
        **_schemas.PLUGIN_ATTRIBUTES,
    )  # fmt: skip


def _experts(
    x: Value,
    expert_ids: Value,
    expert_weights: Value,
    w1: Value,
    b1: Value | None,
    w2: Value,
    b2: Value | None,
    **expert_options: Any,
) -> Value:
    experts, rows, width = _sizes(w1)
    optional = _fill_holes((b1, (experts, rows), w1), (b2, (experts, width), w1))
    return _moe.DroplessMoEExperts(
        x, expert_ids, expert_weights, w1, w2, *optional,
        **_attributes(w1, w2, _sizes(expert_ids)[-1], **expert_options),
        **_schemas.PLUGIN_ATTRIBUTES,
    )  # fmt: skip


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


def _fill_holes(
    *optional: tuple[Value | None, tuple[int, ...], Value],
) -> list[Value]:
    """Returns the optional inputs up to the last present one, zeros standing for absent ones.

    TensorRT's handling of an omitted input in the middle is unverified.

    Args:
        optional: Per input: its value or None, its shape, and a value of its dtype.
    """
    present = [index for index, (value, _, _) in enumerate(optional) if value is not None]
    filled = []
    for value, shape, like in optional[: present[-1] + 1 if present else 0]:
        filled.append(_zeros(shape, like.dtype) if value is None else value)
    return filled


def _zeros(shape: Sequence[int], dtype: ir.DataType | None) -> Value:
    if dtype is None:
        raise ValueError("an MoE operator's parameters must have a known dtype")
    zeros = ir.tensor(np.zeros(shape, dtype.numpy()))
    return opset18.Constant(value=ir.serde.serialize_tensor(zeros))


def _sizes(value: Value) -> tuple[int, ...]:
    """Returns the static sizes of a parameter; only expert_ids may have others before its last."""
    if value.shape is None:
        raise ValueError(f"{value.name!r} must have a known shape")
    sizes = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    if sizes[-1] < 1:
        raise ValueError(f"{value.name!r} must have a static last dimension, got {value.shape}")
    return sizes
