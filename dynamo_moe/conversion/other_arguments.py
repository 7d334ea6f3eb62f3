"""What a layer is called with beside its tokens: a condition, a time, ids, a mask.

Legend: D model width.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynamo_moe.evaluation import evaluating

# By how much floating numbers of trials are off those of the example, relative to their spread.
_NOISE = 0.3


class OtherTensor(NamedTuple):
    """A tensor that a layer's forward gets beside the tokens, with so many dimensions."""

    dimensions: int


def is_plain(value: Any) -> bool:
    """Whether a value is None, a bool, a number or a string."""
    return value is None or isinstance(value, (bool, int, float, str))


@dataclass(frozen=True)
class OtherArguments:
    """The arguments of one call of a layer beside its tokens.

    Attributes:
        leading: The leading dimensions of the tokens.
        values: The other arguments by name, those of ``*name`` as :func:`positions` says.
    """

    leading: tuple[int, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def form(self) -> tuple[tuple[str, Any], ...]:
        """Their names, each with a plain value or an :class:`OtherTensor`."""
        return tuple(
            (name, OtherTensor(value.ndim) if isinstance(value, Tensor) else value)
            for name, value in self.values.items()
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are tensors."""
        return {name: value for name, value in self.values.items() if isinstance(value, Tensor)}

    def missing(self, module: nn.Module) -> list[str]:
        """Returns the arguments that a module's forward needs beside tokens and these."""
        parameters = [*inspect.signature(module.forward).parameters.values()][1:]
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
        return [name for name in needed if name not in self.values]

    def of_size(self, x: Tensor) -> dict[str, Any]:
        """Returns arguments for tokens ``[..., D]`` of other sizes.

        Leading dimensions that a tensor shares with the tokens follow them, also if it has a row
        for each token. Its values are drawn from the example's, so that ids stay ids; floating ones
        are changed a little, and masks are drawn at random.

        Raises:
            ValueError: If the tokens have another number of dimensions.
        """
        if self.values and x.ndim - 1 != len(self.leading):
            raise ValueError(f"its arguments are for tokens of {len(self.leading) + 1} dimensions")
        generator = torch.Generator().manual_seed(x.numel())
        drawn = {
            name: _of_size(tensor, self.leading, tuple(x.shape[:-1]), generator).to(x.device)
            for name, tensor in self.tensors.items()
        }
        return {**self.values, **drawn}


def positions(name: str, count: int) -> list[str]:
    """Returns names of the arguments that a forward gets as ``*name``, such as ``name[0]``."""
    return [f"{name}[{number}]" for number in range(count)]


def call_with(function: Callable[..., Any], x: Tensor, others: Mapping[str, Any]) -> Any:
    """Calls a forward with tokens and what else it gets, by name or as one of its positions."""
    by_position = [value for name, value in others.items() if "[" in name]
    return function(x, *by_position, **{n: v for n, v in others.items() if "[" not in n})


def _of_size(
    tensor: Tensor, leading: tuple[int, ...], wanted: tuple[int, ...], generator: torch.Generator
) -> Tensor:
    sizes = zip(tensor.shape, leading, strict=False)
    shared = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], sizes)])
    shape = (*wanted[:shared], *tensor.shape[shared:])
    if not shared and tensor.shape[:1] == (math.prod(leading),):
        shape = (math.prod(wanted), *tensor.shape[1:])
    if tensor.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    known = tensor.detach().cpu().flatten()
    values = known[torch.randint(len(known), shape, generator=generator)]
    if tensor.is_floating_point() and bool(known.isfinite().all()):  # Else it is a mask.
        spread = known.double().square().mean().sqrt().clamp_min(1e-3)
        noise = torch.randn(shape, generator=generator) * _NOISE * spread
        values = values + noise.to(values.dtype)
    return values


def observe_calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], paths: Collection[str]
) -> dict[str, OtherArguments]:
    """Returns what modules of some paths are called with when a model runs, each at first.

    The model does not run if none of their forwards takes more than one argument. Modules whose
    call has only tokens, has them behind other arguments, or has containers are left out.

    Raises:
        ValueError: If the model does not take the arguments.
    """
    calls: dict[str, OtherArguments] = {}
    modules = {path: model.get_submodule(path) for path in paths}
    modules = {path: module for path, module in modules.items() if _takes_more(module)}
    if not modules:
        return calls

    def record(path: str, module: nn.Module, given: tuple[Any, ...], named: Any) -> None:
        others = _other_arguments(module, given, named)
        if others is not None:
            calls.setdefault(path, others)

    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        for path, module in modules.items():
            hook = partial(record, path)
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        try:
            model(*args, **kwargs)
        except Exception as failure:  # The model is the user's: anything can come out of it.
            raise ValueError(f"the model fails on args and kwargs: {failure}") from failure
    return calls


def _takes_more(module: nn.Module) -> bool:
    """Whether a module's forward takes more than one argument."""
    kinds = [p.kind for p in inspect.signature(module.forward).parameters.values()]
    return len(kinds) > 1 or inspect.Parameter.VAR_POSITIONAL in kinds


def _other_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> OtherArguments | None:
    signature = inspect.signature(module.forward)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    is_positional = inspect.Parameter.VAR_POSITIONAL in kinds
    # Ahead of arguments by position, all have to be given by position.
    if inspect.Parameter.POSITIONAL_ONLY in kinds or (
        is_positional and kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) > 1
    ):
        return None
    x, *others = _without_defaults(signature, args, kwargs)
    tokens = x[1]
    if not isinstance(tokens, Tensor) or not tokens.is_floating_point() or not others:
        return None
    if not all(isinstance(value, Tensor) or is_plain(value) for _, value in others):
        return None
    return OtherArguments(tuple(tokens.shape[:-1]), dict(others))


def _without_defaults(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yields the arguments of a call by name, without those that are their default."""
    bound = signature.bind(*args, **kwargs).arguments
    for name, value in bound.items():
        parameter = signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            yield from zip(positions(name, len(value)), value, strict=True)
        elif isinstance(value, Tensor) or value is not parameter.default:
            yield name, value
