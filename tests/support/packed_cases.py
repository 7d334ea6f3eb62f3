"""Calls of the operators with packed weights, and what they are compared with.

Legend: D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k, G group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from custom_ops import ExpertOptions, RouterOptions, reference
from custom_ops.options import ROUTER_OPTIONS
from custom_ops.packed_weights import WHOLE, blocks_of, encoding_of
from custom_ops.weight_formats import WHOLE_MATRIX, WeightFormat, packed_format
from moe_cases import Case, make_case

#: A batch whose tokens have odd numbers.
SHAPE = (11,)
FP8 = (128, 128)


@dataclass(frozen=True)
class PackedCase:
    """One call.

    Attributes:
        plain: The same call with weights that are not packed, whose values do not matter.
        weight_format: How w1 and w2 are packed.
        packed: The tensors that store them, by argument.
    """

    plain: Case
    weight_format: str
    packed: dict[str, Tensor | None]

    @property
    def overload(self) -> torch._ops.OpOverload:
        """The operator."""
        return getattr(torch.ops.moe, f"{self.plain.op}_packed").default

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        others = {k: v for k, v in self.plain.arguments.items() if k not in ("w1", "w2")}
        return others | self.packed

    @property
    def options(self) -> dict[str, Any]:
        """The options and the format."""
        return self.plain.options | {"weight_format": self.weight_format}

    def __call__(self) -> Tensor:
        """Calls the operator."""
        return self.overload(**self.arguments, **self.options)

    def format(self) -> WeightFormat:
        """Returns the format as kernels have it."""
        x, scales = self.plain.arguments["x"], self.packed["w1_scales"]
        assert scales is not None
        known, found = encoding_of(self.weight_format), []
        for name in ("w1", "w2"):
            _, rows, columns = self.plain.arguments[name].shape
            beside = self.packed[f"{name}_scales"]
            assert beside is not None
            found.append(known.blocks(rows, columns, beside.shape[1:]))
        first, second = found
        block = next(block for block in first if block in second)
        zero_points, zero_points_block = self.packed["w1_zero_points"], None
        if zero_points is not None:
            zero_points_block = WHOLE_MATRIX if zero_points.shape[1:] == (1, 1) else block
        return packed_format(
            self.weight_format,
            x.dtype,
            scales.dtype,
            block,
            zero_points_block=zero_points_block,
        )

    def changed(self, **changes: Any) -> PackedCase:
        """Returns the case with other arguments or options."""
        packed = {name: changes.pop(name, old) for name, old in self.packed.items()}
        weight_format = changes.pop("weight_format", self.weight_format)
        return replace(
            self, plain=self.plain.changed(**changes), weight_format=weight_format, packed=packed
        )

    def decoded(self, *, rounded: bool = True) -> Case:
        """Returns the call with the weights that the packed ones stand for."""
        dtype = self.plain.arguments["x"].dtype
        weights = {}
        for name in ("w1", "w2"):
            tensors = [
                self.packed[name + suffix]
                for suffix in ("", "_scales", "_zero_points", "_global_scales")
            ]
            exact = reference.unpacked(self.weight_format, *tensors)
            weights[name] = exact.to(dtype) if rounded else exact
        return self.plain.changed(**weights)

    def oracle(self) -> Tensor:
        """Returns the result in float64, of weights that are not rounded."""
        a, options = self.decoded(rounded=False).arguments, dict(self.plain.options)
        named = {row.name: options.pop(row.name) for row in ROUTER_OPTIONS if row.name in options}
        routing = (a.get("expert_ids"), a.get("expert_weights"))
        if self.plain.op == "dropless":
            router = RouterOptions(a["top_k"], **named)
            routing = reference.router(
                a["x"], a["router_weight"], a["router_bias"], router, a["selection_bias"]
            )
        weights = (a["w1"], a["b1"], a["w2"], a["b2"])
        return reference.experts(a["x"], *routing, *weights, ExpertOptions(**options))


class PackedLayer(nn.Module):
    """A call whose tensors are the module's."""

    def __init__(self, case: PackedCase) -> None:
        super().__init__()
        self.case = case
        for name, value in case.arguments.items():
            if isinstance(value, Tensor) and name != "x":
                self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        held = {name: getattr(self, name, value) for name, value in self.case.arguments.items()}
        if self.case.plain.op == "experts":
            tokens = x.flatten(0, -2).shape[0]
            for name in ("expert_ids", "expert_weights"):
                held[name] = held[name][:tokens].view(*x.shape[:-1], held[name].shape[-1])
        return self.case.overload(**{**held, "x": x}, **self.case.options)


def packed_case(
    op: str,
    weight_format: str = "int4",
    *,
    group: int | None = None,
    zero_points: Literal["", "groups", "experts"] = "",
    scales_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = SHAPE,
    width: int = 32,
    hidden: int = 16,
    experts: int = 5,
    **options: Any,
) -> PackedCase:
    """Returns a random call, scaled so that results are around 1.

    A format may have a form behind it: ``int8 rows``, ``fp8 whole``. Zero points are one
    for each group, or for each expert.
    """
    name, _, form = weight_format.partition(" ")
    group = {"mxfp4": 32, "nvfp4": 16}.get(name) or group or 8
    if weight_format in ("mxfp4", "fp8 groups"):
        hidden = max(hidden, 32)
    case = make_case(op, shape, dtype=dtype, width=width, hidden=hidden, experts=experts, **options)
    generator = torch.Generator().manual_seed(7)
    packed: dict[str, Tensor | None] = {}
    for weight in ("w1", "w2"):
        _, rows, columns = case.arguments[weight].shape
        size = (experts, rows, 1 if form == "rows" else columns // group)
        values = torch.randint(-128, 128, (experts, rows, columns // 2), generator=generator)
        scales = (torch.rand(size, generator=generator) + 0.5) / (6 * columns**0.5)
        zeros = torch.randint(0, 16, size, generator=generator).to(torch.int8)
        packed[weight] = values.to(torch.int8)
        packed[f"{weight}_scales"] = scales.to(scales_dtype)
        global_scales = None
        if name == "mxfp4":
            exponents = scales.log2().round() + 128
            packed[f"{weight}_scales"] = exponents.to(torch.uint8).view(torch.int8)
        elif name == "fp8":
            blocks = {"rows": (1, WHOLE), "whole": (WHOLE, WHOLE), "groups": (1, 32)}
            size = blocks_of(rows, columns, blocks.get(form, FP8))
            numbers = torch.randn(experts, rows, columns, generator=generator)
            packed[weight] = numbers.to(torch.float8_e4m3fn).view(torch.int8)
            scales = torch.rand(experts, *size, generator=generator) + 0.5
            packed[f"{weight}_scales"] = (scales / columns**0.5).to(scales_dtype)
        elif name == "nvfp4":
            # From the scales, whose greatest is about 448 then, to all of them.
            factors = torch.rand(experts, rows, 1, generator=generator) + 0.5
            numbers = (448 * scales / scales.max()).to(torch.float8_e4m3fn)
            packed[f"{weight}_scales"] = numbers.view(torch.int8)
            global_scales = factors * scales.max() / 448
        elif name == "int8":
            packed[weight] = torch.randint(
                -128, 128, (experts, rows, columns), generator=generator, dtype=torch.int8
            )
            packed[f"{weight}_scales"] = (scales / 16).to(scales_dtype)
        zeros = zeros[:, :1, :1].contiguous() if zero_points == "experts" else zeros
        packed[f"{weight}_zero_points"] = zeros if zero_points else None
        packed[f"{weight}_global_scales"] = global_scales
    return PackedCase(case, name, packed)
