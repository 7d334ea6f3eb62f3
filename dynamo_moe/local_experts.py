"""A rank's share of a layer's experts, as a module within the layer's own.

Legend: T tokens, D model width, E experts of the layer, of which the rank has C; K choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

import custom_ops
from custom_ops.expert_weights import ExpertWeights
from custom_ops.options import RouterOptions
from custom_ops.ranks import (
    check_group,
    copy_to_ranks,
    gather_from_ranks,
    scatter_sum_over_ranks,
)
from custom_ops.routing import route

#: The name of the module within a layer.
NAME = "local_experts"

_UNEQUAL = "with tokens='split' all ranks need as many tokens, so pad the last batch"

_ROUTER_OPTIONS = {field.name for field in fields(RouterOptions)}


class PlainExperts(nn.Module):
    """Experts whose weights are parameters, as the operators take them.

    Args:
        weights: ``[C, F, D]``, ``[C, F]`` or None, ``[C, D, H]``, and ``[C, D]`` or None.
    """

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None

    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__()
        for name, weight in weights._asdict().items():
            self.register_parameter(name, None if weight is None else nn.Parameter(weight))

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, **options: Any) -> Tensor:
        """Computes :func:`custom_ops.experts` with these weights."""
        return custom_ops.experts(x, ids, weights, *self.weights(), **options)

    def weights(self) -> ExpertWeights:
        """Returns the weights."""
        return ExpertWeights(self.w1, self.b1, self.w2, self.b2)


class EqualCounts:
    """Checks that all ranks have as many tokens, as collectives need them to.

    All take part in every check: a rank whose number is new cannot know whether it is for others.
    On an accelerator the host waits once for each number, and the device checks the others.

    Args:
        ranks: The size of the group.
        group: Its name.
    """

    def __init__(self, ranks: int, group: str) -> None:
        self._ranks, self._group = ranks, group
        self._known: set[int] = set()

    def check(self, x: Tensor) -> None:
        """Checks the number of rows, but not while a model is traced.

        Raises:
            ValueError: If it is another one on another rank. Of a number that the host does not
                wait for, the device fails with an assertion.
        """
        if torch.compiler.is_compiling():
            return
        check_group(self._group, self._ranks)
        own = torch.full((1,), len(x), device=x.device)
        counts = gather_from_ranks(own, self._ranks, self._group)
        if x.device.type != "cpu" and len(x) in self._known:
            torch.ops.aten._assert_async.msg((counts == len(x)).all(), _UNEQUAL)
            return
        if len({*counts.tolist()}) > 1:
            raise ValueError(f"the ranks have {counts.tolist()} tokens of their own: {_UNEQUAL}")
        self._known.add(len(x))


class LocalExperts(nn.Module):
    """The experts of a layer that one rank of a group has, consecutive ones.

    A token's experts on other ranks get the id -1, the rank's own compute, and the parts of all
    ranks are summed. No token moves, or all are gathered before.

    Args:
        part: The rank's experts, with a method ``experts`` as :class:`PlainExperts` has it. A rank
            of no experts has one that no token gets: so it takes part in the sum, and its gradients
            in theirs, and no graph has a constant in its place, which would be that of all layers.
        share: The numbers of its experts in the layer.
        total: All of the layer's experts, E.
        rank: The rank, in ``0..ranks-1``.
        ranks: The size of the group.
        group: Its name; empty: no other rank is there, and the results are the rank's parts.
        counts: Where each rank has its own tokens; None: all have the same.
    """

    local_ids: Tensor

    def __init__(
        self,
        part: nn.Module,
        share: range,
        total: int,
        rank: int,
        ranks: int,
        group: str,
        counts: EqualCounts | None = None,
    ) -> None:
        super().__init__()
        self.part = part
        self.share, self.total = share, total
        self.rank, self.ranks, self.group = rank, ranks, group
        self.counts = counts
        # The number of each id from -1 on among the rank's own. In a tensor, so that the graphs of
        # ranks with as many experts differ in tensors alone.
        numbers = torch.full((1 + total,), -1)
        numbers[1 + share.start : 1 + share.stop] = torch.arange(len(share))
        own = next(part.parameters(), None)
        device = next(part.buffers()).device if own is None else own.device
        self.register_buffer("local_ids", numbers.to(device), persistent=False)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, **options: Any) -> Tensor:
        """Computes :func:`custom_ops.experts` with the experts of all ranks."""
        residual = options.pop("residual", False)
        if self.counts is not None:
            y = self._of_own_tokens(x, ids, weights, self.counts, options)
            return x + y if residual else y
        part: Any = self.part
        y = part.experts(
            copy_to_ranks(x, self.group),
            self.local_ids[ids + 1],
            copy_to_ranks(weights, self.group),
            **options,
        )
        if self.ranks > 1:
            y = custom_ops.sum_over_ranks(y, self.ranks, self.group)
        return x + y if residual else y

    def _of_own_tokens(
        self, x: Tensor, ids: Tensor, weights: Tensor, counts: EqualCounts, options: dict[str, Any]
    ) -> Tensor:
        rows = [each.reshape(-1, each.shape[-1]).contiguous() for each in (x, ids, weights)]
        counts.check(rows[0])
        x_TD, ids_TK, weights_TK = (
            gather_from_ranks(each, self.ranks, self.group) for each in rows
        )
        part: Any = self.part
        y_TD = part.experts(x_TD, self.local_ids[ids_TK + 1], weights_TK, **options)
        return scatter_sum_over_ranks(y_TD, self.ranks, self.group).reshape(x.shape)

    def dropless(self, x: Tensor, router_weight: Tensor, **options: Any) -> Tensor:
        """Computes :func:`custom_ops.dropless` with the experts of all ranks."""
        ids, weights, options = routed(x, router_weight, **options)
        return self.experts(x, ids, weights, **options)

    def extra_repr(self) -> str:
        """The share, for ``print(model)``."""
        share = f"experts {self.share.start} to {self.share.stop - 1}" if self.share else "none"
        return f"{share} of {self.total}, rank {self.rank} of {self.ranks}"


def routed(
    x: Tensor,
    router_weight: Tensor,
    router_bias: Tensor | None = None,
    selection_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Returns the experts that the operator's router chooses, their weights, and other options."""
    router = {name: options.pop(name) for name in _ROUTER_OPTIONS & options.keys()}
    with _without_autocast(x.device.type):
        ids, weights = route(x, router_weight, router_bias, RouterOptions(**router), selection_bias)
    return ids, weights, options


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Returns a context in which the router computes as the operator does, whatever the device."""
    known = torch.amp.is_autocast_available(device)
    enabled = known and torch.is_autocast_enabled(device)
    # Else a trace would have a region for it.
    return torch.autocast(device, enabled=False) if enabled else nullcontext()


def of(layer: nn.Module) -> LocalExperts | None:
    """Returns a rank's share of a layer's experts; None if the layer is not sharded."""
    module = getattr(layer, NAME, None)
    return module if isinstance(module, LocalExperts) else None


def need_common_tokens(model: nn.Module) -> None:
    """Checks that a model has no layer whose tokens are split among ranks.

    Raises:
        ValueError: If it has one.
    """
    for path, layer in model.named_modules():
        local = of(layer)
        if local is not None and local.counts is not None:
            raise ValueError(
                f"the tokens of {path!r} are split among ranks, for which there are no files: "
                "export a model before it is sharded"
            )


def need_whole(layers: Mapping[str, nn.Module], doing: str) -> None:
    """Checks that no layer is sharded, for what is done with whole ones.

    Raises:
        ValueError: With the first that is, and ``doing``.
    """
    for path, layer in layers.items():
        if of(layer) is not None:
            raise ValueError(f"the experts of {path!r} are sharded already: {doing}")
