"""What a body depends on: the options that change its nodes, not the layer's sizes."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from custom_ops.options import (
    EXPERT_OPTIONS,
    LAYOUT_OPTIONS,
    ROUTER_OPTIONS,
    ExpertOptions,
    Flag,
    Option,
    RouterOptions,
    WeightLayout,
)
from dynamo_moe.moe_nodes.nodes import (
    DROPLESS,
    DROPLESS_GRAD,
    DROPLESS_ROUTED,
    EXPERTS,
    EXPERTS_GRAD,
    INPUTS,
    OPTIONAL_INPUTS,
    TRAINING_INPUTS,
)
from dynamo_moe.moe_nodes.schemas import FLOAT_TYPES, ID_TYPES, SCHEMAS

# Split has num_outputs since 18. Gelu, which is used if the opset has it, came with 20.
MIN_OPSET = 18


@dataclass(frozen=True)
class BodyConfig(ExpertOptions, RouterOptions, WeightLayout):
    """The configuration of a layer that one body serves, whatever the layer's sizes.

    Beside the attributes listed here it has every option. Numbers among them, and ``top_k``, do not
    matter, since a body takes them from its node; nor do the router's options without a router.

    Attributes:
        router: True for ``DroplessMoE``, False for ``DroplessMoEExperts``, whose ids and weights
            are inputs.
        has_router_bias: The node has ``router_bias``.
        has_b1: The node has ``b1``, and with a router also ``router_bias``, because only trailing
            inputs may be omitted.
        has_b2: The node has ``b2``, and therefore ``b1``.
        has_selection_bias: The node has ``selection_bias``, and therefore ``b2``.
        x_dtype: Dtype of the tokens and the result.
        w_dtype: Dtype of ``w1``, ``b1``, ``w2`` and ``b2``.
        router_dtype: Dtype of ``router_weight`` and ``router_bias``, or of ``expert_weights``.
        selection_dtype: Dtype of ``selection_bias``.
        ids_dtype: Dtype of ``expert_ids``: INT64 or INT32.

    Raises:
        ValueError: If an option is unknown, or options contradict one another.
    """

    top_k: int = 1
    router: bool = True
    has_router_bias: bool = False
    has_b1: bool = False
    has_b2: bool = False
    has_selection_bias: bool = False
    x_dtype: ir.DataType = ir.DataType.FLOAT
    w_dtype: ir.DataType = ir.DataType.FLOAT
    router_dtype: ir.DataType = ir.DataType.FLOAT
    selection_dtype: ir.DataType = ir.DataType.FLOAT
    ids_dtype: ir.DataType = ir.DataType.INT64

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("x_dtype", "w_dtype", "router_dtype", "selection_dtype"):
            _check_choice(name, getattr(self, name), FLOAT_TYPES)
        _check_choice("ids_dtype", self.ids_dtype, ID_TYPES)
        if self.has_router_bias and not self.router:
            raise ValueError("router_bias needs a router")
        self._check_trailing()

    def _check_trailing(self) -> None:
        if self.has_b2 and not self.has_b1:
            raise ValueError("b2 needs b1 before it: pass zeros for b1 and set has_b1")
        if self.router and self.has_b1 and not self.has_router_bias:
            raise ValueError("b1 needs router_bias before it: pass zeros and set has_router_bias")
        if self.has_selection_bias and not (self.router and self.has_b2):
            raise ValueError("selection_bias needs a router, and b2 before it: pass zeros")

    @property
    def op_type(self) -> str:
        """The operator, which is also the plugin's name."""
        return DROPLESS if self.router else EXPERTS

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that a node of this configuration passes, in order."""
        absent = {name: not getattr(self, f"has_{name}") for name in OPTIONAL_INPUTS}
        return tuple(
            name for name in (INPUTS | TRAINING_INPUTS)[self.op_type] if not absent.get(name)
        )

    @property
    def attributes(self) -> tuple[str, ...]:
        """The attributes that a node of this configuration passes."""
        return tuple(SCHEMAS[self.op_type].attributes)

    @property
    def overload(self) -> str:
        """A name for this configuration; configurations with equal names have equal bodies.

        >>> BodyConfig(gated=True, activation="silu", w_dtype=ir.DataType.BFLOAT16).overload
        'softmax_renormalize_silu_gated_f32_bf16_f32'
        """
        dtypes = [self.x_dtype, self.w_dtype, self.router_dtype]
        if not self.router:
            dtypes.append(self.ids_dtype)
        if self.has_selection_bias:
            dtypes.append(self.selection_dtype)
        router = ROUTER_OPTIONS if self.router else ()
        options = (*router, *EXPERT_OPTIONS, *LAYOUT_OPTIONS)
        parts = [
            *(self._part(option) for option in options),
            *(name * getattr(self, f"has_{name}") for name in OPTIONAL_INPUTS),
            *(dtype.short_name() for dtype in dtypes),
        ]
        return "_".join(filter(None, parts))

    def _part(self, option: Option) -> str:
        """Returns what an option adds to the configuration's name."""
        value = getattr(self, option.name)
        if option.is_number or not option.has_effect(self):
            return ""
        if isinstance(option.slot, Flag):
            return option.flag if option.code(value) else ""
        return "" if value == "none" else str(value)

    def is_transposed(self, weight: str) -> bool:
        """Whether ``w1`` or ``w2`` lies as (in, out)."""
        return self.w1_transposed if weight == "w1" else self.w2_transposed

    @property
    def renormalizes(self) -> bool:
        """Whether the weights are divided by their sum; with topk_softmax they already sum to 1."""
        return self.renormalize and self.scoring != "topk_softmax"

    @property
    def routing_dtype(self) -> ir.DataType:
        """The dtype the router computes in: DOUBLE for DOUBLE tokens, else FLOAT."""
        return ir.DataType.DOUBLE if self.x_dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT

    @property
    def weights_dtype(self) -> ir.DataType:
        """The dtype of ``expert_weights``."""
        return self.routing_dtype if self.router else self.router_dtype

    @property
    def compute_dtype(self) -> ir.DataType:
        """The dtype the experts compute in: DOUBLE if tokens or experts are DOUBLE, else FLOAT."""
        double = ir.DataType.DOUBLE in (self.x_dtype, self.w_dtype)
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


def _check_choice(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        choices = ", ".join(str(choice) for choice in known)
        raise ValueError(f"{name} must be one of {choices}; got {value!r}")
