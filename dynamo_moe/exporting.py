"""``export``: from a PyTorch module to an ONNX file, one call."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import onnx.defs
import onnx_ir as ir
import torch
from rich.console import Console

from dynamo_moe import local_experts, pytree
from dynamo_moe.conversion import unconverted
from dynamo_moe.evaluation import check_model, unwrapped
from dynamo_moe.export_report import ExportReport
from dynamo_moe.files import file_form, inputs, metadata, model_files, rank_files
from dynamo_moe.files.copies import Copy, with_copies
from dynamo_moe.files.rank_files import rank_path
from dynamo_moe.graph import dequantized_weights, lowering
from dynamo_moe.graph.fusion import FIRST_OPSET
from dynamo_moe.model_graph import (
    Arguments,
    ExportForm,
    Graph,
    RepeatedBlocks,
    Trace,
    check_graph,
    explained_by_model,
    graph_of,
    graph_of_trace,
    layout_of,
    naming_unconverted,
    rename,
)
from dynamo_moe.moe_nodes.targets.names import DEFAULT_BODY, DEFAULT_TARGET, BodyName, TargetName
from dynamo_moe.moe_nodes.targets.registry import chosen_target
from dynamo_moe.private import exporter
from dynamo_moe.private.pytorch import modules_by_path, own_parts
from dynamo_moe.process_state import ProcessState, collecting_seldom
from dynamo_moe.progress.display import shown
from dynamo_moe.progress.phases import Progress, Stopwatch
from dynamo_moe.progress.profiling import profiled, save_profile
from dynamo_moe.sharding import Plan, check_plan, sharded
from dynamo_moe.tracing.arguments import constants_of
from dynamo_moe.tracing.autocast import autocast_inside
from dynamo_moe.tracing.dynamic_shapes import (
    BATCH,
    DynamicShapes,
    resolve,
)
from dynamo_moe.weights import placeholders

MIN_OPSET = 18


def export(
    model: torch.nn.Module,
    args: tuple[Any, ...] | torch.Tensor,
    path: str | os.PathLike[str],
    *,
    kwargs: dict[str, Any] | None = None,
    target: TargetName = DEFAULT_TARGET,
    body: BodyName = DEFAULT_BODY,
    dynamic_shapes: DynamicShapes = BATCH,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset: int | None = None,
    fuse: bool = True,
    shared_cache: bool = False,
    external_data: bool | None = None,
    link_weights: bool = False,
    layers_as_functions: bool = False,
    repeated_blocks: RepeatedBlocks = "auto",
    ranks: int | None = None,
    plan: Plan = "experts",
    split_axes: Mapping[str, int] | None = None,
    metadata_props: Mapping[str, str] | None = None,
    progress: bool | Progress = False,
    profile: bool = False,
) -> ExportReport:
    """Exports a model, after :func:`convert`, to an ONNX file.

    A router that the model computes itself becomes part of its layer's node, ``DroplessMoE``, where
    that has the same router: softmax or sigmoid of logits in float32 or in the tokens' dtype, with
    or without renormalising, a bias of the logits or of the choice, groups of experts, a constant
    factor. Any other stays as it is, in front of ``DroplessMoEExperts``. Where scores are equal the
    node takes the lower expert; it compares logits, which still differ where float32 rounds their
    sigmoids to 1.

    Args:
        model: The model; exported as in ``eval()``, left as it was.
        args: Example positional arguments, or one tensor. Only their shapes and dtypes matter; for
            :func:`verify`, the file also records the least and the greatest of their integers.
        path: The file to write. It is written beside and renamed, so an earlier file stays whole
            until then.
        kwargs: Example keyword arguments.
        target: ``plugin``: one ``moe`` node per layer, with a body of standard operators in the
            same file; ``dense``: standard operators only, every expert on every token;
            ``onnxruntime``: ``com.microsoft::MoE``; ``tensorrt_moe``: TensorRT's own ``TRT_MoE``,
            experimental, for datacentre Blackwell and Thor alone.
        body: With ``plugin``, how runtimes without the plugin compute a layer. ``loop`` visits the
            experts and reads their weights where they are: with external data it loads at once,
            however large the model. ``unrolled`` has products for each expert, whose weights ONNX
            Runtime packs while it loads the file: faster where an expert gets few rows in a run,
            but it takes seconds to load and the memory of a copy.
        dynamic_shapes: ``"batch"``: the first dimension of every tensor is symbolic; a mapping from
            argument to ``{dimension: name}`` adds to that (``{0: None}`` makes it static); a tuple
            or a list with an entry for each argument adds to nothing, as in ``torch.export``; None:
            every shape is static. A tensor's entry can also be a tuple or a list with a name for
            each dimension, or None; an argument that is a container has entries in the same
            structure. A name is a string, a ``torch.export.Dim``, ``Dim.DYNAMIC`` or ``Dim.AUTO``,
            which give none; ``Dim.STATIC``, the example's size and None stand for a static
            dimension. Dimensions of one name have one size. A ``ShapesCollection`` and
            ``AdditionalInputs`` of ``torch.export`` are taken too.
        input_names: Names of the file's inputs, in the order of the example's tensors; None: those
            of the arguments of the model's forward.
        output_names: Names of the file's outputs, in order; None: ``output``, ``output_2``, …
        opset: Version of the standard operators, at least 18; None: 23 with ``onnxruntime``, which
            ONNX Runtime 1.23 reads, and 20 with the others, or 21 where packed matrices need it
            and 22 where operators of bfloat16 do. Below 21 packed matrices are decoded as they are
            written. What a version does not have in half precision is computed in float32.
        fuse: From opset 23 on, what a model writes out becomes one node each: RMS norms
            ``RMSNormalization``, rotary embeddings ``RotaryEmbedding``, and with target
            ``onnxruntime`` attention ``Attention``, which extends the cache of keys and values
            itself. Attention with sinks becomes ``com.microsoft::GroupQueryAttention``. There, an
            ``attention_mask`` whose length is named ``total_sequence`` has an entry for each of
            ``past`` and ``sequence``, if inputs have dimensions of these names.
        shared_cache: With target ``onnxruntime``, a language model's attention becomes
            ``com.microsoft::GroupQueryAttention``, which writes new keys and values into the cache
            where a caller gives the same buffers as ``past_key_values`` and as ``present``. They
            have room for all tokens to come; ``attention_mask`` says how many there are.
        external_data: Weights in ``<name>.data`` beside the file; None: only above 2 GB.
        link_weights: Weights of a model opened by :func:`open_checkpoint` that need no change stay
            in the checkpoint's own files, which the ONNX file then refers to. The ONNX file must be
            in their folder, or in one above. Matrices that ONNX wants transposed get a Transpose,
            which runtimes compute when they load the file.
        layers_as_functions: Blocks that repeat, each with weights of its own, are calls of one
            function of the file, in the domain ``dynamo_moe.blocks`` and named after their class:
            the file is small, and shows the model's architecture. Otherwise, and where fewer than
            four in a row are found to be equal, or they have loops, their nodes are in the graph.
            Runtimes put them there when they load the file.
        repeated_blocks: ``auto``: of blocks that repeat, each with weights of its own, three are
            traced, and the others are their copies in the file, once a run of the whole model
            without values has shown that all of them run the same operators; the report says of
            which, or why of none. ``off``: each block is traced.
        ranks: Files for so many devices, ``<name>.rank0.onnx`` and so on, each with a share of the
            experts and all else: the devices compute one layer together, and sum their parts by the
            runtime's own collective. No process group is needed, nor more than one process. None:
            one file, for one device.
        plan: With ``ranks``, what is split beside the experts, as for :func:`shard`.
        split_axes: With ``ranks`` and plan ``experts+heads``, inputs and outputs of which each rank
            has an equal share, and the axis of it, such as 1 for keys and values of a cache by
            heads. The example is the whole model's. It needs the names of both;
            :func:`export_language_model` gives them itself.
        metadata_props: Further entries of the file's metadata.
        progress: True: an export of more than two seconds shows its phase on stderr. Or a function,
            called at the beginning of each phase with its name, 0 and 0, and while weights are
            written with ``"serialization"``, the bytes so far and in all.
        profile: Samples what runs, and writes ``<name>.speedscope.json``, for
            https://www.speedscope.app, and ``<name>.profile.html``, for a browser; the report shows
            the time of each phase.

    Returns:
        What was written.

    Warns:
        UserWarning: If the file holds MoE modules that :func:`convert` has not replaced.

    Raises:
        ValueError: If an argument is out of range, a layer cannot be expressed for the target, or
            the model has parameters without values (on the meta device).
        TypeError: If the model is not a module, or the example does not fit its forward.
        ExportError: If PyTorch's exporter cannot take the model, or what it makes of it is refused
            by onnx's checker.
        FileNotFoundError: If the folder of ``path`` does not exist.
        IsADirectoryError: If ``path`` is a folder.
        ImportError: If ``profile`` is set and pyinstrument is not installed.
    """
    started = time.perf_counter()
    check_model(model)
    model = unwrapped(model)
    local_experts.need_common_tokens(model)
    path = Path(path)
    lowered_for = chosen_target(target, body)
    newest = onnx.defs.onnx_opset_version()
    if opset is not None and not MIN_OPSET <= opset <= newest:
        raise ValueError(f"opset must be in {MIN_OPSET}..{newest} with this onnx, got {opset}")
    opset_at_least = opset or lowered_for.opset
    if shared_cache and not (
        lowered_for.takes_attention and fuse and opset_at_least >= FIRST_OPSET
    ):
        raise ValueError(
            f"shared_cache needs target 'onnxruntime', fuse and an opset of at least "
            f"{FIRST_OPSET}; got target {target!r}, fuse={fuse} and opset {opset_at_least}"
        )
    if repeated_blocks not in get_args(RepeatedBlocks):
        raise ValueError(f"repeated_blocks must be 'auto' or 'off', got {repeated_blocks!r}")
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise ValueError(f"ranks must be an integer of at least 1, got {ranks!r}")
    check_plan(plan)
    _check_split(split_axes, plan, ranks, input_names, output_names)
    if ranks is None:
        path = model_files.destination(path)
    for rank in range(ranks or 0):
        model_files.destination(rank_path(path, rank))
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, tuple):
        raise TypeError(f"args must be a tuple or one tensor, got {type(args).__name__}")

    arguments = args, kwargs or {}
    remaining = unconverted.unconverted_modules(model)
    with progressing(progress, path) as progressed, profiled(profile) as sampled:
        watch = Stopwatch(progressed)
        form = ExportForm(
            lowered_for,
            body,
            opset,
            input_names,
            output_names,
            link_weights,
            layers_as_functions,
            repeated_blocks,
            fuse,
            shared_cache,
            metadata_props or {},
            split_axes=split_axes or {},
        )
        with watch.running(), collecting_seldom(), naming_unconverted(model):

            def write(
                form: ExportForm, file: Path, arguments: Arguments, known: Trace | None = None
            ) -> _Written:
                return _write(model, arguments, dynamic_shapes, form, file, external_data, known)

            if ranks is None:
                written = [write(form, path, arguments)]
            else:
                written = _write_ranks(write, model, arguments, form, path, (ranks, plan))
    # A module that calls torch.ops.moe itself needs no conversion.
    first = written[0]
    layers = first.layers
    files = tuple(file for each in written for file in each.files)
    remaining = tuple(layer for layer in remaining if not _has_layer(layer.module, layers))
    warned = [unconverted.warning(remaining)] if remaining else []
    bypassed = [
        path for path in unconverted.converted_modules(model) if not _has_layer(path, layers)
    ]
    if bypassed:
        warned.append(unconverted.own_forward_warning(bypassed))
    for message in warned:
        warnings.warn(message, stacklevel=2)
    return ExportReport(
        path=files[0],
        files=files,
        target=target,
        body=body if body in lowered_for.bodies else None,
        layers=tuple(layer.name for layer in layers),
        operators=dict(Counter(layer.op_type for layer in layers)),
        nodes=dict(first.operators.most_common()),
        parameters_bytes=sum(each.parameters_bytes for each in written),
        file_bytes=sum(file.stat().st_size for file in files),
        seconds=time.perf_counter() - started,
        phases=watch.seconds,
        profile=save_profile(sampled, path) if sampled else (),
        blocks=tuple(first.trace.blocks),
        notes=(*dict.fromkeys(note for each in written for note in each.notes), *warned),
        ranks=ranks,
    )


# --- The steps of an export ---


class _Written(NamedTuple):
    """Facts that the report needs of a graph that is in its files."""

    files: list[Path]
    layers: list[metadata.Layer]
    operators: Counter[str]
    parameters_bytes: int
    trace: Trace
    notes: list[str]


def _check_split(
    split_axes: Mapping[str, int] | None,
    plan: Plan,
    ranks: int | None,
    *names: Sequence[str] | None,
) -> None:
    if plan != "experts" and ranks is None:
        raise ValueError(f"plan {plan!r} is one of files for several devices: it needs ranks")
    if not split_axes:
        return
    if plan == "experts" or None in names:
        raise ValueError(
            "split_axes needs plan 'experts+heads', and the names of inputs and outputs"
        )
    unknown = split_axes.keys() - {name for each in names for name in each or ()}
    if unknown:
        raise ValueError(f"split_axes has {sorted(unknown)}, which no input or output is called")


def _share_of_example(arguments: Arguments, form: ExportForm, rank: int, ranks: int) -> Arguments:
    """Returns a rank's share of the example's tensors."""
    names = iter(form.input_names or ())

    def share(tensor: torch.Tensor) -> torch.Tensor:
        name = next(names, "")
        axis = form.split_axes.get(name)
        if axis is None:
            return tensor
        size, more = divmod(tensor.shape[axis], ranks)
        if more:
            raise ValueError(
                f"{name!r} has {tensor.shape[axis]} values along axis {axis}, no multiple of the "
                f"{ranks} ranks"
            )
        return tensor.narrow(axis, rank * size, size)

    shared: Arguments = pytree.tree_map_only(torch.Tensor, share, arguments)
    return shared


def _write_ranks(
    write: Callable[[ExportForm, Path, Arguments, Trace | None], _Written],
    model: torch.nn.Module,
    arguments: Arguments,
    form: ExportForm,
    path: Path,
    split: tuple[int, Plan],
) -> list[_Written]:
    """Writes a file for each rank, which take their places once all are written.

    The graphs of ranks whose tensors have the same layout differ in their values alone, so one
    trace is enough: with uneven shares two, for each number of experts.
    """
    ranks, plan = split
    form = form._replace(of_ranks=uuid.uuid4().hex)
    written: list[_Written] = []
    layout, trace = None, None
    try:
        for rank in range(ranks):
            part = path.with_name(f".{rank_path(path, rank).name}")
            with sharded(model, rank, ranks, plan):
                if layout != layout_of(model):
                    layout, trace = layout_of(model), None
                share = _share_of_example(arguments, form, rank, ranks)
                written.append(write(form, part, share, trace))
                trace = written[-1].trace
        return [
            each._replace(files=model_files.rename_model(each.files, rank_path(path, rank)))
            for rank, each in enumerate(written)
        ]
    finally:
        for each in written:
            for file in each.files:
                file.unlink(missing_ok=True)


def _write(
    model: torch.nn.Module,
    arguments: Arguments,
    dynamic_shapes: DynamicShapes,
    form: ExportForm,
    path: Path,
    external_data: bool | None,
    known: Trace | None = None,
) -> _Written:
    """Writes a file of a model; a trace may be known that was made with weights of its layout."""
    with _exporting(), autocast_inside(model):
        _check_values(model)
        if known is None:
            graph = graph_of(model, arguments, resolve(model, *arguments, dynamic_shapes), form)
        else:
            graph = graph_of_trace(model, known, form)
        model_ir, layers, trace = graph.model, graph.layers, graph.trace
        rename("output_names", model_ir.graph.outputs, form.output_names)
        model_ir.metadata_props.update(form.metadata_props)
        metadata.store(model_ir, layers)
        rank_files.store(model_ir, model, form.of_ranks, form.split_axes)
        file_form.store_linear(model_ir, model)
        leaves = pytree.tree_leaves(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        inputs.store(model_ir, tensors, trace.sizes, constants_of(model, *arguments))
        if form.link_weights:
            placeholders.link(model_ir, path.parent)
        with explained_by_model(model, arguments):
            checked = check_graph(model_ir, graph.copies)
    files = model_files.save_model(model_ir, path, external_data, checked)
    activations = {layer.attributes["activation"] for layer in layers}
    notes = lowering.notes(model_ir, activations, form.target)
    notes += [*dequantized_weights.notes(model_ir), *trace.notes]
    size = model_files.model_bytes(model_ir)
    return _Written(files, layers, _operators(graph), size, trace, notes)


def progressing(
    wanted: bool | Progress, path: Path
) -> contextlib.AbstractContextManager[Progress | None]:
    """Returns the context in which an export's progress shows, as :func:`export` documents it."""
    if wanted is not True:
        return contextlib.nullcontext(wanted or None)
    return shown(path.name, Console(stderr=True))


_exporting = ProcessState(exporter.members_looked_up_once)


def _check_values(model: torch.nn.Module) -> None:
    parts = (own_parts(module) for _, module in modules_by_path(model))
    values = (tensor for tables in parts for table in tables[:2] for tensor in table.values())
    if not any(tensor is not None and tensor.is_meta for tensor in values):
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    without = [name for name, tensor in tensors.items() if tensor.is_meta]
    if without:
        raise ValueError(
            f"{without[0]!r} is on the meta device, without values ({len(without)} of "
            f"{len(tensors)} weights): load them with load_state_dict(..., assign=True), or open "
            "the checkpoint with dynamo_moe.open_checkpoint"
        )


def _has_layer(module: str, layers: Sequence[metadata.Layer]) -> bool:
    """Whether a layer comes from a module; one in a branch of control flow may come from any."""
    prefix = f"{module}." if module else ""
    return any(not layer.name or f"{layer.name}.".startswith(prefix) for layer in layers)


def _operators(graph: Graph) -> Counter[str]:
    return Counter(map(qualified, with_copies(graph.model.graph, graph.copies)))


def qualified(node: ir.Node | Copy) -> str:
    """Returns a node's operator, with its domain where it has one."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type
