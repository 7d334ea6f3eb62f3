"""Language models of transformers as ONNX files that generate token by token.

Legend: B batch, S new tokens, P tokens in the cache, V vocabulary, D width, G heads of keys and
values, C width of such a head.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dynamo_moe.evaluation import check_model, evaluating
from dynamo_moe.export_report import ExportReport
from dynamo_moe.exporting import export
from dynamo_moe.files import cache_entries, library_operators, model_parts
from dynamo_moe.files.cache_entries import PAST_LENGTH, SEQUENCE, TOTAL, CacheEntry
from dynamo_moe.files.inputs import DrawnCase
from dynamo_moe.files.model_parts import FILES, PartName
from dynamo_moe.language_models.caches import ModelCache, Past
from dynamo_moe.language_models.folders import (
    FolderFormat,
    RuntimeFolder,
    check_folder,
    check_place,
    genai_cache,
)
from dynamo_moe.language_models.parts import EMBEDS, FEATURES, Parts
from dynamo_moe.moe_nodes.targets.registry import TARGETS
from dynamo_moe.restoring import state_kept
from dynamo_moe.sharding import Plan, sharded
from dynamo_moe.tolerances import tolerance_for
from dynamo_moe.tracing import cache_writes
from dynamo_moe.tracing.exportable_models import exportable_models
from dynamo_moe.weights.lazy_tensors import LazyTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Task = Literal[
    "text-generation-with-past", "text-generation", "feature-extraction", "image-text-to-text"
]
TASKS: tuple[str, ...] = get_args(Task)
Role = Literal["text-generation-with-past", "text-generation", "feature-extraction"] | PartName
"""What a file does: a task, or one of the parts of ``image-text-to-text``."""

# B, S and P of the cases that a file is verified with.
# The last is longer than the chunks in which linear attention is computed.
_VERIFIED = ((1, 5, 0), (3, 1, 6), (2, 4, 3), (2, 33, 0), (2, 2, 40), (1, 130, 0))
# A cache of a fixed length has room for the first three, and for more than the example's 7 tokens.
_LEAST_ROOM = 8
# Of those with a cache, the tokens of the last row that are padding.
_PADDING = {2: 2, 4: 3}
# What a file of a role gives first.
_RESULTS: dict[Role, str] = {
    "text-generation-with-past": "logits",
    "text-generation": "logits",
    "feature-extraction": "last_hidden_state",
    "vision": FEATURES,
    "embedding": EMBEDS,
    "decoder": "logits",
}
# Held while a forward is replaced or restored.
_REPLACING = Lock()


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
      and ``image_grid_thw`` ``[pictures, 3]`` where these are rows of patches, to
      ``image_features``, a row for each token that stands for a part of a picture, and to
      ``deepstack_features.0``, …, if the model adds some to its hidden states. ``embedding.onnx``:
      from ``input_ids`` and these to ``inputs_embeds`` ``[B, S, D]`` and ``deepstack_embeds.0``, ….
      ``decoder.onnx``: as ``text-generation-with-past``, but from ``inputs_embeds``, and with
      ``position_ids`` ``[3, B, S]`` where a token's place is one in time, height and width. Their
      metadata is a :class:`~dynamo_moe.files.model_parts.ModelPart`. :func:`generate` runs such a
      folder.

    Args:
        model: A model in memory, or one opened by :func:`open_checkpoint`.
        path: The file to write; the folder with ``folder`` or the task ``image-text-to-text``.
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
            ``progress`` and ``profile`` of :func:`export`; no ``ranks`` with a folder. With plan
            ``experts+heads`` each rank's file has its own heads of keys and values, G / ranks.

    Returns:
        What was written.

    Raises:
        ValueError: If the task is unknown, or is ``text-generation-with-past`` and the model's
            cache holds what a file cannot keep, such as blocks of tokens, or states that do not
            begin with zeros, which only weights with values show; if the task is
            ``image-text-to-text`` and the model sees no pictures, or is more than the three parts;
            if ``folder`` is unknown, or its runtime cannot run the file; if ``cache_length`` is
            too small for the example, or does not go with the other options or the model's cache;
            if ``library`` is given with another folder or target than those.
        FileNotFoundError: With ``library``, if it is missing.
        TypeError: If the model is not a module.
        ExportError: If PyTorch's exporter cannot take the model.
    """
    check_model(model)
    if options.get("ranks") is not None and (folder is not None or task == "image-text-to-text"):
        what = f"task {task!r}" if folder is None else f"a folder for {folder!r}"
        raise ValueError(f"{what} has files for one device: it takes no ranks")
    if cache_length is not None:
        _check_cache_length(cache_length, task, folder, options, bounded_windows=bounded_windows)
        options["opset"] = options.get("opset") or cache_writes.OPSET
    if library:
        _check_library(folder, options)
    check_folder(path, folder, links=options.get("link_weights", False))
    if task == "image-text-to-text":
        return _export_parts(model, Path(path), folder, options, bounded_windows=bounded_windows)
    role: Role = task
    form: dict[str, Any] = {"bounded_windows": bounded_windows, "cache_length": cache_length}
    if role == "text-generation-with-past" and options.get("ranks") is not None:
        plan = options.get("plan", "experts")
        options["split_axes"] = _split_axes(model, options["ranks"], plan, form)
    with performing(model, role, **form):
        _check_cache(model)
        if folder is None:
            return _export(model, path, role, options)
        cache = _cache_of(model)
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


def _check_cache_length(
    length: int,
    task: Task,
    folder: FolderFormat | None,
    options: dict[str, Any],
    *,
    bounded_windows: bool,
) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < _LEAST_ROOM:
        raise ValueError(
            f"cache_length must be an integer of at least {_LEAST_ROOM}, got {length!r}"
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
    kind: FolderFormat | None,
    options: dict[str, Any],
    *,
    bounded_windows: bool,
) -> ExportReport:
    """Writes the three files of a model that sees pictures, once all are there."""
    if kind is not None:
        raise ValueError(f"no folder for {kind} can hold a model that sees pictures")
    check_place(folder, links=options.get("link_weights", False))
    reports: dict[PartName, ExportReport] = {}
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as written:
        for part, name in FILES.items():
            own = {} if part == "decoder" else {"shared_cache": False}
            with performing(model, part, bounded_windows=bounded_windows):
                parts = _parts_of(model)
                if parts is not None and part == "vision" and _has_values(model):
                    parts.check()
                _check_cache(model)
                reports[part] = _export(model, Path(written) / name, part, options | own)
        folder.mkdir(exist_ok=True)
        moved = [
            file.replace(folder / file.name) for report in reports.values() for file in report.files
        ]
    return replace(
        reports["decoder"],
        path=folder / FILES["decoder"],
        files=tuple(moved),
        file_bytes=sum(report.file_bytes for report in reports.values()),
        seconds=sum(report.seconds for report in reports.values()),
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
    case = example_case(model, new=_example_length(model))
    cache, parts = _cache_of(model), _parts_of(model)
    if cache is not None and cache.length is not None:
        # A trace asks for no values, and there is room for as many tokens as a model can read.
        case["past_key_values"] = cache.empty(2)
    inputs, outputs = [*case], [_RESULTS[role]]
    metadata: dict[str, str] = {}
    dynamic: dict[str, Any] = {name: {1: SEQUENCE} for name in inputs}
    if parts is not None:
        metadata[model_parts.KEY] = model_parts.dumps(parts.described(parts.role))
        dynamic |= parts.dimensions(case)
        inputs, outputs = parts.names(case, outputs[0])
    if cache is not None:
        entries = [kept.entry() for kept in cache.tensors]
        dynamic["attention_mask"] = {1: TOTAL if cache.length is None else None}
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


@contextlib.contextmanager
def performing(
    model: PreTrainedModel,
    role: Role,
    *,
    bounded_windows: bool = False,
    cache_length: int | None = None,
) -> Iterator[None]:
    """Inside the context, the model's forward takes and returns what its file for a role does.

    For ``text-generation-with-past`` that is ``forward(input_ids, attention_mask,
    past_key_values)``, with a tuple of tensors, such as (keys, values), for each layer that keeps
    some; it returns (logits, list of such tuples). With ``cache_length``, another argument is in
    front of ``past_key_values``: ``past_sequence_length``. For the other tasks of one file
    ``forward(input_ids, attention_mask)`` returns one tensor; the parts of ``image-text-to-text``
    take and return what their files do. Contexts of one role may overlap, also in several threads;
    the last to end restores the forward.
    :func:`verify` does this itself.

    Raises:
        ValueError: As :func:`export_language_model`.
    """
    if role not in _RESULTS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}; got {role!r}")
    with _REPLACING:
        performed: Any = model.forward
        form = role, bounded_windows, cache_length
        if getattr(performed, "form", None) != form:
            if role in FILES:
                performed = _part(model, role, bounded_windows=bounded_windows)
            elif role == "text-generation-with-past":
                performed = _with_past(
                    model, bounded_windows=bounded_windows, cache_length=cache_length
                )
            else:
                performed = _without_past(model, _RESULTS[role])
            performed.form, performed.contexts = form, 0
            performed.original = vars(model).get("forward")  # accelerate's hooks set one.
            model.forward = performed
        performed.contexts += 1
    try:
        yield
    finally:
        with _REPLACING:
            performed.contexts -= 1
            if not performed.contexts:
                del model.forward
                if performed.original is not None:
                    model.forward = performed.original


def role_of(model: torch.nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> Role | None:
    """Returns the role of a file with these inputs and outputs; None if the model has none."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    firsts: dict[PartName, str] = {"vision": "pixel_values", "embedding": "input_ids"}
    for part, first in (firsts | {"decoder": EMBEDS}).items():
        others = FEATURES in inputs if part == "embedding" else True
        if inputs[:1] == [first] and outputs[:1] == [_RESULTS[part]] and others:
            return part
    if list(inputs[:2]) != ["input_ids", "attention_mask"] or not outputs:
        return None
    kept = inputs[3:] if list(inputs[2:3]) == [PAST_LENGTH] else inputs[2:]
    past = [name.removeprefix("past_key_values.") for name in kept]
    if past and list(outputs[1:]) == [f"present.{name}" for name in past]:
        return "text-generation-with-past" if outputs[0] == "logits" else None
    if len(inputs) != 2 or len(outputs) != 1:
        return None
    roles: tuple[Role, ...] = ("text-generation", "feature-extraction")
    return next((role for role in roles if outputs[0] == _RESULTS[role]), None)


def verification_cases(model: PreTrainedModel, *, one_goes_on: bool = False) -> list[DrawnCase]:
    """Returns cases for a model within :func:`performing`: a prompt, a step, a part of a prompt.

    Where the task has a cache, parts of prompts have padding in it; where it has none, a prompt has
    padding on either side. The last are longer, and optional: a model may have fewer positions.
    A cache of more than keys and values holds what the model has left in it after a prompt.

    Args:
        model: The model.
        one_goes_on: Whether a file takes several tokens after others of one sequence alone.
    """
    parts, cache = _parts_of(model), _cache_of(model)
    if parts is not None and cache is None:
        return [DrawnCase(case) for case in parts.cases()]
    _check_cache(model)
    drawn = []
    for number, (batch, new, past) in enumerate(_VERIFIED):
        if cache is None:
            case = example_case(model, batch, new)
            if number == 3:
                case["attention_mask"][0, :30] = case["attention_mask"][1, 20:] = 0
            first = 0
        else:
            if cache.length is not None and past + new > cache.length:
                continue
            only = one_goes_on and new > 1 and past > 0
            case = example_case(model, 1 if only else batch, new, past)
            case["attention_mask"][-1, : _PADDING.get(number, 0)] = 0
            if not cache.is_plain:
                case["past_key_values"] = _past_of(model, cache, case, past)
            first = past
        kept = case["attention_mask"][:, first : first + new] == 1
        drawn.append(DrawnCase(case, optional=number > 2, kept=kept))
    return drawn


def _past_of(model: PreTrainedModel, cache: ModelCache, case: dict[str, Any], past: int) -> Past:
    """Returns what a model keeps of random tokens before a case's own."""
    mask = case["attention_mask"][:, :past]
    empty = cache.empty(len(mask))
    if not past:
        return empty
    prompt = example_case(model, len(mask), past, 0)
    with evaluating(model), torch.no_grad():
        given = {"attention_mask": mask, "past_key_values": empty}
        kept: Past = model.forward(**prompt | given)[1]
    return kept


def example_case(
    model: PreTrainedModel, batch: int = 2, new: int = 3, cached: int = 4
) -> dict[str, Any]:
    """Returns random arguments of the model's forward, the same every time.

    Args:
        model: The model, within :func:`performing`.
        batch: B.
        new: S.
        cached: P; for a task with a cache.
    """
    generator = torch.Generator().manual_seed(0)
    cache = _cache_of(model)
    parts = _parts_of(model)
    if parts is not None and cache is None:
        return parts.case()
    cached = 0 if cache is None else cached
    if cache is not None and cache.length is not None:
        cached = min(cached, cache.length - new)
        if cached < 0:
            raise ValueError(f"cache_length must be at least {new}, got {cache.length}")
    vocabulary = model.config.get_text_config().vocab_size
    case: dict[str, Any] = {
        "input_ids": torch.randint(vocabulary, (batch, new), generator=generator),
        "attention_mask": torch.ones(batch, cached + new, dtype=torch.int64),
    }
    if cache is not None and cache.length is not None:
        after = cache.length - cached - new
        case["attention_mask"] = F.pad(case["attention_mask"], (0, after))
        case[PAST_LENGTH] = torch.tensor([cached])
    if parts is not None:
        case = parts.decoder_case(case)
    if cache is not None:
        case["past_key_values"] = cache.random(batch, cached, generator)
    return case


def _cache_of(model: PreTrainedModel) -> ModelCache | None:
    """Returns the cache of a model within :func:`performing`; None if its task has none."""
    return getattr(model.forward, "cache", None)


def _parts_of(model: PreTrainedModel) -> Parts | None:
    """Returns the parts of a model whose forward is one of them."""
    return getattr(model.forward, "parts", None)


def _example_length(model: PreTrainedModel) -> int:
    """Returns S of the example: several chunks of a state space, as a trace knows one too well."""
    sizes = [getattr(module, "chunk_size", None) for module in model.modules()]
    return 3 + max((size for size in sizes if isinstance(size, int)), default=0)


def _check_cache(model: PreTrainedModel) -> None:
    """Checks that a model computes with its cache what it does without, if weights have values.

    States of zeros may not stand for no tokens; and a model may not expect keys of tokens to come.

    Raises:
        ValueError: If the model computes something else without a cache.
    """
    cache = _cache_of(model)
    if cache is None or not _has_values(model):
        return
    forward: Any = model.forward
    if cache.length is not None:
        calls, case = _in_two_calls(example_case(model, 1, min(33, cache.length), 0))
    elif all(kept.holds_tokens for kept in cache.tensors):
        return
    else:
        case = example_case(model, 1, 5, 0)
        del case["past_key_values"]
        calls = [case]
    with state_kept(model), evaluating(model), torch.no_grad():
        past, results = cache.empty(1), []
        for call in calls:
            logits, past = forward(**call | {"past_key_values": past})
            results.append(logits)
        begun = torch.cat(results, 1).float()
        alone = forward.alone(**case).float()
    error = (begun - alone).square().mean().sqrt() / alone.square().mean().sqrt()
    if error > tolerance_for({x.dtype for x in model.parameters()}).rms:
        if cache.length is not None:
            raise ValueError(
                f"{type(model).__name__} computes something else with a cache of a fixed length "
                f"(its logits differ by {error:.1e}), as a model does that takes the number of "
                "keys for that of the tokens so far: leave out cache_length"
            )
        raise ValueError(
            f"{type(model).__name__} begins with states that are not zeros (with zeros, its logits "
            f"differ by {error:.1e}): use task text-generation"
        )


def _in_two_calls(case: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns a prompt in two calls of a cache of a fixed length, and in one without a cache."""
    ids = case["input_ids"]
    length = ids.shape[1]
    calls = []
    for begin, end in ((0, length - 2), (length - 2, length)):
        mask = torch.zeros_like(case["attention_mask"])
        mask[:, :end] = 1
        call = {"input_ids": ids[:, begin:end], "attention_mask": mask}
        calls.append(call | {PAST_LENGTH: torch.tensor([begin])})
    return calls, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _has_values(model: PreTrainedModel) -> bool:
    """Whether a model can run where it is."""
    return not any(isinstance(x, LazyTensor) or x.device.type != "cpu" for x in model.parameters())


def _with_past(
    model: PreTrainedModel,
    *,
    bounded_windows: bool,
    cache_length: int | None = None,
    parts: Parts | None = None,
) -> Callable[..., Any]:
    cache = ModelCache(model, bounded_windows=bounded_windows, cache_length=cache_length)
    original = model.forward
    takes_positions = "position_ids" in inspect.signature(original).parameters

    def computed(
        tokens: dict[str, Tensor],
        attention_mask: Tensor,
        past_length: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        (new,) = tokens.values()

        def of_the_new(columns: Tensor) -> Tensor:
            if past_length is None:
                return columns[:, -new.shape[1] :]
            steps = torch.arange(new.shape[1], device=new.device)
            return columns.index_select(1, past_length + steps)

        if takes_positions:
            # As generate() does: padding on the left does not count. These are the tokens before.
            positions = attention_mask.cumsum(-1) - attention_mask
            options.setdefault("position_ids", of_the_new(positions))
        if past_length is not None and not cache.is_plain:
            # Linear attention reads the last columns as the new tokens', attention the first L.
            attention_mask = torch.cat([attention_mask, of_the_new(attention_mask)], dim=1)
        logits: Tensor = original(**tokens, attention_mask=attention_mask, **options).logits
        return logits

    def gone_on(
        tokens: dict[str, Tensor],
        attention_mask: Tensor,
        past_key_values: Past,
        past_length: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        (new,) = tokens.values()
        before = attention_mask.shape[1] - new.shape[1] if past_length is None else past_length
        filled = cache.filled(past_key_values, before)
        options |= {"past_key_values": filled, "use_cache": True}
        with exportable_models():  # Some recurrences of transformers cannot go on from a state.
            logits = computed(tokens, attention_mask, past_length, **options)
        return logits, cache.held(filled)

    def growing(
        input_ids: Tensor, attention_mask: Tensor, past_key_values: Past
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        return gone_on({"input_ids": input_ids}, attention_mask, past_key_values)

    def with_room(
        input_ids: Tensor,
        attention_mask: Tensor,
        past_sequence_length: Tensor,
        past_key_values: Past,
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        tokens = {"input_ids": input_ids}
        return gone_on(tokens, attention_mask, past_key_values, past_sequence_length)

    def alone(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return computed({"input_ids": input_ids}, attention_mask, use_cache=False)

    performed: Any = growing if cache_length is None else with_room
    if parts is not None:
        performed = parts.decoding(gone_on)
    performed.alone = alone if parts is None else parts.decoding(computed, use_cache=False)
    performed.cache = cache
    replacement: Callable[..., Any] = performed
    return replacement


def _part(model: PreTrainedModel, part: PartName, *, bounded_windows: bool) -> Callable[..., Any]:
    parts = Parts(model, part)
    if part == "decoder":
        performed: Any = _with_past(model, bounded_windows=bounded_windows, parts=parts)
    else:
        performed = parts.performed()
        performed.unused = parts.decoder  # An export does not warn of its experts.
    performed.parts = parts
    replacement: Callable[..., Any] = performed
    return replacement


def _without_past(model: PreTrainedModel, name: str) -> Callable[..., Any]:
    original = model.forward
    takes_cache = "use_cache" in inspect.signature(original).parameters
    options = {"use_cache": False} if takes_cache else {}

    def forward(input_ids: Tensor, attention_mask: Tensor) -> Any:
        outputs = original(input_ids=input_ids, attention_mask=attention_mask, **options)
        if not hasattr(outputs, name):
            raise ValueError(f"{type(model).__name__} gives no {name}: choose another task")
        return getattr(outputs, name)

    return forward
