"""Layers that do what one before them was proved to do, each with its own weights.

Python does the same where everything that it reads is the same, which ``tracing.equal_blocks``
compares. With equal random weights such layers would give equal numbers, so trials with these need
not be repeated. Nothing is said about their own weights: code may read the values of these, and
compute something else for larger tokens, for one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_moe.private import modules_by_path, own_parts
from dynamo_moe.tracing.descriptions import Common, Description, describe
from dynamo_moe.tracing.reachable_state import State, state_of
from dynamo_moe.tracing.read_names import ReadNames
from dynamo_moe.weights.lazy_tensors import LazyTensor


@dataclass(frozen=True)
class ModelParts:
    """What belongs to a model, by ids.

    Attributes:
        tied: Tensors that it has in several places.
        all: Its modules and tensors.
    """

    tied: Collection[int]
    all: Collection[int]

    @classmethod
    def of(cls, model: nn.Module) -> ModelParts:
        """Returns the parts of a model."""
        modules = [module for _, module in modules_by_path(model)]
        tables = (table for module in modules for table in own_parts(module)[:2])
        tensors = (each for table in tables for each in table.values() if each is not None)
        return cls(tied_tensors(model), {id(part) for part in (*modules, *tensors)})


def tied_tensors(model: nn.Module) -> set[int]:
    """Returns the ids of the parameters and buffers that a model has in several places."""
    from collections import Counter
    parts = (own_parts(module) for _, module in modules_by_path(model))
    tables = (table for parameters, buffers, _ in parts for table in (parameters, buffers))
    tensors = (id(each) for table in tables for each in dict.values(table) if each is not None)
    return {tensor for tensor, count in Counter(tensors).items() if count > 1}


class LayerCode:
    """All that a layer's computation depends on, but for the values of the weights in a trial.

    It is equal to none where it cannot be read: what the layer refers to is the user's, and
    anything can come out of it.
    """

    def __init__(self, module: nn.Module, drawn: Collection[str], parts: ModelParts) -> None:
        """Describes a layer before its proof.

        Args:
            module: The layer.
            drawn: The names of the tensors that have random values in a trial.
            parts: Those of the model.
        """
        self._parts = parts
        self._common = Common()
        self._own = self._described(module)
        # Buffers keep their values: one may be a capacity, which decides what is computed.
        self._varying = {name for name, _ in module.named_parameters()} & {*drawn}
        self._classes = {type(part) for part in module.modules()}
        self._names = ReadNames()
        self._state: State | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes the global names that the layer's code uses: the context of its proof."""
        with self._names.watched():
            yield
        if self._own is not None:
            with contextlib.suppress(Exception):
                # Code that reaches the model's parts may look for what is said of one of them.
                self._state = state_of(self._reached(self._own), self._parts.all)

    def is_that_of(self, module: nn.Module) -> bool:
        """Whether a layer has the same code, and what this reaches is as after the proof."""
        own, other = self._own, self._described(module)
        if own is None or other is None or self._state is None or self._names.objection:
            return False
        names = own.tensors.keys() - self._varying
        with contextlib.suppress(Exception):
            return (
                own.differences(other) == frozenset()
                and all(_have_same_values(own.tensors[name], other.tensors[name]) for name in names)
                and self._state.is_unchanged(self._reached(own))
            )
        return False

    def _described(self, module: nn.Module) -> Description | None:
        common = self._common = self._common.after_changes()
        with contextlib.suppress(Exception):
            return describe(module, self._parts.tied, common)
        return None

    def _reached(self, own: Description) -> dict[Hashable, Any]:
        """Returns what the code reaches beside the layer's own."""
        held = (*own.outside, *self._classes)
        return {**dict(enumerate(held)), **self._names.values()}


def _have_same_values(tensor: Tensor, other: Tensor) -> bool:
    known = not any(each.is_meta or isinstance(each, LazyTensor) for each in (tensor, other))
    return known and torch.equal(tensor, other)
