"""``verify``: does the ONNX file compute what the PyTorch model computes, on other inputs?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import onnx_ir as ir
import torch
import torch.distributed as dist
from onnx_ir.tensor_adapters import from_torch_dtype

from custom_ops.dtypes import FLOATS
from dynamo_moe import language_models
from dynamo_moe.evaluation import check_model, unwrapped
from dynamo_moe.files import cache_entries, model_parts, rank_files
from dynamo_moe.files.block_functions import inlined
from dynamo_moe.files.inputs import constants_in, random_inputs
from dynamo_moe.files.library_operators import OPERATORS, operator_nodes
from dynamo_moe.files.metadata import layers_of
from dynamo_moe.files.model_files import load_graph
from dynamo_moe.operators.foreign import ONNXRUNTIME_ATTENTION
from dynamo_moe.tolerances import Tolerance, tolerance_for
from dynamo_moe.verification.cases import RefusedSizesError, Trial, verified
from dynamo_moe.verification.exchange import Exchange
from dynamo_moe.verification.loaded_files import LoadedFile, LoadedRanks, foreign_targets
from dynamo_moe.verification.models import Case, Models
from dynamo_moe.verification.ranks import own_file
from dynamo_moe.verification.report import CaseResult, VerificationError, VerificationReport
from dynamo_moe.verification.runtime import Runtime, RuntimeProcess, describe


def verify(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    inputs: Sequence[Case] | None = None,
    *,
    reference: torch.nn.Module | None = None,
    tolerance: Tolerance | None = None,
    group: dist.ProcessGroup | None = None,
    isolated: bool = False,
    timeout: float | None = None,
    library: bool = False,
) -> VerificationReport:
    """Runs an exported file in ONNX Runtime and the model in PyTorch, and compares.

    A file of :func:`export_language_model` is compared with the model of transformers that it was
    exported from, cache included, on a prompt and on further tokens. A model wrapped by
    ``torch.compile`` or ``AveragedModel`` runs without the wrapper.

    Args:
        path: The ONNX file. Of files for several ranks any one: all of them run here, and their
            parts are summed. Or a folder: one that a runtime opens, or that of a model that sees
            pictures, whose files are compared with that part of the model each.
        model: The model that it was exported from, on the CPU; run as in ``eval()``.
        inputs: Cases to run, each a tuple of positional arguments or a mapping of keyword
            arguments. None: random ones of several batch sizes and lengths, up to 40 and beyond any
            size that a condition of the model's trace names; the longer ones are left out where the
            model refuses them. If it refuses short ones, or a batch of 1, batches are of 2 and 3
            and sizes multiples of 224, or of 32 if there are three and more. They are drawn for the
            file's inputs: floats from a normal distribution, of three scales, some rows zero; masks
            (booleans, integers of 0 and 1, and floats that are 0 or below -1e4 in the example) hide
            tokens at the beginning, at the end or anywhere, but never all; other integers are below
            the size of what they index, else between the least and the greatest of the example's
            (0..9 where these are unknown or 0).
        reference: A model with the same arguments that the file must agree with instead, such as
            a copy made before :func:`convert`. The routing is still compared with ``model``, whose
            own error is reported too.
        tolerance: None: by the lowest precision among the file's weights. In half precision a case
            beyond it passes too if the file is at most twice as far from the model in float32 as
            the model is, and the model's own errors are at most ten times the tolerance.
        group: A process group, as of gloo, each process of which has the file of its rank, its own
            ``path``, and all of which call this with the same model and cases. The model is whole,
            or sharded over the same group as the files are. Where one of them fails, in its file or
            in its model, all fail with its reason.
        isolated: ONNX Runtime runs in a separate process, so that its crash is an error here.
        timeout: Seconds that this process may take to load the file, and to run each case.
        library: The native library's operators compute the MoE nodes, as in
            :func:`dynamo_moe.session`; the report says which nodes they did, and which the
            functions beside these.

    Returns:
        Errors and routing agreement of every case, all within the tolerance.

    Raises:
        VerificationError: If an error exceeds the tolerance.
        FileNotFoundError: If the file does not exist, or the native library.
        ModuleNotFoundError: If ONNX Runtime is not installed.
        RankError: With ``group``, a ValueError, if any rank's process fails, whatever its error is.
        ValueError: With ``library``, if the file has no node that its operators are for, or is one
            of several ranks. If a case does not fit the file's inputs or the model, or ONNX Runtime
            cannot run the file, for instance because of a node that it does not know and that has
            no body.
        TypeError: If the model is not a module, or ``inputs`` is not a sequence of tuples or
            mappings.
        ChildProcessError: If ONNX Runtime, isolated, died.
        TimeoutError: If it took longer than ``timeout``.
    """
    exchange = None if group is None else Exchange(group)
    with ExitStack() as stack:
        if exchange is not None:
            stack.enter_context(exchange.steps())
        check_model(model)
        path = language_models.model_in(Path(path))
        if timeout is not None and not isolated:
            raise ValueError("timeout needs isolated=True: only a separate process can be ended")
        if group is not None and path.is_dir():
            raise ValueError(f"group needs the file of a rank; {path} is a folder")
        if path.is_dir():
            if inputs is not None:
                raise ValueError(f"inputs are those of one file; {path} is a folder")
            options = {"reference": reference, "tolerance": tolerance, "library": library}
            return _verify_parts(path, model, isolated=isolated, timeout=timeout, **options)
        runtime_name = describe()
        model = unwrapped(model)
        reference = None if reference is None else unwrapped(reference)
        stored = load_graph(path) if exchange is None else own_file(path, exchange)
        proto = inlined(stored)
        outputs = len(proto.graph.output)  # Loading adds those of the routing.
        if library:
            _need_operators(path, proto)
        is_default = tolerance is None
        precisions, approximate_gelu = _precisions(proto), _approximates_gelu(proto)
        trials = _trials(stack, proto, [model] if reference is None else [model, reference], inputs)
        counts = [] if exchange is None else exchange(len(trials))
        if len({*counts}) > 1:
            raise ValueError(f"the ranks have {counts} cases: pass the same to all of them")
        profiles = stack.enter_context(TemporaryDirectory()) if library else ""
        runtime = stack.enter_context(RuntimeProcess(timeout) if isolated else Runtime())
        file = (
            LoadedFile(path, proto, runtime, is_stored=proto is stored, profiles=profiles)
            if rank_files.record_of(stored) is None
            else LoadedRanks(path, proto, runtime, exchange)
        )
        if file.missing:  # The model may round to it between casts, which the file then does not.
            precisions.add(torch.bfloat16)
        tolerance = tolerance or tolerance_for(precisions, approximate_gelu=approximate_gelu)
        models = Models(
            model,
            reference,
            outputs,
            exchange,
            rounds=is_default and not file.missing,
            is_widened=bool(file.missing),
            constants=constants_in(stored),
        )
        try:
            results = [verified(file, models, trial, tolerance) for trial in trials]
        except RefusedSizesError as refused:
            if exchange is not None:
                raise
            results = [None, *_results_of_pictures(file, models, proto, tolerance, refused)]
        computed, expanded = (
            file.moe_nodes() if library and isinstance(file, LoadedFile) else (None, ())
        )
    cases = tuple(result for result in results if result is not None)
    left_out = len(results) - len(cases)
    report = VerificationReport(
        path,
        runtime_name,
        tolerance,
        cases,
        left_out,
        by_operator=computed,
        by_function=expanded,
        missing=file.missing,
    )
    if not report.passed:
        raise VerificationError(report)
    return report


def _results_of_pictures(
    file: LoadedFile | LoadedRanks,
    models: Models,
    proto: onnx.ModelProto,
    tolerance: Tolerance,
    refused: RefusedSizesError,
) -> list[CaseResult | None]:
    """Compares on inputs of sizes that pictures have, after others were refused."""
    trials = _drawn(proto, as_pictures=True)
    try:
        return [verified(file, models, trial, tolerance) for trial in trials]
    except RefusedSizesError:  # It says less of a model without pictures.
        raise refused from refused.__cause__


def _verify_parts(folder: Path, model: torch.nn.Module, **options: Any) -> VerificationReport:
    """Compares each file of a folder; returns the cases of all."""
    parts = model_parts.files_in(folder)
    files = parts.values()
    library = options.pop("library")
    computed = {file for file in files if library and operator_nodes(inlined(load_graph(file)))}
    if library and not computed:
        raise ValueError(_no_operators(folder))
    with language_models.turn():
        reports = [verify(file, model, library=file in computed, **options) for file in files]
        language_models.check_parts(unwrapped(model), next(iter(parts)))
    cases = tuple(case for report in reports for case in report.cases)
    by_operator = tuple(node for report in reports for node in report.by_operator or ())
    by_function = tuple(node for report in reports for node in report.by_function)
    return replace(
        reports[-1],
        path=folder,
        cases=cases,
        by_operator=by_operator if library else None,
        by_function=by_function,
        missing=next((report.missing for report in reports if report.missing), ""),
    )


def _need_operators(path: Path, proto: onnx.ModelProto) -> None:
    record = rank_files.record_of(proto)
    if record is not None:
        raise ValueError(
            f"library needs a file for one device; {path} is for rank {record.rank} of "
            f"{record.ranks}"
        )
    if not operator_nodes(proto):
        raise ValueError(_no_operators(path))


def _no_operators(path: Path) -> str:
    return (
        f"{path} has no node that the native library's operators compute "
        f"({', '.join(OPERATORS)}): export the model with target 'plugin'"
    )


# --- The errors that the file's weights and layers allow ---


def _precisions(proto: onnx.ModelProto) -> set[torch.dtype]:
    """Returns the floating dtypes of a graph's weights, and of outputs that are all rounded."""
    dtypes = {from_torch_dtype(dtype).value: dtype for dtype in FLOATS}
    # Constants made by the exporter are small and may be wider than the weights.
    stored = {t.data_type for t in proto.graph.initializer if len(t.dims) >= 2}
    outputs = {output.type.tensor_type.elem_type for output in proto.graph.output} & dtypes.keys()
    if all(dtypes[data_type].itemsize == 2 for data_type in outputs):
        stored |= outputs
    return {dtypes[data_type] for data_type in stored if data_type in dtypes}


def _approximates_gelu(proto: onnx.ModelProto) -> bool:
    """Whether a runtime's operator stands for a layer that asks for the exact GELU."""
    activations = {layer.attributes["activation"] for layer in layers_of(proto)}
    approximates = any("gelu" in target.approximations for target in foreign_targets(proto))
    return "gelu" in activations and approximates


# --- The cases ---


def _trials(
    stack: ExitStack,
    proto: onnx.ModelProto,
    models: Sequence[Any],
    inputs: Sequence[Case] | None,
) -> list[Trial]:
    """Makes the models' forwards do what the file does while the stack lasts; returns trials."""
    graph = proto.graph
    names = ([value.name for value in values] for values in (graph.input, graph.output))
    role = language_models.role_of(models[0], *names)
    if role is not None:
        metadata = {entry.key: entry.value for entry in proto.metadata_props}
        caches = cache_entries.loads(metadata.get(cache_entries.KEY, "[]"))
        form: dict[str, Any] = {
            "bounded_windows": any(cache.window is not None for cache in caches),
            "cache_length": next((cache.room for cache in caches if cache.room), None),
        }
        for model in models:
            stack.enter_context(language_models.performing(model, role, **form))
    if inputs is not None:
        return [Trial(case) for case in _checked(inputs)]
    if role is None:
        return _drawn(proto)
    # ONNX Runtime's own attention goes on with one sequence at a time, but for single tokens.
    grouped = any(ONNXRUNTIME_ATTENTION.is_of(node.domain, node.op_type) for node in graph.node)
    cases = language_models.verification_cases(models[0], one_goes_on=grouped)
    return [Trial(case.inputs, True, case.optional, case.kept) for case in cases]


def _drawn(proto: onnx.ModelProto, *, as_pictures: bool = False) -> list[Trial]:
    # A runtime's own operator has an order of its own for equal scores.
    rows_of_zeros = not foreign_targets(proto)
    model = ir.from_proto(proto)
    cases = random_inputs(model, rows_of_zeros=rows_of_zeros, as_pictures=as_pictures)
    return [Trial(case.inputs, True, case.optional, case.kept) for case in cases]


def _checked(inputs: Sequence[Case]) -> list[Case]:
    cases = list(inputs)
    if not cases:
        raise ValueError("inputs holds no case: nothing would be verified")
    for case in cases:
        if not isinstance(case, (tuple, Mapping)):
            raise TypeError(
                "inputs must be a sequence of cases, each a tuple or a mapping, as in [(x,)]; "
                f"got a case of type {type(case).__name__}"
            )
    return cases
