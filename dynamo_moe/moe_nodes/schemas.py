"""The ONNX operators of MoE layers: names, inputs, attributes, type and shape inference.

:mod:`dynamo_moe.moe_nodes.translation` registers them, so that onnx's checker, its shape inference
and onnxscript know them.
"""

from __future__ import annotations

import onnx.helper
from onnx.defs import OpSchema

from dynamo_moe.operators import shape_inference
from dynamo_moe.operators.schemas import OWN_DOMAIN, PLUGIN_ATTRIBUTES

__all__ = [
    "DOMAIN",
    "DROPLESS",
    "EXPERTS",
    "PLUGIN_ATTRIBUTES",
    "SCHEMAS",
    "VERSION",
]

DOMAIN = OWN_DOMAIN
VERSION = 1
DROPLESS = "DroplessMoE"
EXPERTS = "DroplessMoEExperts"

_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]
_TYPE_CONSTRAINTS = [
    ("T", _FLOATS, "Tokens and result."),
    ("W", _FLOATS, "Experts' parameters."),
    ("R", _FLOATS, "Router's parameters, or the experts' weights."),
]
_IDS = ("I", ["tensor(int32)", "tensor(int64)"], "Expert indices.")

_TOKENS = ("x", "T", "Tokens [..., D].")
_EXPERTS_REQUIRED = (
    ("w1", "W", "First product [E, F, D], (out, in); F = H, or 2H when gated."),
    ("w2", "W", "Second product [E, D, H]."),
)
_EXPERTS_BIASES = (("b1", "W", "[E, F]."), ("b2", "W", "[E, D]."))
_Attributes = tuple[tuple[str, str | int | float, str], ...]

_ROUTER_ATTRIBUTES: _Attributes = (
    ("scoring", "softmax", "softmax, topk_softmax or sigmoid."),
    ("renormalize", 1, "1: divide a token's weights by their sum."),
    ("routed_scaling", 1.0, "Factor on every weight."),
)
_SIZE_ATTRIBUTES = (
    ("top_k", "Experts per token K."),
    ("num_experts", "Experts E."),
    ("in_features", "Model width D."),
    ("hidden_features", "Hidden width H."),
)
_EXPERT_ATTRIBUTES: _Attributes = (
    ("activation", "gelu", "gelu, gelu_tanh, silu, relu, relu2, clamped_swiglu or clamped_silu."),
    ("gated", 0, "1: h = activation(gate) * up."),
    ("interleaved", 0, "1: gate rows are ::2 of w1, up rows 1::2."),
    ("weight_on_input", 0, "1: weights scale the experts' inputs instead of their results."),
    ("activation_alpha", 1.702, "Sigmoid slope of clamped_swiglu."),
    ("activation_limit", 7.0, "Clamp of clamped_swiglu and clamped_silu."),
    ("pre_norm", "none", "none, or rms: rows of the first product over x's root mean square."),
    ("norm_eps", 1e-6, "Added to the mean square of pre_norm."),
    ("residual", 0, "1: x is added to the sum of the experts' results."),
)


def _input(
    name: str, type_str: str, description: str, *, optional: bool = False
) -> OpSchema.FormalParameter:
    option = OpSchema.FormalParameterOption.Optional
    required = OpSchema.FormalParameterOption.Single
    return OpSchema.FormalParameter(
        name, type_str, description, param_option=option if optional else required
    )


def _attribute(name: str, default: str | int | float, description: str) -> OpSchema.Attribute:
    value = onnx.helper.make_attribute(name, default)
    return OpSchema.Attribute(name, value, description)


def _schema(
    name: str,
    doc: str,
    inputs: list[OpSchema.FormalParameter],
    attributes: _Attributes,
    type_constraints: list[tuple[str, list[str], str]],
) -> OpSchema:
    schema = OpSchema(
        name,
        DOMAIN,
        VERSION,
        doc,
        inputs=inputs,
        outputs=[OpSchema.FormalParameter("y", "T", "[..., D], x's shape and type.")],
        type_constraints=type_constraints,
        attributes=[
            *(
                OpSchema.Attribute(attribute, OpSchema.AttrType.INT, text, required=True)
                for attribute, text in _SIZE_ATTRIBUTES
            ),
            *(_attribute(*attribute) for attribute in (*_EXPERT_ATTRIBUTES, *attributes)),
            *(
                _attribute(attribute, default, "Read by TensorRT's ONNX parser.")
                for attribute, default in PLUGIN_ATTRIBUTES.items()
            ),
        ],
    )
    schema.set_type_and_shape_inference_function(shape_inference.like(0))
    return schema


SCHEMAS = {
    DROPLESS: _schema(
        DROPLESS,
        "A dropless mixture-of-experts layer: each token through its top_k experts.",
        [
            _input(*_TOKENS),
            _input("router_weight", "R", "[E, D]."),
            *(_input(*formal) for formal in _EXPERTS_REQUIRED),
            _input("router_bias", "R", "[E], added to the logits.", optional=True),
            *(_input(*formal, optional=True) for formal in _EXPERTS_BIASES),
        ],
        _ROUTER_ATTRIBUTES,
        _TYPE_CONSTRAINTS,
    ),
    EXPERTS: _schema(
        EXPERTS,
        "The experts of a dropless mixture-of-experts layer whose router is outside.",
        [
            _input(*_TOKENS),
            _input("expert_ids", "I", "[..., K] in 0..E-1, or -1 for no expert."),
            _input("expert_weights", "R", "[..., K]."),
            *(_input(*formal) for formal in _EXPERTS_REQUIRED),
            *(_input(*formal, optional=True) for formal in _EXPERTS_BIASES),
        ],
        (),
        [*_TYPE_CONSTRAINTS, _IDS],
    ),
}
"""By name of the operator."""
