"""The experts of a layer with packed weights, as a module within the layer's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

import custom_ops
from custom_ops.dtypes import accumulation_dtype
from custom_ops.expert_weights import ExpertWeights
from custom_ops.packed_weights import PackedWeight
from custom_ops.weight_formats import GLOBAL_SCALES, STORED_SUFFIXES
from dynamo_moe import local_experts

#: The name of the module within a layer.
NAME = "packed_experts"


class PackedExperts(nn.Module):
    """Experts whose weights are packed. They have no gradients.

    Args:
        weight_format: One of :data:`custom_ops.packed_weights.ENCODINGS`.
        w1: The first product's weight.
        b1: Its bias ``[E, F]``, or None.
        w2: The second product's weight.
        b2: Its bias ``[E, D]``, or None.
        w1_order: Where the columns of ``w1`` lie in another order than a token's numbers, the
            number's place for each, ``[E, D]`` int64; or None.
    """

    b1: Tensor | None
    b2: Tensor | None
    w1_order: Tensor | None

    def __init__(
        self,
        weight_format: str,
        w1: PackedWeight,
        b1: Tensor | None,
        w2: PackedWeight,
        b2: Tensor | None,
        w1_order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.weight_format = weight_format
        self.register_buffer("w1_order", w1_order)
        for name, weight, bias in (("1", w1, b1), ("2", w2, b2)):
            for suffix, tensor in zip(STORED_SUFFIXES, weight, strict=True):
                self.register_buffer(f"w{name}{suffix}", tensor)
            self.register_buffer(f"b{name}", bias)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, **options: Any) -> Tensor:
        """Computes :func:`custom_ops.experts` with these weights."""
        tensors = self._tensors(x)
        if self.w1_order is None:
            return custom_ops.experts_packed(x, ids, weights, **tensors, **options)
        residual = options.pop("residual", False)
        # A row for each choice, whose numbers lie as its expert's columns do.
        order = self.w1_order[ids.clamp(min=0)]
        rows = x.unsqueeze(-2).expand_as(order).gather(-1, order)
        wide = custom_ops.experts_packed(
            rows, ids.unsqueeze(-1), weights.unsqueeze(-1), **tensors, **options
        )
        y = wide.sum(-2, dtype=accumulation_dtype(x)).to(x.dtype)
        return x + y if residual else y

    def dropless(self, x: Tensor, router_weight: Tensor, **options: Any) -> Tensor:
        """Computes :func:`custom_ops.dropless` with these weights."""
        if self.w1_order is None:
            return custom_ops.dropless_packed(x, router_weight, **self._tensors(x), **options)
        ids, weights, options = local_experts.routed(x, router_weight, **options)
        return self.experts(x, ids, weights, **options)

    def packed_weights(self) -> tuple[PackedWeight, PackedWeight]:
        """Returns the tensors of both weights."""
        w1, w2 = (
            PackedWeight(*(getattr(self, weight + suffix) for suffix in STORED_SUFFIXES))
            for weight in ("w1", "w2")
        )
        return w1, w2

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts, but for global scales, which half precision does not hold."""
        names = [weight + GLOBAL_SCALES for weight in ("w1", "w2")]
        before = {name: getattr(self, name) for name in names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # It has no annotations.
        for name, scales in before.items():
            if scales is not None:
                setattr(self, name, scales.to(getattr(self, name).device))
        return self

    def extra_repr(self) -> str:
        """The format, for ``print(model)``."""
        return f"weight_format={self.weight_format!r}"

    def _tensors(self, x: Tensor) -> dict[str, Any]:
        biases = {name: getattr(self, name) for name in ("b1", "b2")}
        names = [weight + suffix for weight in ("w1", "w2") for suffix in STORED_SUFFIXES]
        return {
            **{name: _narrow(getattr(self, name)) for name in names},
            **{name: None if b is None else b.to(x.dtype) for name, b in biases.items()},
            "weight_format": self.weight_format,
        }


def _narrow(tensor: Tensor | None) -> Tensor | None:
    """Returns float32 for float64, to which ``model.double()`` casts the scales."""
    wide = tensor is not None and tensor.dtype == torch.float64
    return tensor.float() if wide and tensor is not None else tensor


def of(layer: nn.Module) -> PackedExperts | None:
    """Returns a layer's packed experts, or a rank's of them; None if they are not packed."""
    local = local_experts.of(layer)
    module = getattr(layer, NAME, None) if local is None else local.part
    return module if isinstance(module, PackedExperts) else None


def experts(
    layer: nn.Module,
    plain: Callable[[], ExpertWeights],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    **options: Any,
) -> Tensor:
    """Computes :func:`custom_ops.experts` with a rank's share, or packed or plain experts."""
    local = local_experts.of(layer)
    if local is not None:
        return local.experts(x, ids, weights, **options)
    packed = of(layer)
    if packed is not None:
        return packed.experts(x, ids, weights, **options)
    return custom_ops.experts(x, ids, weights, *plain(), **options)


def dropless(
    layer: nn.Module,
    plain: Callable[[], ExpertWeights],
    x: Tensor,
    router_weight: Tensor,
    **options: Any,
) -> Tensor:
    """Computes :func:`custom_ops.dropless` with a rank's share, or packed or plain experts."""
    local = local_experts.of(layer)
    if local is not None:
        return local.dropless(x, router_weight, **options)
    packed = of(layer)
    if packed is not None:
        return packed.dropless(x, router_weight, **options)
    return custom_ops.dropless(x, router_weight, **plain()._asdict(), **options)


def pack(layer: nn.Module, packed: PackedExperts, parameters: list[str]) -> None:
    """Gives a layer packed experts in the place of parameters, by their paths, or of a rank's."""
    local = local_experts.of(layer)
    if local is not None:
        local.part = packed
        return
    for path in parameters:
        owner, _, name = path.rpartition(".")
        layer.get_submodule(owner).register_parameter(name, None)
    layer.add_module(NAME, packed)
