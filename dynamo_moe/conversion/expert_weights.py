"""The record of a layer's experts, and their weights in the layout of ``torch.ops.moe``.

Legend: D model width, H hidden width, F = H, or 2H when gated, E experts.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from custom_ops.expert_weights import ExpertWeights
from custom_ops.options import ExpertOptions
from dynamo_moe.modules import ParameterCache
from dynamo_moe.private.pytorch import change_count, is_exporting


@dataclass(frozen=True)
class ParameterStack:
    """Where a module keeps one matrix, or one bias, of every expert.

    Attributes:
        names: One parameter per expert, or a single one for all.
        shape: ``(E, a, b)`` or ``(E, a)`` at the conversion, in the order in which they are
            stored. Later the parameters may get other sizes; only E stays.
        transposed: Whether matrices are stored (in, out).
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """(out, in) of one expert's matrix, or (out,) of its bias."""
        return self.shape[:0:-1] if self.transposed else self.shape[1:]

    def tensor(self, module: nn.Module) -> Tensor:
        """Returns ``[E, out, in]`` or ``[E, out]``: a view where the layout allows it."""
        parts: list[Tensor] = [attrgetter(name)(module) for name in self.names]
        stacked = parts[0] if len(parts) == 1 else torch.stack(parts)
        if stacked.ndim != len(self.shape):
            columns = stacked.shape[-1:] if len(self.shape) == 3 else ()
            stacked = stacked.reshape(self.shape[0], -1, *columns)
        return stacked.mT if self.transposed else stacked


@dataclass(frozen=True)
class ExpertsSpec:
    """The options of a module's experts, and the parameters that are their weights.

    Attributes:
        w1: The matrices of the first product: one stack, or gate and up in a stack each.
        b1: Their biases; empty if there are none.
        w2: The matrices of the second product, one stack.
        b2: Its biases, one stack or none.
        options: The operator's options, around and between the two products.
        up_first: Whether a single first stack holds the up rows before the gate rows.
    """

    w1: tuple[ParameterStack, ...]
    b1: tuple[ParameterStack, ...]
    w2: tuple[ParameterStack, ...]
    b2: tuple[ParameterStack, ...]
    options: ExpertOptions
    up_first: bool = False

    @property
    def num_experts(self) -> int:
        """E."""
        return self.w2[0].shape[0]

    @property
    def width(self) -> int:
        """D."""
        return self.w2[0].sizes[0]

    @property
    def stacks(self) -> tuple[ParameterStack, ...]:
        """The stacks of all matrices and biases."""
        return (*self.w1, *self.b1, *self.w2, *self.b2)

    def weights(self, module: nn.Module) -> ExpertWeights:
        """Returns the weights as the operators take them: views where the layout allows it."""
        b1, b2 = self.biases(module)
        return ExpertWeights(self._rows(self.w1, module), b1, _joined(self.w2, module), b2)

    def biases(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """Returns b1 and b2 as the operators take them."""
        return self._rows(self.b1, module), _joined(self.b2, module)

    def _rows(self, stacks: tuple[ParameterStack, ...], module: nn.Module) -> Any:
        rows = _joined(stacks, module)
        if rows is None or not self.up_first:
            return rows
        half = rows.shape[1] // 2
        return torch.cat([rows[:, half:], rows[:, :half]], dim=1)

    def parameter_names(self) -> list[str]:
        """Returns the paths of the parameters."""
        return [name for stack in self.stacks for name in stack.names]

    def memory(self, module: nn.Module) -> Hashable:
        """Returns what is equal for modules whose weights are those of the same parameters."""
        parameters = (id(parameter) for parameter in _parameters(self, module))
        layout = ((stack.shape, stack.transposed, len(stack.names)) for stack in self.stacks)
        return self.up_first, len(self.w1), *layout, *parameters


def _joined(stacks: tuple[ParameterStack, ...], module: nn.Module) -> Any:
    parts = [stack.tensor(module) for stack in stacks]
    return torch.cat(parts, dim=1) if len(parts) > 1 else next(iter(parts), None)


class CachedWeights(ParameterCache):
    """The expert weights of a module, or of several, kept from call to call where that is safe.

    Where each expert is a module, the weights lie apart. The first call without gradients stacks
    them and turns the parameters into views of the stack, as ``nn.LSTM`` does with its own: the
    weights are held once, and whatever changes them, an optimizer or a state dict, changes the
    stack. Where that is impossible (gate and up in stacks of their own, rows in another order,
    parameters that are views already), each call makes a copy, which is kept if none is trained and
    PyTorch counts their changes. It counts none of inference tensors, and none through ``.data``.

    Offloaded weights stay where they are, also while a call is compiled: they are pinned, and lie
    in the parameters' memory.
    """

    def __init__(self) -> None:
        self._weights: ExpertWeights | None = None
        self._key: Any = None
        self._is_offloaded = False

    def __reduce__(self) -> Any:  # Copies and pickles begin without weights.
        return CachedWeights, ()

    def get(self, experts: ExpertsSpec, module: nn.Module) -> ExpertWeights:
        """Returns the weights of a module."""
        compiling, exporting = torch.compiler.is_compiling(), is_exporting()
        if self._is_offloaded and self._weights is not None and compiling and not exporting:
            return self._weights
        parameters = _parameters(experts, module)
        trained = any(p.requires_grad for p in parameters)
        if compiling or (trained and torch.is_grad_enabled()):
            return experts.weights(module)
        key = _memory_key(parameters)
        if self._weights is not None and self._key == key:
            return self._weights
        # Training could not use tensors made in inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            if self._is_offloaded and self._weights is not None and _same_memory(key, self._key):
                # The parameters' changes in place are those of the stacks, which do not count them.
                for weight in (self._weights.w1, self._weights.w2):
                    weight[:0].zero_()
                self.keep(experts, module, self._weights.w1, self._weights.w2)
                return self._weights
            weights = experts.weights(module)
            are_views = _make_parameters_views(experts, module, weights)
        self._is_offloaded = False
        if are_views or not (trained or any(p.is_inference() for p in parameters)):
            self._weights, self._key = weights, _memory_key(parameters)
        return weights

    def keep(self, experts: ExpertsSpec, module: nn.Module, w1: Tensor, w2: Tensor) -> None:
        """Keeps offloaded weights, in whose memory the parameters now are, beside the biases."""
        b1, b2 = experts.biases(module)
        self._weights = ExpertWeights(w1, b1, w2, b2)
        self._key = _memory_key(_parameters(experts, module))
        self._is_offloaded = True


def _parameters(experts: ExpertsSpec, module: nn.Module) -> list[Tensor]:
    return [attrgetter(name)(module) for name in experts.parameter_names()]


def _memory_key(parameters: list[Tensor]) -> Any:
    """Returns a key that differs once a parameter has other memory or was changed in place."""
    return [(p.data_ptr(), p.device, p.dtype, change_count(p)) for p in parameters]


def _same_memory(key: Any, other: Any) -> bool:
    return [memory[:3] for memory in key] == [memory[:3] for memory in other]


def _make_parameters_views(experts: ExpertsSpec, module: nn.Module, weights: ExpertWeights) -> bool:
    """Makes all experts' parameters views of the stacked weights, if the layout allows it."""
    if experts.up_first or any(len(stack.names) == 1 for stack in experts.stacks):
        return False
    views: list[tuple[Tensor, Tensor]] = []
    for operand, stacked in weights._asdict().items():
        stacks: tuple[ParameterStack, ...] = getattr(experts, operand)
        for index, stack in enumerate(stacks):
            part = stacked.chunk(len(stacks), dim=1)[index]
            part = part.mT if stack.transposed else part
            views += [(attrgetter(n)(module), part[number]) for number, n in enumerate(stack.names)]
    is_shared = len({id(parameter) for parameter, _ in views}) < len(views)
    if is_shared or not all(_can_become_view(parameter, view) for parameter, view in views):
        return False
    for parameter, view in views:
        parameter.data = view
    return True


def _can_become_view(parameter: Tensor, view: Tensor) -> bool:
    """Whether the parameter's memory is its own, and its values lie in the view as they are."""
    storage = parameter.untyped_storage()
    owns_memory = storage.nbytes() == parameter.nbytes and not parameter.is_shared()
    return owns_memory and view.is_contiguous() and view.shape == parameter.shape
