"""The ONNX operators of MoE layers: names, inputs, attributes, type and shape inference.

:mod:`dynamo_moe.moe_nodes.translation` registers them, so that onnx's checker, its shape inference
and onnxscript know them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx.helper
import onnx_ir as ir
import torch
from onnx import TensorProto, TypeProto
from onnx.defs import OpSchema
from onnx.shape_inference import InferenceContext
from onnx_ir.tensor_adapters import from_torch_dtype

from custom_ops.dtypes import FLOATS, IDS, KERNEL_FLOATS
from custom_ops.options import EXPERT_OPTIONS, LAYOUT_OPTIONS, ROUTER_OPTIONS, SIZES, Option
from custom_ops.packed_weights import ENCODINGS
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
    INPUTS,
    OPTIONAL_INPUTS,
    SUM_OVER_RANKS,
    TENSORRT_ATTRIBUTES,
    TRAIN_PARAMETERS,
    TRAINING_INPUTS,
    TRAINING_OUTPUTS,
    WEIGHT_FORMAT,
)
from dynamo_moe.operators import shape_inference
from dynamo_moe.operators.schemas import PLUGIN_ATTRIBUTES

VERSION = 1

FLOAT_TYPES = tuple(map(from_torch_dtype, FLOATS))
ID_TYPES = tuple(map(from_torch_dtype, IDS))


_TYPE_CONSTRAINTS = {
    "T": (FLOAT_TYPES, "Tokens and result."),
    "W": (FLOAT_TYPES, "Experts' parameters."),
    "R": (FLOAT_TYPES, "Router's parameters, or the experts' weights."),
    "S": (FLOAT_TYPES, "Selection bias."),
    "I": (ID_TYPES, "Expert indices."),
    "P": ((ir.DataType.FLOAT, ir.DataType.DOUBLE), "Weights that the router computes."),
    "B": ((ir.DataType.INT8,), "Packed bytes."),
    "G": ((ir.DataType.FLOAT,), "Global scales."),
    "C": (tuple(map(from_torch_dtype, (*KERNEL_FLOATS, torch.int8))), "Scales."),
}
_TENSORS = {
    "x": ("T", "Tokens [..., D]."),
    "dy": ("T", "The result's gradient [..., D]."),
    "router_weight": ("R", "[E, D]."),
    "router_bias": ("R", "[E], added to the logits."),
    "selection_bias": ("S", "[E], added to the scores by which experts are chosen."),
    "expert_ids": ("I", "[..., K] in 0..E-1, or -1 for no expert."),
    "expert_weights": ("R", "[..., K]."),
    "w1": ("W", "First product [E, F, D], or [E, D, F] if transposed; F = H, or 2H when gated."),
    "w2": ("W", "Second product [E, D, H], or [E, H, D] if transposed."),
    "b1": ("W", "[E, F]."),
    "b2": ("W", "[E, D]."),
    "w1_scales": ("C", "[E, F / block_rows, D / block_size]; bytes in `mxfp4` and `nvfp4`."),
    "w2_scales": ("C", "[E, D / block_rows, H / block_size]."),
    "w1_zero_points": ("B", "[E, F, D / block_size], or [E, 1, 1]; 8 if absent. Of `int4` alone."),
    "w2_zero_points": ("B", "[E, D, H / block_size], or [E, 1, 1]; 8 if absent."),
    "w1_global_scales": ("G", "[E, F, 1], of `nvfp4`; others have them before biases: [E, 1, 1]."),
    "w2_global_scales": ("G", "[E, D, 1], likewise."),
}
# What differs where weights are packed.
_PACKED_TENSORS = {
    "w1": ("B", "First product: bytes [E, F, D], or [E, F, D / 2] where a byte has two values."),
    "w2": ("B", "Second product: bytes [E, D, H], or [E, D, H / 2]."),
    "b1": ("T", "[E, F]."),
    "b2": ("T", "[E, D]."),
}
_Presence = OpSchema.FormalParameterOption


def attribute(option: Option) -> OpSchema.Attribute:
    """Returns the attribute of an option; ONNX has no booleans, so that True is 1.

    That of a rare option has no default: the exporter would write it into every node.
    """
    default = int(option.default) if option.type is bool else option.default
    value = onnx.helper.make_attribute(option.attribute, default)
    description = option.description.replace("``", "`")
    if option.rare:
        kind = getattr(OpSchema.AttrType, onnx.AttributeProto.AttributeType.Name(value.type))
        description += f" Absent: `{default}`."
        return OpSchema.Attribute(option.attribute, kind, description, required=False)
    return OpSchema.Attribute(option.attribute, value, description)


def _input(name: str, symbol: str = "", *, packed: bool = False) -> OpSchema.FormalParameter:
    presence = _Presence.Optional if name in OPTIONAL_INPUTS else _Presence.Single
    default, meaning = (_TENSORS | _PACKED_TENSORS if packed else _TENSORS)[name]
    return OpSchema.FormalParameter(name, symbol or default, meaning, param_option=presence)


def _schema(
    name: str,
    doc: str,
    inputs: Sequence[OpSchema.FormalParameter],
    outputs: Sequence[OpSchema.FormalParameter],
    attributes: Sequence[OpSchema.Attribute],
) -> OpSchema:
    """Returns a schema without inference; ``attributes`` are those beside the sizes."""
    used = {formal.type_str for formal in (*inputs, *outputs)}
    return OpSchema(
        name,
        DOMAIN,
        VERSION,
        doc,
        inputs=inputs,
        outputs=outputs,
        type_constraints=[
            (symbol, [f"tensor({dtype.name.lower()})" for dtype in types], meaning)
            for symbol, (types, meaning) in _TYPE_CONSTRAINTS.items()
            if symbol in used
        ],
        attributes=[
            *(
                OpSchema.Attribute(size.attribute, OpSchema.AttrType.INT, size.doc, required=True)
                for size in SIZES
            ),
            *attributes,
        ],
    )


def _for_tensorrt(values: Mapping[str, str]) -> list[OpSchema.Attribute]:
    return [
        OpSchema.Attribute(
            name, onnx.helper.make_attribute(name, value), "Read by TensorRT's ONNX parser."
        )
        for name, value in values.items()
    ]


def _layer_schema(
    name: str, doc: str, options: tuple[Option, ...], *, packed: bool = False
) -> OpSchema:
    schema = _schema(
        name,
        doc,
        [_input(input_name, packed=packed) for input_name in INPUTS[name]],
        [_RESULT],
        [
            *map(attribute, options),
            *(_STORAGE if packed else map(attribute, LAYOUT_OPTIONS)),
            *_for_tensorrt(TENSORRT_ATTRIBUTES),
        ],
    )
    schema.set_type_and_shape_inference_function(shape_inference.like(0))
    return schema


_STORAGE = [
    OpSchema.Attribute(
        WEIGHT_FORMAT,
        OpSchema.AttrType.STRING,
        f"How the weights are stored: one of {', '.join(f'`{name}`' for name in ENCODINGS)}.",
        required=True,
    ),
    OpSchema.Attribute(
        BLOCK_SIZE,
        OpSchema.AttrType.INT,
        "How many columns of a matrix, along the product's inputs, share a scale; 0: all.",
        required=True,
    ),
    OpSchema.Attribute(
        BLOCK_ROWS,
        onnx.helper.make_attribute(BLOCK_ROWS, 1),
        "How many of its rows share a scale; 0: all.",
    ),
]
_RESULT = OpSchema.FormalParameter("y", "T", "[..., D], x's shape and type.")
_CHOICE = [
    OpSchema.FormalParameter(
        "expert_ids", "I", "[T, K], the experts that the router chose; int32."
    ),
    OpSchema.FormalParameter(
        "expert_weights", "P", "[T, K], their weights; double where x is, else float."
    ),
]


def _routed_schema() -> OpSchema:
    schema = _schema(
        DROPLESS_ROUTED,
        "`DroplessMoE` in training: also gives the router's choice, which its gradient takes.",
        [_input(input_name) for input_name in TRAINING_INPUTS[DROPLESS_ROUTED]],
        [_RESULT, *_CHOICE],
        [*map(attribute, (*EXPERT_OPTIONS, *ROUTER_OPTIONS)), *_for_tensorrt(PLUGIN_ATTRIBUTES)],
    )
    schema.set_type_and_shape_inference_function(_infer_routed)
    return schema


def _infer_routed(context: InferenceContext) -> None:
    tokens = context.get_input_type(0)
    if tokens is None:
        return
    context.set_output_type(0, tokens)
    top_k = context.get_attribute("top_k")
    sizes = tokens.tensor_type.shape.dim
    # The number of tokens is known where they have one leading dimension.
    lead = (sizes[0].dim_value or sizes[0].dim_param or None) if len(sizes) == 2 else None
    double = tokens.tensor_type.elem_type == TensorProto.DOUBLE
    for position, dtype in (
        (1, TensorProto.INT32),
        (2, TensorProto.DOUBLE if double else TensorProto.FLOAT),
    ):
        size = None if top_k is None else top_k.i
        context.set_output_type(position, onnx.helper.make_tensor_type_proto(dtype, [lead, size]))


def _gradient_schema(name: str, doc: str, options: tuple[Option, ...]) -> OpSchema:
    inputs = TRAINING_INPUTS[name]
    computed = "P" if "router_weight" in inputs else ""
    schema = _schema(
        name,
        doc,
        [_input(input_name, computed * (input_name == "expert_weights")) for input_name in inputs],
        [_gradient(output.removeprefix("d")) for output in TRAINING_OUTPUTS[name]],
        [
            *map(attribute, options),
            OpSchema.Attribute(
                TRAIN_PARAMETERS,
                onnx.helper.make_attribute(TRAIN_PARAMETERS, 1),
                "Whether `w1`, `b1`, `w2` and `b2` get gradients.",
            ),
            *_for_tensorrt(PLUGIN_ATTRIBUTES),
        ],
    )
    schema.set_type_and_shape_inference_function(_infer_gradients(name))
    return schema


def _gradient(name: str) -> OpSchema.FormalParameter:
    like = "x's" if name == "x" else f"`{name}`'s"
    empty = "; empty where it gets none" if name in _MAY_HAVE_NONE else ""
    return OpSchema.FormalParameter(
        f"d{name}", _TENSORS[name][0], f"The gradient, of {like} shape and type{empty}."
    )


def _infer_gradients(name: str) -> Callable[[InferenceContext], None]:
    positions = {input_name: position for position, input_name in enumerate(TRAINING_INPUTS[name])}

    def infer(context: InferenceContext) -> None:
        trained = context.get_attribute(TRAIN_PARAMETERS)
        frozen = trained is not None and not trained.i
        for position, output in enumerate(TRAINING_OUTPUTS[name]):
            of = output.removeprefix("d")
            of_expert = of in _EXPERTS_PARAMETERS
            index = positions[of]
            is_present = index < context.get_num_inputs() and context.has_input(index)
            type_proto: TypeProto | None
            if is_present and not (frozen and of_expert):
                type_proto = context.get_input_type(index)
            else:
                type_proto = _empty(
                    context.get_input_type(positions["w1" if of_expert else "router_weight"])
                )
            if type_proto is not None:
                context.set_output_type(position, type_proto)

    return infer


def _empty(like: TypeProto | None) -> TypeProto | None:
    if like is None:
        return None
    return onnx.helper.make_tensor_type_proto(like.tensor_type.elem_type, [0])


def _sum_schema() -> OpSchema:
    """Without the group of the operator, which a process of PyTorch has, and no runtime."""
    schema = OpSchema(
        SUM_OVER_RANKS,
        DOMAIN,
        VERSION,
        "The sum of a tensor over the ranks that run the files of one model.",
        inputs=[OpSchema.FormalParameter("y", "T", "A rank's part, of any shape.")],
        outputs=[OpSchema.FormalParameter("total", "T", "The sum, the same on every rank.")],
        type_constraints=[
            ("T", [f"tensor({dtype.name.lower()})" for dtype in FLOAT_TYPES], "Part and sum.")
        ],
        attributes=[
            OpSchema.Attribute(
                "ranks", OpSchema.AttrType.INT, "How many there are.", required=True
            ),
            *_for_tensorrt(PLUGIN_ATTRIBUTES),
        ],
    )
    schema.set_type_and_shape_inference_function(shape_inference.like(0))
    return schema


_EXPERTS_PARAMETERS = ("w1", "b1", "w2", "b2")
_MAY_HAVE_NONE = (*_EXPERTS_PARAMETERS, "router_bias")

SCHEMAS = {
    DROPLESS: _layer_schema(
        DROPLESS,
        "A dropless mixture-of-experts layer: each token through its top_k experts.",
        (*EXPERT_OPTIONS, *ROUTER_OPTIONS),
    ),
    EXPERTS: _layer_schema(
        EXPERTS,
        "The experts of a dropless mixture-of-experts layer whose router is outside.",
        EXPERT_OPTIONS,
    ),
    DROPLESS_PACKED: _layer_schema(
        DROPLESS_PACKED,
        "`DroplessMoE` with packed weights.",
        (*EXPERT_OPTIONS, *ROUTER_OPTIONS),
        packed=True,
    ),
    EXPERTS_PACKED: _layer_schema(
        EXPERTS_PACKED, "`DroplessMoEExperts` with packed weights.", EXPERT_OPTIONS, packed=True
    ),
    DROPLESS_ROUTED: _routed_schema(),
    DROPLESS_GRAD: _gradient_schema(
        DROPLESS_GRAD,
        "The gradients of `DroplessMoERouted`; the choice of experts has none.",
        (*EXPERT_OPTIONS, *ROUTER_OPTIONS),
    ),
    EXPERTS_GRAD: _gradient_schema(
        EXPERTS_GRAD, "The gradients of `DroplessMoEExperts`.", EXPERT_OPTIONS
    ),
    SUM_OVER_RANKS: _sum_schema(),
}
"""By name of the operator."""
