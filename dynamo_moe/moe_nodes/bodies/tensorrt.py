"""The layer as TensorRT's own operator, ``TRT_MoE``.

TensorRT has kernels for it on datacentre Blackwell and Thor alone: compute capabilities 10.0, 10.3
and 11.0. The router stays outside. Every expert is gated with SiLU.

Legend: T tokens, D model width, H hidden width, E experts, K = top_k.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.ops import Ops
from dynamo_moe.operators.foreign import TRT_MOE

_SILU = 1


def experts(
    op: Ops,
    config: BodyConfig,
    parameters: Mapping[str, ir.Value],
    x_TD: ir.Value,
    ids_TK: ir.Value,
    weights_TK: ir.Value,
) -> ir.Value:
    """Returns the sum over K of the experts' weighted results, ``[T, D]`` in the compute dtype.

    Raises:
        ValueError: If ``TRT_MoE`` cannot express this configuration.
    """
    _check(config)
    dtype = config.operand_dtype
    if not config.router:
        # Slots of no expert, -1, have weight 0.
        ids_TK = op.Max(ids_TK, 0, out="ids_of_experts_TK")
    ids_TK = op.Cast(ids_TK, to=ir.DataType.INT32, out="ids_i32_TK")
    weights_TK = op.cast(weights_TK, config.compute_dtype, dtype, out="weights_rounded_TK")
    rounded_TD = op.cast(x_TD, config.tokens_dtype, dtype, out="x_rounded_TD")
    tokens = [
        op.Unsqueeze(value, [0], out=f"{value.name}_1")
        for value in (rounded_TD, ids_TK, weights_TK)
    ]
    gate_EHD, up_EHD = op.Split(parameters["w1"], axis=1, num_outputs=2, out=("gate", "up"))
    matrices = [
        op.Transpose(value, perm=[0, 2, 1], out=f"{value.name}_t")
        for value in (gate_EHD, up_EHD, parameters["w2"])
    ]
    node = ir.Node(
        TRT_MOE.domain,
        TRT_MOE.op_type,
        [*tokens, *matrices, *_biases(op, config, parameters)],
        ir.convenience.convert_attributes({"activation_type": _SILU}),
        outputs=[op.value("moe_1TD")],
        name="TRT_MoE",
    )
    op.nodes.append(node)
    y_TD = op.Squeeze(node.outputs[0], [0], out="moe_TD")
    return op.cast(y_TD, dtype, config.compute_dtype, out="y_TD")


def _biases(op: Ops, config: BodyConfig, parameters: Mapping[str, ir.Value]) -> list[ir.Value]:
    """The biases of gate, up and down: all three or none."""
    if "b1" not in parameters:
        return []
    gate_EH, up_EH = op.Split(parameters["b1"], axis=1, num_outputs=2, out=("gate_b", "up_b"))
    if "b2" in parameters:
        return [gate_EH, up_EH, parameters["b2"]]
    ED = op.Concat(op.size("num_experts"), op.size("in_features"), axis=0, out="ED")
    return [gate_EH, up_EH, op.zeros(ED, config.bias_dtype, out="down_b")]


def _check(config: BodyConfig) -> None:
    options = config.options
    gated = "gated" if options.gated else "not gated"
    causes = {
        f"an expert that is {gated}, with activation {options.activation!r}; it has gated SiLU": (
            not config.options.gated or config.options.activation != "silu"
        ),
        "interleaved gate and up rows": config.options.interleaved,
        "weights on the experts' inputs": config.options.weight_on_input,
        f"pre_norm {config.options.pre_norm!r}": config.options.pre_norm != "none",
        "double": config.compute_dtype == ir.DataType.DOUBLE,
    }
    for cause, applies in causes.items():
        if applies:
            raise ValueError(f"TRT_MoE has no form of {cause}: use target 'plugin' or 'dense'")
