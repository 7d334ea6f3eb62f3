"""How many experts of each layer have a slot in device memory: given, or as many as fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from custom_ops.offload import cache_bytes

#: Stands for the layers that are not named.
ANY = "*"


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes that decide how many experts of a layer fit.

    Attributes:
        name: The layer's name, as :func:`dynamo_moe.inspect` shows it.
        node: Its node's name.
        experts: E.
        tensor_bytes: Bytes of one expert's part of each tensor that stores w1 or w2.
    """

    name: str
    node: str
    experts: int
    tensor_bytes: tuple[int, ...]

    def device_bytes(self, slots: int) -> int:
        """The bytes that so many slots take on the device."""
        return cache_bytes(self.experts, slots, self.tensor_bytes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that it may be called by; an export names a node after its module."""
        module, _, _ = self.node.rpartition("/")
        return (self.name, self.node, *filter(None, [module]))


def choose(
    layers: Sequence[ExpertSizes],
    resident_experts: int | Mapping[str, int] | None,
    resident_memory: int | None,
) -> list[int | None]:
    """Returns the slots of each layer; None for one whose experts all stay in the engine.

    Args:
        layers: The layers.
        resident_experts: The slots of every layer; or those of layers by name, where ``"*"`` is
            any other layer. Layers that are not named stay as they are.
        resident_memory: Most bytes that all layers take on the device.

    Raises:
        ValueError: If not exactly one of the two is given, a name is of no layer, a layer has fewer
            experts, or less than one expert of a layer fits.
    """
    if resident_memory is not None and resident_experts is None:
        return [*share(layers, resident_memory)]
    if resident_experts is None or resident_memory is not None:
        raise ValueError("give either resident_experts or resident_memory")
    by_name = {ANY: resident_experts} if isinstance(resident_experts, int) else resident_experts
    _check_names(layers, by_name)
    return [_of_layer(layer, by_name) for layer in layers]


def share(layers: Sequence[ExpertSizes], memory: int) -> list[int]:
    """Returns the slots of each layer that fit into so many bytes in all.

    Every layer gets the same share of its experts, rounded down: the largest that fits.

    Raises:
        ValueError: If less than one expert of a layer fits.
    """

    def slots(share: Fraction) -> list[int]:
        return [int(share * layer.experts) for layer in layers]

    def needed(share: Fraction) -> int:
        return sum(
            layer.device_bytes(count) for layer, count in zip(layers, slots(share), strict=True)
        )

    sizes = {layer.experts for layer in layers}
    shares = sorted({Fraction(count, size) for size in sizes for count in range(1, size + 1)})
    # Of the layer with the fewest experts, one.
    least = Fraction(1, min(sizes))
    fitting = shares[: bisect_right(shares, memory, key=needed)]
    if not fitting or fitting[-1] < least:
        layer = min(layers, key=lambda layer: layer.experts)
        raise ValueError(
            f"{memory} bytes hold less than one expert of layer {layer.name}, which has "
            f"{layer.experts}: with the same share of each layer's experts, the {len(layers)} "
            f"layers need {needed(least)} bytes"
        )
    return slots(fitting[-1])


def _check_names(layers: Sequence[ExpertSizes], by_name: Mapping[str, int]) -> None:
    if not by_name:
        raise ValueError("resident_experts names no layer")
    known = {ANY, *(name for layer in layers for name in layer.names)}
    unknown = [name for name in by_name if name not in known]
    if unknown:
        names = ", ".join(layer.name for layer in layers)
        raise ValueError(f"there is no MoE layer {unknown[0]!r}; the layers: {names}")


def _of_layer(layer: ExpertSizes, by_name: Mapping[str, int]) -> int | None:
    slots = next((by_name[name] for name in (*layer.names, ANY) if name in by_name), None)
    if slots is not None and not 1 <= slots <= layer.experts:
        raise ValueError(
            f"layer {layer.name} has {layer.experts} experts: resident_experts must be in "
            f"1..{layer.experts}, got {slots}"
        )
    return slots
