"""``op_from_function``: a ``torch.autograd.Function`` as an operator that exporters see."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dynamo_moe import pytree
from dynamo_moe.operators.legacy_symbolic import declaration_of
from dynamo_moe.private.operators import parsed_schema
from dynamo_moe.private.pytorch import change_count, storage_key

Function = type[torch.autograd.Function]


@dataclass(frozen=True)
class FunctionOp:
    """An operator made of a ``torch.autograd.Function``; calling it calls the operator.

    Attributes:
        op: For :func:`register_op`, and with the methods of ``torch.library.custom_op``.
        declaration: What the Function's ``symbolic`` says, as arguments of :func:`register_op`;
            empty if it has none.
    """

    op: Any
    declaration: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the operator, as the Function's ``apply`` calls the Function."""
        return self.op(*args, **kwargs)


def op_from_function(
    function: Function,
    name: str,
    *,
    schema: str | None = None,
    fake: Callable[..., Any] | None = None,
    symbolic: bool = True,
) -> FunctionOp:
    """Makes an operator of PyTorch that computes what a ``torch.autograd.Function`` computes.

    ``torch.export`` looks into a Function: its forward dissolves into the operators that it calls.
    An operator stays one, and :func:`register_op` makes it one node. A ``symbolic``, by which
    PyTorch's old exporter made a node, says which:
    ``register_op(new.op, **new.declaration, body=...)``.

    Args:
        function: The Function's class; its ``forward`` takes ``ctx`` first, or has a
            ``setup_context`` beside it. Without the latter, forward runs once more where gradients
            are wanted, to learn what it keeps for backward. So it may not draw random numbers, as
            the second run would draw different ones: a call that draws them raises ValueError.
        name: The operator's name, such as ``"my::op"``.
        schema: ``"(Tensor x, float slope) -> Tensor"``; None: from forward's annotations.
        fake: Returns the results' shapes, given forward's arguments; None: forward itself is
            run on fake tensors, which works if it only calls operators of PyTorch.
        symbolic: Whether to look at the Function's ``symbolic``.

    Returns:
        The operator, differentiable as the Function is.

    Raises:
        TypeError: If ``function`` is not such a class, forward is not annotated, or an argument or
            a result has a type that operators cannot have.
        ValueError: If forward changes its arguments, or ``symbolic`` makes anything but one node of
            the arguments.

    Example:
        >>> import torch
        >>> class Twice(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ...         return x + x
        ...     @staticmethod
        ...     def backward(ctx, dy):
        ...         return dy + dy
        ...     @staticmethod
        ...     def symbolic(g, x):
        ...         return g.op("docs::Twice", x)
        >>> twice = op_from_function(Twice, "docs::twice")
        >>> twice.declaration["domain"], twice.declaration["op_type"]
        ('docs', 'Twice')
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise TypeError(f"function must be a torch.autograd.Function class, got {function!r}")
    split = function.setup_context is not torch.autograd.Function.setup_context
    _check_no_mutation(function)
    text = _schema_of(function, split) if schema is None else schema
    parsed = parsed_schema(f"{name}{text}")
    _check_schema(function, parsed)
    declaration = {}
    if symbolic and hasattr(function, "symbolic"):
        declaration = declaration_of(function.symbolic, parsed, function.__name__)

    def forward(*args: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        changes = [*map(change_count, tensors)]
        context = () if split else (_Context((False,) * len(parsed.arguments)),)
        results = function.forward(*context, *args)
        if [*map(change_count, tensors)] != changes:
            raise ValueError(
                f"{function.__name__}.forward changes its arguments, which an operator may not"
            )

        def separate(result: Tensor) -> Tensor:
            shares = storage_key(result) in map(storage_key, tensors)
            tensors.append(result.clone() if shares else result)
            return tensors[-1]

        # An operator may not return its arguments, nor two views of one memory.
        return pytree.tree_map_only(Tensor, separate, results)

    def deterministic_forward(*args: Any) -> Any:
        before = _random_states(args)
        results = forward(*args)
        if _random_states(args) != before:
            raise ValueError(
                f"{function.__name__}.forward draws random numbers: running it again, for what it "
                "keeps for backward, would draw others. Move what it keeps to a setup_context, or "
                "pass it the random numbers"
            )
        return results

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.dynamo_moe_inputs = len(inputs)
        if split:
            function.setup_context(ctx, inputs, output)
        else:
            with torch.no_grad():
                again = function.forward(ctx, *inputs)
            _keep_operators_results(ctx, inputs, again, output)

    def backward(ctx: Any, *gradients: Any) -> Any:
        gradients_of_inputs = function.backward(ctx, *gradients)
        if not isinstance(gradients_of_inputs, tuple):
            gradients_of_inputs = (gradients_of_inputs,)
        # Arguments that equal their defaults are not among the inputs.
        return gradients_of_inputs[: ctx.dynamo_moe_inputs]

    kernel = forward if split else deterministic_forward
    op = torch.library.custom_op(name, kernel, mutates_args=(), schema=text)
    op.register_fake(fake or forward)
    op.register_autograd(backward, setup_context=setup_context)
    return FunctionOp(op, declaration)


@dataclass
class _Context:
    """A ``ctx`` for a forward whose backward never runs."""

    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Any) -> None:
        """Keeps nothing."""

    mark_non_differentiable = save_for_forward = save_for_backward

    def set_materialize_grads(self, value: bool) -> None:
        """Changes nothing: there are no gradients."""


def _keep_operators_results(ctx: Any, inputs: Any, again: Any, output: Any) -> None:
    """Makes ``ctx`` hold the operator's own results instead of those of forward's second run."""
    known = {id(leaf) for leaf in pytree.tree_leaves(inputs)}
    pairs = zip(pytree.tree_leaves(again), pytree.tree_leaves(output), strict=True)
    results = {id(second): first for second, first in pairs if id(second) not in known}
    # Without this the results that backward uses would have no derivative of their own.
    ctx.save_for_backward(*(results.get(id(kept), kept) for kept in ctx.to_save or ()))
    ctx.mark_non_differentiable(
        *(results.get(id(marked), marked) for marked in ctx.non_differentiable or ())
    )


def _random_states(args: Any) -> list[bytes]:
    """Returns the states of the generators that a forward on these arguments would use."""
    leaves = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    devices = {leaf.device for leaf in leaves if leaf.is_cuda}
    states = [torch.get_rng_state()]
    # The state of a generator cannot be read during a capture.
    if devices and not torch.cuda.is_current_stream_capturing():
        states += [torch.cuda.get_rng_state(device) for device in devices]
    return [state.numpy().tobytes() for state in states]


def _schema_of(function: Function, split: bool) -> str:
    forward = function.forward
    try:
        hints = typing.get_type_hints(forward)
    except NameError as error:
        raise TypeError(
            f"{function.__name__}.forward's annotations name what is not defined ({error}): pass "
            "schema='(Tensor x, ...) -> Tensor'"
        ) from error
    parameters = list(inspect.signature(forward).parameters.values())
    parameters = parameters if split else parameters[1:]
    for parameter in parameters:
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise TypeError(
                f"{function.__name__}.forward takes {parameter}; an operator takes a fixed number "
                "of arguments, each by its place"
            )
        if parameter.name not in hints:
            raise TypeError(
                f"{function.__name__}.forward's argument {parameter.name!r} is not annotated: "
                "annotate it, as in x: torch.Tensor, or pass schema='(Tensor x, ...) -> Tensor'"
            )
    if "return" not in hints:
        raise TypeError(
            f"{function.__name__}.forward's result is not annotated: annotate it, as in "
            "-> torch.Tensor, or pass schema='(Tensor x, ...) -> Tensor'"
        )

    def prototype() -> None:
        """Carries the signature from which the schema is inferred."""

    annotated = [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
    prototype.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        annotated, return_annotation=hints["return"]
    )
    try:
        return str(torch.library.infer_schema(prototype, mutates_args=()))
    except ValueError as error:
        raise TypeError(f"{function.__name__}.forward: {error}") from error


def _check_schema(function: Function, schema: Any) -> None:
    for argument in schema.arguments:
        if argument.kwarg_only:
            raise TypeError(
                f"{function.__name__}: {argument.name!r} must not be keyword-only, since a "
                "Function takes its arguments by their places"
            )
        if argument.alias_info is not None:
            raise ValueError(f"{function.__name__}: the schema says that {argument.name!r} changes")
    kinds = [str(result.type) for result in schema.returns]
    if not kinds or set(kinds) != {"Tensor"}:
        raise TypeError(
            f"{function.__name__} must return tensors, a fixed number of them; by its annotations "
            f"it returns {', '.join(kinds) or 'nothing'}"
        )


def _check_no_mutation(function: Function) -> None:
    for method in (function.forward, function.setup_context):
        code = getattr(method, "__code__", None)
        if code is not None and "mark_dirty" in code.co_names:
            raise ValueError(
                f"{function.__name__} calls ctx.mark_dirty: it changes its arguments, which an "
                "operator that becomes a node may not; let forward return new tensors"
            )
