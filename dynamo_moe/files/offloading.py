"""An ONNX file for an engine whose experts' weights stay in host memory.

The MoE nodes of such a file say where their experts' weights lie, and have a placeholder in their
stead: what is in the network would be on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from custom_ops.weight_source import ALIGNMENT, WeightSource
from dynamo_moe.files.experts_file import Progress, write_experts
from dynamo_moe.files.kernel_layers import kernel_layers
from dynamo_moe.files.model_files import check_destination, load_graph, save_model
from dynamo_moe.files.resident_experts import ExpertSizes, choose
from dynamo_moe.moe_nodes.nodes import (
    EXPERT_CACHE,
    INPUTS,
    OFFLOADED_DOMAIN,
    RESIDENT_EXPERTS,
    SOURCES,
    MoENode,
    is_moe,
    layer_name,
    moe_nodes,
    parse,
)
from dynamo_moe.moe_nodes.schemas import VERSION

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
        w1: Where the weights of the first product lie.
        w2: Where those of the second lie.
    """

    name: str
    node: str
    top_k: int
    experts: int
    resident_experts: int
    w1: WeightSource
    w2: WeightSource

    @property
    def sources(self) -> tuple[WeightSource, WeightSource]:
        """Where its weights lie."""
        return self.w1, self.w2

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights, which are those of a slot."""
        return (self.w1.bytes + self.w2.bytes) // self.experts

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return self.resident_experts * self.expert_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all experts' weights."""
        return self.w1.bytes + self.w2.bytes

    @property
    def waves(self) -> int:
        """How many times the slots are filled for one token whose experts have none."""
        return -(-min(self.experts, self.top_k) // self.resident_experts)

    def to_dict(self) -> dict[str, Any]:
        """The layer as strings and numbers."""
        own = {**asdict(self), "w1": str(self.w1), "w2": str(self.w2)}
        return {**own, "slot_bytes": self.slot_bytes, "weight_bytes": self.weight_bytes}


@dataclass(frozen=True)
class OffloadReport:
    """The outcome of :func:`offload_file`; rich prints it as a table.

    Attributes:
        path: The ONNX file that was written, for TensorRT alone.
        weights_file: The safetensors file that was written; None if every weight was in one.
        layers: The offloaded layers.
        shared_cache: Whether the contexts of an engine share their slots.
        notes: What a user of the engine should know.
    """

    path: Path
    weights_file: Path | None
    layers: tuple[OffloadedLayer, ...]
    shared_cache: bool
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, ready for ``json.dumps``."""
        return {
            "path": str(self.path),
            "weights_file": None if self.weights_file is None else str(self.weights_file),
            "layers": [layer.to_dict() for layer in self.layers],
            **memory_of(self.layers),
            "shared_cache": self.shared_cache,
            "notes": list(self.notes),
        }

    def __rich__(self) -> RenderableType:
        """What rich prints."""
        from dynamo_moe.files.offloading_view import report_view

        return report_view(self)


def memory_of(layers: Iterable[OffloadedLayer]) -> dict[str, int]:
    """Returns the bytes of all slots, of the weights if all were resident, and on the host.

    A weight that layers share is once in the network and on the host, but each has slots.
    """
    layers = list(layers)
    sources = {source for layer in layers for source in layer.sources}
    weights = sum(source.bytes for source in sources)
    return {
        "slot_bytes": sum(layer.slot_bytes for layer in layers),
        "weight_bytes": weights,
        "host_bytes": weights,
    }


def offload_file(
    path: str | PathLike[str],
    output: str | PathLike[str],
    *,
    resident_experts: int | Mapping[str, int] | None = None,
    resident_memory: int | None = None,
    weights: str | PathLike[str] | None = None,
    shared_cache: bool = False,
    progress: Progress | None = None,
) -> OffloadReport:
    """Rewrites a file of target ``plugin`` for an engine that holds a part of the experts.

    The file stays as it is, for ONNX Runtime. The copy is for TensorRT alone; it refers to the same
    files for all other weights. Experts' weights that lie in a safetensors file, as
    ``link_weights`` leaves them, stay there; all others are copied into one such file.

    Args:
        path: The file.
        output: The copy. In another folder, links to the files of the other weights are made
            beside it.
        resident_experts: The slots for experts on the GPU: of every layer, or of layers by name,
            where ``"*"`` is any other layer. Layers that are not named are not offloaded.
        resident_memory: Most bytes of all slots, instead of their number: as many as fit, the same
            share of each layer's experts.
        weights: The safetensors file that weights are copied into, if there are any; by default
            ``<output>.experts.safetensors``.
        shared_cache: Whether the contexts of an engine share their slots, under a lock; by default
            each has its own.
        progress: Called with the bytes of the weights that are copied and all of them.

    Raises:
        FileNotFoundError: If there is no such file, or no folder for the copy.
        OSError: If a file cannot be written.
        ValueError: If the file is not an ONNX model, has no MoE node, or a node that there are no
            kernels for; a layer has fewer experts, or less than one fits; or a weight cannot leave
            the network, as it is computed or used elsewhere.
    """
    path, output = Path(path), Path(output)
    check_destination(output)
    if output.exists() and output.samefile(path):
        raise ValueError(f"{output} is the file itself: name another one for the copy")
    # Before gigabytes are copied.
    kernel_layers(path)
    model = ir.from_proto(load_graph(path))
    ir.external_data.set_base_dir(model.graph, path.parent.resolve())
    found = [_Node.of(node) for node in moe_nodes(model)]
    if not found:
        raise ValueError(f"{path} has no MoE nodes of domain 'moe', as files of target plugin do")
    slots = choose([each.expert_sizes for each in found], resident_experts, resident_memory)
    chosen = {each.node: (each, count) for each, count in zip(found, slots, strict=True) if count}
    _check_uses(chosen)
    file = Path(weights) if weights else output.with_name(f"{output.name}.experts.safetensors")
    values = {value: None for each, _ in chosen.values() for value in each.weights.values()}
    sources, copied = _sources(list(values), file, progress)
    _drop_bodies(model, set(chosen))
    model.opset_imports[OFFLOADED_DOMAIN] = VERSION
    for node, (each, count) in chosen.items():
        node.domain = OFFLOADED_DOMAIN
        node.attributes.add(ir.AttrInt64(RESIDENT_EXPERTS, count))
        node.attributes.add(ir.AttrInt64(EXPERT_CACHE, int(shared_cache)))
        for name, value in each.weights.items():
            node.attributes.add(ir.AttrString(SOURCES[name], str(sources[value])))
    for value in values:
        _empty(value)
    if output.parent.resolve() != path.parent.resolve():
        _link_files(model, output.parent)
    save_model(model, output, external_data=False)
    layers = [
        OffloadedLayer(
            each.expert_sizes.name,
            each.expert_sizes.node,
            each.parsed.sizes["top_k"],
            each.parsed.sizes["experts"],
            count,
            *(sources[value] for value in each.weights.values()),
        )
        for each, count in chosen.values()
    ]
    return OffloadReport(
        path=output,
        weights_file=file if copied else None,
        layers=tuple(layers),
        shared_cache=shared_cache,
        notes=tuple(_notes(layers)),
    )


@dataclass(frozen=True)
class _Node:
    """An MoE node, and the values of its w1 and w2."""

    node: ir.Node
    parsed: MoENode
    weights: Mapping[str, ir.Value]

    @classmethod
    def of(cls, node: ir.Node) -> _Node:
        parsed = parse(node)
        weights = {name: parsed.inputs[name] for name in SOURCES}
        for name, shape in _shapes(parsed).items():
            value = weights[name]
            if not value.is_initializer() or value.const_value is None:
                raise ValueError(
                    f"node {_name(node)!r}: its {name} is computed by the graph, or given to it, "
                    "and lies in no file: it cannot be offloaded"
                )
            found = tuple(value.const_value.shape.numpy())
            if found != shape:
                raise ValueError(
                    f"node {_name(node)!r}: its {name} must have the shape {list(shape)}, got "
                    f"{list(found)}"
                )
        return cls(node, parsed, weights)

    @property
    def expert_sizes(self) -> ExpertSizes:
        tensors = [value.const_value for value in self.weights.values()]
        size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        experts = self.parsed.sizes["experts"]
        node = _name(self.node)
        name = layer_name(str(self.weights["w1"].name), node)
        return ExpertSizes(name, node, experts, size // experts)


def _name(node: ir.Node) -> str:
    return node.name or str(node.outputs[0].name)


def _shapes(parsed: MoENode) -> dict[str, tuple[int, ...]]:
    experts, width, hidden = (parsed.sizes[name] for name in ("experts", "width", "hidden"))
    rows = parsed.experts.rows_per_hidden * hidden
    w1, w2 = (rows, width), (width, hidden)
    return {
        "w1": (experts, *(reversed(w1) if parsed.layout.w1_transposed else w1)),
        "w2": (experts, *(reversed(w2) if parsed.layout.w2_transposed else w2)),
    }


def _check_uses(chosen: Mapping[ir.Node, tuple[_Node, int]]) -> None:
    """Checks that nothing but offloaded layers needs their weights.

    Raises:
        ValueError: If something does.
    """
    for each, _ in chosen.values():
        for name, value in each.weights.items():
            where = f"layer {each.expert_sizes.name}: its {name}, {value.name!r},"
            if value.is_graph_output() or value.is_graph_input():
                raise ValueError(f"{where} is also an input or output of the graph")
            for user, place in value.uses():
                if user in chosen and INPUTS[user.op_type][place] in SOURCES:
                    continue
                hint = ": offload that layer, too" if is_moe(user) and user not in chosen else ""
                raise ValueError(
                    f"{where} is also used by node {_name(user)!r} ({user.op_type}), and must "
                    f"stay in the engine{hint}"
                )


def _sources(
    values: Sequence[ir.Value], file: Path, progress: Progress | None
) -> tuple[dict[ir.Value, WeightSource], bool]:
    """Returns where the weights lie, and whether any was copied into ``file``."""
    tensors = {value: value.const_value for value in values if value.const_value is not None}
    sources = {value: _source(tensor) for value, tensor in tensors.items()}
    left = [value for value, source in sources.items() if source is None]
    if left:
        written = write_experts([tensors[value] for value in left], file, progress)
        sources |= dict(zip(left, written, strict=True))
    return {value: source for value, source in sources.items() if source is not None}, bool(left)


def _source(tensor: ir.TensorProtocol) -> WeightSource | None:
    """Returns where a tensor lies in a safetensors file; None if it does not."""
    if not isinstance(tensor, ir.ExternalTensor):
        return None
    try:
        return WeightSource.of(Path(tensor.path), tensor.offset or 0, tensor.nbytes)
    except ValueError:
        return None


def _empty(value: ir.Value) -> None:
    """Puts one zero in the place of a weight: TensorRT's parser takes no input without a name."""
    if value.const_value is not None:
        dtype = value.const_value.dtype
        value.const_value = ir.Tensor(np.zeros(1, dtype.numpy()), dtype=dtype, name=value.name)
        value.shape = ir.Shape([1])


def _drop_bodies(model: ir.Model, offloaded: set[ir.Node]) -> None:
    """Drops the bodies of offloaded nodes, which would compute with the placeholders."""
    bodies = {node.op_identifier() for node in offloaded}
    graphs = (model.graph, *(function.graph for function in model.functions.values()))
    others = (node for graph in graphs for node in graph.all_nodes() if node not in offloaded)
    for body in bodies - {node.op_identifier() for node in others}:
        model.functions.pop(body, None)


def _link_files(model: ir.Model, folder: Path) -> None:
    """Makes links in a folder to the files that a model's weights lie in.

    Raises:
        FileExistsError: If there is another file of that name.
        ValueError: If a file is not in the model's folder or below it.
    """
    weights = (
        value.const_value for graph in model.graphs() for value in graph.initializers.values()
    )
    files = {
        tensor.location: Path(tensor.path).resolve()
        for tensor in weights
        if isinstance(tensor, ir.ExternalTensor)
    }
    for location, path in files.items():
        if Path(location).is_absolute() or ".." in Path(location).parts:
            raise ValueError(f"{location} is not a file in the ONNX file's folder: no link is made")
        link = folder / location
        link.parent.mkdir(parents=True, exist_ok=True)
        if not (link.exists() and link.samefile(path)):
            link.symlink_to(path)


def _notes(layers: Sequence[OffloadedLayer]) -> list[str]:
    slow = [layer for layer in layers if layer.waves > 1]
    notes = []
    if slow:
        first, more = slow[0], f" and {len(slow) - 1} more" * (len(slow) > 1)
        notes.append(
            f"layer {first.name}{more}: with {first.resident_experts} resident experts, a token's "
            f"{first.top_k} take {first.waves} waves, whatever is resident"
        )
    unaligned = {each.path for layer in layers for each in layer.sources if each.offset % ALIGNMENT}
    notes += [
        f"{path}: weights that do not begin at a multiple of {ALIGNMENT} bytes are copied to "
        "pinned memory when the engine is loaded, instead of mapped"
        for path in sorted(unaligned)
    ]
    if layers and all(layer.resident_experts == layer.experts for layer in layers):
        notes.append("every expert has a slot: without offloading, an engine takes no more memory")
    return notes
