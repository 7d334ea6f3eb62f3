"""Language models of transformers as ONNX files that generate token by token.

Legend: B batch, S new tokens, P tokens in the cache, V vocabulary, D width, G heads of keys and
values, C width of such a head.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dynamo_moe.evaluation import check_model, unwrapped
from dynamo_moe.export_report import ExportReport
from dynamo_moe.exporting import export
from dynamo_moe.files import cache_entries, library_operators, model_files, model_parts
from dynamo_moe.files.cache_entries import MASK, PAST_LENGTH, SEQUENCE, TOTAL, CacheEntry
from dynamo_moe.files.model_parts import FILES, PARTS, PartName, PartTask
from dynamo_moe.language_models.caches import ModelCache
from dynamo_moe.language_models.cases import (
    LEAST_ROOM,
    check_cache,
    check_parts,
    example_case,
    example_length,
    has_values,
)
from dynamo_moe.language_models.folders import (
    FolderFormat,
    RuntimeFolder,
    check_folder,
    check_place,
    genai_cache,
)
from dynamo_moe.language_models.forwards import (
    RESULTS,
    Role,
    Task,
    cache_of,
    parts_of,
    performing,
)
from dynamo_moe.language_models.parts import turn
from dynamo_moe.moe_nodes.targets.registry import TARGETS
from dynamo_moe.sharding import Plan, sharded
from dynamo_moe.tracing import cache_writes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def export_language_model(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    *,
    task: Task = "text-generation-with-past",
    folder: FolderFormat | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    bounded_windows: bool = False,
    cache_length: int | None = None,
    library: bool = False,
    **options: Any,
) -> ExportReport:
    """Exports a language model of transformers, after :func:`convert`. B, S and P are symbolic.

    - ``text-generation-with-past``: one file for the prompt (P = 0) and every further token. Its
      inputs: ``input_ids`` ``[B, S]`` int64; ``attention_mask`` ``[B, P + S]`` int64, 0 for
      padding, which is on the left; ``past_key_values.0.key`` ``[B, G, P, C]``,
      ``past_key_values.0.value``, and so on for every layer. Its outputs: ``logits``
      ``[B, S, V]``; ``present.0.key`` ``[B, G, P + S, C]``, ``present.0.value``, … to be the next
      call's ``past_key_values``. Whatever else a layer keeps goes in and out in the same way, such
      as ``past_key_values.1.conv_state`` and ``past_key_values.1.recurrent_state``, which are zeros
      at first, and the keys of an indexer; the file's metadata then describes each of its caches
      (:class:`~dynamo_moe.files.cache_entries.CacheEntry`). :func:`generate` runs such a file.
    - ``text-generation``: from ``input_ids`` and ``attention_mask`` ``[B, S]`` to ``logits``.
    - ``feature-extraction``: from the same to ``last_hidden_state`` ``[B, S, D]``.
    - ``image-text-to-text``: a folder of three files for a model that sees pictures; what each
      gives is an input of the same name of those after it. ``vision.onnx``: from ``pixel_values``,
      and ``image_grid_thw`` ``[pictures, 3]`` where these are rows of patches, or
      ``image_position_ids`` ``[pictures, patches, 2]`` where each picture is some, to
      ``image_features``, a row for each token that stands for a part of a picture, and to
      ``deepstack_features.0``, …, if the model adds some to its hidden states. ``embedding.onnx``:
      from ``input_ids`` and these to ``inputs_embeds`` ``[B, S, D]`` and ``deepstack_embeds.0``, ….
      ``decoder.onnx``: as ``text-generation-with-past``, but from ``inputs_embeds``, and with
      ``position_ids`` ``[3, B, S]`` where a token's place is one in time, height and width, or
      ``token_type_ids`` ``[B, S]`` where the tokens of a picture, 1, see one another. Their
      metadata is a :class:`~dynamo_moe.files.model_parts.ModelPart`. :func:`generate` runs such a
      folder.
    - ``text2text-generation-with-past``: a folder of two files for a model with an encoder.
      ``encoder.onnx``: from ``input_ids`` and ``attention_mask`` ``[B, T]`` to what each layer of
      the decoder sees of them: ``cross_attention.0.key`` ``[B, G, T, C]``,
      ``cross_attention.0.value``, …. ``decoder.onnx``: from ``input_ids`` ``[B, S]``, that mask as
      ``encoder_attention_mask``, these, and ``past_key_values.0.key``, …, to ``logits`` and
      ``present.0.key``, …, as ``text-generation-with-past``. Its rows have no padding. Metadata
      and :func:`generate` as before.

    Args:
        model: A model in memory, or one opened by :func:`open_checkpoint`.
        path: The file to write; the folder with ``folder`` or a task of several files.
        task: One of the above.
        bounded_windows: Layers with a sliding window keep the tokens in it alone, so that their
            caches stop growing; their length is then another one than that of other layers, which
            runtimes such as onnxruntime-genai do not take. Otherwise they keep all, and a mask
            hides those before the window.
        cache_length: Keys and values have room for this many tokens, L, from the beginning, and do
            not grow; L is at least 8. ``past_key_values.0.key`` and ``present.0.key`` are
            ``[B, G, L, C]``, and may be one buffer, zeros at first, into which TensorScatter writes
            new tokens; TensorRT updates it in place. Then ``attention_mask`` is ``[B, L]``, 0 also
            for tokens to come, and another input, ``past_sequence_length`` ``[1]`` int64, is P.
            Shapes stay the same from token to token. Keys of an indexer are ``[B, 1, L, C]``;
            states are replaced as otherwise. It needs opset 24, the default then. Not with target
            ``onnxruntime``, which has ``shared_cache``.
        folder: A folder that a runtime opens, in place of a file alone: ``genai``, with what
            onnxruntime-genai needs (target ``onnxruntime`` and its shared cache, unless told
            otherwise), or ``transformers``, for transformers.js and optimum's ``ORTModel``.
        tokenizer: The model's tokenizer, for the folder; None: that of its checkpoint's folder.
        library: With ``folder="genai"``, the native library's operators compute the MoE layers: the
            folder has a copy of the library, for machines like this one, and the target is
            ``plugin``. Layers of several configurations find their operators by a change of the
            file, which then runs with the library alone.
        options: ``target``, ``body``, ``opset``, ``fuse``, ``shared_cache``, ``external_data``,
            ``link_weights``, ``layers_as_functions``, ``repeated_blocks``, ``ranks``, ``plan``,
            ``progress`` and ``profile`` of :func:`export`; no ``ranks`` with a folder, no
            ``link_weights`` with a task of several files. With plan
            ``experts+heads`` each rank's file has its own heads of keys and values, G / ranks.

    Returns:
        What was written.

    Raises:
        ValueError: If the task is unknown or not for such a model, or has a cache and the model's
            cache holds what a file cannot keep, such as states that do not begin with zeros,
            which only weights with values show; if the model is more than the
            parts of a task of several files; if ``folder`` is unknown, or its runtime cannot run
            the file; if ``cache_length`` is too small for the example, or does not go with the
            other options or the model's cache; if ``library`` is given with another folder or
            target than those.
        FileNotFoundError: With ``library``, if it is missing.
        TypeError: If the model is not a module.
        ExportError: If PyTorch's exporter cannot take the model.
    """
    check_model(model)
    model = cast("PreTrainedModel", unwrapped(model))
    if options.get("ranks") is not None and (folder is not None or task in PARTS):
        what = f"task {task!r}" if folder is None else f"a folder for {folder!r}"
        raise ValueError(f"{what} has files for one device: it takes no ranks")
    if cache_length is not None:
        _check_cache_length(cache_length, task, folder, options, bounded_windows=bounded_windows)
        options["opset"] = options.get("opset") or cache_writes.OPSET
    if library:
        _check_library(folder, options)
    check_folder(path, folder, links=options.get("link_weights", False))
    if task == "image-text-to-text" or task == "text2text-generation-with-past":  # noqa: PLR1714
        bounded = bounded_windows
        with turn():
            return _export_parts(model, Path(path), task, folder, options, bounded_windows=bounded)
    role: Role = task
    form: dict[str, Any] = {"bounded_windows": bounded_windows, "cache_length": cache_length}
    if role == "text-generation-with-past" and options.get("ranks") is not None:
        plan = options.get("plan", "experts")
        options["split_axes"] = _split_axes(model, options["ranks"], plan, form)
    with performing(model, role, **form):
        check_cache(model)
        if folder is None:
            return _export(model, path, role, options)
        cache = cache_of(model)
        if folder == "genai":
            genai_cache(model, cache)  # Before anything is traced.
            options.setdefault("target", "onnxruntime")
            target = TARGETS.get(options["target"])
            options.setdefault("shared_cache", target is not None and target.takes_attention)
        written = RuntimeFolder(path, folder)
        try:
            report = _export(model, written.model_path, role, options)
        finally:
            written.remove_if_empty()
        files, notes = written.complete(
            model,
            report.files,
            tokenizer,
            cache=cache,
            shared_cache=options.get("shared_cache", False),
            library=library,
        )
        size = sum(file.stat().st_size for file in files)
        return replace(report, files=tuple(files), file_bytes=size, notes=(*report.notes, *notes))


_NOT_COMPARED = (
    "its parts were not compared with the whole model, whose weights have no values here: verify, "
    "with a model that has them, does so"
)


def _check_cache_length(
    length: int,
    task: Task,
    folder: FolderFormat | None,
    options: dict[str, Any],
    *,
    bounded_windows: bool,
) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < LEAST_ROOM:
        raise ValueError(
            f"cache_length must be an integer of at least {LEAST_ROOM}, got {length!r}"
        )
    reason = ""
    if task != "text-generation-with-past":
        reason = f"task text-generation-with-past, got {task!r}"
    elif folder is not None:
        reason = f"a file alone: no runtime that opens a folder for {folder!r} is known to take it"
    elif (target := TARGETS.get(options.get("target", ""))) and target.takes_attention:
        reason = f"a target without an attention of its own: {target.name!r} has shared_cache"
    elif bounded_windows:
        reason = "all tokens in all layers, without bounded_windows"
    elif (options.get("opset") or cache_writes.OPSET) < cache_writes.OPSET:
        reason = f"an opset of at least {cache_writes.OPSET}, got {options['opset']}"
    if reason:
        raise ValueError(f"cache_length needs {reason}")


def _check_library(folder: FolderFormat | None, options: dict[str, Any]) -> None:
    """Checks that a file's folder and target have a use for the native library."""
    if folder != "genai":
        raise ValueError(f"library needs folder='genai', got {folder!r}")
    target = TARGETS.get(options.setdefault("target", "plugin"))
    if target is not None and not target.keeps_nodes:
        raise ValueError(
            f"library needs target 'plugin', whose nodes its operators compute, got {target.name!r}"
        )
    library_operators.library()


def _export_parts(
    model: PreTrainedModel,
    folder: Path,
    task: PartTask,
    kind: FolderFormat | None,
    options: dict[str, Any],
    *,
    bounded_windows: bool,
) -> ExportReport:
    """Writes the files of a model of several parts, once all are there."""
    if kind is not None:
        what = "sees pictures" if task == "image-text-to-text" else "has an encoder"
        raise ValueError(f"no folder for {kind} can hold a model that {what}")
    if options.get("link_weights"):
        raise ValueError(f"task {task!r} writes several files, none of which links its weights")
    check_place(folder, links=False)
    others = [
        FILES[part] for part in FILES if part not in PARTS[task] and (folder / FILES[part]).exists()
    ]
    if others:
        raise ValueError(f"{folder} has {', '.join(others)} of another task: name another folder")
    check_parts(model, PARTS[task][0])
    reports: dict[PartName, ExportReport] = {}
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as written:
        for part in PARTS[task]:
            own = {} if part == "decoder" else {"shared_cache": False}
            with performing(model, part, bounded_windows=bounded_windows):
                check_cache(model)
                reports[part] = _export(model, Path(written) / FILES[part], part, options | own)
        files = [file for report in reports.values() for file in (*report.files, *report.profile)]
        moved = model_files.move_together(files, folder, old=Path(written) / "old")
    report = _merged(reports, folder / FILES["decoder"], moved)
    return report if has_values(model) else replace(report, notes=(*report.notes, _NOT_COMPARED))


def _merged(
    reports: Mapping[PartName, ExportReport], path: Path, files: Sequence[Path]
) -> ExportReport:
    """Returns the report of all parts: what each says, and the sums of what is counted."""
    each = reports.values()

    profile = tuple(path.parent / file.name for report in each for file in report.profile)

    def summed(counts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        return dict(sum(map(Counter, counts), Counter[str]()))

    return replace(
        reports["decoder"],
        path=path,
        files=tuple(file for file in files if file not in profile),
        layers=tuple(layer for report in each for layer in report.layers),
        operators=summed(report.operators for report in each),
        nodes=summed(report.nodes for report in each),
        parameters_bytes=sum(report.parameters_bytes for report in each),
        file_bytes=sum(report.file_bytes for report in each),
        seconds=sum(report.seconds for report in each),
        phases=summed(report.phases for report in each),
        blocks=tuple(f"{part}: {x}" for part, report in reports.items() for x in report.blocks),
        notes=tuple(f"{part}: {x}" for part, report in reports.items() for x in report.notes),
        profile=profile,
    )


def _split_axes(
    model: PreTrainedModel, ranks: int, plan: Plan, form: Mapping[str, Any]
) -> dict[str, int]:
    """Returns the axis of each of a cache's tensors of which a rank keeps a share."""
    if plan == "experts":
        return {}
    whole = ModelCache(model, **form)
    with sharded(model, 0, ranks, plan):
        local = ModelCache(model, **form)
    axes: dict[str, int] = {}
    for kept, of_rank in zip(whole.tensors, local.tensors, strict=True):
        for axis, (size, share) in enumerate(zip(kept.shape, of_rank.shape, strict=True)):
            if size != share:
                entry = kept.entry()
                axes |= {entry.input: axis, entry.output: axis}
    return axes


def _export(
    model: PreTrainedModel, path: str | os.PathLike[str], role: Role, options: dict[str, Any]
) -> ExportReport:
    """Exports a model within :func:`performing`."""
    case = example_case(model, new=example_length(model))
    cache, parts = cache_of(model), parts_of(model)
    if cache is not None and cache.length is not None:
        # A trace asks for no values, and there is room for as many tokens as a model can read.
        case["past_key_values"] = cache.empty(2)
    inputs = [*case]
    metadata: dict[str, str] = {}
    dynamic: dict[str, Any] = {name: {1: SEQUENCE} for name in inputs}
    if parts is not None:
        metadata[model_parts.KEY] = model_parts.dumps(parts.described())
        dynamic |= parts.dimensions(case)
        inputs, outputs = parts.names(case)
    else:
        outputs = [RESULTS[role]]
    if cache is not None:
        entries = [kept.entry() for kept in cache.tensors]
        if MASK in case:
            dynamic[MASK] = {1: TOTAL if cache.length is None else None}
        if cache.length is not None:
            dynamic[PAST_LENGTH] = {0: None}
        dynamic["past_key_values"] = [
            tuple(
                {axis: size for axis, size in enumerate(kept.shape) if isinstance(size, str)}
                for kept in layer
            )
            for layer in cache.layers
        ]
        inputs = [*inputs[:-1], *(entry.input for entry in entries)]
        outputs += [entry.output for entry in entries]
        if not cache.is_plain or cache.length is not None:
            shares = [_share(entry, options) for entry in entries]
            metadata[cache_entries.KEY] = cache_entries.dumps(shares)
    return export(
        model,
        (),
        path,
        kwargs=case,
        dynamic_shapes=dynamic,
        input_names=inputs,
        output_names=outputs,
        metadata_props=metadata,
        **options,
    )


def _share(entry: CacheEntry, options: dict[str, Any]) -> CacheEntry:
    """Returns what a rank keeps of a tensor of a cache."""
    split = options.get("split_axes", {}).get(entry.input)
    shape = (
        size // options["ranks"] if axis == split else size for axis, size in enumerate(entry.shape)
    )
    return replace(entry, shape=tuple(shape))
