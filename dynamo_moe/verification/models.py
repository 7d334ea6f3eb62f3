"""The model in PyTorch: its outputs and its routing for a case."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamo_moe import pytree
from dynamo_moe.evaluation import evaluating
from dynamo_moe.private.pytorch import takes_positions
from dynamo_moe.process_state import exclusive
from dynamo_moe.verification import rounding
from dynamo_moe.verification.exchange import Exchange
from dynamo_moe.verification.routing import RoutingRecorder

Case = tuple[Any, ...] | Mapping[str, Any]


class Results(NamedTuple):
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
class Models:
    """The model, and another one that the file has to agree with instead, if any.

    The file has so many outputs: tensors, and numbers that are sizes; constants are none. If it
    ``rounds``, it may be as far from a model in float32 as that model in half precision is. Where
    the file ``is_widened``, models are run in float32 too. Arguments that the file has as
    ``constants`` are theirs too, where a case names its inputs.
    """

    model: torch.nn.Module
    reference: torch.nn.Module | None
    count: int
    exchange: Exchange | None
    rounds: bool
    is_widened: bool
    constants: Mapping[str, Any]

    def results(self, case: Case) -> Results:
        """Runs them."""
        with ExitStack() as stack:
            if self.exchange is not None:
                stack.enter_context(self.exchange.sums())
            if self.is_widened:
                case = rounding.widened_case(case)
                for model in filter(None, (self.model, self.reference)):
                    stack.enter_context(rounding.in_float32(model))
            with RoutingRecorder() as recorder:
                outputs = self._outputs(self.model, case)
            expected = outputs
            if self.reference is not None:
                expected = self._outputs(self.reference, case)
        return Results(outputs, expected, recorder.ids)

    def in_float32(self, case: Case) -> list[Tensor] | None:
        """Returns what the file has to, computed in float32; None if that says nothing."""
        model = self.reference or self.model
        if not self.rounds or self.exchange is not None or not rounding.is_half(model):
            return None
        try:
            with rounding.in_float32(model):
                return self._outputs(model, rounding.widened_case(case))
        except Exception:  # The model's own code runs, and may ask for half precision.
            return None

    def _outputs(self, model: torch.nn.Module, case: Case) -> list[Tensor]:
        return outputs_of(model, case, self.count, self.constants)

    def results_of_all(self, case: Case) -> Results:
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


def outputs_of(
    model: torch.nn.Module, case: Case, count: int, constants: Mapping[str, Any]
) -> list[Tensor]:
    """Returns a model's tensors for a case, and numbers too where a file has so many outputs."""
    # Copies: a forward may write into its arguments.
    copied = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, case)
    args, kwargs = _arguments(model, copied)
    if isinstance(case, Mapping):
        parameters = inspect.signature(model.forward).parameters
        collects = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        given = {*[*parameters][: len(args)], *kwargs}
        kwargs |= {  # A reference may take others.
            name: value
            for name, value in constants.items()
            if name not in given and (collects or name in parameters)
        }
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
    keywords = dict(case)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters) and not case.keys() <= named:
        keywords = _containers(case, named)
        if not keywords.keys() <= named:
            return tuple(case.values()), {}
    if not takes_positions(model):
        return (), keywords
    # What has a default was more probably given by name.
    required = (p.name for p in parameters if p.name in first and p.default is p.empty)
    leading = [*itertools.takewhile(keywords.__contains__, required)]
    return tuple(keywords.pop(name) for name in leading), keywords


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
