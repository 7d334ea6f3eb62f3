"""The options of a dropless MoE layer, checked once and passed around as two frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = [
    "ACTIVATIONS",
    "CLAMPED",
    "PRE_NORMS",
    "SCORINGS",
    "Activation",
    "ExpertOptions",
    "PreNorm",
    "RouterOptions",
    "Scoring",
]

Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "relu2", "clamped_swiglu", "clamped_silu"]
Scoring = Literal["softmax", "topk_softmax", "sigmoid"]
PreNorm = Literal["none", "rms"]

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
SCORINGS: tuple[str, ...] = get_args(Scoring)
PRE_NORMS: tuple[str, ...] = get_args(PreNorm)
# The gatings that clamp gate and up.
CLAMPED = ("clamped_swiglu", "clamped_silu")
# float32's normal numbers: kernels compute with a float32, and one that is 0 makes the scale of a
# row of zeros infinite.
_NORM_EPS_BOUNDS = (2.0**-126, 2.0**128)


@dataclass(frozen=True)
class RouterOptions:
    """How router logits become expert indices and weights.

    Attributes:
        top_k: Experts per token, at least 1.
        scoring: ``softmax`` over all experts then top-k; ``topk_softmax``: top-k of the logits,
            then softmax over the chosen; ``sigmoid``: top-k of the logits, then sigmoid of each.
        renormalize: Divide a token's weights by their sum. No effect for ``topk_softmax``,
            whose weights already sum to one.
        routed_scaling: Factor on every weight, after renormalising.

    Raises:
        ValueError: If ``top_k`` is below 1 or ``scoring`` is unknown.
    """

    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    routed_scaling: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}; got {self.scoring!r}")


@dataclass(frozen=True)
class ExpertOptions:
    """What the experts compute around and between their two matrix products.

    Attributes:
        activation: One of :data:`ACTIVATIONS`. ``gelu`` is the exact (erf) form, ``relu2`` is
            ``relu(x)**2``; ``clamped_swiglu`` is gpt-oss's gating with ``alpha`` and ``limit``,
            ``clamped_silu`` DeepSeek-V4's with ``limit``.
        gated: The first product yields gate and up rows (F = 2H), ``h = act(gate) * up``.
        interleaved: Gate rows are ``::2`` and up rows ``1::2``; otherwise gate rows come first.
        weight_on_input: The routing weight scales the expert's input instead of its output.
        alpha: Sigmoid slope of ``clamped_swiglu``.
        limit: Clamp of ``clamped_swiglu`` and ``clamped_silu``.
        pre_norm: ``rms``: each row of the first product is divided by its token's root mean
            square, before the bias. ``none``: it is not.
        norm_eps: Added to the mean square of ``pre_norm``.
        residual: The token is added to the sum of its experts' results.

    Raises:
        ValueError: If an option is unknown or out of range, or options contradict one another.
    """

    activation: str = "gelu"
    gated: bool = False
    interleaved: bool = False
    weight_on_input: bool = False
    alpha: float = 1.702
    limit: float = 7.0
    pre_norm: str = "none"
    norm_eps: float = 1e-6
    residual: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation must be one of {known}; got {self.activation!r}")
        if self.activation in CLAMPED and not self.gated:
            raise ValueError(f"activation {self.activation!r} is a gating: it needs gated=True")
        if self.interleaved and not self.gated:
            raise ValueError("interleaved=True orders gate and up rows: it needs gated=True")
        if not self.limit > 0:
            raise ValueError(f"limit must be positive, got {self.limit}")
        if self.pre_norm not in PRE_NORMS:
            known = ", ".join(PRE_NORMS)
            raise ValueError(f"pre_norm must be one of {known}; got {self.pre_norm!r}")
        low, high = _NORM_EPS_BOUNDS
        if not low <= self.norm_eps < high:
            raise ValueError(
                f"norm_eps must be positive and a normal number of float32, got {self.norm_eps}"
            )

    @property
    def rows_per_hidden(self) -> int:
        """Rows of ``w1`` per hidden unit: 2 when gated, else 1."""
        return 2 if self.gated else 1
