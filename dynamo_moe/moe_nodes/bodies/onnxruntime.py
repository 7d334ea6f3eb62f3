"""The layer as ONNX Runtime's own operator: ``com.microsoft::MoE``, or ``QMoE`` if packed.

That operator takes router logits and does softmax and top-k itself, so a softmax router needs no
change. Any other decision is passed as logits: the logarithms of the wanted weights, and a floor
for every other expert. The operator's weights then sum to one, so the result is scaled by the
wanted sum. This needs positive weights, and a token must not choose an expert twice.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from custom_ops.packed_weights import WHOLE
from custom_ops.weight_formats import SCALES, ZERO_POINTS
from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.expert import rms_scale
from dynamo_moe.moe_nodes.bodies.ops import Ops
from dynamo_moe.moe_nodes.bodies.router import logits, route
from dynamo_moe.moe_nodes.bodies.weights import loaded, stored
from dynamo_moe.operators.foreign import ONNXRUNTIME_MOE, ONNXRUNTIME_QMOE

_PLAIN = {
    "gelu": "gelu",
    "gelu_tanh": "gelu",
    "silu": "silu",
    "relu": "relu",
    "identity": "identity",
}
# The slope of the sigmoid in a gating without clamps.
_SWISH = {"silu": 1.0, "quick_gelu": 1.702}
# exp(floor) is 0 in float32; the floor is finite so that a token without experts is not NaN.
_FLOOR = -1e30
_LEAST_GROUP = 16
# Bits of an element, of the formats that QMoE of ONNX Runtime 1.31 runs on a CPU.
_QMOE_BITS = {"int4": 4, "int8": 8}


def layer(op: Ops, config: BodyConfig, inputs: Mapping[str, ir.Value], x_TD: ir.Value) -> ir.Value:
    """Returns the layer's result ``[T, D]`` in the compute dtype.

    Raises:
        ValueError: If ``com.microsoft::MoE`` cannot express this configuration.
    """
    _check(config)
    dtype = config.compute_dtype
    x_wide_TD = op.cast(x_TD, config.tokens_dtype, dtype, out="x_wide_TD")
    if config.options.pre_norm != "none":
        x_wide_TD = op.Mul(x_wide_TD, rms_scale(op, config, x_TD), out="x_normed_TD")
    if _has_its_router(config):
        normalize = config.renormalizes or config.router_options.scoring == "topk_softmax"
        logits_TE = logits(op, config, inputs, x_TD)
        y_TD = _moe(op, config, inputs, x_wide_TD, logits_TE, normalize=normalize)
        factor = op.real("routed_scaling", dtype)
    else:
        ids_TK, weights_TK = route(op, config, inputs, x_TD)
        logits_TE = _logits_of(op, dtype, ids_TK, weights_TK)
        y_TD = _moe(op, config, inputs, x_wide_TD, logits_TE, normalize=False)
        factor = op.ReduceSum(weights_TK, [1], keepdims=1, out="total_weight_T1")
    y_TD = op.Mul(y_TD, factor, out="scaled_TD")
    # If MoE is the last user of its input, ONNX Runtime 1.31 lets it write its result over that
    # input while still reading it: wrong numbers. So x is used once more after it.
    return op.Where(op.constant("never", False, ir.DataType.BOOL), x_wide_TD, y_TD, out="y_TD")


def _has_its_router(config: BodyConfig) -> bool:
    """Whether the operator's own router is the layer's."""
    router = config.router
    if router is None or router.scoring == "sigmoid" or config.has_selection_bias:
        return False
    if router.is_rare:
        # It rounds no weights, and does not take the lower of equal logits, which are many.
        return False
    # On a CPU, QMoE of ONNX Runtime 1.31 divides the weights by their sum whatever it is told.
    divides = config.shape.weight_format.is_plain or router.scoring == "topk_softmax"
    return router.group_scoring == "none" and (divides or config.renormalizes)


def _moe(
    op: Ops,
    config: BodyConfig,
    inputs: Mapping[str, ir.Value],
    x_TD: ir.Value,
    logits_TE: ir.Value,
    *,
    normalize: bool,
) -> ir.Value:
    is_plain = config.shape.weight_format.is_plain
    parameters = (_plain if is_plain else _packed)(op, config, inputs)
    attributes: dict[str, int | float | str] = {
        "activation_type": "swiglu" if config.options.gated else _PLAIN[config.options.activation],
        "normalize_routing_weights": int(normalize),
    }
    references = []
    if config.shape.top_k <= config.shape.experts:
        references.append(ir.RefAttr("k", "top_k", ir.AttributeType.INT))
    else:  # A rank's few experts: the token's others have the id -1.
        attributes["k"] = config.shape.experts
    if config.options.gated:
        attributes["swiglu_fusion"] = 1  # Interleaved rows: the only form that runs on the CPU.
        if config.options.activation == "clamped_swiglu":
            attributes["activation_beta"] = 1.0
            references += [
                ir.RefAttr("activation_alpha", "activation_alpha", ir.AttributeType.FLOAT),
                ir.RefAttr("swiglu_limit", "activation_limit", ir.AttributeType.FLOAT),
            ]
        else:
            alpha = _SWISH[config.options.activation]
            attributes |= {"activation_alpha": alpha, "activation_beta": 0.0}
    if not is_plain:
        bits = _QMOE_BITS[config.shape.weight_format.encoding]
        attributes |= {"expert_weight_bits": bits, "quant_type": "int"}
        references.append(ir.RefAttr("block_size", "block_size", ir.AttributeType.INT))
    operator = ONNXRUNTIME_MOE if is_plain else ONNXRUNTIME_QMOE
    node = ir.Node(
        operator.domain,
        operator.op_type,
        [x_TD, logits_TE, *parameters],
        [*ir.convenience.convert_attributes(attributes), *references],
        outputs=[op.value("moe_TD")],
        name=operator.op_type,
    )
    op.nodes.append(node)
    return node.outputs[0]


def _plain(op: Ops, config: BodyConfig, inputs: Mapping[str, ir.Value]) -> list[ir.Value | None]:
    """The parameters of ``MoE``."""

    def parameter(name: str) -> ir.Value | None:
        if name not in inputs:
            return None
        tensors = [inputs[part] for part in stored(config, name)]
        return _ordered(op, config, loaded(op, config, name, tensors, out=f"{name}_wide"), name)

    return [parameter(name) for name in ("w1", "b1", "w2", "b2")]


def _packed(op: Ops, config: BodyConfig, inputs: Mapping[str, ir.Value]) -> list[ir.Value | None]:
    """The parameters of ``QMoE``, whose bytes are unsigned, and whose zero points are packed."""
    is_signed = config.shape.weight_format.encoding == "int8"
    # Zero points of rows lie like scales without groups, neighbouring rows' in a byte.
    is_of_rows = not is_signed and config.shape.weight_format.block[1] == WHOLE

    def parameter(name: str) -> ir.Value | None:
        if name not in inputs or (is_signed and name.endswith(ZERO_POINTS)):
            return None
        if name.endswith(SCALES):
            value = op.Cast(inputs[name], to=config.compute_dtype, out=f"{name}_wide")
        elif name in ("b1", "b2"):
            value = op.cast(inputs[name], config.bias_dtype, config.compute_dtype, out=f"{name}_w")
        else:
            value = op.Cast(inputs[name], to=ir.DataType.UINT8, out=f"{name}_bytes")
            if is_signed:
                sign = op.constant("sign", 128, ir.DataType.UINT8)
                value = op.BitwiseXor(value, sign, out=f"{name}_from_0")
        is_zero_points = name.endswith(ZERO_POINTS)
        if is_zero_points:
            shape = op.Shape(inputs[name.replace(ZERO_POINTS, SCALES)], out=f"{name}_shape")
            value = op.Expand(value, shape, out=f"{name}_of_groups")
        if is_of_rows and (is_zero_points or name.endswith(SCALES)):
            rows = op.Squeeze(_ordered(op, config, value, name), [-1], out=f"{name}_of_rows")
            return _pairs(op, rows) if is_zero_points else rows
        return _ordered(op, config, _pairs(op, value) if is_zero_points else value, name)

    names = ONNXRUNTIME_QMOE.inputs[2:]
    return [parameter(name) for name in names]


def _pairs(op: Ops, codes: ir.Value) -> ir.Value:
    """Packs codes of 4 bits along the last axis, the even one's in the low bits."""
    name = codes.name or ""
    padded = op.Pad(codes, [0, 1], None, [-1], out=f"{name}_padded")
    last = [np.iinfo(np.int64).max]
    high = op.Slice(padded, [1], last, [-1], [2], out=f"{name}_odd")
    low = op.Slice(codes, [0], last, [-1], [2], out=f"{name}_even")
    four = op.constant("bits_4", 4, ir.DataType.UINT8)
    return op.BitwiseOr(
        low, op.BitShift(high, four, direction="LEFT", out=f"{name}_high"), out=f"{name}_packed"
    )


def _ordered(op: Ops, config: BodyConfig, value: ir.Value, name: str) -> ir.Value:
    """The rows of the first product with gate and up in turn."""
    is_first = config.options.gated and name.startswith(("w1", "b1"))
    return _interleave(op, value, name) if is_first and not config.options.interleaved else value


def _check(config: BodyConfig) -> None:
    supported = config.options.activation in (
        (*_SWISH, "clamped_swiglu") if config.options.gated else tuple(_PLAIN)
    )
    if not supported:
        gated = "a gated" if config.options.gated else "an"
        raise ValueError(
            f"com.microsoft::MoE has no form of {gated} expert with activation "
            f"{config.options.activation!r}: use target 'plugin' or 'dense'"
        )
    if config.options.weight_on_input:
        raise ValueError(
            "com.microsoft::MoE cannot weight the experts' inputs: use target 'plugin' or 'dense'"
        )
    if config.shape.weight_format.encoding not in ("plain", *_QMOE_BITS):
        raise ValueError(
            f"com.microsoft::QMoE of ONNX Runtime 1.31 does not run {config.shape.weight_format} "
            "on a CPU: use target 'plugin'"
        )
    group = config.shape.weight_format.block[1]
    if config.shape.weight_format.encoding == "int8" and group != WHOLE:
        raise ValueError(
            "com.microsoft::QMoE of ONNX Runtime 1.31 rounds tokens to 8 bits where int8 weights "
            f"have groups, here of {group}, whatever its accuracy_level: use target 'plugin', or "
            "one scale to a row"
        )
    if 0 < group < _LEAST_GROUP or group & (group - 1):
        raise ValueError(
            f"com.microsoft::QMoE takes groups of {_LEAST_GROUP}, 32, 64, ... values, got {group}: "
            "use target 'plugin'"
        )
    if config.compute_dtype == ir.DataType.DOUBLE:
        raise ValueError("com.microsoft::MoE has no double form: use target 'plugin' or 'dense'")


def _logits_of(op: Ops, dtype: ir.DataType, ids_TK: ir.Value, weights_TK: ir.Value) -> ir.Value:
    """Logits ``[T, E]`` whose softmax is the weights divided by their sum."""
    tokens_1 = op.Shape(ids_TK, start=0, end=1, out="T")
    # Column 0 collects choices of no expert.
    columns_1 = op.Add(op.size("num_experts"), 1, out="columns")
    floor = op.constant("floor", _FLOOR, dtype)
    floors = op.Expand(floor, op.Concat(tokens_1, columns_1, axis=0, out="TE_1"), out="floors")
    scattered = op.ScatterElements(
        floors,
        op.Add(ids_TK, 1, out="columns_TK"),
        op.Log(weights_TK, out="log_weights_TK"),
        axis=1,
        out="scattered",
    )
    return op.Slice(scattered, [1], [np.iinfo(np.int64).max], [1], out="expert_logits_TE")


def _interleave(op: Ops, value: ir.Value, name: str) -> ir.Value:
    """Rearranges gate rows followed by up rows, ``[E, 2H, ...]``, to ``::2`` and ``1::2``."""
    gate, up = op.Split(value, axis=1, num_outputs=2, out=(f"{name}_gate", f"{name}_up"))
    gate_EH1 = op.Unsqueeze(gate, [2], out=f"{name}_gate_EH1")
    up_EH1 = op.Unsqueeze(up, [2], out=f"{name}_up_EH1")
    pairs_EH2 = op.Concat(gate_EH1, up_EH1, axis=2, out=f"{name}_pairs_EH2")
    return op.Reshape(pairs_EH2, op.Shape(value, out=f"{name}_shape"), out=f"{name}_interleaved")
