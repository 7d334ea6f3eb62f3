"""Recognises and reads MoE nodes: one predicate and one parser."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnx import NodeProto
from onnx_ir.tensor_adapters import from_torch_dtype

from custom_ops.dtypes import FLOATS, IDS
from custom_ops.layer_shape import LayerShape
from custom_ops.options import (
    EXPERT_OPTIONS,
    LAYOUT_OPTIONS,
    ROUTER_OPTIONS,
    SIZES,
    ExpertOptions,
    Option,
    RouterOptions,
    WeightLayout,
)
from custom_ops.packed_weights import WHOLE, encoding_of
from custom_ops.weight_formats import (
    GLOBAL_SCALES,
    WHOLE_MATRIX,
    ZERO_POINTS,
    WeightFormat,
    packed_format,
    plain_format,
)
from dynamo_moe.operators.schemas import OWN_DOMAIN, PLUGIN_ATTRIBUTES, is_own_domain

DOMAIN = OWN_DOMAIN
DROPLESS = "DroplessMoE"
EXPERTS = "DroplessMoEExperts"
# With packed weights.
DROPLESS_PACKED = "DroplessMoEPacked"
EXPERTS_PACKED = "DroplessMoEExpertsPacked"

_BESIDE_BIASES = ("w1_zero_points", "w2_zero_points", "w1_global_scales", "w2_global_scales")
_PACKED = ("w1", "w2", "w1_scales", "w2_scales", *_BESIDE_BIASES)
#: A node's inputs in order, by the names of the PyTorch operator's arguments.
INPUTS = {
    DROPLESS: ("x", "router_weight", "w1", "w2", "router_bias", "b1", "b2", "selection_bias"),
    EXPERTS: ("x", "expert_ids", "expert_weights", "w1", "w2", "b1", "b2"),
    DROPLESS_PACKED: ("x", "router_weight", *_PACKED, "router_bias", "b1", "b2", "selection_bias"),
    EXPERTS_PACKED: ("x", "expert_ids", "expert_weights", *_PACKED, "b1", "b2"),
}

#: The sum over the ranks that have a layer's experts.
SUM_OVER_RANKS = "SumOverRanks"

# In training files.
DROPLESS_ROUTED = "DroplessMoERouted"
DROPLESS_GRAD = "DroplessMoEGrad"
EXPERTS_GRAD = "DroplessMoEExpertsGrad"

#: As :data:`INPUTS`, for the nodes of training.
TRAINING_INPUTS = {
    DROPLESS_ROUTED: INPUTS[DROPLESS],
    DROPLESS_GRAD: (
        "dy", "x", "expert_ids", "expert_weights", "router_weight", "w1", "w2", "router_bias",
        "b1", "b2",
    ),
    EXPERTS_GRAD: ("dy", "x", "expert_ids", "expert_weights", "w1", "w2", "b1", "b2"),
}  # fmt: skip
#: Their results in order. A gradient is named after the input that it belongs to.
TRAINING_OUTPUTS = {
    DROPLESS_ROUTED: ("y", "expert_ids", "expert_weights"),
    DROPLESS_GRAD: ("dx", "drouter_weight", "dw1", "db1", "dw2", "db2", "drouter_bias"),
    EXPERTS_GRAD: ("dx", "dexpert_weights", "dw1", "db1", "dw2", "db2"),
}
OPTIONAL_INPUTS = (*_BESIDE_BIASES, "router_bias", "b1", "b2", "selection_bias")

#: How the weights of a packed node are stored, and the columns and rows that share a scale; 0: all.
WEIGHT_FORMAT = "weight_format"
BLOCK_SIZE = "block_size"
BLOCK_ROWS = "block_rows"

#: Whether the experts' parameters get gradients.
TRAIN_PARAMETERS = "train_parameters"

#: The attribute that names the bundle of kernels. Empty: whoever builds the engine gives one.
KERNELS = "kernels"
#: A node's attributes that say nothing of its layer.
TENSORRT_ATTRIBUTES = {**PLUGIN_ATTRIBUTES, KERNELS: ""}

#: The domain of an offloaded layer's node: without its weights, it is not the operator of
#: :data:`DOMAIN`. TensorRT finds its plugin by name.
OFFLOADED_DOMAIN = f"{DOMAIN}.offloaded"
#: How many experts of an offloaded layer have a slot on the GPU.
RESIDENT_EXPERTS = "resident_experts"
#: Where an offloaded layer's weights lie: of each tensor that stores one, a line with its
#: :class:`custom_ops.offload.WeightSource`.
SOURCES = {"w1": "w1_source", "w2": "w2_source"}
#: Whether the contexts of an engine share the slots of an offloaded layer: 0 or 1.
EXPERT_CACHE = "expert_cache"

_SCOPES = "pkg.torch.onnx.name_scopes"


def plugin_version(*, offloaded: bool, rare: bool) -> str:
    """Returns a node's ``plugin_version``, of a plugin that takes the attributes that it has.

    TensorRT's parser warns of each attribute that a plugin takes and a node lacks.

    Args:
        offloaded: Whether it has the attributes of an offloaded layer.
        rare: Whether it has those of rare options, see :attr:`custom_ops.options.Option.rare`.
    """
    return str(1 + offloaded + 2 * rare)


def is_moe(node: ir.Node | NodeProto) -> bool:
    """Whether a node is an MoE layer: one of the operators, with or without a router."""
    return is_own_domain(node.domain) and node.op_type in INPUTS


def moe_nodes(model: ir.Model) -> list[ir.Node]:
    """Returns the MoE nodes of a graph, including those in branches and loops."""
    return [node for node in model.graph.all_nodes() if is_moe(node)]


@dataclass(frozen=True)
class MoENode:
    """A layer as its node describes it.

    Attributes:
        shape: The layer.
        resident_experts: Slots for experts on the GPU; None: the layer is not offloaded.
        inputs: The inputs that the node has, by their names in :data:`INPUTS` or
            :data:`TRAINING_INPUTS`.
    """

    shape: LayerShape
    resident_experts: int | None
    inputs: dict[str, ir.Value]


def parse(node: ir.Node) -> MoENode:
    """Reads an MoE node, or one of training; attributes that it leaves out have their defaults.

    Raises:
        ValueError: If an attribute or an input is missing, an attribute has another type or a value
            that the option does not take, or the dtype of an input is not known.
        TypeError: If an input has a dtype that the operators do not take.
    """
    names = (INPUTS | TRAINING_INPUTS)[node.op_type]
    inputs = {
        name: value for name, value in zip(names, node.inputs, strict=False) if value is not None
    }
    missing = [name for name in names if name not in (*inputs, *OPTIONAL_INPUTS)]
    if missing:
        raise ValueError(f"it has no input {', '.join(missing)}")
    sizes: dict[str, Any] = {size.name: _attribute(node, size.attribute, int) for size in SIZES}
    router = None
    if "router_weight" in names:
        router = RouterOptions(sizes["top_k"], **_options(node, ROUTER_OPTIONS))
    dtypes = {name: _dtype(name, value) for name, value in inputs.items()}
    routing, weights = _ROUTING[router is not None]
    shape = LayerShape(
        **sizes,
        tokens_dtype=dtypes["x"],
        weight_format=_weight_format(node, inputs, dtypes),
        options=ExpertOptions(**_options(node, EXPERT_OPTIONS)),
        router=router,
        routing_dtype=dtypes[routing],
        weights_dtype=dtypes.get(weights),
        selection_dtype=dtypes.get("selection_bias"),
        b1="b1" in inputs,
        b2="b2" in inputs,
        layout=WeightLayout(**_options(node, LAYOUT_OPTIONS)),
    )
    return MoENode(shape, _attribute(node, RESIDENT_EXPERTS, int, 0) or None, inputs)


def _weight_format(
    node: ir.Node, inputs: Mapping[str, ir.Value], dtypes: Mapping[str, torch.dtype]
) -> WeightFormat:
    if node.op_type not in (DROPLESS_PACKED, EXPERTS_PACKED):
        return plain_format(dtypes["w1"])
    block = (
        _attribute(node, BLOCK_ROWS, int, 1) or WHOLE,
        _attribute(node, BLOCK_SIZE, int) or WHOLE,
    )
    encoding = encoding_of(_attribute(node, WEIGHT_FORMAT, str))
    zero_points = {name: value for name, value in inputs.items() if name.endswith(ZERO_POINTS)}
    # While a model is exported, the shape of what is filled in is not known yet. It is one.
    kinds = {has_one_zero_point(value) is not False for value in zero_points.values()}
    if kinds == {False} and not encoding.has_zero_points:
        raise ValueError(
            f"{encoding.name} has no zero points: its {' and '.join(zero_points)} must be "
            "[E, 1, 1], which stand for none"
        )
    missing = [name for name in _GLOBAL_SCALES if name not in inputs]
    if encoding.has_global_scales and missing:
        raise ValueError(f"{encoding.name} needs its {' and '.join(missing)}")
    if len(kinds) > 1:
        raise ValueError(
            f"its {' and '.join(zero_points)} must both have one for each scale, or be [E, 1, 1]"
        )
    return packed_format(
        encoding.name,
        dtypes["x"],
        dtypes["w1_scales"],
        block,
        zero_points_block=None if not kinds else WHOLE_MATRIX if kinds == {True} else block,
    )


_GLOBAL_SCALES = tuple(weight + GLOBAL_SCALES for weight in ("w1", "w2"))


def has_one_zero_point(zero_points: ir.Value) -> bool | None:
    """Whether each expert has one zero point, not each scale; None where no shape is known."""
    stored = zero_points.const_value
    shape = zero_points.shape if stored is None else stored.shape
    return None if shape is None else tuple(shape)[1:] == (1, 1)


# By whether there is a router: the inputs that ``routing_dtype`` and ``weights_dtype`` are of.
_ROUTING = {True: ("router_weight", "router_bias"), False: ("expert_ids", "expert_weights")}
_DTYPES = {from_torch_dtype(dtype): dtype for dtype in (*FLOATS, *IDS, torch.int8)}


def _dtype(name: str, value: ir.Value) -> torch.dtype:
    constant = ir.convenience.get_const_tensor(value) if value.dtype is None else None
    dtype = value.dtype if constant is None else constant.dtype
    if dtype is None:
        raise ValueError(f"the dtype of its input {name}, {value.name!r}, is not known")
    if dtype not in _DTYPES:
        raise TypeError(
            f"its input {name}, {value.name!r}, has the dtype {dtype.name.lower()}, "
            "which the operators do not take"
        )
    return _DTYPES[dtype]


def _options(node: ir.Node, options: tuple[Option, ...]) -> dict[str, Any]:
    return {
        option.name: option.type(_attribute(node, option.attribute, option.type, option.default))
        for option in options
    }


# By Python's type of a value; ONNX has no booleans.
_KINDS = {
    int: ir.AttributeType.INT,
    bool: ir.AttributeType.INT,
    float: ir.AttributeType.FLOAT,
    str: ir.AttributeType.STRING,
}


def _attribute(node: ir.Node, name: str, kind: type, default: Any = None) -> Any:
    attribute = node.attributes.get(name)
    if attribute is None:
        if default is None:
            raise ValueError(f"it has no attribute {name}")
        return default
    if attribute.type != _KINDS[kind]:
        raise ValueError(
            f"its attribute {name} must be of type {_KINDS[kind].name}, got {attribute.type.name}"
        )
    return attribute.value


def layer_name(w1: str, node: str) -> str:
    """Returns a layer's name: its place in the model by the name of ``w1``, or its node.

    Not what the names of all weights share: equal biases of two layers may be one initializer.

    >>> layer_name("blocks.0.mlp.w1", "blocks.0.mlp/DroplessMoE")
    'blocks.0.mlp'
    """
    return w1.rpartition(".")[0].removesuffix(".packed_experts") or node


def module_of(node: ir.Node) -> str:
    """Returns the path of the PyTorch module that a freshly exported node comes from."""
    return _module(node.metadata_props.get(_SCOPES, "[]"))


@functools.lru_cache(maxsize=2**14)
def _module(scopes: str) -> str:
    # [root, module, submodule, ..., the fx node itself]. The root's path is empty; nodes that
    # PyTorch adds for sizes have an internal name instead.
    modules = ast.literal_eval(scopes)[:-1]
    return str(modules[-1]) if modules and not modules[0] else ""


def set_module(node: ir.Node, path: str) -> None:
    """Makes a node come from another PyTorch module."""
    node.metadata_props[_SCOPES] = repr(["", path, ""])
