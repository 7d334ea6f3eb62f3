"""Experts' weights in the layout of ``torch.ops.moe``, from the parameters that a module has.

Legend: D model width, H hidden width, F = H, or 2H when gated, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from custom_ops.options import ExpertOptions
from dynamo_moe.private import change_count

__all__ = ["Experts", "Stack", "StackedWeights", "Weights"]


class Weights(NamedTuple):
    """The operators' arguments: ``[E, F, D]``, ``[E, F]``, ``[E, D, H]`` and ``[E, D]``."""

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None


@dataclass(frozen=True)
class Stack:
    """Where a module holds one matrix, or one bias, of every expert.

    Attributes:
        names: A parameter for each expert, or one of them all: ``[E, a, b]`` or ``[E * a, b]``.
        experts: E.
        transposed: Whether matrices are stored (in, out).
    """

    names: tuple[str, ...]
    experts: int
    transposed: bool = False

    def matrices(self, module: nn.Module) -> Tensor:
        """Returns ``[E, out, in]``."""
        stacked = self._stacked(module)
        if stacked.ndim != 3:
            stacked = stacked.reshape(self.experts, -1, stacked.shape[-1])
        return stacked.mT if self.transposed else stacked

    def biases(self, module: nn.Module) -> Tensor:
        """Returns ``[E, out]``."""
        stacked = self._stacked(module)
        return stacked if stacked.ndim == 2 else stacked.reshape(self.experts, -1)

    def _stacked(self, module: nn.Module) -> Tensor:
        parts: list[Tensor] = [attrgetter(name)(module) for name in self.names]
        return parts[0] if len(parts) == 1 else torch.stack(parts)


@dataclass(frozen=True)
class Experts:
    """What a module's experts compute, and from which of its parameters.

    Attributes:
        first: The first product's matrices: one, or gate and up apart.
        first_bias: Their biases, if there are any.
        second: The second product's matrices.
        second_bias: Its biases.
        options: What is computed between the two.
        up_first: Whether the one matrix holds the up rows before the gate rows.
    """

    first: tuple[Stack, ...]
    first_bias: tuple[Stack, ...]
    second: Stack
    second_bias: Stack | None
    options: ExpertOptions
    up_first: bool = False

    def weights(self, module: nn.Module) -> Weights:
        """Returns the weights as the operators take them: views as far as the layout lets them."""
        return Weights(
            self._rows([stack.matrices(module) for stack in self.first]),
            self._rows([stack.biases(module) for stack in self.first_bias])
            if self.first_bias
            else None,
            self.second.matrices(module),
            None if self.second_bias is None else self.second_bias.biases(module),
        )

    def stacks(self) -> Iterator[Stack]:
        """Yields all of them."""
        yield from (*self.first, *self.first_bias, self.second)
        if self.second_bias is not None:
            yield self.second_bias

    def names(self) -> list[str]:
        """Returns the paths of the parameters."""
        return [name for stack in self.stacks() for name in stack.names]

    def _rows(self, parts: list[Tensor]) -> Tensor:
        if self.up_first:
            up, gate = parts[0].chunk(2, dim=1)
            parts = [gate, up]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class StackedWeights:
    """The stacked weights of one module, kept from call to call where that is safe.

    Experts that are modules of their own have their weights apart. The first call without gradients
    stacks them and makes the parameters views of the stack, as ``nn.LSTM`` does with its own: they
    are held once, and whatever changes them, an optimizer or a state dict, changes the stack. Where
    the layout has no such views (gate and up in stacks of their own, rows in another order), or the
    parameters are views themselves, every call makes a copy; it is kept if none is trained.
    """

    def __init__(self) -> None:
        self._weights: Weights | None = None
        self._key: Any = None

    def __deepcopy__(self, memo: Any) -> StackedWeights:
        return StackedWeights()

    def __reduce__(self) -> Any:
        return StackedWeights, ()

    def of(self, experts: Experts, module: nn.Module) -> Weights:
        """Returns the weights of a module."""
        parameters: list[Tensor] = [attrgetter(name)(module) for name in experts.names()]
        trained = any(p.requires_grad for p in parameters)
        if torch.compiler.is_compiling() or (trained and torch.is_grad_enabled()):
            return experts.weights(module)
        if self._weights is not None and self._key == _key(parameters):
            return self._weights
        # Not those of inference mode: training could not use them afterwards.
        with torch.inference_mode(mode=False), torch.no_grad():
            weights = experts.weights(module)
            shared = _share(experts, module, weights)
        if shared or not trained:
            self._weights, self._key = weights, _key(parameters)
        return weights


def _key(parameters: list[Tensor]) -> Any:
    """Returns what is another when a parameter has other memory, or was changed in place."""
    return [(p.data_ptr(), p.device, p.dtype, change_count(p)) for p in parameters]


def _share(experts: Experts, module: nn.Module, weights: Weights) -> bool:
    """Makes all experts' parameters views of the stacked weights, if those hold them as they are.

    Returns:
        Whether they are views now.
    """
    views: list[tuple[Tensor, Tensor]] = []
    both = ((experts.first, weights.w1), (experts.first_bias, weights.b1))
    second = (() if experts.second_bias is None else (experts.second_bias,), weights.b2)
    for stacks, stacked in (*both, ((experts.second,), weights.w2), second):
        start = 0
        for stack in stacks:
            rows = 0 if stacked is None else stacked.shape[1] // len(stacks)
            for place, name in enumerate(stack.names):
                if stacked is None or len(stack.names) == 1:
                    return False
                view = stacked[place, start : start + rows]
                views.append((attrgetter(name)(module), view.mT if stack.transposed else view))
            start += rows
    movable = all(_is_movable(p, view) for p, view in views)
    if experts.up_first or not movable or len({id(p) for p, _ in views}) < len(views):
        return False
    for parameter, view in views:
        parameter.data = view
    return True


def _is_movable(parameter: Tensor, view: Tensor) -> bool:
    """Whether a parameter's memory is its own, and nobody else's to find it in."""
    storage = parameter.untyped_storage()
    own = storage.nbytes() == parameter.nbytes and not parameter.is_shared()
    return own and view.is_contiguous() and view.shape == parameter.shape
