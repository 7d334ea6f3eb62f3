"""What a layer's experts compute, and their weights in the layout of ``torch.ops.moe``.

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

__all__ = ["CachedWeights", "ExpertWeights", "ExpertsSpec", "ParameterStack"]


class ExpertWeights(NamedTuple):
    """The operators' arguments: ``[E, F, D]``, ``[E, F]``, ``[E, D, H]`` and ``[E, D]``."""

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None


@dataclass(frozen=True)
class ExpertsSpec:
    """What a module's experts compute, and from which of its parameters.

    Attributes:
        first: The matrices of the first product: one stack, or gate and up in a stack each.
        first_bias: Their biases; empty if there are none.
        second: The matrices of the second product.
        second_bias: Its biases, or None.
        options: What is computed around and between the two products.
        up_first: Whether a single first stack holds the up rows before the gate rows.
    """

    first: tuple[ParameterStack, ...]
    first_bias: tuple[ParameterStack, ...]
    second: ParameterStack
    second_bias: ParameterStack | None
    options: ExpertOptions
    up_first: bool = False

    @property
    def num_experts(self) -> int:
        """E."""
        return self.second.num_experts

    def width(self, module: nn.Module) -> int:
        """Returns D."""
        return self.second.shape(module)[0]

    def weights(self, module: nn.Module) -> ExpertWeights:
        """Returns the weights as the operators take them: views where the layout allows it."""
        return ExpertWeights(
            self._gate_rows_first([stack.matrices(module) for stack in self.first]),
            self._gate_rows_first([stack.biases(module) for stack in self.first_bias])
            if self.first_bias
            else None,
            self.second.matrices(module),
            None if self.second_bias is None else self.second_bias.biases(module),
        )

    def _gate_rows_first(self, parts: list[Tensor]) -> Tensor:
        if self.up_first:
            up, gate = parts[0].chunk(2, dim=1)
            parts = [gate, up]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def stacks(self) -> Iterator[ParameterStack]:
        """Yields the stacks of all matrices and biases."""
        yield from (*self.first, *self.first_bias, self.second)
        if self.second_bias is not None:
            yield self.second_bias

    def parameter_names(self) -> list[str]:
        """Returns the paths of the parameters."""
        return [name for stack in self.stacks() for name in stack.names]


@dataclass(frozen=True)
class ParameterStack:
    """Where a module keeps one matrix, or one bias, of every expert.

    Attributes:
        names: One parameter per expert, or a single one ``[E, a, b]`` or ``[E * a, b]`` for all.
        num_experts: E.
        transposed: Whether matrices are stored (in, out).
    """

    names: tuple[str, ...]
    num_experts: int
    transposed: bool = False

    def matrices(self, module: nn.Module) -> Tensor:
        """Returns ``[E, out, in]``."""
        stacked = self._stacked(module)
        if stacked.ndim != 3:
            stacked = stacked.reshape(self.num_experts, -1, stacked.shape[-1])
        return stacked.mT if self.transposed else stacked

    def shape(self, module: nn.Module) -> tuple[int, int]:
        """Returns (out, in) of one expert's matrix."""
        parameter: Tensor = attrgetter(self.names[0])(module)
        matrices = self.num_experts if len(self.names) == 1 else 1
        columns = parameter.shape[-1]
        rows = parameter.numel() // (matrices * columns)
        return (columns, rows) if self.transposed else (rows, columns)

    def biases(self, module: nn.Module) -> Tensor:
        """Returns ``[E, out]``."""
        stacked = self._stacked(module)
        return stacked if stacked.ndim == 2 else stacked.reshape(self.num_experts, -1)

    def _stacked(self, module: nn.Module) -> Tensor:
        parts: list[Tensor] = [attrgetter(name)(module) for name in self.names]
        return parts[0] if len(parts) == 1 else torch.stack(parts)


class CachedWeights:
    """One module's expert weights, kept from call to call where that is safe.

    Where each expert is a module, the weights lie apart. The first call without gradients stacks
    them and turns the parameters into views of the stack, as ``nn.LSTM`` does with its own: the
    weights are held once, and whatever changes them, an optimizer or a state dict, changes the
    stack. Where that is impossible (gate and up in stacks of their own, rows in another order,
    parameters that are views already), each call makes a copy, which is kept if none is trained.
    """

    def __init__(self) -> None:
        self._weights: ExpertWeights | None = None
        self._key: Any = None

    def __deepcopy__(self, memo: Any) -> CachedWeights:
        return CachedWeights()

    def __reduce__(self) -> Any:
        return CachedWeights, ()

    def get(self, experts: ExpertsSpec, module: nn.Module) -> ExpertWeights:
        """Returns the weights of a module."""
        parameters: list[Tensor] = [attrgetter(name)(module) for name in experts.parameter_names()]
        trained = any(p.requires_grad for p in parameters)
        if torch.compiler.is_compiling() or (trained and torch.is_grad_enabled()):
            return experts.weights(module)
        if self._weights is not None and self._key == _memory_key(parameters):
            return self._weights
        # Training could not use tensors made in inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            weights = experts.weights(module)
            are_views = _make_parameters_views(experts, module, weights)
        if are_views or not trained:
            self._weights, self._key = weights, _memory_key(parameters)
        return weights


def _memory_key(parameters: list[Tensor]) -> Any:
    """Returns a key that differs once a parameter has other memory or was changed in place."""
    return [(p.data_ptr(), p.device, p.dtype, change_count(p)) for p in parameters]


def _make_parameters_views(experts: ExpertsSpec, module: nn.Module, weights: ExpertWeights) -> bool:
    """Makes all experts' parameters views of the stacked weights.

    Returns:
        Whether the layout allowed it.
    """
    if experts.up_first:
        return False
    views: list[tuple[Tensor, Tensor]] = []
    second_bias = () if experts.second_bias is None else (experts.second_bias,)
    for stacks, stacked in (
        (experts.first, weights.w1),
        (experts.first_bias, weights.b1),
        ((experts.second,), weights.w2),
        (second_bias, weights.b2),
    ):
        for place, stack in enumerate(stacks):
            if stacked is None or len(stack.names) == 1:
                return False
            part = stacked.chunk(len(stacks), dim=1)[place]
            for expert, name in enumerate(stack.names):
                view = part[expert].mT if stack.transposed else part[expert]
                views.append((attrgetter(name)(module), view))
    is_shared = len({id(parameter) for parameter, _ in views}) < len(views)
    if is_shared or not all(_can_become_view(parameter, view) for parameter, view in views):
        return False
    for parameter, view in views:
        parameter.data = view
    return True


def _can_become_view(parameter: Tensor, view: Tensor) -> bool:
    """Whether the parameter's memory is its own, and its values lie in the view as they are."""
    storage = parameter.untyped_storage()
    own = storage.nbytes() == parameter.nbytes and not parameter.is_shared()
    return own and view.is_contiguous() and view.shape == parameter.shape
