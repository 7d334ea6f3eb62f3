"""Routing as a layer's own forward applies it: probes in place of its experts show their weights.

A layer's result is a sum of its experts' results, with a weight each, and of a rest without them:
a residual, shared experts, what a capacity drops. Where no tensor holds these weights, as experts
cut their tokens in a loop, or the rest is added in a way that no record has, its own forward still
says them. It runs to its end with *probes* instead of experts: modules that return one unit vector
for all rows, another for each expert. Number e of a token's result then is the weight of expert e,
whatever the forward did to get there. With probes that return zeros the result is the rest.

Legend: T tokens, D model width, H hidden width, E experts, K choices.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from dynamo_moe import pytree
from dynamo_moe.conversion.other_arguments import call_with
from dynamo_moe.conversion.own_routing import Value, ValuesSeen, chosen_weights
from dynamo_moe.conversion.routing import Routed
from dynamo_moe.modules import ConvertedModule
from dynamo_moe.private.pytorch import copy_around, is_exporting

# Beside a rest, unit vectors are so long that what they lose to it is nothing; a power of two, so
# that a division by it is exact. Float16 has no such number.
_UNIT = 2.0**32


Rest: TypeAlias = Literal["nothing", "tokens", "second run"] | Value
"""What is added to the experts' sum: nothing, the layer's tokens, a value that the forward
computes, or something that only a second run shows, with probes that return zeros."""


class Probe(NamedTuple):
    """What stands in for an expert, for a linear layer of one, or for a module of all experts.

    Attributes:
        path: The module that it stands for.
        expert: The expert's number, or None.
        width: How many numbers it gives for a row.
        axes: The dimensions of the rows that count the experts, of a module of all of them. Empty
            without an expert: it gives zeros, as what follows it is a probe.
    """

    path: str
    expert: int | None
    width: int
    axes: tuple[int, ...] = ()

    def vectors(self, rows: Tensor, unit: float) -> Tensor:
        """Returns what it gives for rows ``[..., D]``."""
        # It may be changed in place, so each row is in memory of its own.
        shape = (*rows.shape[:-1], self.width)
        if self.expert is None and not self.axes:
            return rows.new_zeros(shape)
        counted = [rows.shape[axis] if axis in self.axes else 1 for axis in range(rows.ndim)]
        experts = torch.arange(math.prod(counted), device=rows.device).view(counted)
        if self.expert is not None:
            experts = experts + self.expert
        is_expert = experts == torch.arange(self.width, device=rows.device)
        return (is_expert.to(rows.dtype) * unit).expand(shape).clone()


@dataclass(frozen=True)
class ProbedRouting:
    """The routing that a layer's own forward applies.

    Attributes:
        probes: What stands in for the experts.
        result: Which of the tensors and values that the forward returns is the experts' sum.
        num_experts: E, at most D.
        top_k: K, the most experts whose weight is not zero for a token.
        rest: What is added to that sum.
        tokens: What the experts take, if not the layer's tokens: a value that the forward computes.
        channels_first: Whether the forward takes images ``[B, D, ...]``.
    """

    probes: tuple[Probe, ...]
    result: int
    num_experts: int
    top_k: int
    rest: Rest = "nothing"
    tokens: Value | None = None
    channels_first: bool = False

    def __call__(
        self, module: nn.Module, x: Tensor, others: Mapping[str, Any] | None = None
    ) -> Routed:
        """Returns the routing of tokens ``[..., D]``, their rest, and all that the forward returns.

        An expert of weight 0 has the id -1.

        Args:
            module: The layer.
            x: The tokens.
            others: What else its forward gets, by name.

        Raises:
            ValueError: If the forward does not compute what the experts take.
            TypeError: If something is added to the experts' sum in float16.
        """
        if self.rest != "nothing" and x.dtype == torch.float16:
            raise TypeError(
                "tokens must be float32 or bfloat16, got float16: beside what the layer adds to "
                "its experts' results, the weights of experts lose their digits"
            )
        run = _results if is_exporting() else _results_by_running
        image = x.movedim(-1, 1) if self.channels_first else x
        unit = 1.0 if self.rest == "nothing" else _UNIT
        leaves, values = run(self, module, image, others or {}, unit)
        summed_TD, rest = self._rows(leaves, x), None
        if self.rest != "nothing":
            match self.rest:
                case "tokens":
                    rest = x
                case "second run":
                    rest = self._rows(run(self, module, image, others or {}, 0.0)[0], x)
                case _:
                    rest = values[self.rest]
            rest = rest.reshape(summed_TD.shape)
            summed_TD = (summed_TD - rest) / unit
        ids_TK, weights_TK = chosen_weights(summed_TD[:, : self.num_experts], self.top_k)
        tokens = None if self.tokens is None else values[self.tokens].reshape(x.shape)
        return Routed(ids_TK, weights_TK, leaves, tokens, rest)

    def _rows(self, leaves: list[Any], x: Tensor) -> Tensor:
        """Returns the result ``[T, D]`` of a run."""
        result: Tensor = leaves[self.result]
        if self.channels_first and result.ndim == x.ndim:
            result = result.movedim(1, -1)
        return result.reshape(-1, x.shape[-1])

    def calls(self) -> tuple[()]:
        """Returns nothing: which submodules run is up to the forward."""
        return ()

    def builtin(self) -> None:
        """Returns None: ``torch.ops.moe.dropless`` has no router that is Python code."""


def probed_results(
    module: nn.Module,
    x: Tensor,
    others: Mapping[str, Any],
    probes: tuple[Probe, ...],
    unit: float,
    rows: list[Tensor] | None = None,
) -> list[Any]:
    """Returns what a forward returns for ``x``, flattened, with probes in place of its experts.

    Args:
        module: The layer.
        x: Its tokens or images.
        others: What else its forward gets, by name.
        probes: The probes.
        unit: The length of the vectors that they return.
        rows: Takes what each call of an expert gets.
    """
    stand_ins = {
        probe.path: _stand_in(module.get_submodule(probe.path), probe, unit, rows)
        for probe in probes
    }
    layer = copy_around(module, stand_ins)
    forward = layer.own_forward if isinstance(layer, ConvertedModule) else layer.forward
    return pytree.tree_leaves(call_with(forward, x, others))


def _stand_in(expert: nn.Module, probe: Probe, unit: float, rows: list[Tensor] | None) -> nn.Module:
    """Returns a module with the attributes of an expert that gives the probe's vector instead."""

    def answer(*args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = next(iter((*args, *kwargs.values())))
        if rows is not None:
            rows.append(x)
        return probe.vectors(x, unit)

    twin = copy.copy(expert)
    original: Any = type(expert)
    twin.__class__ = _stand_in_class(original)
    vars(twin)["_dynamo_moe_answer"] = answer
    return twin


@functools.cache
def _stand_in_class(original: Any) -> type[nn.Module]:
    def answered(module: Any, *args: Any, **kwargs: Any) -> Any:
        return vars(module)["_dynamo_moe_answer"](*args, **kwargs)

    # Hooks, which are the user's, do not see a probe: a call is its forward.
    return type(
        f"Probed{original.__name__}", (original,), {"forward": answered, "__call__": answered}
    )


def _results(
    routing: ProbedRouting, module: nn.Module, x: Tensor, others: Mapping[str, Any], unit: float
) -> tuple[list[Any], dict[Value, Tensor]]:
    """Returns what a forward returns with probes, and the values of it that are needed."""
    candidates = (routing.tokens, routing.rest if isinstance(routing.rest, Value) else None)
    needed = [value for value in dict.fromkeys(candidates) if value is not None]
    if not needed:  # A trace takes less through a mode.
        return probed_results(module, x, others, routing.probes, unit), {}
    with ValuesSeen(needed) as seen:
        leaves = probed_results(module, x, others, routing.probes, unit)
    return leaves, seen.values()


# Where torch.compile would read the forward, it runs, as in own_routing.
_results_by_running: Callable[..., tuple[list[Any], dict[Value, Tensor]]] = torch.compiler.disable(
    _results
)
