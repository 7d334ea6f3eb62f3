"""From a model to the graph of its file: traced, translated, and in the form of its target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import onnx
import onnx_ir as ir
import torch
from torch.export import ExportedProgram

from dynamo_moe.conversion import unconverted
from dynamo_moe.conversion.observation import has_values
from dynamo_moe.evaluation import evaluating
from dynamo_moe.files import metadata
from dynamo_moe.files.copies import Copies
from dynamo_moe.graph import dequantized_weights
from dynamo_moe.graph.checking import InvalidGraphError, check
from dynamo_moe.graph.instantiate import Units
from dynamo_moe.graph.operand_types import opset_of_types, widen_refused
from dynamo_moe.graph.pipeline import Form, give_form
from dynamo_moe.moe_nodes.targets.names import BodyName
from dynamo_moe.moe_nodes.targets.record import Target
from dynamo_moe.private import tracer
from dynamo_moe.tracing import failures
from dynamo_moe.tracing.capture import capture, without_constants
from dynamo_moe.tracing.dynamic_shapes import DynamicExample, name_dimensions
from dynamo_moe.tracing.equal_blocks import TRACED, EqualBlocks, NotSharedError
from dynamo_moe.tracing.fixed_sizes import FixedSizeError, SizeTrials
from dynamo_moe.tracing.nodes import NeedsRetraceError
from dynamo_moe.tracing.program_runs import changed_buffers
from dynamo_moe.tracing.shared_trace import SharedTrace
from dynamo_moe.tracing.translate import set_opset, translate
from dynamo_moe.weights import placeholders

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a model."""

RepeatedBlocks = Literal["auto", "off"]
"""What becomes of blocks that repeat."""

_NOT_REPEATABLE = (
    "the model counts its calls where that cannot be undone, such as in an iterator, and computes "
    "something else by now: make it anew and export it with repeated_blocks='off'"
)


class ExportError(RuntimeError):
    """The model cannot become a file that computes the same.

    The message names the model's MoE modules that :func:`convert` has not replaced, if any.
    """


@contextlib.contextmanager
def naming_unconverted(model: torch.nn.Module) -> Iterator[None]:
    """Adds a model's MoE modules that were not converted to the first line of an ExportError."""
    try:
        yield
    except ExportError as error:
        headline, *details = str(error).split("\n")
        hint = unconverted.hint(unconverted.unconverted_modules(model), model)
        if hint:
            error.args = ("\n".join((f"{headline.rstrip('. ')}. {hint}", *details)),)
        raise


class ExportForm(NamedTuple):
    """The form of the graph: arguments of :func:`export`."""

    target: Target
    body: BodyName
    opset: int | None
    input_names: Sequence[str] | None
    output_names: Sequence[str] | None
    link_weights: bool
    layers_as_functions: bool
    repeated_blocks: RepeatedBlocks
    fuse: bool
    shared_cache: bool
    metadata_props: Mapping[str, str]
    of_ranks: str = ""
    """A number that the files of all ranks share."""
    split_axes: Mapping[str, int] = MappingProxyType({})


class Trace(NamedTuple):
    """A model as it was traced and translated, and what a user should know of how it was done."""

    model: ir.Model  # without weights, where it is for several ranks
    sharing: SharedTrace | None
    notes: list[str]
    sizes: set[int]  # that its decisions name
    blocks: list[str]


class Graph(NamedTuple):
    """A graph as it is written, and its MoE layers."""

    model: ir.Model
    copies: Copies  # of its nodes, which the file has beside them
    layers: list[metadata.Layer]
    trace: Trace


def graph_of(
    model: torch.nn.Module, arguments: Arguments, example: DynamicExample, form: ExportForm
) -> Graph:
    """Traces a model, equal blocks only as often as it takes, and returns its optimised graph."""
    with evaluating(model):
        reason = ""
        if form.repeated_blocks == "auto" and tracer.missing() is None:
            try:
                return _shared_graph(model, arguments, example, form)
            except NotSharedError as error:
                reason = f"traced one by one: {error}"
        with placeholders.placeholders(model) as lazies:
            trace = _traced(model, arguments, example, form, lazies)
            trace.blocks.extend([reason] if reason else [])
            return _formed(model, trace, form, lazies)


def graph_of_trace(model: torch.nn.Module, trace: Trace, form: ExportForm) -> Graph:
    """Returns the optimised graph of a model, of a trace that was made with other weights."""
    with evaluating(model), placeholders.placeholders(model) as lazies:
        return _formed(model, trace, form, lazies)


def layout_of(model: torch.nn.Module) -> dict[str, Any]:
    """Returns what a trace knows of a model's tensors: all but their values."""
    return {
        name: (tensor.shape, tensor.stride(), tensor.dtype)
        for name, tensor in _named_tensors(model).items()
    }


def _shared_graph(
    model: torch.nn.Module, arguments: Arguments, example: DynamicExample, form: ExportForm
) -> Graph:
    """Returns the graph of a model whose equal blocks are passed over, if it has any.

    Raises:
        NotSharedError: If they have to be traced one by one.
    """
    with placeholders.placeholders(model) as lazies:
        equal = EqualBlocks(model, example)
        sharing = SharedTrace(equal) if equal.runs else None
        try:
            with sharing.passing_over() if sharing is not None else contextlib.nullcontext():
                trace = _traced(model, arguments, example, form, lazies, sharing)
                graph = _formed(model, trace, form, lazies)
        except (ExportError, NotSharedError) as error:
            if sharing is None:
                raise
            if not equal.is_repeatable():
                raise ExportError(_NOT_REPEATABLE) from error
            failed = "" if isinstance(error, NotSharedError) else "the model fails without some: "
            headline = str(error).partition("\n")[0]
            raise NotSharedError(f"{failed}{headline}") from error
    trace.blocks.extend(equal.report())
    return graph


def _traced(
    model: torch.nn.Module,
    arguments: Arguments,
    example: DynamicExample,
    form: ExportForm,
    lazies: placeholders.Lazies,
    sharing: SharedTrace | None = None,
) -> Trace:
    trials = SizeTrials(model, example, has_values=lazies.are_in_memory, prepare=lazies.fill)
    program = captured(
        model, arguments, example, trials, runs=not lazies and sharing is None, sharing=sharing
    )
    changed = changed_buffers(program)
    constants = without_constants(program)
    if not program.graph_signature.user_outputs:
        raise ExportError(f"the model returns no tensor, but {', '.join(map(repr, constants))}")
    needed = dequantized_weights.opset_of(lazies)
    opset = form.opset or max(needed, form.target.opset)
    traced, fallback = translated(
        program,
        example,
        trials,
        opset,
        is_least=form.opset is None,
        retraces=sharing is None,
    )
    placeholders.attach(traced, lazies)
    if form.of_ranks:
        placeholders.detach(traced, _named_tensors(model))
    notes = [*([fallback] if fallback else []), *trials.notes]
    if constants:
        notes.append(
            f"results that are no tensors are not in the file: {', '.join(map(repr, constants))}"
        )
    if form.layers_as_functions and not (sharing is not None and sharing.units):
        notes.append("no blocks were found that could be calls of one function")
    notes += [
        f"the model changes its buffer {name} as it runs; in the file it stays as it is now"
        for name in sorted(changed & _read_weights(traced))
    ]
    return Trace(traced, sharing, notes, trials.sizes, [])


# Of others it matters only what they are, not their values.
_READ_INPUTS = {"Shape": 0, "CastLike": 1}


def _read_weights(model: ir.Model) -> set[str]:
    """Returns the names of the initializers that a graph's outputs depend on."""
    remaining: list[ir.Value | None] = [*model.graph.outputs]
    seen: set[ir.Value | None] = {None}
    while remaining:
        value = remaining.pop()
        node = None if value in seen or value is None else value.producer()
        seen.add(value)
        if node is not None:
            inner = (part for graph in node.attributes.values() for part in _inputs_within(graph))
            remaining += [*node.inputs[: _READ_INPUTS.get(node.op_type)], *inner]
    return {str(value.name) for value in model.graph.initializers.values() if value in seen}


def _inputs_within(attribute: ir.Attr) -> list[ir.Value | None]:
    """Returns the inputs of all nodes of a branch or a loop, which may be from around it."""
    graphs = [attribute.as_graph()] if attribute.type is ir.AttributeType.GRAPH else []
    return [value for graph in graphs for node in graph.all_nodes() for value in node.inputs]


def _formed(
    model: torch.nn.Module, trace: Trace, form: ExportForm, lazies: placeholders.Lazies
) -> Graph:
    """Gives a model's graph the form of its target; of a trace for several ranks, a copy of it."""
    graph = trace.model
    if form.of_ranks:
        graph = graph.clone()
        placeholders.attach_named(graph, _named_tensors(model), lazies)
    units = _units(graph, trace.sharing, lazies) if trace.sharing is not None else []
    rename("input_names", graph.graph.inputs, form.input_names)
    graph_form = Form(
        form.target,
        form.body,
        form.link_weights,
        form.layers_as_functions,
        form.fuse,
        form.shared_cache,
    )
    layers, copies = give_form(graph, graph_form, units)
    return Graph(graph, copies, layers, trace)


def _units(traced: ir.Model, sharing: SharedTrace, lazies: placeholders.Lazies) -> list[Units]:
    """Returns the units of equal blocks; the values that they end with are outputs no longer."""
    outputs = traced.graph.outputs
    inputs = {str(value.name): value for value in traced.graph.inputs}
    count = sum(len(ends) for units in sharing.units for ends in units.ends)
    ends = reversed([str(outputs.pop().name) for _ in range(count)])
    results = dict(zip(sharing.positions, (str(output.name) for output in outputs), strict=True))
    return [
        Units(
            kinds=units.run.kinds,
            paths=[units.run.unit_paths(unit) for unit in range(units.run.units)],
            tensors=[
                {name: lazies.get(x.data_ptr(), x) for name, x in tensors.items()}
                for tensors in map(units.run.unit_tensors, range(units.run.units))
            ],
            ends=[[next(ends) for _ in nodes] for nodes in units.ends],
            inputs=[[inputs[name] for name in names] for names in units.inputs],
            kept=[[results[number] for number in unit] for unit in units.run.results[:TRACED]],
            positions=units.run.results,
        )
        for units in sharing.units
    ]


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def captured(
    model: torch.nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    example: DynamicExample,
    trials: SizeTrials,
    *,
    runs: bool = True,
    gradients: bool = False,
    sharing: SharedTrace | None = None,
) -> ExportedProgram:
    """Traces a model; one that ``runs``, because it has its weights, is run to explain a failure.

    Whether it will be given ``gradients`` decides what becomes of LSTMs and GRUs. With ``sharing``,
    equal blocks are passed over.

    Raises:
        ExportError: If it cannot be traced.
    """
    try:
        return capture(model, example, trials, gradients=gradients, sharing=sharing)
    except NotSharedError:
        raise
    except Exception as error:  # The model's own code runs.
        failure = failures.model_failure(model, *arguments, error) if runs else None
        if failure is not None:
            shown = failures.described(model, *arguments)
            raise ExportError(failures.explain_model_failure(failure, shown)) from failure
        raise ExportError(failures.explain(error)) from error


def translated(
    program: ExportedProgram,
    example: DynamicExample,
    trials: SizeTrials,
    opset: int,
    *,
    is_least: bool = False,
    retraces: bool = True,
) -> tuple[ir.Model, str | None]:
    """Returns a program's graph, its MoE layers as bare nodes, and a note on who translated it.

    A program with gradients cannot be traced again, where that is needed. Where the opset
    ``is_least``, the graph gets the later one that its types need.

    Raises:
        ExportError: If an operator has no translation, or one that is right at one size only.
    """
    try:
        traced, note = translate(program, opset, trials, retraces=retraces)
    except (FixedSizeError, NeedsRetraceError, torch.onnx.OnnxExporterError) as error:
        raise ExportError(failures.explain(failures.first_cause(error))) from error
    # The exporter keeps its own opset where onnx cannot convert to the one asked for.
    if traced.opset_imports[""] != opset:
        raise ExportError(f"PyTorch {torch.__version__} cannot export this model to opset {opset}")
    if is_least:
        set_opset(traced, max(opset, opset_of_types(traced)))
    widen_refused(traced)
    name_dimensions(traced, example.labels)
    return traced, note


def rename(argument: str, values: Sequence[ir.Value], names: Sequence[str] | None) -> None:
    """Gives a graph's inputs or outputs the names of an argument of :func:`export`, if any.

    Raises:
        ValueError: If there are more or fewer, or two are equal.
    """
    if names is None:
        return
    if len(names) != len(values) or len(set(names)) != len(names):
        raise ValueError(f"{argument} must be {len(values)} different names, got {list(names)}")
    for value, name in zip(values, names, strict=True):
        value.name = name


def check_graph(model: ir.Model, copies: Copies | None = None) -> onnx.ModelProto:
    """Checks what is about to be written, and returns it without its weights.

    Raises:
        ExportError: If it is not valid ONNX.
    """
    try:
        return check(model, copies)
    except InvalidGraphError as error:
        raise ExportError(
            f"the graph is not valid ONNX, and no file is written: {error}"
        ) from error


@contextlib.contextmanager
def explained_by_model(model: torch.nn.Module, arguments: Arguments) -> Iterator[None]:
    """Raises, in the place of an export's error, the one that the model itself raises, if any.

    A trace does not ask for equal dtypes everywhere that PyTorch does.
    """
    try:
        yield
    except ExportError as error:
        failure = failures.failure_on(model, *arguments) if has_values(model) else None
        if failure is None:
            raise
        shown = failures.described(model, *arguments)
        raise ExportError(failures.explain_model_failure(failure, shown)) from error
