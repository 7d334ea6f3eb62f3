"""From a PyTorch module to an ``ExportedProgram`` that PyTorch's ONNX exporter can translate."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.overrides import TorchFunctionMode

from dynamo_moe.modules import ConvertedModule
from dynamo_moe.private import tracer
from dynamo_moe.private.pytorch import FakeTensor
from dynamo_moe.progress.phases import phase
from dynamo_moe.restoring import state_kept
from dynamo_moe.tracing import shortcuts
from dynamo_moe.tracing.autocast import with_casts
from dynamo_moe.tracing.dynamic_shapes import DynamicExample
from dynamo_moe.tracing.exportable_models import exportable_models
from dynamo_moe.tracing.fixed_sizes import SizeTrials
from dynamo_moe.tracing.in_place import changed_windows
from dynamo_moe.tracing.model_calls import CallsNoted, DataDetached
from dynamo_moe.tracing.nodes import UnfollowedError, all_nodes
from dynamo_moe.tracing.router_fusion import fuse_routers
from dynamo_moe.tracing.shared_trace import SharedTrace
from dynamo_moe.tracing.size_decisions import decisions_noted, decisions_of
from dynamo_moe.tracing.sizes_in_tensors import SizesInTensors
from dynamo_moe.tracing.traced_forward import code_importable, keywords_named, sizes_of_one_name
from dynamo_moe.tracing.translatable import make_translatable
from dynamo_moe.tracing.vmapped import flatten_vmaps


@phase("capture")
def capture(
    model: torch.nn.Module,
    example: DynamicExample,
    trials: SizeTrials,
    *,
    gradients: bool = False,
    sharing: SharedTrace | None = None,
) -> ExportedProgram:
    """Traces the model: by running it, which is faster, or else by reading its code.

    Plain routers are part of their layers' nodes in the returned program. Code that turns a size
    into a number, such as ``int(math.ceil(1.25 * tokens))``, keeps it symbolic only when read.
    With ``sharing``, whose context is entered, equal blocks are passed over; what ends the traced
    ones are further results of the program. For a program with gradients, LSTMs and GRUs are not
    loops, which have none, but steps of the example's number, and where the model switches
    gradients off is a region.

    Raises:
        Exception: Whatever the model's code or the tracer raises, from the first attempt.
    """
    try:
        program = _checked_trace(
            model, example, trials, strict=False, gradients=gradients, sharing=sharing
        )
    except Exception as failure:  # The model's own code runs.
        if sharing is not None:
            raise
        try:
            program = _checked_trace(model, example, trials, strict=True, gradients=gradients)
        except Exception:
            graph = getattr(failure, "partial_fx_graph", None)
            if graph is not None:
                failure.add_note(f"What was traced until then:\n{graph}")
            raise failure from None
    if changed_windows(all_nodes(program)):
        with CallsNoted(Tensor.unfold) as unfolding:
            _trace(model, example, strict=False, gradients=gradients)
        raise UnfollowedError(
            f"a tensor is changed through its windows, which unfold gives at "
            f"{', '.join(dict.fromkeys(unfolding.lines))}: change the tensor itself"
        )
    make_translatable(program, gradients=gradients)
    fuse_routers(program)
    if sharing is not None:
        sharing.mark(program)
    return program


def _checked_trace(
    model: torch.nn.Module,
    example: DynamicExample,
    trials: SizeTrials,
    *,
    strict: bool,
    gradients: bool,
    sharing: SharedTrace | None = None,
) -> ExportedProgram:
    with decisions_noted() as noted:
        try:
            program = _trace(model, example, strict=strict, gradients=gradients)
        except Exception as error:  # The model's own code runs.
            for decision in noted:
                if decision.line and decision.fixes_a_size():
                    error.add_note(decision.line)
            raise
    if sharing is not None:
        sharing.check(program)
    decisions = decisions_of(program, noted)
    if any(isinstance(m, ConvertedModule) and m.runs_own_code for m in model.modules()):
        # It is left at a certain call of a function, of which a trace may have others.
        trials.check_example(program)
    trials.check_trace(program, decisions)
    return with_casts(program, strict=strict)


def _trace(
    model: torch.nn.Module, example: DynamicExample, *, strict: bool, gradients: bool
) -> ExportedProgram:
    # What torch.onnx.export does around torch.export, and more.
    rnns = nullcontext() if gradients or not example.shapes else tracer.rnn_loops()
    regions = nullcontext() if gradients else tracer.without_gradients()
    graphs = nullcontext() if strict else tracer.graphs_compiled_late()
    keywords = nullcontext() if strict else keywords_named(model, example)
    sizes = nullcontext() if strict else sizes_of_one_name(model, example)
    code = code_importable(model) if strict else nullcontext()

    def program() -> ExportedProgram:
        with state_kept(model), tracer.no_layers_left():
            traced = torch.export.export(
                model,
                example.args,
                kwargs=example.kwargs,
                dynamic_shapes=example.shapes,
                strict=strict,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
        flatten_vmaps(traced)
        return traced

    with exportable_models(), shortcuts.capturing(), rnns, regions, graphs, keywords, sizes, code:
        watched: TorchFunctionMode = DataDetached()
        try:
            traced = program()
            if not _without_values(traced):
                return traced
        except RuntimeError as error:
            if tracer.decides_by_values(error):
                watched = SizesInTensors()
            elif not tracer.lacks_values(error):
                raise
            if strict:
                raise
        with watched:
            traced = program()
    for name in _without_values(traced):
        raise ValueError(
            f"the trace does not have the values of the constant {name}: a tensor's .data is read "
            "within a loop or a branch (use .detach()), or a tensor is made in a way that a trace "
            "does not follow (make it a buffer)"
        )
    return traced


def _without_values(program: ExportedProgram) -> list[str]:
    """Returns the names of constants, those of branches and loops among them, without values."""
    constants = dict(program.constants)
    for node in all_nodes(program):
        if node.op == "get_attr":
            constants[str(node.target)] = getattr(node.graph.owning_module, str(node.target), None)
    return [name for name, constant in constants.items() if isinstance(constant, FakeTensor)]


def without_constants(program: ExportedProgram) -> list[Any]:
    """Removes the results that are constants: None, and numbers that are no sizes; returns them."""
    output = program.graph.output_node()
    results: Any = output.args[0]
    specs = program.graph_signature.output_specs
    constants = [spec.arg for spec in specs if isinstance(spec.arg, ConstantArgument)]
    kept = [not isinstance(spec.arg, ConstantArgument) for spec in specs]
    output.args = (tuple(itertools.compress(results, kept)),)
    specs[:] = itertools.compress(specs, kept)
    return [constant.value for constant in constants]
