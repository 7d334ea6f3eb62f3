"""Finds what stands in for a layer's experts, and what its result is made of beside them.

The layer runs with probes (``probed_routing``), of unit length and of zeros. The weights that show,
with its experts' own results, must give the layer's result.

Legend: T tokens, D model width, R rows, E experts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_moe.conversion.comparison import TOLERANCE, relative_error
from dynamo_moe.conversion.expert_weights import ExpertsSpec
from dynamo_moe.conversion.find_own_routing import are_constant, values_of_tokens
from dynamo_moe.conversion.observation import random_tokens, same_draws
from dynamo_moe.conversion.other_arguments import OtherArguments, call_with
from dynamo_moe.conversion.own_routing import Value
from dynamo_moe.conversion.probed_routing import Probe, ProbedRouting, Rest, probed_results
from dynamo_moe.private.pytorch import TorchDispatchMode

_aten = torch.ops.aten

# Tokens of several sizes, of which one may have more experts than any of few: as of a threshold.
_MANY, _SIZES = 4096, (1.0, 0.05, 5.0, 0.3)


class _Selections(TorchDispatchMode):
    """Records how many of at most E scores a forward selects, each time that it does.

    Attributes:
        sizes: These numbers, one for each selection.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # It has no annotations.
        self.sizes: list[int] = []
        self._num_experts = num_experts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _aten.topk.default:
            _, k, dim = (*args, -1)[:3]
            self._record(args[0], dim, k)
        elif func in (_aten.argmax.default, _aten.max.dim) and args[1:2] not in ((), (None,)):
            self._record(args[0], args[1], 1)
        return result

    def _record(self, scores: Tensor, dim: int, size: int) -> None:
        if scores.ndim and scores.shape[dim] <= self._num_experts:
            self.sizes.append(size)


@dataclass(frozen=True)
class ProbedTrial:
    """A layer's run on a few tokens, of which the result is known.

    Attributes:
        module: The layer.
        experts: The candidate for its experts.
        x: The tokens ``[..., D]``.
        others: What else its forward gets.
        result: What it returns, flattened.
        each_expert: From tokens ``[T, D]`` to every expert's result ``[T, E, D]``.
        channels_first: Whether it takes images ``[B, D, ...]``.
        draws: Whether it draws random numbers.
    """

    module: nn.Module
    experts: ExpertsSpec
    x: Tensor
    others: OtherArguments
    result: list[Any]
    each_expert: Callable[[Tensor], Tensor]
    channels_first: bool
    draws: bool

    def routings(self, hidden: Collection[str]) -> Iterator[ProbedRouting]:
        """Yields the routings that give the layer's numbers.

        Args:
            hidden: The paths of the modules that are experts, or an expert's linear layers; of a
                list of experts, that of the list.
        """
        if self.experts.width != self.x.shape[-1] or self.experts.num_experts > self.x.shape[-1]:
            return
        of_modules = _probes_of_modules(self.experts, hidden)
        for probes in (of_modules, *self._probes_of_stacks()):
            if probes:
                yield from self._routings(probes)

    def _run(self, probes: tuple[Probe, ...], unit: float, rows: list[Tensor]) -> list[Any]:
        others, image = self.others.of_size(self.x), self.x
        image = image.movedim(-1, 1) if self.channels_first else image
        with same_draws():
            leaves = probed_results(self.module, image, others, probes, unit, rows)
        is_image = [self.channels_first and _shape_of(leaf) == image.shape for leaf in leaves]
        pairs = zip(leaves, is_image, strict=True)
        return [leaf.movedim(1, -1) if moved else leaf for leaf, moved in pairs]

    def _routings(self, probes: tuple[Probe, ...]) -> Iterator[ProbedRouting]:
        width, tokens = self.x.shape[-1], self.x.shape[:-1].numel()
        rows: list[Tensor] = []
        try:
            with torch.no_grad():
                run = functools.partial(self._run, probes, 1.0, rows)
                units, values = values_of_tokens(run, tokens, width)
                rests = self._run(probes, 0.0, [])
        except Exception:  # The module is the user's: with probes, anything can come out of it.
            return
        inputs: dict[Value | None, Tensor] = {None: self.x.reshape(-1, width)}
        inputs.update((value, tensor.reshape(-1, width)) for value, tensor in values.items())
        for number, leaf in enumerate(self.result):
            is_result = isinstance(leaf, Tensor) and leaf.is_floating_point()
            if not is_result or leaf.shape[-1:] != (width,) or leaf.numel() != self.x.numel():
                continue
            expected_TD, unit_TD, rest_TD = (
                each[number].reshape(-1, width) for each in (self.result, units, rests)
            )
            weights_TE = unit_TD.double() - rest_TD.double()
            weights_TE = weights_TE[:, : self.experts.num_experts]
            if are_constant(weights_TE):
                continue
            for value in self._tokens_of_experts(inputs, rows, weights_TE, expected_TD - rest_TD):
                base = ProbedRouting(probes, number, self.experts.num_experts, 1, "nothing", value)
                base = replace(base, channels_first=self.channels_first)
                yield from self._with_rests(base, inputs, rest_TD)

    def _tokens_of_experts(
        self,
        inputs: Mapping[Value | None, Tensor],
        rows: list[Tensor],
        weights_TE: Tensor,
        expected_TD: Tensor,
    ) -> Iterator[Value | None]:
        """Yields the tokens with which the experts' results add up to the layer's."""
        for value, tokens_TD in inputs.items():
            if _are_rows_of(rows, tokens_TD):
                y_TED = self.each_expert(tokens_TD)
                summed_TD = torch.einsum("te,ted->td", weights_TE, y_TED)
                if relative_error(summed_TD, expected_TD) <= TOLERANCE:
                    yield value

    def _with_rests(
        self, base: ProbedRouting, inputs: Mapping[Value | None, Tensor], rest_TD: Tensor
    ) -> Iterator[ProbedRouting]:
        """Yields a routing with everything that may be added to the experts' sum, and each K."""
        rests: list[Rest] = [] if rest_TD.any() else ["nothing"]
        equal = [value for value, tensor in inputs.items() if torch.equal(tensor, rest_TD)]
        rests += ["tokens" if value is None else value for value in equal]
        if not self.draws:  # It would draw twice as much.
            rests.append("second run")
        for rest in rests:
            routing = replace(base, rest=rest)
            for top_k in dict.fromkeys((self._most_choices(routing), base.num_experts)):
                yield replace(routing, top_k=top_k)

    def _most_choices(self, routing: ProbedRouting) -> int:
        """Returns how many experts a token has at most.

        That many of many tokens of several sizes have, and it is what the forward selects, in one
        selection or in all; if it selects more, all of them, and if it does not select, E.
        """
        leading = (*(1 for _ in self.x.shape[:-2]), _MANY)
        x = random_tokens(*leading, self.x.shape[-1], like=self.x)
        for start, size in enumerate(_SIZES):
            x[..., start :: len(_SIZES), :] *= size
        routing = replace(routing, top_k=routing.num_experts)
        try:
            with torch.no_grad(), same_draws(), _Selections(routing.num_experts) as seen:
                routed = routing(self.module, x, self.others.of_size(x))
        except Exception:  # The module is the user's: it may take no such tokens.
            return routing.num_experts
        most = max(1, int((routed.weights != 0).sum(dim=1).max()))
        total = sum(seen.sizes)
        if most in (total, max(seen.sizes, default=0)):
            return most
        return min(total or routing.num_experts, routing.num_experts)

    def _probes_of_stacks(self) -> Iterator[tuple[Probe, ...]]:
        """Yields the probes that may stand for a module that holds all experts' stacks."""
        names = self.experts.parameter_names()
        owners = {name.rpartition(".")[0] for name in names}
        path = next(iter(owners))
        if len(owners) > 1 or not path or len(names) > len(self.experts.stacks):
            return
        shape = self._rows_of(path)
        if shape is None or shape[-1] != self.experts.width:
            return  # Rows in the order of their experts, with counts.
        for first, last in itertools.combinations(range(len(shape)), 2):
            counted = shape[first:last]
            if 1 not in (counted[0], counted[-1]) and counted.numel() == self.experts.num_experts:
                yield (Probe(path, None, self.experts.width, tuple(range(first, last))),)

    def _rows_of(self, path: str) -> torch.Size | None:
        """Returns the shape of the one tensor that a module of experts is called with, once."""
        shapes: list[torch.Size] = []

        def record(_: nn.Module, args: tuple[Any, ...]) -> None:
            shapes.extend(arg.shape for arg in args if isinstance(arg, Tensor))

        handle = self.module.get_submodule(path).register_forward_pre_hook(record)
        image = self.x.movedim(-1, 1) if self.channels_first else self.x
        try:
            with same_draws():
                call_with(self.module, image, self.others.of_size(self.x))
        except Exception:  # The module is the user's: anything can come out of it.
            return None
        finally:
            handle.remove()
        return shapes[0] if len(shapes) == 1 and len(shapes[0]) > 1 else None


def _probes_of_modules(experts: ExpertsSpec, hidden: Collection[str]) -> tuple[Probe, ...]:
    """Returns the probes in place of experts that are modules, or lists of linear layers."""

    def module_of(name: str) -> str:
        parts = name.split(".")
        paths = [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]
        return next((p for p in paths if p in hidden or p.rpartition(".")[0] in hidden), "")

    last = [module_of(name) for name in experts.w2[0].names]
    if len(last) != experts.num_experts or len({*last}) != len(last) or "" in last:
        return ()
    probes = [Probe(path, expert, experts.width) for expert, path in enumerate(last)]
    for stack in experts.w1:
        paths = {module_of(name) for name in stack.names}
        probes += [Probe(path, None, stack.sizes[0]) for path in sorted(paths - {*last})]
    return tuple(probes)


def _are_rows_of(rows: list[Tensor], tokens_TD: Tensor) -> bool:
    """Whether all rows that experts get are rows of these tokens, or zeros."""
    width = tokens_TD.shape[-1]
    given = [row.reshape(-1, width) for row in rows if row.shape[-1:] == (width,)]
    rows_RD = torch.cat(given) if given else tokens_TD[:0]
    known_R = (rows_RD[:, None] == tokens_TD).all(dim=-1).any(dim=-1) | (rows_RD == 0).all(dim=-1)
    return bool(known_R.all())


def _shape_of(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None
