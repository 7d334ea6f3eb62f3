"""What a body depends on: the options that change its nodes, not the layer's sizes."""

from __future__ import annotations

from dataclasses import dataclass

import onnx.defs
import onnx_ir as ir

from custom_ops.options import ACTIVATIONS, CLAMPED, PRE_NORMS, SCORINGS
from dynamo_moe.moe_nodes import schemas

__all__ = ["MIN_OPSET", "BodyConfig"]

# Split has num_outputs since 18. Gelu, which is used if the opset has it, came with 20.
MIN_OPSET = 18

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
_INTS = (ir.DataType.INT64, ir.DataType.INT32)


@dataclass(frozen=True)
class BodyConfig:
    """The configuration of a layer that one body serves, whatever the layer's sizes.

    Attributes:
        router: True for ``DroplessMoE``, False for ``DroplessMoEExperts``, whose ids and weights
            are inputs.
        scoring: ``softmax``, ``topk_softmax`` or ``sigmoid``; ignored without a router.
        renormalize: Divide a token's weights by their sum; ignored without a router.
        activation: ``gelu`` (exact), ``gelu_tanh``, ``silu``, ``relu``, ``relu2`` or
            ``clamped_swiglu``, ``clamped_silu``.
        gated: ``h = act(gate) * up``.
        interleaved: Gate rows are ``::2`` of ``w1``, up rows ``1::2``.
        weight_on_input: The weights scale the experts' inputs instead of their results.
        pre_norm: ``none``, or ``rms`` to divide the rows of the first product by their token's
            root mean square.
        residual: The result is the token plus the sum of its experts' results.
        has_router_bias: The node has ``router_bias``.
        has_b1: The node has ``b1``, and with a router also ``router_bias``, because only trailing
            inputs may be omitted.
        has_b2: The node has ``b2``, and therefore ``b1``.
        x_dtype: Dtype of the tokens and the result.
        w_dtype: Dtype of ``w1``, ``b1``, ``w2`` and ``b2``.
        router_dtype: Dtype of ``router_weight`` and ``router_bias``, or of ``expert_weights``.
        ids_dtype: Dtype of ``expert_ids``: INT64 or INT32.

    Raises:
        ValueError: If an option is unknown, or options contradict one another.
    """

    router: bool = True
    scoring: str = "softmax"
    renormalize: bool = True
    activation: str = "gelu"
    gated: bool = False
    interleaved: bool = False
    weight_on_input: bool = False
    pre_norm: str = "none"
    residual: bool = False
    has_router_bias: bool = False
    has_b1: bool = False
    has_b2: bool = False
    x_dtype: ir.DataType = ir.DataType.FLOAT
    w_dtype: ir.DataType = ir.DataType.FLOAT
    router_dtype: ir.DataType = ir.DataType.FLOAT
    ids_dtype: ir.DataType = ir.DataType.INT64

    def __post_init__(self) -> None:
        _check_choice("scoring", self.scoring, SCORINGS)
        _check_choice("activation", self.activation, ACTIVATIONS)
        _check_choice("pre_norm", self.pre_norm, PRE_NORMS)
        for name in ("x_dtype", "w_dtype", "router_dtype"):
            _check_choice(name, getattr(self, name), _FLOATS)
        _check_choice("ids_dtype", self.ids_dtype, _INTS)
        if not self.gated and (self.interleaved or self.activation in CLAMPED):
            option = "interleaved" if self.interleaved else f"activation {self.activation!r}"
            raise ValueError(f"{option} needs gated=True")
        if self.has_b2 and not self.has_b1:
            raise ValueError("b2 needs b1 before it: pass zeros for b1 and set has_b1")
        if self.router and self.has_b1 and not self.has_router_bias:
            raise ValueError("b1 needs router_bias before it: pass zeros and set has_router_bias")
        if self.has_router_bias and not self.router:
            raise ValueError("router_bias needs a router")

    @property
    def op_type(self) -> str:
        """The operator, which is also the plugin's name."""
        return schemas.DROPLESS if self.router else schemas.EXPERTS

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that a node of this configuration passes, in order."""
        names = [formal.name for formal in self._schema.inputs]
        return tuple(
            names[: 4 + self.has_router_bias + self.has_b1 + self.has_b2 + (not self.router)]
        )

    @property
    def attributes(self) -> tuple[str, ...]:
        """The attributes that a node of this configuration passes."""
        return tuple(self._schema.attributes)

    @property
    def _schema(self) -> onnx.defs.OpSchema:
        return schemas.SCHEMAS[self.op_type]

    @property
    def overload(self) -> str:
        """A name for this configuration; configurations with equal names have equal bodies.

        >>> BodyConfig(gated=True, activation="silu", w_dtype=ir.DataType.BFLOAT16).overload
        'softmax_renormalize_silu_gated_f32_bf16_f32'
        """
        dtypes = [self.x_dtype, self.w_dtype, self.router_dtype]
        if not self.router:
            dtypes.append(self.ids_dtype)
        parts = {
            self.scoring: self.router,
            "renormalize": self.router and self.renormalizes,
            self.activation: True,
            "gated": self.gated,
            "interleaved": self.interleaved,
            "weight_on_input": self.weight_on_input,
            f"{self.pre_norm}_norm": self.pre_norm != "none",
            "residual": self.residual,
            "router_bias": self.has_router_bias,
            "b1": self.has_b1,
            "b2": self.has_b2,
            "_".join(dtype.short_name() for dtype in dtypes): True,
        }
        return "_".join(name for name, present in parts.items() if present)

    @property
    def renormalizes(self) -> bool:
        """Whether the weights are divided by their sum; with topk_softmax they already sum to 1."""
        return self.renormalize and self.scoring != "topk_softmax"

    @property
    def routing_dtype(self) -> ir.DataType:
        """The dtype the router computes in: DOUBLE for DOUBLE tokens, else FLOAT."""
        return ir.DataType.DOUBLE if self.x_dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT

    @property
    def compute_dtype(self) -> ir.DataType:
        """The dtype the experts compute in: DOUBLE if tokens or experts are DOUBLE, else FLOAT."""
        double = ir.DataType.DOUBLE in (self.x_dtype, self.w_dtype)
        return ir.DataType.DOUBLE if double else ir.DataType.FLOAT


def _check_choice(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        choices = ", ".join(str(choice) for choice in known)
        raise ValueError(f"{name} must be one of {choices}; got {value!r}")
