"""``verify``: does the ONNX file compute what the PyTorch model computes, on other inputs?"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import torch
import torch.distributed as dist
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor

from custom_ops.dtypes import FLOATS
from dynamo_moe import language_models, pytree
from dynamo_moe.conversion.reports import few
from dynamo_moe.evaluation import check_model, evaluating, unwrapped
from dynamo_moe.files import cache_entries, model_parts, rank_files
from dynamo_moe.files.block_functions import inlined
from dynamo_moe.files.inputs import random_inputs
from dynamo_moe.files.library_operators import OPERATORS, operator_nodes, take_operators
from dynamo_moe.files.library_operators import library as library_file
from dynamo_moe.files.metadata import layers_of
from dynamo_moe.files.model_files import all_nodes, load_graph
from dynamo_moe.moe_nodes.nodes import OFFLOADED_DOMAIN
from dynamo_moe.moe_nodes.targets.record import Target
from dynamo_moe.moe_nodes.targets.registry import target_of
from dynamo_moe.operators.foreign import ONNXRUNTIME_ATTENTION, foreign_operator
from dynamo_moe.process_state import exclusive
from dynamo_moe.ties import TiesByIndex
from dynamo_moe.tolerances import Tolerance, tolerance_for
from dynamo_moe.verification.errors import worst_errors
from dynamo_moe.verification.exchange import Exchange, RankError
from dynamo_moe.verification.ranks import Ranks, own_file
from dynamo_moe.verification.report import CaseResult, VerificationError, VerificationReport
from dynamo_moe.verification.routing import (
    ChoicesOfFile,
    RoutingRecorder,
    add_routing_outputs,
    agreement,
    other_choices,
)
from dynamo_moe.verification.runtime import RefusedError, Runtime, RuntimeProcess, describe

Case = tuple[Any, ...] | Mapping[str, Any]

# How many inputs a message shows.
_SHOWN = 4


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
        tolerance: None: by the lowest precision among the file's weights.
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
        if library:
            _need_operators(path, proto)
        tolerance = tolerance or tolerance_for(
            _precisions(proto), approximate_gelu=_approximates_gelu(proto)
        )
        trials = _trials(stack, proto, [model] if reference is None else [model, reference], inputs)
        counts = [] if exchange is None else exchange(len(trials))
        if len({*counts}) > 1:
            raise ValueError(f"the ranks have {counts} cases: pass the same to all of them")
        profiles = stack.enter_context(TemporaryDirectory()) if library else ""
        runtime = stack.enter_context(RuntimeProcess(timeout) if isolated else Runtime())
        file = (
            _LoadedFile(path, proto, runtime, is_stored=proto is stored, profiles=profiles)
            if rank_files.record_of(stored) is None
            else _LoadedRanks(path, proto, runtime, exchange)
        )
        models = _Models(model, reference, len(proto.graph.output), exchange)
        try:
            results = [_verified(file, models, trial, tolerance) for trial in trials]
        except _RefusedSizesError:
            if exchange is not None:
                raise
            trials = _drawn(proto, as_pictures=True)
            results = [None, *(_verified(file, models, trial, tolerance) for trial in trials)]
        computed, expanded = (
            file.moe_nodes() if library and isinstance(file, _LoadedFile) else (None, ())
        )
    cases = tuple(result for result in results if result is not None)
    left_out = len(results) - len(cases)
    report = VerificationReport(
        path, runtime_name, tolerance, cases, left_out, by_operator=computed, by_function=expanded
    )
    if not report.passed:
        raise VerificationError(report)
    return report


def _verify_parts(folder: Path, model: torch.nn.Module, **options: Any) -> VerificationReport:
    """Compares each file of a folder; returns the cases of all."""
    files = [folder / name for name in model_parts.FILES.values()]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"folder {folder} has no {', '.join(missing)}")
    library = options.pop("library")
    computed = {file for file in files if library and operator_nodes(inlined(load_graph(file)))}
    if library and not computed:
        raise ValueError(_no_operators(folder))
    reports = [verify(file, model, library=file in computed, **options) for file in files]
    cases = tuple(case for report in reports for case in report.cases)
    by_operator = tuple(node for report in reports for node in report.by_operator or ())
    by_function = tuple(node for report in reports for node in report.by_function)
    return replace(
        reports[-1],
        path=folder,
        cases=cases,
        by_operator=by_operator if library else None,
        by_function=by_function,
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
    approximates = any("gelu" in target.approximations for target in _foreign_targets(proto))
    return "gelu" in activations and approximates


def _foreign_targets(proto: onnx.ModelProto) -> list[Target]:
    """Returns the targets of which a graph has a runtime's own operators."""
    operators = (foreign_operator(node.domain, node.op_type) for node in proto.graph.node)
    return [target_of(operator) for operator in dict.fromkeys(operators) if operator is not None]


# --- The cases ---


@dataclass(frozen=True)
class _Trial:
    """A case, and what may come of it.

    Attributes:
        case: The inputs.
        is_drawn: Whether they are random, and not the user's.
        is_optional: Whether the model may refuse them.
        kept: Which tokens masks leave, ``[B, L]``, if that is known.
    """

    case: Case
    is_drawn: bool = False
    is_optional: bool = False
    kept: Tensor | None = None


def _trials(
    stack: ExitStack,
    proto: onnx.ModelProto,
    models: Sequence[Any],
    inputs: Sequence[Case] | None,
) -> list[_Trial]:
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
        return [_Trial(case) for case in _checked(inputs)]
    if role is None:
        return _drawn(proto)
    # ONNX Runtime's own attention goes on with one sequence at a time, but for single tokens.
    grouped = any(ONNXRUNTIME_ATTENTION.is_of(node.domain, node.op_type) for node in graph.node)
    cases = language_models.verification_cases(models[0], one_goes_on=grouped)
    return [_Trial(case.inputs, True, case.optional, case.kept) for case in cases]


def _drawn(proto: onnx.ModelProto, *, as_pictures: bool = False) -> list[_Trial]:
    # A runtime's own operator has an order of its own for equal scores.
    rows_of_zeros = not _foreign_targets(proto)
    model = ir.from_proto(proto)
    cases = random_inputs(model, rows_of_zeros=rows_of_zeros, as_pictures=as_pictures)
    return [_Trial(case.inputs, True, case.optional, case.kept) for case in cases]


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


def _feeds(names: Sequence[str], case: Case) -> dict[str, np.ndarray]:
    if isinstance(case, Mapping) and set(case) == set(names):
        return {name: _to_numpy(value) for name, value in case.items()}
    leaves = [leaf for leaf in pytree.tree_leaves(case) if isinstance(leaf, Tensor)]
    if len(leaves) != len(names):
        raise ValueError(
            f"a case must hold one tensor per input of the file ({', '.join(names)}); "
            f"got {len(leaves)}"
        )
    return {name: _to_numpy(leaf) for name, leaf in zip(names, leaves, strict=True)}


# --- PyTorch ---


class _Results(NamedTuple):
    """What the models return for a case.

    Attributes:
        outputs: What the model returns.
        expected: What the file has to: the same, or what the reference returns.
        routed: The ids of each MoE layer of the model.
    """

    outputs: list[Tensor]
    expected: list[Tensor]
    routed: list[Tensor]


@dataclass(frozen=True)
class _Models:
    """The model, and another one that the file has to agree with instead, if any.

    The file has so many outputs: tensors, and numbers that are sizes; constants are none.
    """

    model: torch.nn.Module
    reference: torch.nn.Module | None
    count: int
    exchange: Exchange | None

    def results(self, case: Case) -> _Results:
        """Runs them."""
        with nullcontext() if self.exchange is None else self.exchange.sums():
            with RoutingRecorder() as recorder:
                outputs = _outputs(self.model, case, self.count)
            expected = outputs
            if self.reference is not None:
                expected = _outputs(self.reference, case, self.count)
        return _Results(outputs, expected, recorder.ids)

    def results_of_all(self, case: Case) -> _Results:
        """Runs them, and fails where another process's fail."""
        if self.exchange is None:
            return self.results(case)
        with self.exchange.steps():
            return self.results(case)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Lets nn.TransformerEncoder compute padded positions, as a file does; else they are zeros."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _outputs(model: torch.nn.Module, case: Case, count: int) -> list[Tensor]:
    # Copies: a forward may write into its arguments.
    copied = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, case)
    args, kwargs = _arguments(model, copied)
    # Compiled parts run eagerly: a dispatch mode sees every operator. The stance is the process's,
    # and so are the methods of nn.Module that another thread's export has replaced.
    eager = torch.compiler.set_stance("force_eager")
    with exclusive(), torch.no_grad(), evaluating(model), eager, _without_fast_path():
        result = model(*args, **kwargs)
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, (Tensor, int, float))]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors if len(leaves) != count else [torch.as_tensor(leaf) for leaf in leaves]


def _arguments(model: torch.nn.Module, case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a case as the model's forward takes it: by name where the names are its own."""
    if not isinstance(case, Mapping):
        return case, {}
    parameters = inspect.signature(model.forward).parameters.values()
    first = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    collected = [
        name
        for parameter in parameters
        if parameter.kind is parameter.VAR_POSITIONAL
        for name in case
        if re.fullmatch(rf"{parameter.name}_\d+", name)  # As the file names them.
    ]
    named = {*first, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)}
    if collected:
        positional = [*(name for name in first if name in case), *collected]
        keywords = {name: value for name, value in case.items() if name not in positional}
        return tuple(case[name] for name in positional), keywords
    if any(p.kind is p.VAR_KEYWORD for p in parameters) or case.keys() <= named:
        return (), dict(case)
    whole = _containers(case, named)
    return ((), whole) if whole.keys() <= named else (tuple(case.values()), {})


def _containers(case: Mapping[str, Any], parameters: Collection[str]) -> dict[str, Any]:
    """Returns a case with the parts of an argument as one: ``x_a`` and ``x_b`` are a dictionary.

    That is how a file names the tensors of an argument ``x``. Parts with numbers are a tuple.
    """
    whole: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in case.items():
        owners = [each for each in parameters if name.startswith(f"{each}_")]
        if name in parameters or not owners:
            whole[name] = value
        else:
            owner = max(owners, key=len)
            parts.setdefault(owner, {})[name.removeprefix(f"{owner}_")] = value
    for owner, items in parts.items():
        numbered = all(map(str.isdecimal, items))
        whole[owner] = tuple(items.values()) if numbered else items
    return whole


# --- ONNX Runtime ---


class _LoadedFile:
    """The file in ONNX Runtime, with its layers' expert ids as further outputs, if they are known.

    One session gives both, unless the file has functions of blocks, which hide their layers, or
    nodes of a runtime's own operator. ONNX Runtime lets ``com.microsoft::MoE`` write its result
    over its input while still reading it, if nothing reads that input afterwards (seen with 1.31.1:
    errors of 2 and more). Computing the routing reads it, which hides the error (from 1.4 to 0.8 in
    a file of two layers). So such a file runs as it is, and the routing comes from a session of its
    own.
    """

    def __init__(
        self,
        path: Path,
        proto: onnx.ModelProto,
        runtime: Runtime,
        *,
        is_stored: bool,
        profiles: str = "",
    ) -> None:
        self._path, self._runtime, self.ranks = path, runtime, 1
        self._outputs = [value.name for value in proto.graph.output]
        separate = bool(_foreign_targets(proto)) or not (is_stored or profiles)
        self._computed = [node.name for node in operator_nodes(proto)] if profiles else []
        as_it_is: tuple[Any, ...] = (str(path),)
        if profiles:
            library = library_file(), profiles
            take_operators(proto)
            as_it_is = proto.SerializeToString(), str(path.parent), library
        self._routed, routed = add_routing_outputs(proto), as_it_is
        if self._routed:
            routed = (proto.SerializeToString(), str(path.parent), *as_it_is[2:])
        try:
            self._session, self.inputs = runtime.load(*(as_it_is if separate else routed))
        except RefusedError as error:
            raise ValueError(
                f"ONNX Runtime cannot run {path}: {_reason(str(error), proto)}"
            ) from error
        self._routing_session = self._session
        if self._routed and separate:
            self._routing_session, _ = runtime.load(*routed)

    def moe_nodes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the MoE nodes that operators of the library computed, and those that did not."""
        ran = {name for op, name in self._runtime.nodes_run(self._session) if op in OPERATORS}
        by_function = tuple(name for name in self._computed if name not in ran)
        return tuple(name for name in self._computed if name in ran), by_function

    def run(
        self, feeds: Mapping[str, np.ndarray], *, routing: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the outputs, and each layer's expert ids if they are wanted and known."""
        routed = self._routed if routing else []
        if self._routing_session != self._session:
            outputs = self._run(self._session, feeds, self._outputs)
            return outputs, self._run(self._routing_session, feeds, routed) if routed else []
        results = self._run(self._session, feeds, [*self._outputs, *routed])
        return results[: len(self._outputs)], results[len(self._outputs) :]

    def greatest(self, *values: float) -> list[float]:
        """Returns the values: there are no other files."""
        return [*values]

    def _run(
        self, session: int, feeds: Mapping[str, np.ndarray], outputs: Sequence[str]
    ) -> list[Tensor]:
        try:
            return [_to_torch(array) for array in self._runtime.run(session, feeds, outputs)]
        except RefusedError as error:
            raise _refusal(self._path, feeds, error) from error


class _LoadedRanks:
    """The files of all ranks, without expert ids, of which each has its own alone."""

    def __init__(
        self, path: Path, proto: onnx.ModelProto, runtime: Runtime, exchange: Exchange | None
    ) -> None:
        self._path = path
        files = [(path, proto)]
        if exchange is None:
            files = [(file, inlined(each)) for file, each in rank_files.files_of_ranks(path)]
        self._ranks = Ranks(files, runtime, exchange)
        self.inputs, self.ranks = self._ranks.inputs, len(files)

    def greatest(self, *values: float) -> list[float]:
        """Returns the greatest that any rank has of each value: all of them go on as one."""
        return self._ranks.greatest(*values)

    def run(
        self, feeds: Mapping[str, np.ndarray], *, routing: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the outputs of each rank, rank by rank."""
        try:
            return [_to_torch(array) for array in self._ranks.run(feeds)], []
        except RefusedError as error:
            raise _refusal(self._path, feeds, error) from error


def _refusal(path: Path, feeds: Mapping[str, np.ndarray], error: RefusedError) -> ValueError:
    shapes = {name: list(array.shape) for name, array in feeds.items()}
    return ValueError(f"ONNX Runtime cannot run {path} on inputs of shapes {shapes}: {error}")


# Domains of the operators that ONNX Runtime has.
_RUNTIME_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")


def _reason(error: str, proto: onnx.ModelProto) -> str:
    """Returns why ONNX Runtime cannot load a file."""
    functions = {(function.domain, function.name) for function in proto.functions}
    for node in all_nodes(proto.graph.node):
        foreign = foreign_operator(node.domain, node.op_type)
        if foreign is not None and not target_of(foreign).runs_in_onnxruntime:
            return (
                f"only {foreign.runtime} has {foreign.op_type}. Verify an export of the same model "
                "with target 'plugin' or 'dense'"
            )
        if node.domain == OFFLOADED_DOMAIN:
            return "its experts are offloaded. Verify the file that it was made from"
        if node.domain not in _RUNTIME_DOMAINS and (node.domain, node.op_type) not in functions:
            return (
                f"{node.domain}::{node.op_type} has no body in the file. Give register_op a body "
                "of standard operators, and export again"
            )
    missing = re.search(r"Could not find an implementation for (\w+)\(\d+\)", error)
    weights = {tensor.data_type for tensor in proto.graph.initializer}
    if missing and onnx.TensorProto.BFLOAT16 in weights:
        return (
            f"on a CPU it has no {missing[1]} of bfloat16. Verify an export of the model in "
            "float32, or with the experts alone in bfloat16"
        )
    return error


def _to_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.is_complex():  # A file has pairs of real numbers.
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy(force=True)
    return tensor.detach().cpu().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _to_torch(array: np.ndarray) -> Tensor:
    if array.dtype != ml_dtypes.bfloat16:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


# --- Both ---


class _RefusedSizesError(ValueError):
    """The model does not take inputs that were drawn."""


def _verified(
    file: _LoadedFile | _LoadedRanks, models: _Models, trial: _Trial, bound: Tolerance
) -> CaseResult | None:
    """Returns a trial's result; None if the model refuses it, and may."""
    feeds = _feeds(file.inputs, trial.case)
    try:
        results = models.results_of_all(trial.case)
    except Exception as error:  # The model's own code runs.
        if trial.is_optional:
            return None
        refuses = trial.is_drawn or isinstance(error, IndexError)  # Ids beyond an embedding.
        if refuses and not isinstance(error, RankError):
            raise (_RefusedSizesError if trial.is_drawn else ValueError)(
                f"the model does not take these inputs ({error}): pass inputs of your own, as in "
                f"{_call(feeds)}"
            ) from error
        raise
    if trial.is_drawn and not _has_numbers(results.expected):
        if trial.is_optional:
            return None
        raise ValueError(
            "the model gives no finite number for the inputs that were drawn: pass inputs of your "
            f"own, as in {_call(feeds)}"
        )
    result = _compare(file, feeds, results, bound)
    if result.passed:
        return result
    if trial.kept is not None:
        visible = _compare(file, feeds, results, bound, trial.kept)
        if visible.passed:
            return replace(visible, excepted="hidden tokens")
    with TiesByIndex() as ties:
        by_index = models.results(trial.case)
    if any(file.greatest(ties.found)):
        again = _compare(file, feeds, by_index, bound, trial.kept)
        if again.passed:
            others = other_choices(results.routed, by_index.routed)
            return replace(again, excepted="ties", other_choices=others)
    _, in_file = file.run(feeds, routing=bool(results.routed))
    with ChoicesOfFile(in_file, bound.max) as choices:
        chosen = models.results(trial.case)
    if choices.taken:
        again = _compare(file, feeds, chosen, bound, trial.kept)
        if again.passed:
            return replace(again, excepted="close choices", other_choices=choices.taken)
    return result


def _has_numbers(tensors: Sequence[Tensor]) -> bool:
    return any(not tensor.numel() or bool(tensor.isfinite().any()) for tensor in tensors)


def _call(feeds: Mapping[str, np.ndarray]) -> str:
    """Returns a call with inputs of these names, dtypes and shapes."""
    inputs = [f"{name!r}: <{feed.dtype} {list(feed.shape)}>" for name, feed in feeds.items()]
    return f"verify(path, model, inputs=[{{{few(inputs, _SHOWN)}}}])"


def _compare(
    file: _LoadedFile | _LoadedRanks,
    feeds: Mapping[str, np.ndarray],
    results: _Results,
    bound: Tolerance,
    kept: Tensor | None = None,
) -> CaseResult:
    """Returns a case's result; with ``kept``, only these tokens ``[B, L]`` are compared."""
    outputs, in_file = file.run(feeds, routing=bool(results.routed))
    outputs, of_model, expected = (
        _visible(tensors, kept) for tensors in (outputs, results.outputs, results.expected)
    )
    max_error, rms_error = file.greatest(*worst_errors("file", outputs, expected * file.ranks))
    has_reference = results.outputs is not results.expected
    return CaseResult(
        shapes={name: tuple(value.shape) for name, value in feeds.items()},
        max_error=max_error,
        rms_error=rms_error,
        routing_agreement=agreement(results.routed, in_file),
        passed=max_error <= bound.max and rms_error <= bound.rms,
        model_error=worst_errors("model", of_model, expected)[0] if has_reference else None,
    )


def _visible(tensors: Sequence[Tensor], kept: Tensor | None) -> list[Tensor]:
    """Returns what of each tensor belongs to tokens that are kept, where it has an axis of them."""
    return [
        tensor if kept is None or tensor.shape[:2] != kept.shape else tensor[kept]
        for tensor in tensors
    ]
