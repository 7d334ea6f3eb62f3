"""What offloading did to a file: its layers, and the memory that they take on GPU and host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from custom_ops.offload import cache_bytes
from custom_ops.offload.weight_source import WeightSource

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class OffloadedLayer:
    """An MoE layer whose experts' weights are copied to the GPU when a token needs them.

    Attributes:
        name: The layer's name, as :func:`dynamo_moe.inspect` shows it.
        node: Its node's name.
        top_k: Experts per token.
        experts: Experts.
        resident_experts: Slots for experts in device memory.
        tensors: Where each tensor lies that stores its weights: ``w1`` and ``w2``, with
            ``w1_scales`` and the like where they are packed.
    """

    name: str
    node: str
    top_k: int
    experts: int
    resident_experts: int
    tensors: Mapping[str, WeightSource]

    @property
    def sources(self) -> tuple[WeightSource, ...]:
        """Where its weights lie."""
        return tuple(self.tensors.values())

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights, which are those of a slot."""
        return self.weight_bytes // self.experts

    @property
    def device_bytes(self) -> int:
        """Bytes of all slots and the tables of what they hold."""
        sizes = (source.bytes // self.experts for source in self.sources)
        return cache_bytes(self.experts, self.resident_experts, sizes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all experts' weights."""
        return sum(source.bytes for source in self.sources)

    @property
    def waves(self) -> int:
        """How many times the slots are filled for one token whose experts have none."""
        return -(-min(self.experts, self.top_k) // self.resident_experts)

    def to_dict(self) -> dict[str, Any]:
        """The layer as dicts, strings and numbers."""
        return {
            "name": self.name,
            "node": self.node,
            "top_k": self.top_k,
            "experts": self.experts,
            "resident_experts": self.resident_experts,
            "tensors": {name: source.to_dict() for name, source in self.tensors.items()},
            "expert_bytes": self.expert_bytes,
            "device_bytes": self.device_bytes,
            "weight_bytes": self.weight_bytes,
        }


@dataclass(frozen=True)
class OffloadReport:
    """The outcome of :func:`offload_file`; rich prints it as a table.

    Attributes:
        path: The ONNX file that was written.
        weights_file: The safetensors file that weights were copied into; None if every weight was
            in one.
        is_weights_file_new: Whether it was written; otherwise there was one of the same content.
        layers: The offloaded layers.
        shared_cache: Whether the contexts of an engine share their slots.
        notes: What a user of the engine should know.
    """

    path: Path
    weights_file: Path | None
    is_weights_file_new: bool
    layers: tuple[OffloadedLayer, ...]
    shared_cache: bool
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, ready for ``json.dumps``."""
        return {
            "path": str(self.path),
            "weights_file": None if self.weights_file is None else str(self.weights_file),
            "is_weights_file_new": self.is_weights_file_new,
            "layers": [layer.to_dict() for layer in self.layers],
            "memory": memory_of(self.layers),
            "shared_cache": self.shared_cache,
            "notes": list(self.notes),
        }

    def __rich__(self) -> RenderableType:
        """Returns the table that rich prints."""
        from dynamo_moe.files.offloading_view import report_view

        return report_view(self.to_dict())


def memory_of(layers: Iterable[OffloadedLayer]) -> dict[str, int]:
    """Returns the bytes on the device, those if all experts were there, and on the host.

    A weight that layers share is once in the network and on the host, but each has slots.
    """
    layers = list(layers)
    sources = {source for layer in layers for source in layer.sources}
    weights = sum(source.bytes for source in sources)
    return {
        "device_bytes": sum(layer.device_bytes for layer in layers),
        "weight_bytes": weights,
        "host_bytes": weights,
    }
