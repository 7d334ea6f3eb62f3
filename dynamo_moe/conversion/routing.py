"""How a layer chooses a token's experts and their weights, as records that compute it.

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

Scoring = Literal["none", "softmax", "sigmoid"]
Weighting = Literal["none", "sum", "softmax", "sigmoid"]


class Routed(NamedTuple):
    """The experts chosen, and everything that the gate returned on the way.

    Attributes:
        ids: ``[T, K]``.
        weights: ``[T, K]``.
        gate_outputs: The values that the gate returned, flattened, or the layer's own forward.
        tokens: What the experts take ``[..., D]``, if not the layer's tokens.
        rest: What is added to the experts' sum ``[T, D]``, if anything is.
    """

    ids: Tensor
    weights: Tensor
    gate_outputs: list[Any]
    tokens: Tensor | None = None
    rest: Tensor | None = None


@dataclass(frozen=True)
class TopKRouting:
    """A token's experts are those of its K largest scores.

    Attributes:
        source: The router of the logits, or of the scores, ``[T, E]``.
        output: Which of its outputs they are.
        top_k: K.
        scoring: The function from logits to scores.
        selection_bias: A parameter or buffer ``[E]`` that is added to the scores for the choice
            only, or None.
        weighting: The function from the chosen scores to weights.
        scale: A factor on the weights.
    """

    source: SubmoduleCall | LinearRouter
    output: int
    top_k: int
    scoring: Scoring
    selection_bias: str | None = None
    weighting: Weighting = "none"
    scale: float = 1.0

    def __call__(self, module: nn.Module, x: Tensor, others: object = None) -> Routed:
        """Returns the routing of tokens ``[..., D]``, whatever else the layer gets."""
        outputs = self.source.outputs(module, x)
        logits = outputs[self.output]
        logits_TE = logits.reshape(-1, logits.shape[-1])
        if logits_TE.dtype != torch.float64:
            logits_TE = logits_TE.float()
        scores_TE = _normalized(logits_TE, self.scoring)
        if self.selection_bias is None:
            weights_TK, ids_TK = scores_TE.topk(self.top_k, dim=-1)
        else:
            bias_E: Tensor = attrgetter(self.selection_bias)(module)
            ids_TK = (scores_TE + bias_E.reshape(-1)).topk(self.top_k, dim=-1).indices
            weights_TK = scores_TE.gather(-1, ids_TK)
        return Routed(ids_TK, _normalized(weights_TK, self.weighting, self.scale), outputs)

    def calls(self) -> tuple[SubmoduleCall, ...]:
        """Returns the calls of the layer's submodules that this makes."""
        return (self.source,) if isinstance(self.source, SubmoduleCall) else ()

    def builtin(self) -> tuple[LinearRouter, RouterOptions] | None:
        """Returns the same as a router of ``torch.ops.moe.dropless``, if it has that one."""
        kind = {
            ("softmax", "none"): ("softmax", False),
            ("softmax", "sum"): ("softmax", True),
            ("none", "softmax"): ("topk_softmax", True),
            ("sigmoid", "none"): ("sigmoid", False),
            ("sigmoid", "sum"): ("sigmoid", True),
        }.get((self.scoring, self.weighting))
        if kind is None or self.selection_bias or not isinstance(self.source, LinearRouter):
            return None
        return self.source, RouterOptions(self.top_k, *kind, routed_scaling=self.scale)


@dataclass(frozen=True)
class GateRouting:
    """The gate itself returns a token's experts and their weights.

    Attributes:
        source: The gate's call.
        ids: Which of its outputs are the experts.
        weights: Which of its outputs are their weights.
        weighting: The function that is applied to the weights.
        scale: A factor on them.
    """

    source: SubmoduleCall
    ids: int
    weights: int
    weighting: Weighting = "none"
    scale: float = 1.0

    def __call__(self, module: nn.Module, x: Tensor, others: object = None) -> Routed:
        """Returns the routing of tokens ``[..., D]``, whatever else the layer gets."""
        outputs = self.source.outputs(module, x)
        ids, weights = outputs[self.ids], outputs[self.weights]
        choices = ids.shape[-1]
        weights_TK = _normalized(weights.reshape(-1, choices), self.weighting, self.scale)
        return Routed(ids.reshape(-1, choices), weights_TK, outputs)

    def calls(self) -> tuple[SubmoduleCall, ...]:
        """Returns the call of the gate."""
        return (self.source,)

    def builtin(self) -> None:
        """Returns None: ``torch.ops.moe.dropless`` has no router that runs a submodule."""


def _normalized(values: Tensor, kind: Weighting, scale: float = 1.0) -> Tensor:
    """Returns a token's scores or weights, normalised over the last dimension, times a factor."""
    if kind == "sum":
        values = values / values.sum(dim=-1, keepdim=True)
    elif kind == "softmax":
        values = values.softmax(dim=-1)
    elif kind == "sigmoid":
        values = values.sigmoid()
    return values if scale == 1.0 else values * scale


@dataclass(frozen=True)
class LinearRouter:
    """Logits that are a product of the tokens and a parameter, computed in float32.

    Attributes:
        weight: A parameter ``[E, D]``, or ``[D, E]`` where ``transposed``.
        bias: A parameter ``[E]``, or None.
        transposed: Whether the weight is stored (in, out).
    """

    weight: str
    bias: str | None
    transposed: bool

    def parameters(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Returns ``[E, D]`` and ``[E]``."""
        weight: Tensor = attrgetter(self.weight)(module)
        bias = None if self.bias is None else attrgetter(self.bias)(module)
        return weight.mT if self.transposed else weight, bias

    def outputs(self, module: nn.Module, x: Tensor) -> list[Any]:
        """Returns the logits ``[T, E]`` of tokens ``[..., D]``."""
        weight, bias = self.parameters(module)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        tokens = x.reshape(-1, x.shape[-1]).to(dtype)
        bias = None if bias is None else bias.to(dtype)
        return [nn.functional.linear(tokens, weight.to(dtype), bias)]


class TensorArgument(NamedTuple):
    """An argument that is a parameter or buffer of the layer; with an empty path, the tokens."""

    path: str


@dataclass(frozen=True)
class SubmoduleCall:
    """A call of one of the layer's submodules, as the layer's forward makes it.

    Attributes:
        path: The submodule.
        args: Positional arguments: a :class:`TensorArgument`, or a constant.
        kwargs: Keyword arguments, likewise.
        flat: Whether it gets the tokens as ``[T, D]``, or in the shape that the layer gets.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    flat: bool

    def outputs(self, module: nn.Module, x: Tensor) -> list[Any]:
        """Returns its results for tokens ``[..., D]``, flattened."""
        callee = module.get_submodule(self.path)
        tokens = x.reshape(-1, x.shape[-1]) if self.flat else x
        # In half precision a router is often computed in float32.
        first = next((p for p in callee.parameters() if p.is_floating_point()), tokens)
        tokens = tokens.to(first.dtype)

        def value(argument: Any) -> Any:
            if not isinstance(argument, TensorArgument):
                return argument
            return attrgetter(argument.path)(module) if argument.path else tokens

        args = [value(argument) for argument in self.args]
        kwargs = {name: value(argument) for name, argument in self.kwargs}
        return pytree.tree_leaves(callee(*args, **kwargs))
