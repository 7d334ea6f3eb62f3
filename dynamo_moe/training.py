"""``export_training``: loss and gradients as one ONNX file, for training without PyTorch."""

from __future__ import annotations

import inspect
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec

import dynamo_moe.tracing.gradients  # noqa: F401  Registers decompositions.
from dynamo_moe import exporting, local_experts, packed_experts
from dynamo_moe.conversion import unconverted
from dynamo_moe.evaluation import check_model
from dynamo_moe.files import model_files
from dynamo_moe.graph.pipeline import AddBodies, Findings, NameNodesByModule, Simplify
from dynamo_moe.json_values import json_values
from dynamo_moe.model_graph import (
    ExportError,
    captured,
    check_graph,
    naming_unconverted,
    translated,
)
from dynamo_moe.moe_nodes.targets.plugin import PLUGIN
from dynamo_moe.moe_nodes.targets.record import DEFAULT_OPSET
from dynamo_moe.private import gradients
from dynamo_moe.private.pytorch import schema_of
from dynamo_moe.progress.phases import Progress, Stopwatch
from dynamo_moe.tracing import shortcuts
from dynamo_moe.tracing.dynamic_shapes import BATCH, DynamicExample, DynamicShapes, resolve
from dynamo_moe.tracing.fixed_sizes import SizeTrials
from dynamo_moe.tracing.nodes import all_nodes
from dynamo_moe.weights.packed_linear import packed_layers

LOSS = "loss"
"""The name of a training file's first output."""

_MODEL = "model."


def export_training(
    model: nn.Module,
    loss: Callable[..., Tensor | Mapping[str, Tensor]],
    args: tuple[Any, ...] | Tensor,
    labels: tuple[Any, ...] | Tensor,
    path: str | os.PathLike[str],
    *,
    parameters: Literal["inputs", "initializers"] = "inputs",
    dynamic_shapes: DynamicShapes = BATCH,
    opset: int = DEFAULT_OPSET,
    external_data: bool | None = None,
    progress: bool | Progress = False,
) -> TrainingReport:
    """Exports a model with its loss and the gradients of its parameters to one ONNX file.

    The file's outputs are ``loss``, ``<parameter>.grad`` for each parameter that requires a
    gradient, and ``<buffer>.new`` for each buffer that a step changes, such as the statistics of a
    batch norm. An optimizer outside of the file, in a few lines, makes the step. A parameter that
    the model uses under two names has one, with the sum of both gradients.

    Args:
        model: The model, in the modes that its modules are in: call ``model.train()`` first, and
            ``eval()`` of modules that stay as they are, such as a frozen batch norm, and of
            converted MoE layers, which compute through ``torch.ops.moe`` in that mode alone.
        loss: Called with the model's output and the labels; gives a floating scalar, or a mapping
            with it as ``loss`` and with other tensors, such as a number of right answers, that are
            outputs of these names. A module's own parameters get gradients too, as
            ``loss.<parameter>.grad``.
        args: Example arguments of the model, or one tensor; only shapes and dtypes matter.
        labels: Example labels, or one tensor: further inputs, ``labels``, or ``labels_0`` and on.
        path: The file to write. It is written beside and renamed.
        parameters: ``inputs``: parameters and buffers are inputs of the file, by their names, after
            the batch and the labels; ``initializers``: their values are in the file, for a runtime
            that changes them there.
        dynamic_shapes: As of :func:`export`; labels are arguments of these names.
        opset: Version of the standard operators, at least 18.
        external_data: Weights in ``<name>.data`` beside the file; None: only above 2 GB.
        progress: As of :func:`export`.

    Returns:
        What was written.

    Raises:
        ValueError: If an argument is out of range, no parameter requires a gradient, the loss is no
            floating scalar, or the model draws random numbers, as dropout does.
        TypeError: If the model is not a module, or the example does not fit its forward.
        ExportError: If PyTorch's exporter cannot take the model, or what it makes of it is refused
            by onnx's checker.
    """
    started = time.perf_counter()
    check_model(model)
    path = Path(path)
    if parameters not in ("inputs", "initializers"):
        raise ValueError(f"parameters must be inputs or initializers; got {parameters!r}")
    packed = next((p for p, m in model.named_modules() if packed_experts.of(m) is not None), None)
    if packed is not None:
        raise ValueError(
            f"the experts of {packed!r} are packed: quantise a model once it is trained"
        )
    local_experts.need_whole(dict(model.named_modules()), "training files are for one device")
    if linear := next(iter(packed_layers(model)), None):
        raise ValueError(f"the weight of {linear!r} is packed: quantise a model once it is trained")
    reason = gradients.missing()
    if reason is not None:
        raise ExportError(f"PyTorch {torch.__version__} cannot export gradients: {reason}")
    path = model_files.destination(path)
    args, labels = ((value,) if isinstance(value, Tensor) else value for value in (args, labels))
    together = _WithLoss(model, loss, len(args), len(labels))
    with exporting.progressing(progress, path) as progressed:
        watch = Stopwatch(progressed)
        with watch.running(), _kept_buffers(together), naming_unconverted(model):
            example = resolve(together, (*args, *labels), {}, dynamic_shapes)
            trials = SizeTrials(together, example)
            values: tuple[Any, dict[str, Any]] = (*args, *labels), {}
            program = captured(together, values, example, trials, gradients=True)
            results = _results(program)
            _refuse_random(program)
            state = _state(together)
            trained = _trained(together, example)
            joint, outputs = _with_gradients(program, results, trained, state)
            graph, note = translated(joint, example, trials, opset, retraces=False)
            _optimize(graph, outputs, state, parameters)
            checked = check_graph(graph)
            files = model_files.save_model(graph, path, external_data, checked)
    warning = unconverted.training_warning(model)
    if warning:
        warnings.warn(warning, stacklevel=2)
    return TrainingReport(
        path=path,
        files=tuple(files),
        inputs=tuple(str(value.name) for value in graph.graph.inputs),
        outputs=tuple(str(value.name) for value in graph.graph.outputs),
        gradients=tuple(name for name in outputs if name.endswith(".grad")),
        buffers=tuple(name for name in outputs if name.endswith(".new")),
        nodes=dict(Counter(exporting.qualified(node) for node in graph.graph).most_common()),
        file_bytes=sum(file.stat().st_size for file in files),
        seconds=time.perf_counter() - started,
        notes=(note,) if note else (),
    )


class _WithLoss(nn.Module):
    """A model and its loss as one module, whose arguments are the model's and the labels."""

    def __init__(
        self, model: nn.Module, loss: Callable[..., Any], arguments: int, labels: int
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

        def forward(*values: Any) -> Any:
            result = self.loss(self.model(*values[:arguments]), *values[arguments:])
            if not isinstance(result, Mapping) or LOSS not in result:
                return result
            others = {
                name: value.detach() if isinstance(value, Tensor) else value
                for name, value in result.items()
                if name != LOSS
            }
            return {LOSS: result[LOSS], **others}

        # The names of the file's inputs.
        names = _argument_names(model, arguments)
        names += ["labels"] if labels == 1 else [f"labels_{number}" for number in range(labels)]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind) for name in names]
        )
        self.forward = forward


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Gives buffers their values back, which a forward in training may change."""
    before = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in before:
            setattr(module, name, buffer.copy_(value))


def _argument_names(model: nn.Module, count: int) -> list[str]:
    """Returns the names of a model's first arguments; those of ``*args`` are numbered."""
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*range(count)).arguments
    except TypeError as error:
        raise TypeError(
            f"the example does not fit {type(model).__name__}.forward{signature}: {error}"
        ) from None
    names: list[str] = []
    for name, value in bound.items():
        several = len(value) if isinstance(value, tuple) else 0
        names += [f"{name}_{number}" for number in range(several)] if several else [name]
    return names


def _path_in_model(name: str) -> str:
    """Returns the path of a module, parameter or buffer in the user's model."""
    return name.removeprefix(_MODEL)


def _state(model: nn.Module) -> dict[str, str]:
    """Returns the names of parameters and buffers as the file has them: one for each tensor."""
    first: dict[int, str] = {}
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: first.setdefault(id(tensor), _path_in_model(name)) for name, tensor in named}


# --- What a graph of training cannot be ---


def _results(program: ExportedProgram) -> list[str]:
    """Returns the names of a program's results, the loss first.

    Raises:
        ValueError: If they are no floating scalar and tensors beside it.
    """
    spec = program.call_spec.out_spec
    names = [str(name) for name in spec.context] if spec.type is dict else [LOSS]
    results = [
        spec for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT
    ]
    values = [_value(program, result) for result in results]
    if names[:1] != [LOSS]:
        raise ValueError(f"loss must give a tensor of the name {LOSS!r}, got {', '.join(names)}")
    if len(values) != len(names) or not all(isinstance(value, Tensor) for value in values):
        suffix = " for each name" if spec.type is dict else ""
        raise ValueError(f"loss must give one tensor{suffix}, got {len(values)} values")
    value = values[0]
    if value.ndim or not value.is_floating_point():
        shape = ", ".join(map(str, value.shape))
        dtype = str(value.dtype).removeprefix("torch.")
        raise ValueError(f"loss must be a floating scalar, got {dtype} of shape [{shape}]")
    return names


def _value(program: ExportedProgram, spec: OutputSpec) -> Any:
    name = getattr(spec.arg, "name", None)
    nodes = (node for node in program.graph.nodes if node.name == name)
    return next((node.meta["val"] for node in nodes), None)


_INSTEAD = {
    "BackwardHookFunction": "remove the backward hooks of its modules",
    "CheckpointFunction": "call checkpoint with use_reentrant=False",
}
"""What to do about PyTorch's own Functions."""

_OPERATOR_INSTEAD = (
    "make an operator of it, by dynamo_moe.op_from_function or torch.library.custom_op"
)

# What operators call the probability with which they drop elements.
_PROBABILITIES = ("p", "dropout_p", "dropout")


def _refuse_random(program: ExportedProgram) -> None:
    for node in all_nodes(program):
        if _is_random(node):
            module = _module(node)
            raise ValueError(
                f"{module} draws random numbers ({node.target}), which differ between PyTorch and "
                "the file: set the probability of dropout to 0, or put the module into eval()"
            )


def _is_random(node: fx.Node) -> bool:
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    arguments = schema_of(target).arguments
    values = {
        argument.name: argument.default_value
        for argument in arguments
        if argument.has_default_value()
    }
    names = (argument.name for argument in arguments)
    values |= dict(zip(names, node.args, strict=False)) | node.kwargs
    probability = next((values[name] for name in _PROBABILITIES if name in values), 1)
    return probability != 0 and values.get("train", values.get("training", True)) is not False


def _module(node: fx.Node) -> str:
    """Returns the path of the module that calls a node's operator, for a message."""
    calls = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return _path_in_model(calls[-1]) if calls and calls[-1] else "the model"


# --- The graph ---


def _trained(model: nn.Module, example: DynamicExample) -> set[str]:
    """Returns the names of parameters that get a gradient, by running the example."""
    named = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    if not named:
        raise ValueError("no parameter of the model requires a gradient: nothing is trained")
    buffers = dict(model.named_buffers())
    result = model(*example.args)
    loss = result[LOSS] if isinstance(result, Mapping) else result
    for name, buffer in model.named_buffers():
        if buffer is not buffers.get(name):
            raise ValueError(
                f"the model assigns its buffer {_path_in_model(name)!r} anew, which a trace does "
                "not keep: change it in place, as by copy_()"
            )
    if not loss.requires_grad:
        raise ValueError("loss depends on no parameter that requires a gradient")
    _refuse_functions(loss)
    gradients = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
    return {name for name, gradient in zip(named, gradients, strict=True) if gradient is not None}


def _refuse_functions(loss: Tensor) -> None:
    """Refuses Functions: a trace goes through their forward and does not see their backward.

    Raises:
        ValueError: If the loss depends on one.
    """
    remaining, seen = [loss.grad_fn], set[Any]()
    while remaining:
        step = remaining.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        name = type(step).__name__.removesuffix("Backward")
        # Operators of torch.library have one, too, which is theirs in a trace as well.
        if isinstance(step, BackwardCFunction) and not name.startswith("GeneratedBackwardFor_"):
            instead = _INSTEAD.get(name, _OPERATOR_INSTEAD)
            raise ValueError(
                f"the model calls the torch.autograd.Function {name}, whose backward a trace does "
                f"not see: {instead}"
            )
        remaining += [following for following, _ in step.next_functions]


def _with_gradients(
    program: ExportedProgram, results: Sequence[str], trained: set[str], state: Mapping[str, str]
) -> tuple[ExportedProgram, list[str]]:
    """Returns the program with its gradients, and the names of all its results."""
    try:
        with shortcuts.decomposing():
            joint, specs = gradients.with_gradients(program, trained)
    except Exception as error:  # The operators' own code runs.
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(f"PyTorch cannot trace the model's gradients: {reason}") from error
    forms = {
        OutputKind.GRADIENT_TO_PARAMETER: "{}.grad",
        OutputKind.BUFFER_MUTATION: "{}.new",
    }
    remaining, names = iter(results), []
    for spec in specs:
        if spec.kind in (OutputKind.LOSS_OUTPUT, OutputKind.USER_OUTPUT):
            names.append(next(remaining))
        elif spec.kind in forms:
            names.append(forms[spec.kind].format(state.get(str(spec.target))))
        else:
            raise ExportError(f"the model changes its input {spec.target!r}, which no file can")
    return joint, names


def _optimize(
    model: ir.Model, outputs: Sequence[str], state: Mapping[str, str], parameters: str
) -> None:
    """Names results and parameters, and simplifies the graph, in place."""
    graph = model.graph
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    # PyTorch's own order begins with the buffers.
    graph.outputs[:] = sorted(graph.outputs, key=lambda value: str(value.name).endswith(".new"))
    trained = {name: value for name, value in graph.initializers.items() if name in state}
    values = {name: value.const_value for name, value in trained.items()}
    for name, value in trained.items():  # As inputs, so that nothing computed from them is folded.
        del graph.initializers[name]
        value.const_value = None
        value.name = state[name]
        graph.inputs.append(value)
    # No layer is recorded: a training file's metadata has none.
    for step in (NameNodesByModule(), Simplify(Findings(layers=[])), AddBodies(PLUGIN)):
        step(model)
    if parameters == "initializers":
        for name, value in trained.items():
            graph.inputs.remove(value)
            value.const_value = values[name]
            graph.register_initializer(value)
    common_passes.NameFixPass()(model)  # A parameter may be called as some node's result is.
    common_passes.ClearMetadataAndDocStringPass()(model)


# --- The outcome ---


@dataclass(frozen=True)
class TrainingReport:
    """The outcome of :func:`export_training`.

    Attributes:
        path: The ONNX file.
        files: All files written, the ONNX file first.
        inputs: The file's inputs, in order.
        outputs: The file's outputs, in order: the loss and what came with it, gradients, buffers.
        gradients: The outputs that are gradients, ``<parameter>.grad``.
        buffers: The outputs that are new values of buffers, ``<buffer>.new``.
        nodes: Number of the graph's nodes by operator.
        file_bytes: Bytes of all files.
        seconds: Wall time.
        notes: What a user of the file should know.
    """

    path: Path
    files: tuple[Path, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    buffers: tuple[str, ...]
    nodes: Mapping[str, int]
    file_bytes: int
    seconds: float
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain values, for JSON."""
        return json_values(self)

    def __rich__(self) -> Table:
        """Returns a table for the terminal."""
        title = f"Exported {escape(str(self.path))}, for training"
        table = Table(show_header=False, title=title, title_justify="left")
        table.add_row("gradients", str(len(self.gradients)))
        table.add_row("changed buffers", str(len(self.buffers)))
        table.add_row("nodes", str(sum(self.nodes.values())))
        table.add_row("files", f"{decimal(self.file_bytes)} in {len(self.files)}")
        table.add_row("time", f"{self.seconds:.1f} s")
        for note in self.notes:
            table.add_row("note", escape(note))
        return table
