"""Logs of a whole model, and of a program that was traced of it, at the same sizes.

Neither has values: weights and inputs are tensors of the meta device. In both, a parameter, a
buffer and an input have the same names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from dynamo_moe import pytree
from dynamo_moe.private.pytorch import modules_by_path, own_parts, tensors_replaced
from dynamo_moe.private.tracer import exporting
from dynamo_moe.restoring import state_of
from dynamo_moe.tracing.dynamic_shapes import DynamicExample
from dynamo_moe.tracing.exportable_models import exportable_models
from dynamo_moe.tracing.nodes import ASSERTIONS
from dynamo_moe.tracing.operator_log import META, Forms, OperatorLog, like_on_meta
from dynamo_moe.tracing.shortcuts import capturing

_CASTING_DEVICES = ("cpu", "cuda")
_WEIGHTS = frozenset({InputKind.PARAMETER, InputKind.BUFFER})


@dataclass(frozen=True)
class Span:
    """The part of a log that is one call of a block.

    Attributes:
        records: Its records in the log, from one number up to another.
        values: Its results, likewise.
        memories: What of its results has memory of its own, likewise.
        autocast: The dtypes that PyTorch casts to around the block, by device: tensors without
            values are not cast, so no operator of the log shows it.
    """

    records: range
    values: range
    memories: range
    autocast: Mapping[str, torch.dtype]


@dataclass(frozen=True)
class ModelLog:
    """The log of a run of a model or a program.

    Attributes:
        operators: The log.
        spans: By the id of a block that was watched, its calls in order.
        results: The leaves of what was returned: the numbers of tensors, and what other values
            show.
    """

    operators: OperatorLog
    spans: Mapping[int, Sequence[Span]]
    results: Sequence[int | str]


@dataclass
class LoggedModel:
    """A model that runs without values, as it does while it is traced.

    Attributes:
        model: The model.
        example: Its arguments.
    """

    model: nn.Module
    example: DynamicExample
    _forms: Forms = field(default_factory=Forms)

    def __post_init__(self) -> None:
        self._restore_state = state_of(self.model)
        # By path, the first path of the same tensor, and by that a tensor of the same layout.
        self._first_paths: dict[str, str] = {}
        self._weights: dict[str, Tensor] = {}
        first_paths: dict[int, str] = {}
        for module_path, module in modules_by_path(self.model):
            for tensors in own_parts(module)[:2]:
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    path = f"{module_path}.{name}" if module_path else name
                    first = first_paths.setdefault(id(tensor), path)
                    self._first_paths[path] = first
                    if first == path:
                        self._weights[path] = _like(tensor)
        self._leaves, self._spec = pytree.tree_flatten((self.example.args, self.example.kwargs))

    def inputs(self, factor: int, more: int = 0) -> list[Any]:
        """Returns the example's leaves at other sizes.

        Args:
            factor: How many times their size symbolic dimensions have.
            more: What they have beyond that.
        """
        labels = iter(self.example.labels)

        def resized(tensor: Tensor) -> Tensor:
            symbolic = {key for key, label in next(labels, {}).items() if label is not None}
            shape = [
                size * factor + more if dimension in symbolic else size
                for dimension, size in enumerate(tensor.shape)
            ]
            return torch.empty(shape, dtype=tensor.dtype, device=META)

        return [resized(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]

    def run(
        self, inputs: Sequence[Any], blocks: Sequence[nn.Module], most_records: int | None = None
    ) -> ModelLog:
        """Runs the model.

        Args:
            inputs: The leaves of its arguments.
            blocks: Blocks whose spans are wanted.
            most_records: How many operators may run.

        Raises:
            Exception: Whatever the model's code raises, such as where it asks for a value.
        """
        log = self._begun(inputs, most_records)
        spans: dict[int, list[Span]] = {id(block): [] for block in blocks}
        args, kwargs = pytree.tree_unflatten(inputs, self._spec)

        def replacement(path: str, tensor: Any) -> Any:
            return tensor if tensor is None else self._weights[self._first_paths[path]]

        with contextlib.ExitStack() as contexts:
            contexts.callback(self._restore_state)
            contexts.enter_context(tensors_replaced(self.model, replacement))
            contexts.enter_context(_running())
            contexts.enter_context(_spans_noted(log, spans))
            contexts.enter_context(log)
            results = pytree.tree_leaves(self.model(*args, **kwargs))
        return ModelLog(log, spans, _shown(log, results))

    def run_program(self, program: ExportedProgram, inputs: Sequence[Any]) -> ModelLog:
        """Runs a program that was traced of the model, or of a part of it.

        Raises:
            Exception: Whatever an operator raises.
        """
        log = self._begun(inputs, None)
        signature = program.graph_signature
        remaining = iter(inputs)
        arguments = [
            next(remaining)
            if spec.kind is InputKind.USER_INPUT
            else self._weights[self._first_paths[str(spec.target)]]
            if spec.kind in _WEIGHTS
            else program.constants[str(spec.target)]
            for spec in signature.input_specs
        ]
        with _running(), log:
            results = _ProgramOnMeta(program.graph_module).run(*arguments)
        wanted = [
            result
            for spec, result in zip(signature.output_specs, results, strict=True)
            if spec.kind is OutputKind.USER_OUTPUT
        ]
        if len(wanted) < len(results):
            raise ValueError("the program changes buffers or inputs")
        return ModelLog(log, {}, _shown(log, wanted))

    def _begun(self, inputs: Sequence[Any], most_records: int | None) -> OperatorLog:
        log = OperatorLog(self._forms, most_records)
        for path, tensor in self._weights.items():
            log.add_origin(tensor, ("weight", path))
        for position, leaf in enumerate(inputs):
            if isinstance(leaf, Tensor):
                log.add_origin(leaf, ("input", position))
        return log


def _like(tensor: Tensor) -> Tensor:
    like = like_on_meta(tensor.detach())
    return nn.Parameter(like, requires_grad=False) if isinstance(tensor, nn.Parameter) else like


@contextlib.contextmanager
def _running() -> Iterator[None]:
    """The conditions of a trace, but for its symbolic sizes; compiled parts run as they are."""
    with contextlib.ExitStack() as contexts:
        for context in (exportable_models(), capturing(), exporting(), torch.no_grad()):
            contexts.enter_context(context)
        contexts.enter_context(torch.compiler.set_stance("force_eager"))
        contexts.enter_context(_WithNumbers())
        yield


class _WithNumbers(TorchFunctionMode):
    """Keeps the numbers of tensors that are made of Python's, on whatever device.

    On the meta device they would have none, and be like no others.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.new_tensor and args[0].is_meta:
            func, kwargs = torch.tensor, {"dtype": args[0].dtype} | kwargs
            args = args[1:]
        if func in {torch.tensor, torch.as_tensor} and not isinstance((*args, None)[0], Tensor):
            kwargs.pop("device", None)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _spans_noted(log: OperatorLog, spans: Mapping[int, list[Span]]) -> Iterator[None]:
    begun: list[tuple[int, int, int, Mapping[str, torch.dtype]]] = []

    def begin(module: nn.Module, _: Any) -> None:
        if id(module) in spans:
            begun.append((len(log.records), log.values, log.memories, _autocast()))

    def end(module: nn.Module, _: Any, __: Any) -> None:
        if id(module) in spans:
            record, value, memory, autocast = begun.pop()
            span = Span(
                range(record, len(log.records)),
                range(value, log.values),
                range(memory, log.memories),
                autocast,
            )
            spans[id(module)].append(span)

    hooks = register_module_forward_pre_hook(begin), register_module_forward_hook(end)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _autocast() -> dict[str, torch.dtype]:
    return {
        device: torch.get_autocast_dtype(device)
        for device in _CASTING_DEVICES
        if torch.is_autocast_enabled(device)
    }


def _shown(log: OperatorLog, leaves: Sequence[Any]) -> list[int | str]:
    return [log.number(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]


class _ProgramOnMeta(fx.Interpreter):
    """Runs a program whose devices are those of the example, on the meta device."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in ASSERTIONS:
            return None
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: META, (args, kwargs))
        return super().call_function(target, args, kwargs)
