"""Runs of a model, and of programs that were traced of it, on inputs of any size."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from dynamo_moe import pytree
from dynamo_moe.private.pytorch import OpOverload, schema_of, without_values
from dynamo_moe.restoring import state_of
from dynamo_moe.tracing.dynamic_shapes import DynamicExample
from dynamo_moe.tracing.in_place import changed_inputs
from dynamo_moe.tracing.nodes import ASSERTIONS

_META = torch.device("meta")

Run = Callable[[Sequence[Any]], Sequence[Any]]
"""From an example's leaves to those of the results."""


def changed_parameters(program: ExportedProgram) -> frozenset[str]:
    """Returns the names of the parameters whose values a program changes."""
    return _changed(program, program.graph_signature.inputs_to_parameters)


def changed_buffers(program: ExportedProgram) -> frozenset[str]:
    """Returns the names of the buffers whose values a program changes."""
    return _changed(program, program.graph_signature.inputs_to_buffers)


def _changed(program: ExportedProgram, names: Mapping[str, str]) -> frozenset[str]:
    changed = {node.name for node in changed_inputs(program.graph_module)}
    return frozenset(names[name] for name in changed & names.keys())


def model_run(model: nn.Module, example: DynamicExample, parameters: Collection[str]) -> Run:
    """Returns a run of a model, which leaves its buffers and its other state as they are.

    It computes with copies of ``parameters``, those that it changes.
    """
    _, spec = pytree.tree_flatten((example.args, example.kwargs))
    restore = functools.cache(lambda: state_of(model))

    def run(leaves: Sequence[Any]) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        tensors = dict(model.named_buffers())
        tensors |= {name: model.get_parameter(name) for name in parameters}
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        restoring = restore()
        try:
            return pytree.tree_leaves(torch.func.functional_call(model, copies, args, kwargs))
        finally:
            restoring()

    return run


class _Run(fx.Interpreter):
    @staticmethod
    def taken(value: Any) -> Any:
        """Returns a constant or a weight as this takes it."""
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in ASSERTIONS:
            return None
        if target is torch.ops.aten.view.default:  # A file has no strides that it could not take.
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return _body(value) if isinstance(value, fx.GraphModule) else value


class _RunOnMeta(_Run):
    """A run with PyTorch's meta tensors, which have a shape and a dtype alone."""

    @staticmethod
    def taken(value: Any) -> Any:
        """Returns a tensor without its values."""
        return _on_meta(value)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if _makes_tensors(target):
            kwargs = {**kwargs, "device": _META}
        args = [_META if isinstance(argument, torch.device) else argument for argument in args]
        return super().call_function(target, tuple(args), kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _on_meta(super().get_attr(target, args, kwargs))


@functools.cache
def _makes_tensors(target: Any) -> bool:
    """Whether an operator takes the device of its result by name."""
    arguments = schema_of(target).arguments if isinstance(target, OpOverload) else ()
    return any(argument.name == "device" and argument.kwarg_only for argument in arguments)


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)


def _body(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a loop's or a branch's graph that asserts nothing either."""
    body = fx.GraphModule(module, copy.deepcopy(module.graph))
    for node in [*body.graph.nodes]:
        if node.target in ASSERTIONS:
            body.graph.erase_node(node)
        elif node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        elif node.op == "get_attr" and isinstance(
            part := getattr(body, node.target), fx.GraphModule
        ):
            setattr(body, node.target, _body(part))
    body.recompile()
    return body


def program_run(
    program: ExportedProgram,
    module: fx.GraphModule | None = None,
    run_by: type[_Run] = _Run,
) -> Run:
    """Returns a run of a traced program, or of another module with its signature."""
    signature = program.graph_signature
    values = {
        name: run_by.taken(value)
        for name, value in {**program.state_dict, **program.constants}.items()
    }
    changed = changed_parameters(program)

    def run(leaves: Sequence[Any]) -> Sequence[Any]:
        remaining = iter(leaves)
        inputs = [
            next(remaining)
            if spec.kind is InputKind.USER_INPUT
            else _copied(values[str(spec.target)], is_changed=spec.target in changed)
            for spec in signature.input_specs
        ]
        results = run_by(module or program.graph_module).run(*inputs)
        return [
            result
            for spec, result in zip(signature.output_specs, results, strict=True)
            if spec.kind is OutputKind.USER_OUTPUT
        ]

    return run


def shapes_run(program: ExportedProgram, module: fx.GraphModule | None = None) -> Run:
    """Returns such a run without values: its results have shapes and dtypes alone.

    PyTorch's meta tensors take a tenth of the time of its fake ones, which know some numbers.
    """
    on_meta = program_run(program, module, _RunOnMeta)
    fake = program_run(program, module)

    def run(leaves: Sequence[Any]) -> Sequence[Any]:
        try:
            return on_meta([_on_meta(leaf) for leaf in leaves])
        except Exception:  # An operator without meta tensors, or one that asks for a number.
            with without_values():
                return fake(leaves)

    return run


def _copied(value: Any, *, is_changed: bool) -> Any:
    """Returns a copy of what a run may change in place."""
    may_change = isinstance(value, Tensor) and (is_changed or not value.requires_grad)
    return value.detach().clone() if may_change else value
