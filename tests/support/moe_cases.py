"""Calls of the two operators on random layers, and their comparison with the float64 oracle.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from custom_ops import ExpertOptions, RouterOptions, reference
from custom_ops.dtypes import FLOATS
from custom_ops.options import GATINGS, GROUP_SCORINGS, POINTWISE, ROUTER_OPTIONS, SCORINGS
from dynamo_moe.tolerances import tolerance_for

OPS = ("dropless", "experts")

_MIXED = (
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float32),
    (torch.float32, torch.float64),
)
# Dtypes of the tokens and of the experts.
DTYPES = [
    pytest.param(x, w, id=f"{x}-{w}".replace("torch.", ""))
    for x, w in [*((dtype, dtype) for dtype in FLOATS), *_MIXED]
]

_GATINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gated": {"gated": True},
    "interleaved": {"gated": True, "interleaved": True},
}


def once_if_pointwise(activation: str) -> list[pytest.MarkDecorator]:
    """The mark of an activation whose code is a function alone, as that of the first five is."""
    return [pytest.mark.once(activation)] if activation in POINTWISE[5:] else []


# What an expert computes. A limit of 1 makes the clamps take effect.
EXPERT_FORMS = [
    pytest.param(
        {"activation": activation} | gating,
        id=f"{activation}-{name}",
        marks=once_if_pointwise(activation),
    )
    for activation in POINTWISE
    for name, gating in _GATINGS.items()
] + [
    pytest.param(
        {"activation": activation, "alpha": 1.3, "limit": 1.0} | _GATINGS[name],
        id=f"{activation}-{name}",
    )
    for activation in GATINGS
    for name in ("gated", "interleaved")
]

# The same for kernels, where a gating and an activation meet in one line: SiLU in each gating,
# the others in one.
KERNEL_FORMS = [
    pytest.param(*form.values, id=form.id, marks=pytest.mark.once(activation))
    if (activation := form.values[0]["activation"]) not in ("silu", *GATINGS)
    else form
    for form in EXPERT_FORMS
]

# What happens around an expert. An eps of 0.5 has a visible effect.
NORM_FORMS = [
    pytest.param({"pre_norm": norm, "norm_eps": 0.5, "residual": residual}, id=name)
    for norm, residual, name in (
        ("rms", False, "rms"),
        ("none", True, "residual"),
        ("rms", True, "rms-residual"),
    )
]

ROUTER_FORMS = [
    pytest.param(
        {"scoring": scoring, "renormalize": renormalize, "routed_scaling": scaling},
        id=f"{scoring}-{'renormalized' if renormalize else 'raw'}-{scaling}",
    )
    for scoring in SCORINGS
    for renormalize in (True, False)
    for scaling in (1.0, 2.5)
]
# For six experts.
GROUP_FORMS = [
    pytest.param(
        {"scoring": scoring, "group_scoring": group, "n_group": 3, "topk_group": 2},
        id=f"{scoring}-{group}",
    )
    for scoring in SCORINGS
    for group in GROUP_SCORINGS[1:]
]
# Of tokens in half precision.
ROUNDING_FORMS = [
    pytest.param(form, id="-".join(form))
    for form in (
        {"logits_dtype": "tokens"},
        {"routing_weights_dtype": "tokens"},
        {"logits_dtype": "tokens", "routing_weights_dtype": "tokens"},
    )
]


@dataclass(frozen=True)
class Case:
    """One call of an operator.

    Attributes:
        op: One of :data:`OPS`.
        arguments: Arguments by name, in the schema's order, without the options.
        options: Keyword-only arguments.
    """

    op: str
    arguments: dict[str, Any]
    options: dict[str, Any]

    def __call__(self) -> Tensor:
        """Calls the operator."""
        return self.function(*self.floats.values())

    @property
    def overload(self) -> torch._ops.OpOverload:
        """The operator."""
        return getattr(torch.ops.moe, self.op).default

    @property
    def floats(self) -> dict[str, Tensor]:
        """The arguments that have gradients."""
        return {
            name: value
            for name, value in self.arguments.items()
            if isinstance(value, Tensor) and name not in ("expert_ids", "selection_bias")
        }

    @property
    def function(self) -> Callable[..., Tensor]:
        """The operator as a function of the floats alone, by position."""
        names = list(self.floats)

        def call(*floats: Tensor) -> Tensor:
            arguments = self.arguments | dict(zip(names, floats, strict=True))
            return self.overload(*arguments.values(), **self.options)

        return call

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Dtypes of the tokens and the experts, which limit the precision."""
        return {self.arguments["x"].dtype, self.arguments["w1"].dtype}

    def changed(self, **changes: Any) -> Case:
        """The same case with other arguments or options."""
        arguments = {name: changes.pop(name, old) for name, old in self.arguments.items()}
        return replace(self, arguments=arguments, options=self.options | changes)

    def with_grad(self) -> Case:
        """The same case with leaves that require gradients."""
        leaves = {name: t.detach().clone().requires_grad_() for name, t in self.floats.items()}
        return self.changed(**leaves)

    def oracle(self) -> Tensor:
        """The result in float64, computed from the rounded arguments.

        The operators route at least in float32, so random logits choose the oracle's experts.
        """
        a, options = self.arguments, dict(self.options)
        router_options = {
            row.name: options.pop(row.name) for row in ROUTER_OPTIONS if row.name in options
        }
        if self.op == "dropless":
            router_options = RouterOptions(a["top_k"], **router_options)
            routing = reference.router(
                a["x"], a["router_weight"], a["router_bias"], router_options, a["selection_bias"]
            )
        else:
            routing = (a["expert_ids"], a["expert_weights"])
        # Rounded as the experts read it, but with a gradient that ignores the rounding. Otherwise
        # a pre-activation could fall on the other side of relu's kink.
        x = a["x"] + (a["x"].to(a["w1"].dtype).to(a["x"].dtype) - a["x"]).detach()
        parameters = (a["w1"], a["b1"], a["w2"], a["b2"])
        return reference.experts(x, *routing, *parameters, ExpertOptions(**options))

    def gradients(self, run: Callable[[Case], Tensor] = lambda case: case()) -> dict[str, Tensor]:
        """Gradients of every float, given one fixed gradient of the result."""
        case = self.with_grad()
        result = run(case)
        generator = torch.Generator().manual_seed(1)
        # The same numbers for every dtype of the result: bfloat16 values are exact in all others.
        dy = torch.randn(result.shape, generator=generator).bfloat16().to(result.dtype)
        gradients = torch.autograd.grad(result, list(case.floats.values()), dy)
        return dict(zip(case.floats, gradients, strict=True))


def make_case(
    op: str,
    shape: tuple[int, ...] = (11,),
    *,
    width: int = 12,
    hidden: int = 10,
    experts: int = 5,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
    x_dtype: torch.dtype | None = None,
    biases: bool = True,
    selection_bias: bool = False,
    seed: int = 0,
    **options: Any,
) -> Case:
    """A random call, scaled so that logits, hidden rows and results are around 1."""
    generator = torch.Generator().manual_seed(seed)
    x_dtype = x_dtype or dtype
    router_dtype = torch.float64 if x_dtype == torch.float64 else torch.float32

    def normal(*size: int, dtype: torch.dtype, fan_in: int = 1) -> Tensor:
        values = torch.randn(size, generator=generator, dtype=torch.float64)
        return (values / fan_in**0.5).to(dtype)

    rows = 2 * hidden if options.get("gated") else hidden
    x = normal(*shape, width, dtype=x_dtype)
    logits = normal(*shape, experts, dtype=router_dtype)
    parameters = {
        "w1": normal(experts, rows, width, dtype=dtype, fan_in=width),
        "b1": normal(experts, rows, dtype=dtype) if biases else None,
        "w2": normal(experts, width, hidden, dtype=dtype, fan_in=hidden),
        "b2": normal(experts, width, dtype=dtype) if biases else None,
    }
    if op == "experts":
        weights, ids = logits.softmax(-1).topk(top_k, dim=-1)
        routing = {"expert_ids": ids, "expert_weights": weights}
        return Case(op, {"x": x} | routing | parameters, options)
    router_weight = normal(experts, width, dtype=router_dtype, fan_in=width)
    arguments: dict[str, Any] = {"x": x, "router_weight": router_weight, **parameters}
    arguments |= {
        "top_k": top_k,
        "router_bias": normal(experts, dtype=router_dtype) if biases else None,
        "selection_bias": normal(experts, dtype=router_dtype, fan_in=9) if selection_bias else None,
    }
    return Case(op, arguments, options)


def of_size(activation: str, size: float) -> Case:
    """Experts whose pre-activations are about so large."""
    case = make_case("experts", (9,), width=16, hidden=24, biases=False, activation=activation)
    return case.changed(x=case.arguments["x"] * size)


def in_steps(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Those of tokens and router in steps so coarse that sums of their products are exact.

    So logits that are rounded are the same whoever sums; rounded to half precision, many are equal.
    """
    steps = {"x": 2**-4, "router_weight": 2**-6, "router_bias": 2**-6}
    given = {name: tensors[name] for name in steps if tensors.get(name) is not None}
    return {name: (value / steps[name]).round() * steps[name] for name, value in given.items()}


def pruned(case: Case) -> Case:
    """The case with every second expert's selection bias at -inf."""
    bias = case.arguments["selection_bias"].clone()
    bias[1::2] = -torch.inf
    return case.changed(selection_bias=bias)


def assert_matches(
    actual: Tensor, expected: Tensor, dtypes: set[torch.dtype], name: str = "result"
) -> None:
    """Bounds the worst error and the RMS of the errors, relative to the expected RMS."""
    assert actual.shape == expected.shape, f"{name}: {actual.shape}, expected {expected.shape}"
    if not expected.numel():
        return
    tolerance = tolerance_for(dtypes)
    error = (actual.double() - expected).detach().abs()
    scale = expected.detach().double().square().mean().sqrt()
    place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    where = f"{name}{list(place)} is {actual[place]}, expected {expected[place]}"
    assert error.max() <= tolerance.max * scale, f"{where}; RMS expected {scale}"
    assert error.square().mean().sqrt() <= tolerance.rms * scale, f"RMS; worst: {where}"
