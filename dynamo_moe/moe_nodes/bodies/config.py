"""The configuration of a body: the options that change its nodes, not the layer's sizes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype

from custom_ops.layer_shape import LayerShape
from custom_ops.options import (
    ROUTER_OPTIONS,
    ExpertOptions,
    Flag,
    Option,
    Options,
    RouterOptions,
)
from custom_ops.packed_weights import WHOLE
from custom_ops.weight_formats import GLOBAL_SCALES, ZERO_POINTS
from dynamo_moe.moe_nodes.nodes import (
    DROPLESS,
    DROPLESS_GRAD,
    DROPLESS_PACKED,
    DROPLESS_ROUTED,
    EXPERTS,
    EXPERTS_GRAD,
    EXPERTS_PACKED,
    INPUTS,
    OPTIONAL_INPUTS,
    TRAINING_INPUTS,
)
from dynamo_moe.moe_nodes.schemas import SCHEMAS

# Split has num_outputs since 18. Gelu, which is used if the opset has it, came with 20.
MIN_OPSET = 18

_AXES = ("rows", "columns")
_BIASES = ("router_bias", "b1", "b2", "selection_bias")


@dataclass(frozen=True)
class BodyConfig:
    """The configuration of a layer that one body serves, whatever the layer's sizes.

    Sizes and options that are numbers do not matter, since a body takes them from its node.

    Attributes:
        shape: The layer.

    Raises:
        ValueError: If the layer lacks an input before one that it has: only trailing inputs of a
            node may be omitted.
    """

    shape: LayerShape

    def __post_init__(self) -> None:
        self._check_trailing()

    def _check_trailing(self) -> None:
        names = (INPUTS | TRAINING_INPUTS)[self.op_type]
        optional = [name for name in names if name in OPTIONAL_INPUTS]
        for before, name in itertools.pairwise(optional):
            if self._has(name) and not self._has(before):
                fill = {ZERO_POINTS: "eights", GLOBAL_SCALES: "ones"}.get(before[2:], "zeros")
                raise ValueError(f"{name} needs {before} before it: pass {fill} for {before}")

    def _has(self, name: str) -> bool:
        if name.endswith(ZERO_POINTS):
            return self.shape.weight_format.zero_points_block is not None
        if name.endswith(GLOBAL_SCALES):
            # Other packed formats have some only so that biases may come behind them.
            biases = any(map(self._has, _BIASES)) and not self.shape.weight_format.is_plain
            return biases or self.shape.weight_format.has_global_scales
        has: bool = getattr(self, f"has_{name}")
        return has

    @property
    def options(self) -> ExpertOptions:
        """What an expert computes."""
        return self.shape.options

    @property
    def router(self) -> RouterOptions | None:
        """What the router computes; None: ids and weights are inputs."""
        return self.shape.router

    @property
    def has_router_bias(self) -> bool:
        """Whether the node has ``router_bias``."""
        return self.router is not None and self.shape.weights_dtype is not None

    @property
    def has_selection_bias(self) -> bool:
        """Whether the node has ``selection_bias``."""
        return self.shape.selection_dtype is not None

    @property
    def has_b1(self) -> bool:
        """Whether the node has ``b1``."""
        return self.shape.b1

    @property
    def has_b2(self) -> bool:
        """Whether the node has ``b2``."""
        return self.shape.b2

    @property
    def tokens_dtype(self) -> ir.DataType:
        """Dtype of the tokens and the result."""
        return from_torch_dtype(self.shape.tokens_dtype)

    @property
    def operand_dtype(self) -> ir.DataType:
        """Dtype of the products' operands: tokens and hidden rows are rounded to it."""
        return from_torch_dtype(self.shape.weight_format.operand_dtype)

    @property
    def bias_dtype(self) -> ir.DataType:
        """Dtype of ``b1`` and ``b2``."""
        return from_torch_dtype(self.shape.weight_format.bias_dtype)

    @property
    def values_dtype(self) -> ir.DataType:
        """Dtype of ``w1`` and ``w2`` as they are stored."""
        return from_torch_dtype(self.shape.weight_format.values_dtype)

    @property
    def routing_dtype(self) -> ir.DataType:
        """Dtype of ``router_weight`` and ``router_bias``, or of ``expert_ids``."""
        return from_torch_dtype(self.shape.routing_dtype)

    @property
    def selection_dtype(self) -> ir.DataType:
        """Dtype of ``selection_bias``."""
        return from_torch_dtype(self.shape.selection_dtype or torch.float32)

    @property
    def op_type(self) -> str:
        """The operator, which is also the plugin's name."""
        if self.shape.weight_format.is_plain:
            return DROPLESS if self.router else EXPERTS
        return DROPLESS_PACKED if self.router else EXPERTS_PACKED

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that a node of this configuration passes, in order."""
        names = (INPUTS | TRAINING_INPUTS)[self.op_type]
        return tuple(name for name in names if name not in OPTIONAL_INPUTS or self._has(name))

    @property
    def attributes(self) -> tuple[str, ...]:
        """The attributes that a node of this configuration passes."""
        rare = {row.attribute for row in ROUTER_OPTIONS if row.rare}
        absent = set() if self.router and self.router.is_rare else rare
        return tuple(name for name in SCHEMAS[self.op_type].attributes if name not in absent)

    @property
    def overload(self) -> str:
        """A name for this configuration; configurations with equal names have equal bodies.

        >>> from custom_ops.weight_formats import plain_format
        >>> shape = LayerShape(
        ...     experts=8, width=64, hidden=128, top_k=2, tokens_dtype=torch.float32,
        ...     weight_format=plain_format(torch.bfloat16),
        ...     options=ExpertOptions("silu", gated=True),
        ...     router=RouterOptions(2), routing_dtype=torch.float32, weights_dtype=None,
        ... )
        >>> BodyConfig(shape).overload
        'softmax_renormalize_silu_gated_f32_bf16_f32'
        """
        dtypes = [self.shape.tokens_dtype, self.shape.weight_format.operand_dtype]
        if self.router:
            dtypes.append(self.shape.routing_dtype)
        else:
            dtypes += [self.shape.weights_dtype or torch.float32, self.shape.routing_dtype]
        if self.shape.selection_dtype is not None:
            dtypes.append(self.shape.selection_dtype)
        records = filter(None, (self.router, self.options, self.shape.layout))
        parts = [
            *(_part(record, row) for record in records for row in record.rows),
            *(name * self._has(name) for name in OPTIONAL_INPUTS),
            *(from_torch_dtype(dtype).short_name() for dtype in dtypes),
        ]
        if not self.shape.weight_format.is_plain:
            _, scales, *_ = self.shape.weight_format.stored
            scales_dtype = from_torch_dtype(scales.dtype).short_name()
            block = zip(_AXES, self.shape.weight_format.block, strict=True)
            forms = [f"whole_{axis}" for axis, size in block if size == WHOLE]
            parts = [self.shape.weight_format.name, *forms, f"{scales_dtype}scales", *parts]
        return "_".join(filter(None, parts))

    @property
    def router_options(self) -> RouterOptions:
        """What the router computes.

        Raises:
            ValueError: If there is none.
        """
        if self.router is None:
            raise ValueError(f"{self.op_type} has no router")
        return self.router

    @property
    def renormalizes(self) -> bool:
        """Whether the weights are divided by their sum; with topk_softmax they already sum to 1."""
        return self.router_options.renormalize and self.router_options.scoring != "topk_softmax"

    @property
    def router_compute_dtype(self) -> ir.DataType:
        """The dtype the router computes in: DOUBLE for DOUBLE tokens, else FLOAT."""
        return ir.DataType.DOUBLE if self.tokens_dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT

    @property
    def weights_dtype(self) -> ir.DataType:
        """The dtype of ``expert_weights``: the router's, or that of the input."""
        if self.router:
            return self.router_compute_dtype
        return from_torch_dtype(self.shape.weights_dtype or torch.float32)

    @property
    def compute_dtype(self) -> ir.DataType:
        """The dtype the experts compute in: DOUBLE if tokens or experts are DOUBLE, else FLOAT."""
        double = ir.DataType.DOUBLE in (self.tokens_dtype, self.operand_dtype)
        return ir.DataType.DOUBLE if double else ir.DataType.FLOAT


@dataclass(frozen=True)
class RoutedConfig(BodyConfig):
    """The configuration of ``DroplessMoERouted``."""

    @property
    def op_type(self) -> str:
        """The operator."""
        return DROPLESS_ROUTED


@dataclass(frozen=True)
class GradientConfig(BodyConfig):
    """The configuration of ``DroplessMoEGrad``, or without a router of ``DroplessMoEExpertsGrad``.

    Attributes:
        train_parameters: Whether the experts' parameters get gradients.
    """

    train_parameters: bool = True

    def _check_trailing(self) -> None:
        """Any input may be absent: zeros in its place would get a gradient."""

    @property
    def op_type(self) -> str:
        """The operator."""
        return DROPLESS_GRAD if self.router else EXPERTS_GRAD

    @property
    def inputs(self) -> tuple[str, ...]:
        """All inputs; a node may leave out some."""
        return TRAINING_INPUTS[self.op_type]

    @property
    def overload(self) -> str:
        """A name for this configuration."""
        return super().overload + ("" if self.train_parameters else "_frozen")


def _part(record: Options, option: Option) -> str:
    """Returns an option's part of a configuration's name."""
    value = getattr(record, option.name)
    if option.is_number or not option.has_effect(record):
        return ""
    if isinstance(option.slot, Flag):
        return option.flag if option.code(value) else ""
    return "" if value == "none" else str(value)
