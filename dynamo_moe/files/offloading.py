"""An ONNX file for an engine whose experts' weights stay in host memory.

The MoE nodes of such a file say where their experts' weights lie, and have a placeholder in their
stead: what is in the network would be on the GPU.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import prod
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir

from custom_ops.offload.weight_source import ALIGNMENT, SUFFIX, WeightSource
from custom_ops.weight_formats import ZERO_POINTS
from dynamo_moe.files.experts_file import ExpertsFile, Progress, write_experts
from dynamo_moe.files.kernel_layers import inlined_model, kernel_layers_of
from dynamo_moe.files.model_files import destination, load_graph, save_model
from dynamo_moe.files.offload_report import OffloadedLayer, OffloadReport
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
    plugin_version,
)
from dynamo_moe.moe_nodes.schemas import VERSION

if TYPE_CHECKING:
    from custom_ops.kernels.layer import Layer


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

    The file stays as it is, for ONNX Runtime. The copy is for TensorRT, and for ONNX Runtime's CUDA
    provider with the native library's operators; it refers to the same
    files for all other weights. Experts' weights that lie in a safetensors file, as
    ``link_weights`` leaves them, stay there; all others are copied into one such file.

    Args:
        path: The file.
        output: The copy. In another folder, links to the files of the other weights are made
            beside it: TensorRT's parser follows them, onnx and ONNX Runtime refuse them.
        resident_experts: The slots for experts on the GPU: of every layer, or of layers by name,
            where ``"*"`` is any other layer. Layers that are not named are not offloaded.
        resident_memory: Instead of their number, the most bytes that all slots and their tables
            take in each cache: as many as fit, the same share of each layer's experts.
        weights: The safetensors file that weights are copied into, if there are any; by default
            ``<output>.experts.safetensors``; another one must be called ``*.safetensors``, too. A
            checksum of its content is put before this suffix: a file of other weights, which an
            engine may read, stays.
        shared_cache: Whether the contexts of an engine share their slots, under a lock and without
            CUDA graphs; by default each has its own.
        progress: Called with the bytes of the weights that are copied and all of them.

    Raises:
        FileNotFoundError: If there is no such file, or no folder for the copy.
        OSError: If a file cannot be written.
        ValueError: If the file is not an ONNX model, has no MoE node, or a node that there are no
            kernels for; a layer has fewer experts, or less than one fits; or a weight cannot leave
            the network, as it is computed or used elsewhere.
    """
    return offload_graph(
        load_graph(path),
        Path(path),
        Path(output),
        resident_experts=resident_experts,
        resident_memory=resident_memory,
        weights=weights,
        shared_cache=shared_cache,
        progress=progress,
    )


def offload_graph(
    stored: onnx.ModelProto,
    path: Path,
    output: Path,
    *,
    resident_experts: int | Mapping[str, int] | None = None,
    resident_memory: int | None = None,
    weights: str | PathLike[str] | None = None,
    shared_cache: bool = False,
    progress: Progress | None = None,
) -> OffloadReport:
    """As :func:`offload_file`, of a file that is read already, without its external data."""
    file = Path(weights) if weights else output.with_name(f"{output.name}.experts.safetensors")
    output = destination(output)
    # Says what there are no kernels for before gigabytes are copied.
    kernel_layers_of(stored)
    model = inlined_model(stored)
    ir.external_data.set_base_dir(model.graph, path.parent.resolve())
    _check_files(model, path, output, file)
    all_layers = _layers(model, path)
    slots = choose([layer.expert_sizes for layer in all_layers], resident_experts, resident_memory)
    chosen = {layer: count for layer, count in zip(all_layers, slots, strict=True) if count}
    _separate_zero_points(list(chosen))
    _check_weights(list(chosen))
    values = {value: name for layer in chosen for name, value in layer.weights.items()}
    links = _links(model, set(values), path, output.parent)
    sources, written = _sources(list(values), file, progress)
    try:
        _drop_bodies(model, {layer.node for layer in chosen})
        layers = tuple(
            _offload(
                layer,
                count,
                {name: sources[value] for name, value in layer.weights.items()},
                shared_cache,
            )
            for layer, count in chosen.items()
        )
        model.opset_imports[OFFLOADED_DOMAIN] = VERSION
        for value, name in values.items():
            _empty(value, one_for_each=name.endswith(ZERO_POINTS))
        for link, target in links.items():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        save_model(model, output, external_data=False)
    except BaseException:
        if written is not None and written.is_new:
            written.path.unlink()
        raise
    return OffloadReport(
        path=output,
        weights_file=None if written is None else written.path,
        is_weights_file_new=written is not None and written.is_new,
        layers=layers,
        shared_cache=shared_cache,
        notes=tuple(_notes(layers)),
    )


def offloaded_kernel_layers(
    path: str | PathLike[str],
    *,
    resident_experts: int | Mapping[str, int] | None = None,
    resident_memory: int | None = None,
    stored: onnx.ModelProto | None = None,
) -> list[Layer]:
    """Returns the kernels' layers of a file's nodes if :func:`offload_file` offloads their experts.

    Args:
        path: The file.
        resident_experts: As of :func:`offload_file`.
        resident_memory: As of :func:`offload_file`.
        stored: The file's content, if it is read already.

    Raises:
        ValueError: As of :func:`offload_file`, of nodes and numbers.
    """
    stored = load_graph(path) if stored is None else stored
    layers = kernel_layers_of(stored)
    all_layers = _layers(inlined_model(stored), path)
    slots = choose([layer.expert_sizes for layer in all_layers], resident_experts, resident_memory)
    return [
        replace(layer, resident_experts=count) for layer, count in zip(layers, slots, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _Layer:
    """An MoE node, and what it says of its layer."""

    node: ir.Node
    parsed: MoENode
    expert_sizes: ExpertSizes

    @classmethod
    def of(cls, node: ir.Node) -> _Layer:
        parsed = parse(node)
        name = layer_name(str(parsed.inputs["w1"].name), _name(node))
        shape = parsed.shape
        tensor_bytes = tuple(
            prod(sizes) * tensor.dtype.itemsize for tensor, sizes in shape.stored.values()
        )
        sizes = ExpertSizes(name, _name(node), shape.experts, tensor_bytes)
        return cls(node, parsed, sizes)

    @property
    def weights(self) -> dict[str, ir.Value]:
        """The values of the tensors that store w1 and w2."""
        return {name: self.parsed.inputs[name] for name in self.parsed.shape.stored}


def _layers(model: ir.Model, path: str | PathLike[str]) -> list[_Layer]:
    layers = [_Layer.of(node) for node in moe_nodes(model)]
    if not layers:
        raise ValueError(f"{path} has no MoE nodes of domain 'moe', as files of target plugin do")
    return layers


def _name(node: ir.Node) -> str:
    return node.name or str(node.outputs[0].name)


def _check_files(model: ir.Model, path: Path, output: Path, file: Path) -> None:
    """Checks the names of files that are written: nothing that is read would be overwritten.

    Raises:
        ValueError: If something would be, or the weights' file has another suffix, or a path that
            an engine cannot hold.
    """
    if file.suffix != SUFFIX:
        raise ValueError(f"a file of weights must be called *{SUFFIX}, got {file}")
    _check_path(file)
    if output.resolve() in {path.resolve(), *_files(model).values()}:
        raise ValueError(f"{output} is read to write it: name another file")


def _check_path(path: Path) -> None:
    """Raises a ValueError if an engine, which holds paths as text, cannot hold one."""
    text = str(path.parent.resolve() / path.name)
    # Bytes that are not UTF-8 are surrogates in a path.
    if any(character < " " or "\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(
            f"a path of weights must be UTF-8 without control characters, got {text!r}"
        )


def _separate_zero_points(chosen: Sequence[_Layer]) -> None:
    """Gives layers zero points of their own where each expert has one, a byte.

    Where biases follow, an export fills in the same for all layers.
    """
    nodes = {layer.node for layer in chosen}
    for layer in chosen:
        for name, value in layer.weights.items():
            stored, graph = value.const_value, value.graph
            is_shared = not {user for user, _ in value.uses()} <= nodes
            if not (name.endswith(ZERO_POINTS) and is_shared and stored is not None and graph):
                continue
            if stored.shape.numpy()[1:] == (1, 1) and value.is_initializer():
                own_name = f"{layer.expert_sizes.name}.{name}"
                own = ir.Value(
                    name=own_name,
                    type=value.type,
                    shape=value.shape,
                    const_value=ir.Tensor(stored.numpy(), name=own_name),
                )
                graph.register_initializer(own)
                layer.node.replace_input_with(INPUTS[layer.node.op_type].index(name), own)
                layer.parsed.inputs[name] = own


def _check_weights(chosen: Sequence[_Layer]) -> None:
    """Checks that the layers' weights lie in files, and that nothing else needs them.

    Raises:
        ValueError: If a weight is computed, of another shape, or used elsewhere.
    """
    nodes = {layer.node for layer in chosen}
    for layer in chosen:
        for name, value in layer.weights.items():
            where = f"layer {layer.expert_sizes.name}: its {name}, {value.name!r},"
            if value.is_graph_output() or value.is_graph_input():
                raise ValueError(f"{where} is also an input or output of the graph")
            if not value.is_initializer() or value.const_value is None:
                raise ValueError(f"{where} is computed by the graph, and lies in no file")
            shape = layer.parsed.shape.sizes_in_memory(name)
            actual = tuple(value.const_value.shape.numpy())
            if actual != shape:
                raise ValueError(f"{where} must have the shape {list(shape)}, got {list(actual)}")
            for user, position in value.uses():
                if user in nodes and INPUTS[user.op_type][position].startswith(tuple(SOURCES)):
                    continue
                hint = ": offload that layer, too" if is_moe(user) and user not in nodes else ""
                raise ValueError(
                    f"{where} is also used by node {_name(user)!r} ({user.op_type}), and must "
                    f"stay in the engine{hint}"
                )


def _offload(
    layer: _Layer, slots: int, sources: Mapping[str, WeightSource], shared_cache: bool
) -> OffloadedLayer:
    """Writes into a layer's node where its weights are."""
    layer.node.domain = OFFLOADED_DOMAIN
    router = layer.parsed.shape.router
    version = plugin_version(offloaded=True, rare=router is not None and router.is_rare)
    layer.node.attributes.add(ir.AttrString("plugin_version", version))
    layer.node.attributes.add(ir.AttrInt64(RESIDENT_EXPERTS, slots))
    layer.node.attributes.add(ir.AttrInt64(EXPERT_CACHE, int(shared_cache)))
    for weight, attribute in SOURCES.items():
        lines = (str(source) for name, source in sources.items() if name.startswith(weight))
        layer.node.attributes.add(ir.AttrString(attribute, "\n".join(lines)))
    sizes = layer.expert_sizes
    return OffloadedLayer(
        sizes.name, sizes.node, layer.parsed.shape.top_k, sizes.experts, slots, sources
    )


def _sources(
    values: Sequence[ir.Value], file: Path, progress: Progress | None
) -> tuple[dict[ir.Value, WeightSource], ExpertsFile | None]:
    """Returns where the weights lie, and the file for those that lie in no safetensors file."""
    tensors = {value: value.const_value for value in values if value.const_value is not None}
    linked = {value: _source(tensor) for value, tensor in tensors.items()}
    sources = {value: source for value, source in linked.items() if source is not None}
    left = {value: tensor for value, tensor in tensors.items() if value not in sources}
    if not left:
        return sources, None
    written = write_experts(list(left.values()), file, progress)
    return sources | dict(zip(left, written.sources, strict=True)), written


def _source(tensor: ir.TensorProtocol) -> WeightSource | None:
    """Returns where a tensor lies in a safetensors file; None if it does not."""
    if not isinstance(tensor, ir.ExternalTensor) or Path(tensor.path).suffix != SUFFIX:
        return None
    _check_path(Path(tensor.path))
    try:
        return WeightSource.of(Path(tensor.path), tensor.offset or 0, tensor.nbytes)
    except ValueError:
        return None


def _empty(value: ir.Value, *, one_for_each: bool) -> None:
    """Puts one zero in the place of a weight: TensorRT's parser takes no input without a name.

    It is [1], but [1, 1, 1] where each expert has one zero point, and not one for each scale.
    """
    if value.const_value is not None:
        dtype, shape = value.const_value.dtype, value.const_value.shape.numpy()
        is_one = one_for_each and shape[1:] == (1, 1)
        zero = np.zeros((1, 1, 1) if is_one else (1,), dtype.numpy())
        value.const_value = ir.Tensor(zero, dtype=dtype, name=value.name)
        value.shape = ir.Shape(zero.shape)


def _drop_bodies(model: ir.Model, offloaded: set[ir.Node]) -> None:
    """Drops the bodies of offloaded nodes, which would compute with the placeholders."""
    bodies = {node.op_identifier() for node in offloaded}
    graphs = (model.graph, *(function.graph for function in model.functions.values()))
    others = (node for graph in graphs for node in graph.all_nodes() if node not in offloaded)
    for body in bodies - {node.op_identifier() for node in others}:
        model.functions.pop(body, None)


def _links(
    model: ir.Model, offloaded: AbstractSet[ir.Value], path: Path, folder: Path
) -> dict[Path, Path]:
    """Returns the links that a copy in a folder needs to the files of its other weights.

    Raises:
        FileExistsError: If there is another file of that name.
        ValueError: If a file is not in the model's folder or below it.
    """
    links: dict[Path, Path] = {}
    if folder.resolve() == path.parent.resolve():
        return links
    for location, target in _files(model, offloaded).items():
        if Path(location).is_absolute() or ".." in Path(location).parts:
            raise ValueError(f"{location} is not a file in the ONNX file's folder: no link is made")
        link = folder / location
        if not os.path.lexists(link):
            links[link] = target
        elif not (link.exists() and link.samefile(target)):
            raise FileExistsError(errno.EEXIST, "another file is in the place of a link", link)
    return links


def _files(model: ir.Model, without: AbstractSet[ir.Value] = frozenset()) -> dict[str, Path]:
    """The files that a model's weights lie in, by their names in the model."""
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    return {
        str(value.const_value.location): Path(value.const_value.path).resolve()
        for value in values
        if isinstance(value.const_value, ir.ExternalTensor) and value not in without
    }


def _notes(layers: Sequence[OffloadedLayer]) -> list[str]:
    slow = [layer for layer in layers if layer.waves > 1]
    notes = []
    if slow:
        first, more = slow[0], f" and {len(slow) - 1} more" * (len(slow) > 1)
        notes.append(
            f"layer {first.name}{more}: with {first.resident_experts} resident experts, a token's "
            f"{first.top_k} take {first.waves} waves, whatever is resident"
        )
    unaligned = {
        source.path for layer in layers for source in layer.sources if source.offset % ALIGNMENT
    }
    notes += [
        f"{path}: weights that do not begin at a multiple of {ALIGNMENT} bytes are copied to "
        "pinned memory when the engine first runs, instead of mapped"
        for path in sorted(unaligned)
    ]
    if layers and all(layer.resident_experts == layer.experts for layer in layers):
        notes.append("every expert has a slot: without offloading, an engine takes no more memory")
    return notes
