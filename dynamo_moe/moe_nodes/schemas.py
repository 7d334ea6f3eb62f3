"""The ONNX operators of MoE layers: names, inputs, attributes, type and shape inference.

:mod:`dynamo_moe.moe_nodes.translation` registers them, so that onnx's checker, its shape inference
and onnxscript know them.
"""

from __future__ import annotations

import onnx.helper
from onnx.defs import OpSchema
from onnx_ir.tensor_adapters import from_torch_dtype

from custom_ops.dtypes import FLOATS, IDS
from custom_ops.options import EXPERT_OPTIONS, LAYOUT_OPTIONS, ROUTER_OPTIONS, SIZES, Option
from dynamo_moe.moe_nodes.nodes import (
    DOMAIN,
    DROPLESS,
    EXPERTS,
    INPUTS,
    OPTIONAL_INPUTS,
    TENSORRT_ATTRIBUTES,
)
from dynamo_moe.operators import shape_inference

VERSION = 1

FLOAT_TYPES = tuple(map(from_torch_dtype, FLOATS))
ID_TYPES = tuple(map(from_torch_dtype, IDS))


_TYPE_CONSTRAINTS = {
    "T": (FLOAT_TYPES, "Tokens and result."),
    "W": (FLOAT_TYPES, "Experts' parameters."),
    "R": (FLOAT_TYPES, "Router's parameters, or the experts' weights."),
    "S": (FLOAT_TYPES, "Selection bias."),
    "I": (ID_TYPES, "Expert indices."),
}
_TENSORS = {
    "x": ("T", "Tokens [..., D]."),
    "router_weight": ("R", "[E, D]."),
    "router_bias": ("R", "[E], added to the logits."),
    "selection_bias": ("S", "[E], added to the scores by which experts are chosen."),
    "expert_ids": ("I", "[..., K] in 0..E-1, or -1 for no expert."),
    "expert_weights": ("R", "[..., K]."),
    "w1": ("W", "First product [E, F, D], or [E, D, F] if transposed; F = H, or 2H when gated."),
    "w2": ("W", "Second product [E, D, H], or [E, H, D] if transposed."),
    "b1": ("W", "[E, F]."),
    "b2": ("W", "[E, D]."),
}
_Presence = OpSchema.FormalParameterOption


def attribute(option: Option) -> OpSchema.Attribute:
    """Returns the attribute of an option; ONNX has no booleans, so that True is 1."""
    default = int(option.default) if option.type is bool else option.default
    value = onnx.helper.make_attribute(option.attribute, default)
    return OpSchema.Attribute(option.attribute, value, _description(option))


def _attribute_where_set(option: Option) -> OpSchema.Attribute:
    # With a default, the exporter would write it at every node.
    kind = OpSchema.AttrType.INT
    return OpSchema.Attribute(option.attribute, kind, _description(option), required=False)


def _description(option: Option) -> str:
    return option.description.replace("``", "`")


def _input(name: str) -> OpSchema.FormalParameter:
    presence = _Presence.Optional if name in OPTIONAL_INPUTS else _Presence.Single
    return OpSchema.FormalParameter(name, *_TENSORS[name], param_option=presence)


def _schema(name: str, doc: str, options: tuple[Option, ...]) -> OpSchema:
    used = {_TENSORS[each][0] for each in INPUTS[name]}
    schema = OpSchema(
        name,
        DOMAIN,
        VERSION,
        doc,
        inputs=[_input(each) for each in INPUTS[name]],
        outputs=[OpSchema.FormalParameter("y", "T", "[..., D], x's shape and type.")],
        type_constraints=[
            (symbol, [f"tensor({each.name.lower()})" for each in types], meaning)
            for symbol, (types, meaning) in _TYPE_CONSTRAINTS.items()
            if symbol in used
        ],
        attributes=[
            *(
                OpSchema.Attribute(size.attribute, OpSchema.AttrType.INT, size.doc, required=True)
                for size in SIZES
            ),
            *(attribute(option) for option in options),
            *(
                OpSchema.Attribute(
                    name, onnx.helper.make_attribute(name, value), "Read by TensorRT's ONNX parser."
                )
                for name, value in TENSORRT_ATTRIBUTES.items()
            ),
            *(_attribute_where_set(option) for option in LAYOUT_OPTIONS),
        ],
    )
    schema.set_type_and_shape_inference_function(shape_inference.like(0))
    return schema


SCHEMAS = {
    DROPLESS: _schema(
        DROPLESS,
        "A dropless mixture-of-experts layer: each token through its top_k experts.",
        (*EXPERT_OPTIONS, *ROUTER_OPTIONS),
    ),
    EXPERTS: _schema(
        EXPERTS,
        "The experts of a dropless mixture-of-experts layer whose router is outside.",
        EXPERT_OPTIONS,
    ),
}
"""By name of the operator."""
