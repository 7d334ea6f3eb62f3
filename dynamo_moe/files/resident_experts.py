"""How many experts of each layer have a slot in device memory: given, or as many as fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Stands for the layers that are not named.
ANY = "*"


@dataclass(frozen=True)
class ExpertSizes:
    """What decides how many experts of a layer fit.

    Attributes:
        name: The layer's name, as :func:`dynamo_moe.inspect` shows it.
        node: Its node's name.
        experts: E.
        expert_bytes: Bytes of one expert's w1 and w2.
    """

    name: str
    node: str
    experts: int
    expert_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        """What it may be called; a node is named after its module by an export."""
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
        resident_memory: Most bytes of all slots.

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

    Every layer gets the same share of its experts, rounded down, and no more than it has.

    Raises:
        ValueError: If less than one expert of a layer fits.
    """
    total = sum(layer.experts * layer.expert_bytes for layer in layers)
    slots = [min(layer.experts, layer.experts * memory // total) for layer in layers]
    if 0 in slots:
        least = max(-(-total // layer.experts) for layer in layers)
        layer = layers[slots.index(0)]
        raise ValueError(
            f"{memory} bytes hold less than one expert of layer {layer.name}, which has "
            f"{layer.experts} of {layer.expert_bytes} bytes: the file's {len(layers)} layers, "
            f"{total} bytes, need {least} for one each"
        )
    return slots


def _check_names(layers: Sequence[ExpertSizes], by_name: Mapping[str, int]) -> None:
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
