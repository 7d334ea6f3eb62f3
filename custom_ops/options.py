"""The options of an MoE layer: one row each, from which everything that lists options is derived.

A row is a field of :class:`RouterOptions` or :class:`ExpertOptions`: its name, type and default,
and what :func:`_option` adds to them; a record's class has its ``rows``. Derived from them are
the dispatcher's schema and the functions' signatures (:mod:`custom_ops._library`), the attributes
of the ONNX nodes, a bundle's record of a layer, the plugin's fields and tables of the docs.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self, TypedDict, TypeVar

# A name's place is its code in a bundle: a new one comes last.
ACTIVATIONS = (
    "gelu", "gelu_tanh", "silu", "relu", "relu2", "clamped_swiglu", "clamped_silu", "quick_gelu",
    "tanh", "mish", "hardswish", "elu", "leaky_relu", "identity", "softcapped_silu",
)  # fmt: skip
SCORINGS = ("softmax", "topk_softmax", "sigmoid")
GROUP_SCORINGS = ("none", "max", "top2_sum")
PRE_NORMS = ("none", "rms")
#: What a router's logits and weights are rounded to: nothing narrower, or the tokens' dtype.
ROUNDINGS = ("float32", "tokens")
#: The functions of gate and up that bound both, with numbers of their own.
GATINGS = ("clamped_swiglu", "clamped_silu", "softcapped_silu")
#: The functions of one number, with or without gating.
POINTWISE = tuple(name for name in ACTIVATIONS if name not in GATINGS)

Value = str | bool | int | float
_V = TypeVar("_V", bound=Value)
_R = TypeVar("_R", bound="type[Options]")


@dataclass(frozen=True)
class Bounds:
    """The numbers that an option takes: ``low`` to ``high``, both included.

    Attributes:
        text: The phrase for such a number in an error.
        low: The least.
        high: The greatest.
    """

    text: str
    low: float
    high: float

    def contain(self, value: float) -> bool:
        """Whether a value is one of them; NaN is not."""
        return self.low <= value <= self.high


_COUNT = Bounds("at least 1", 1, math.inf)
_POSITIVE = Bounds("positive", math.nextafter(0, 1), math.inf)
# Kernels compute with a float32, and one that is 0 makes the scale of a row of zeros infinite.
_NORMAL = Bounds("positive and a normal number of float32", 2.0**-126, math.nextafter(2.0**128, 0))
#: A softcap: kernels multiply by its reciprocal, in float32.
SOFTCAP = Bounds("in 2**-126..2**126", 2.0**-126, 2.0**126)


@dataclass(frozen=True)
class Flag:
    """An option's place in a bundle's record of a layer: a bit of its flags.

    Attributes:
        bit: Set for True, or for the second of two names.
        name: The flag's name, if not the option's.
    """

    bit: int
    name: str = ""


@dataclass(frozen=True)
class Word:
    """An option's place in a bundle's record of a layer: a 32-bit word, counted from 0.

    A name is stored as its place among the option's names, a float as a float32.
    """

    index: int


@dataclass(frozen=True)
class Option:
    """One row of the table.

    Attributes:
        name: The keyword argument of the operators, or for a layout the field of the layer.
        type: ``str``, ``bool``, ``int`` or ``float``.
        default: Its default.
        doc: A sentence on its effect.
        slot: Where a bundle's record of a layer holds it.
        names: The values of a ``str``.
        bounds: The values of an ``int`` or a ``float``; None: any number.
        attribute: The attribute of the ONNX nodes, and the plugin's field.
        only_with: Another option and the values of it under which this one has an effect; None:
            it always has.
        rare: Only the nodes that set such an option have the attributes of all such options, and a
            version of the plugin that takes them.
    """

    name: str
    type: type[Value]
    default: Value
    doc: str
    slot: Flag | Word
    names: tuple[str, ...] = ()
    bounds: Bounds | None = None
    attribute: str = ""
    only_with: tuple[str, tuple[Value, ...]] | None = None
    rare: bool = False

    @property
    def description(self) -> str:
        """Its effect and, for a ``str``, its values."""
        names = ", ".join(f"``{name}``" for name in self.names)
        return f"One of {names}. {self.doc}" if names else self.doc

    @property
    def is_number(self) -> bool:
        """Whether it is a number, which changes no more than numbers of what is computed."""
        return self.type in (int, float)

    @property
    def flag(self) -> str:
        """The name of its flag in a bundle's record, where it has one."""
        return (isinstance(self.slot, Flag) and self.slot.name) or self.name

    def code(self, value: Any) -> int:
        """Returns the number that stands for anything but a float in a bundle's record."""
        return self.names.index(value) if self.names else int(value)

    def check(self, value: Any) -> None:
        """Checks a value.

        Raises:
            ValueError: If the option does not take it.
        """
        if self.names and value not in self.names:
            known = ", ".join(self.names)
            raise ValueError(f"{self.name} must be one of {known}; got {value!r}")
        if self.bounds and not self.bounds.contain(value):
            raise ValueError(f"{self.name} must be {self.bounds.text}, got {value}")

    def has_effect(self, options: object) -> bool:
        """Whether the option has an effect beside the other options of a record."""
        if self.only_with is None:
            return True
        other, values = self.only_with
        return getattr(options, other) in values


def _option(default: _V, doc: str, **row: Any) -> _V:
    """A field of a record that is a row of the table; ``row`` has fields of :class:`Option`."""
    return field(default=default, metadata={"doc": doc, **row})


def _rows_of(record: Any) -> tuple[Option, ...]:
    """Returns the options among the fields of a record's class, in order."""
    rows: list[Option] = []
    for option_field in fields(record):
        if option_field.metadata:
            default: Any = option_field.default
            row: dict[str, Any] = {"attribute": option_field.name, **option_field.metadata}
            rows.append(Option(option_field.name, type(default), default, **row))
    return tuple(rows)


def list_options(docstring: str | None, options: tuple[Option, ...]) -> str:
    """Returns a docstring whose line ``{options}`` is the list of some options."""
    rows = [
        textwrap.fill(
            f"{option.name}: {option.description}",
            width=100,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_on_hyphens=False,
        )
        for option in options
    ]
    return str(docstring).replace("        {options}", "\n".join(rows))


def _with_rows(record: _R) -> _R:
    record.rows = _rows_of(record)
    record.__doc__ = list_options(record.__doc__, record.rows)
    return record


class Options:
    """The base class of the records of options.

    Attributes:
        rows: The record's rows of the table.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    rows: ClassVar[tuple[Option, ...]]

    def __post_init__(self) -> None:
        for option in self.rows:
            option.check(getattr(self, option.name))

    @property
    def is_rare(self) -> bool:
        """Whether an option that few layers have is set, see :attr:`Option.rare`."""
        return any(row.rare and getattr(self, row.name) != row.default for row in self.rows)

    def keywords(self) -> dict[str, Any]:
        """Returns the values by name; torch.compile of PyTorch 2.11 does not follow ``asdict``."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def canonical(self) -> Self:
        """Returns the record with every option that has no effect at its default."""
        idle = {row.name: row.default for row in self.rows if not row.has_effect(self)}
        return replace(self, **idle)


@_with_rows
@dataclass(frozen=True)
class RouterOptions(Options):
    """How router logits become expert indices and weights.

    Attributes:
        top_k: Experts per token, at least 1.
        {options}

    Raises:
        ValueError: If an option is unknown or out of range.
    """

    top_k: int
    scoring: str = _option(
        "softmax",
        "``softmax`` over all experts, then the top-k; ``topk_softmax``: top-k of the logits, "
        "then softmax over the chosen; ``sigmoid``: top-k of the logits, then the sigmoid of each.",
        names=SCORINGS,
        slot=Word(7),
    )
    renormalize: bool = _option(
        True,
        "Divide a token's weights by their sum. Those of ``topk_softmax`` sum to one anyway.",
        only_with=("scoring", ("softmax", "sigmoid")),
        slot=Flag(32),
    )
    routed_scaling: float = _option(
        1.0, "Factor on every weight, after renormalising.", slot=Word(12)
    )
    group_scoring: str = _option(
        "none",
        "How a group of consecutive experts is scored where a token chooses among the experts of "
        "its best groups alone: by its best expert, or by the sum of its two best (DeepSeek-V3). "
        "Groups are scored as experts are chosen: with the selection bias.",
        names=GROUP_SCORINGS,
        slot=Word(16),
    )
    n_group: int = _option(
        1,
        "Groups, of equal size.",
        bounds=_COUNT,
        only_with=("group_scoring", GROUP_SCORINGS[1:]),
        slot=Word(17),
    )
    topk_group: int = _option(
        1,
        "Groups that a token chooses.",
        bounds=_COUNT,
        only_with=("group_scoring", GROUP_SCORINGS[1:]),
        slot=Word(18),
    )
    logits_dtype: str = _option(
        "float32",
        "With ``tokens``, the logits are rounded once to the tokens' dtype, bias included, as a "
        "linear layer in half precision gives them (Mixtral, Qwen3-MoE).",
        names=ROUNDINGS,
        slot=Flag(2048, "rounded_logits"),
        rare=True,
    )
    routing_weights_dtype: str = _option(
        "float32",
        "With ``tokens``, the weights are rounded once to the tokens' dtype, after scaling "
        "(Qwen3-MoE, gpt-oss).",
        names=ROUNDINGS,
        slot=Flag(4096, "rounded_weights"),
        rare=True,
    )

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        super().__post_init__()
        if self.group_scoring == "none" and self.n_group > 1:
            raise ValueError(f"n_group={self.n_group} needs a group_scoring, got 'none'")
        if self.topk_group > self.n_group:
            raise ValueError(
                f"topk_group must be in 1..{self.n_group} (the groups), got {self.topk_group}"
            )

    @property
    def limits_groups(self) -> bool:
        """Whether there are experts that a token cannot choose for their group."""
        return self.topk_group < self.n_group

    def rules(self, experts: int) -> Iterator[tuple[bool, str]]:
        """Yields the conditions for a number of experts, and the errors if they do not hold."""
        choice = experts
        if self.group_scoring != "none":
            size = experts // self.n_group
            least = 2 if self.group_scoring == "top2_sum" else 1
            yield (
                experts % self.n_group == 0 and size >= least,
                f"n_group={self.n_group} must divide {experts} experts into groups of {least} up",
            )
            choice = self.topk_group * size
        of_groups = f" of {self.topk_group} groups" if self.limits_groups else ""
        yield (
            self.top_k <= choice,
            f"top_k must be in 1..{choice} (the experts{of_groups}), got {self.top_k}",
        )

    def canonical(self) -> Self:
        """Returns the record with every option that has no effect at its default."""
        record = super().canonical()
        if record.limits_groups:
            return record
        return replace(record, group_scoring="none", n_group=1, topk_group=1)


@_with_rows
@dataclass(frozen=True)
class ExpertOptions(Options):
    """What the experts compute around and between their two matrix products.

    Attributes:
        {options}

    Raises:
        ValueError: If an option is unknown or out of range, or options contradict one another.
    """

    activation: str = _option(
        "gelu",
        "``gelu`` is the exact (erf) form, ``relu2`` is ``relu(x)**2``, ``quick_gelu`` is CLIP's; "
        "``clamped_swiglu`` is gpt-oss's gating, ``clamped_silu`` DeepSeek-V4's, "
        "``softcapped_silu`` Inkling 2's.",
        names=ACTIVATIONS,
        slot=Word(6),
    )
    gated: bool = _option(
        False,
        "``w1`` has gate and up rows (F = 2H), and ``h = activation(gate) * up``.",
        slot=Flag(4),
    )
    interleaved: bool = _option(
        False,
        "Gate rows are ``::2`` of ``w1`` and up rows ``1::2``; otherwise gate rows come first.",
        slot=Flag(8),
    )
    weight_on_input: bool = _option(
        False,
        "Routing weights scale the experts' inputs instead of their results (Llama 4).",
        slot=Flag(16),
    )
    alpha: float = _option(
        1.702,
        "Slope of the sigmoid in ``clamped_swiglu``, softcap of the gate in ``softcapped_silu``.",
        attribute="activation_alpha",
        only_with=("activation", ("clamped_swiglu", "softcapped_silu")),
        slot=Word(13),
    )
    limit: float = _option(
        7.0,
        "Clamp of ``clamped_swiglu`` and ``clamped_silu``, softcap of up in ``softcapped_silu``.",
        attribute="activation_limit",
        bounds=_POSITIVE,
        only_with=("activation", GATINGS),
        slot=Word(14),
    )
    pre_norm: str = _option(
        "none",
        "``rms``: the first product of a token is divided by ``sqrt(mean(x**2) + norm_eps)``, "
        "before the bias. The norm's weight belongs in ``w1``, whose columns it scales. ``w1``'s "
        "dtype must hold the token before the norm: beyond 65504 a float16 is infinite, below "
        "6e-5 it loses digits.",
        names=PRE_NORMS,
        slot=Flag(128, "rms_norm"),
    )
    norm_eps: float = _option(
        1e-6,
        "Added to the mean square of ``pre_norm``.",
        bounds=_NORMAL,
        only_with=("pre_norm", ("rms",)),
        slot=Word(15),
    )
    residual: bool = _option(
        False, "The token is added to the sum of its experts' results.", slot=Flag(256)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation in GATINGS and not self.gated:
            raise ValueError(f"activation {self.activation!r} is a gating: it needs gated=True")
        for name in ("alpha", "limit") if self.activation == "softcapped_silu" else ():
            value = getattr(self, name)
            if not SOFTCAP.contain(value):
                rule = f"{SOFTCAP.text} with activation {self.activation!r}"
                raise ValueError(f"{name} must be {rule}, got {value}")
        if self.interleaved and not self.gated:
            raise ValueError("interleaved=True orders gate and up rows: it needs gated=True")

    @property
    def rows_per_hidden(self) -> int:
        """Rows of ``w1`` per hidden unit: 2 when gated, else 1."""
        return 2 if self.gated else 1


@_with_rows
@dataclass(frozen=True)
class WeightLayout(Options):
    """How the experts' weights lie in memory.

    No arguments of the operators, to which a tensor's strides say it, but attributes of the nodes.

    Attributes:
        {options}
    """

    w1_transposed: bool = _option(
        False, "``w1`` lies as (in, out), ``[E, D, F]``, not ``[E, F, D]``.", slot=Flag(512)
    )
    w2_transposed: bool = _option(
        False, "``w2`` lies as (in, out), ``[E, H, D]``, not ``[E, D, H]``.", slot=Flag(1024)
    )


ROUTER_OPTIONS = RouterOptions.rows
EXPERT_OPTIONS = ExpertOptions.rows
LAYOUT_OPTIONS = WeightLayout.rows


class ExpertKeywords(TypedDict, total=False):
    """The fields of :class:`ExpertOptions`, for type checkers: the keywords of ``experts``."""

    activation: str
    gated: bool
    interleaved: bool
    weight_on_input: bool
    alpha: float
    limit: float
    pre_norm: str
    norm_eps: float
    residual: bool


class DroplessKeywords(ExpertKeywords, total=False):
    """The options of ``dropless``: those of its router, too."""

    scoring: str
    renormalize: bool
    routed_scaling: float
    group_scoring: str
    n_group: int
    topk_group: int
    logits_dtype: str
    routing_weights_dtype: str


@dataclass(frozen=True)
class Size:
    """A size of a layer.

    Attributes:
        name: The field of :class:`custom_ops.kernels.layer.Layer`.
        symbol: Its letter.
        attribute: The attribute of the ONNX nodes, and the plugin's field.
        doc: A description.
        slot: Where a bundle's record of a layer holds it.
    """

    name: str
    symbol: str
    attribute: str
    doc: str
    slot: Word


#: In the order of the nodes' attributes.
SIZES = (
    Size("top_k", "K", "top_k", "Experts per token K.", Word(9)),
    Size("experts", "E", "num_experts", "Experts E.", Word(8)),
    Size("width", "D", "in_features", "Model width D.", Word(10)),
    Size("hidden", "H", "hidden_features", "Hidden width H.", Word(11)),
)
