"""Which experts a token goes to: the module's own gate, and what is made of its scores.

Legend: T tokens, D model width, E experts, K choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from custom_ops.options import RouterOptions
from dynamo_moe import pytree

__all__ = [
    "Call",
    "ChosenByGate",
    "ChosenByScores",
    "Named",
    "Product",
    "Routed",
    "Routing",
    "Scoring",
    "Weighting",
]

Scoring = Literal["none", "softmax", "sigmoid"]
Weighting = Literal["none", "sum", "softmax", "sigmoid"]


class Named(NamedTuple):
    """A parameter or buffer as an argument of a call; without a path, the tokens."""

    path: str


class Routed(NamedTuple):
    """A routing, and all that the gate returned on the way.

    Attributes:
        ids: ``[T, K]``.
        weights: ``[T, K]``.
        leaves: The gate's tensors, in order.
    """

    ids: Tensor
    weights: Tensor
    leaves: list[Any]


@dataclass(frozen=True)
class Call:
    """A call of one of the module's submodules, as its forward makes it.

    Attributes:
        path: The submodule.
        args: Positional arguments: the tokens, named tensors, constants.
        kwargs: Keyword arguments, likewise.
        flat: Whether it gets the tokens as ``[T, D]``, or in the shape that the module gets.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    flat: bool

    def leaves(self, module: nn.Module, x: Tensor) -> list[Any]:
        """Returns what it gives for tokens ``[..., D]``, flattened."""
        callee = module.get_submodule(self.path)
        tokens = x.reshape(-1, x.shape[-1]) if self.flat else x
        # In half precision a router is often computed in float32.
        first = next((p for p in callee.parameters() if p.is_floating_point()), tokens)
        tokens = tokens.to(first.dtype)

        def value(argument: Any) -> Any:
            if not isinstance(argument, Named):
                return argument
            return attrgetter(argument.path)(module) if argument.path else tokens

        args = [value(argument) for argument in self.args]
        kwargs = {name: value(argument) for name, argument in self.kwargs}
        return pytree.tree_leaves(callee(*args, **kwargs))


@dataclass(frozen=True)
class Product:
    """Logits as a product of the tokens and a parameter, in float32.

    Attributes:
        weight: ``[E, D]``, or ``[D, E]`` where ``transposed``.
        bias: ``[E]``, or None.
    """

    weight: str
    bias: str | None
    transposed: bool

    def parameters(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Returns ``[E, D]`` and ``[E]``."""
        weight: Tensor = attrgetter(self.weight)(module)
        bias = None if self.bias is None else attrgetter(self.bias)(module)
        return weight.mT if self.transposed else weight, bias

    def leaves(self, module: nn.Module, x: Tensor) -> list[Any]:
        """Returns the logits ``[T, E]`` of tokens ``[..., D]``."""
        weight, bias = self.parameters(module)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        tokens = x.reshape(-1, x.shape[-1]).to(dtype)
        bias = None if bias is None else bias.to(dtype)
        return [nn.functional.linear(tokens, weight.to(dtype), bias)]


@dataclass(frozen=True)
class ChosenByGate:
    """The gate returns the experts and their weights.

    Attributes:
        source: The gate's call.
        ids: Which of its results are the experts.
        weights: Which of its results are their weights.
        weighting: What is made of the weights.
        scale: A factor on them.
    """

    source: Call
    ids: int
    weights: int
    weighting: Weighting = "none"
    scale: float = 1.0

    def __call__(self, module: nn.Module, x: Tensor) -> Routed:
        """Returns the routing of tokens ``[..., D]``."""
        leaves = self.source.leaves(module, x)
        ids, weights = leaves[self.ids], leaves[self.weights]
        choices = ids.shape[-1]
        weights_TK = weights.reshape(-1, choices)
        return Routed(ids.reshape(-1, choices), _weighted(weights_TK, self), leaves)

    def plain(self) -> None:
        """Of what the operator has as its own router, this is none."""
        return


@dataclass(frozen=True)
class ChosenByScores:
    """The experts of the K largest scores.

    Attributes:
        source: What gives the logits, or the scores, ``[T, E]``.
        leaf: Which of its results.
        top_k: K.
        scoring: What makes scores of logits.
        selection_bias: A parameter or buffer ``[E]`` that is added to the scores for the choice
            alone; None: none.
        weighting: What is made of the chosen scores.
        scale: A factor on them.
    """

    source: Call | Product
    leaf: int
    top_k: int
    scoring: Scoring
    selection_bias: str | None = None
    weighting: Weighting = "none"
    scale: float = 1.0

    def __call__(self, module: nn.Module, x: Tensor) -> Routed:
        """Returns the routing of tokens ``[..., D]``."""
        leaves = self.source.leaves(module, x)
        logits = leaves[self.leaf]
        logits_TE = logits.reshape(-1, logits.shape[-1])
        if logits_TE.dtype != torch.float64:
            logits_TE = logits_TE.float()
        scores_TE = logits_TE
        if self.scoring == "softmax":
            scores_TE = logits_TE.softmax(dim=-1)
        elif self.scoring == "sigmoid":
            scores_TE = logits_TE.sigmoid()
        if self.selection_bias is None:
            weights_TK, ids_TK = scores_TE.topk(self.top_k, dim=-1)
        else:
            bias_E: Tensor = attrgetter(self.selection_bias)(module)
            ids_TK = (scores_TE + bias_E.reshape(-1)).topk(self.top_k, dim=-1).indices
            weights_TK = scores_TE.gather(-1, ids_TK)
        return Routed(ids_TK, _weighted(weights_TK, self), leaves)

    def plain(self) -> tuple[Product, RouterOptions] | None:
        """Returns the operator's own router that this is, computed in float32 too, or None."""
        kinds = {
            ("softmax", "none"): ("softmax", False),
            ("softmax", "sum"): ("softmax", True),
            ("none", "softmax"): ("topk_softmax", True),
            ("sigmoid", "none"): ("sigmoid", False),
            ("sigmoid", "sum"): ("sigmoid", True),
        }
        kind = kinds.get((self.scoring, self.weighting))
        if kind is None or self.selection_bias is not None or not isinstance(self.source, Product):
            return None
        return self.source, RouterOptions(self.top_k, *kind, routed_scaling=self.scale)


Routing = ChosenByGate | ChosenByScores


def _weighted(weights_TK: Tensor, routing: Routing) -> Tensor:
    if routing.weighting == "sum":
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    elif routing.weighting == "softmax":
        weights_TK = weights_TK.softmax(dim=-1)
    elif routing.weighting == "sigmoid":
        weights_TK = weights_TK.sigmoid()
    return weights_TK if routing.scale == 1.0 else weights_TK * routing.scale
