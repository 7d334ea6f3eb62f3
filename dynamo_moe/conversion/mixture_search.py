"""Finding what a mixture of experts computes, whatever its class: by structure and by numbers.

The experts' formula is found from one of them. The routing is the module's own gate, run as it is,
and what is made of its scores. Each guess is tried against the module itself, on tokens and weights
drawn at random; what agrees is compared again, with the module's weights, by :mod:`comparing`.

Legend: T tokens, D model width, E experts, K choices.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any, get_args

import torch
from torch import Tensor, nn

import custom_ops
from dynamo_moe import pytree
from dynamo_moe.conversion.comparing import relative_error
from dynamo_moe.conversion.expert_search import (
    ListOfExperts,
    StacksOfExperts,
    experts_of_list,
    experts_of_stacks,
)
from dynamo_moe.conversion.mixture import Mixture, Shared
from dynamo_moe.conversion.observing import (
    Observation,
    as_tokens,
    observe,
    on_any_device,
    random_weights,
    with_tensors,
)
from dynamo_moe.conversion.outputs import left_behind, marks_of, outputs_of
from dynamo_moe.conversion.routing import (
    Call,
    ChosenByGate,
    ChosenByScores,
    Product,
    Routed,
    Routing,
    Scoring,
    Weighting,
)
from dynamo_moe.conversion.stacks import Experts
from dynamo_moe.process_state import exclusive

__all__ = ["Found", "NotRoutedError", "find_mixture"]

# Relative to the RMS of the result. Another routing or activation differs by 1e-2 and more.
_TOLERANCE = 1e-4
# Of a factor on the weights, solved for.
_LARGE = 4
_SCALE_TOLERANCE = 1e-4
# Of the tokens that modules take, and whether as images with channels first.
_LEADING = (((2, 5), False), ((10,), False), ((2, 1, 5), False), ((2, 1, 5), True))
# Above this many, experts keep their weights in a trial: others would take as much memory again.
_MOST_RANDOM = 1 << 27

_SCORINGS: tuple[tuple[Scoring, Weighting], ...] = (
    ("softmax", "sum"),
    ("none", "softmax"),
    ("softmax", "none"),
    ("sigmoid", "none"),
    ("sigmoid", "sum"),
    ("none", "none"),
    ("none", "sum"),
    ("softmax", "softmax"),
)


_PLAIN_TYPES = (bool, int, float, str)


class NotRoutedError(ValueError):
    """The module does not choose among the experts itself: one around it may."""


@dataclass(frozen=True)
class Found:
    """A mixture, and what a module that computes it does no longer.

    Attributes:
        mixture: What the module computes.
        attributes: Those that its forward set on itself, by submodule, with the values that they
            have from now on.
        notes: What a user should know.
        weights: Parameters and buffers that it was found with, by path.
        leading: The leading dimensions of the tokens that it was found with.
    """

    mixture: Mixture
    attributes: dict[str, dict[str, Any]]
    notes: tuple[str, ...]
    weights: dict[str, Tensor]
    leading: tuple[int, ...]


def find_mixture(module: nn.Module, held: ListOfExperts | StacksOfExperts) -> Found:
    """Returns what a module in evaluation mode computes.

    Args:
        module: A module in at least float32.
        held: Its experts, by their path in it.

    Raises:
        NotRoutedError: If it does not route, as far as can be seen.
        ValueError: If it is no mixture that the operators compute; with the reason.
    """
    if "forward" in vars(module):
        raise ValueError("its forward has been replaced in the instance")
    unseen: list[nn.Module] = []
    if isinstance(held, ListOfExperts):
        candidates = experts_of_list(module, held.path)
        unseen.append(module.get_submodule(held.path))
    else:
        prefix = f"{held.path}." if held.path else ""
        candidates = list(experts_of_stacks(module, prefix, held))
        if not candidates:
            named = ", ".join(names[0] for names in held.names)
            raise ValueError(
                f"its stacks of {held.experts} experts ({named}) are no two or "
                "three matrices of an MLP"
            )
    weights = random_weights(module, _drawn(module, candidates))
    _enlarge(weights, candidates[0])
    with torch.no_grad(), with_tensors(module, weights):
        search = _Search(module, held.experts, candidates, unseen)
        mixture, observation, leading = search.run()
    attributes, notes = left_behind(observation, mixture)
    return Found(mixture, attributes, notes, weights, leading)


def _enlarge(weights: dict[str, Tensor], experts: Experts) -> None:
    """Makes every second expert's numbers larger: clamps show there, and all else elsewhere."""
    for stack in experts.stacks():
        for place, name in enumerate(stack.names):
            if name in weights and len(stack.names) == 1:
                weights[name].view(stack.experts, -1)[1::2] *= _LARGE
            elif name in weights and place % 2:
                weights[name] *= _LARGE


def _drawn(module: nn.Module, candidates: list[Experts]) -> set[str]:
    """Returns the names of the parameters and buffers to draw at random for a trial."""
    named = dict((*module.named_parameters(), *module.named_buffers()))
    large = sum(tensor.numel() for tensor in named.values()) > _MOST_RANDOM
    kept = {name for experts in candidates for name in experts.names()} if large else set()
    if large and any(named[name].is_meta for name in kept):
        raise ValueError("it is too large for a trial, and its weights are not there")
    return set(named) - kept


class _Search:
    def __init__(
        self,
        module: nn.Module,
        experts: int,
        candidates: list[Experts],
        unseen: Collection[nn.Module],
    ) -> None:
        self._module = module
        self._experts = experts
        self._candidates = candidates
        self._unseen = unseen
        self._taken = {name for each in candidates for name in each.names()}

    def run(self) -> tuple[Mixture, Observation, tuple[int, ...]]:
        """Returns the first mixture that gives the module's numbers.

        Raises:
            ValueError: If none does.
        """
        widths = list(
            dict.fromkeys(e.second.matrices(self._module).shape[1] for e in self._candidates)
        )
        failure: Exception | None = None
        refusals: list[NotRoutedError] = []
        routed = False
        for width in widths:
            for leading, channels_first in _LEADING:
                x = _tokens(*leading, width, like=self._module)
                run = as_tokens(on_any_device(self._module), channels_first=channels_first)
                try:
                    seen = observe(self._module, run, x, self._unseen)
                except Exception as error:  # The module is the user's: anything can come out.
                    failure = failure or error
                    continue
                with exclusive(), torch.random.fork_rng(()):
                    torch.default_generator.manual_seed(torch.initial_seed() + 1)
                    again = observe(self._module, run, x, self._unseen)
                if not _same(seen.result, again.result):
                    raise ValueError("it gives other numbers each time, in evaluation mode too")
                try:
                    found = self._found(seen, x)
                except NotRoutedError as reason:
                    refusals.append(reason)
                    break
                if found is not None:
                    return replace(found, channels_first=channels_first), seen, leading
                routed = True
                break
        if refusals and not routed:
            raise refusals[0]
        if failure is not None and not routed:
            raise NotRoutedError(f"it fails on random tokens: {_one_line(failure)}") from failure
        raise ValueError(
            f"no known way to choose among its {self._experts} experts gives its numbers"
        )

    def _found(self, seen: Observation, x: Tensor) -> Mixture | None:
        leaves, structure = pytree.tree_flatten(seen.result)
        results = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
            and leaf.numel() == x.numel()
            and leaf.shape[-1] == x.shape[-1]
        ]
        if not results:
            raise NotRoutedError(f"it returns no tensor of its tokens' shape {list(x.shape)}")
        x_TD = x.reshape(-1, x.shape[-1])
        routings = self._routings(seen, x)
        if not routings:
            raise NotRoutedError(
                f"it calls no gate with {self._experts} scores, and has no weight of one"
            )
        dense_RTE = torch.stack([_dense(routed, self._experts) for _, routed in routings])
        sets = list(itertools.product(self._shared(seen, x), self._biases(x)))
        for on_input, candidate in itertools.product((False, True), self._candidates):
            if on_input:
                experts = _on_input(candidate)
                y_RTD = self._weighted_inputs(experts, routings, x_TD)
            else:
                experts = candidate
                y_RTD = torch.einsum("rte,ted->rtd", dense_RTE, self._each(experts, x_TD))
            for (shared, bias), place in itertools.product(sets, results):
                added_TD = sum((each(self._module, x) for each in shared), torch.zeros_like(x_TD))
                if bias is not None:
                    added_TD = added_TD + attrgetter(bias)(self._module)
                expected_TD = leaves[place].reshape(x_TD.shape) - added_TD
                if not expected_TD.any():  # Any guess of experts that give zeros would do.
                    continue
                number, scale, error = self._best(y_RTD, expected_TD, scaled=not on_input)
                if error <= _TOLERANCE:
                    routing, routed = routings[number]
                    return Mixture(
                        arguments=_arguments(self._module),
                        routing=replace(routing, scale=scale),
                        experts=experts,
                        shared=shared,
                        outputs=pytree.tree_unflatten(
                            outputs_of(leaves, place, routed, x, self._experts), structure
                        ),
                        marks=marks_of(leaves[place], routed, x, self._experts),
                        bias=bias,
                    )
        return None

    def _each(self, experts: Experts, x_TD: Tensor) -> Tensor:
        """Returns what each expert alone gives for each token, ``[T, E, D]``, in float64."""
        count, width = len(x_TD), x_TD.shape[-1]
        weights = experts.weights(self._module)
        if weights.w1.shape[-1] != width:
            return x_TD.new_full((count, self._experts, width), float("nan"), dtype=torch.float64)
        ids = torch.arange(self._experts, device=x_TD.device).repeat(count)[:, None]
        rows = x_TD.repeat_interleave(self._experts, dim=0)
        ones = torch.ones_like(ids, dtype=x_TD.dtype)
        y = custom_ops.experts(rows, ids, ones, *weights, **asdict(experts.options))
        return y.view(count, self._experts, width).double()

    def _weighted_inputs(
        self, experts: Experts, routings: list[tuple[Routing, Routed]], x_TD: Tensor
    ) -> Tensor:
        """Returns the results of all routings whose weights scale the experts' inputs."""
        weights, options = experts.weights(self._module), asdict(experts.options)
        if weights.w1.shape[-1] != x_TD.shape[-1]:
            return x_TD.new_full((len(routings), *x_TD.shape), float("nan"), dtype=torch.float64)
        return torch.stack(
            [
                custom_ops.experts(x_TD, routed.ids, routed.weights, *weights, **options).double()
                for _, routed in routings
            ]
        )

    def _best(
        self, y_RTD: Tensor, expected_TD: Tensor, *, scaled: bool
    ) -> tuple[int, float, float]:
        """Returns the routing that comes nearest, the factor on its weights, and its error."""
        expected_TD = expected_TD.double()
        factors_R = (y_RTD * expected_TD).sum((1, 2)) / y_RTD.square().sum((1, 2)).clamp_min(1e-30)
        best = 0, 1.0, float("inf")
        for number, factor in enumerate(factors_R.tolist()):
            scale = 1.0
            if scaled:
                known = min(self._numbers, key=lambda each: abs(each - factor))
                scale = known if abs(known - factor) <= _SCALE_TOLERANCE * abs(factor) else 1.0
            error = relative_error(y_RTD[number] * scale, expected_TD)
            if error < best[2]:
                best = number, scale, error
        return best

    @functools.cached_property
    def _numbers(self) -> list[float]:
        """The numbers that weights may be scaled by: 1, and those among attributes."""
        found = [1.0]
        for part in self._parts():
            values = (value for value in vars(part).values() if type(value) in (int, float))
            found += [float(value) for value in values if value > 0]
        return found

    def _parts(self) -> list[nn.Module]:
        """Returns the modules that are not experts."""
        hidden = {part for each in self._unseen for part in each.modules()}
        return [part for part in self._module.modules() if part not in hidden]

    # --- Routing ---

    def _routings(self, seen: Observation, x: Tensor) -> list[tuple[Routing, Routed]]:
        """Returns the routings to try, with what they give; those that give the same, once."""
        found: list[tuple[Routing, Routed]] = []
        known: list[Tensor] = []
        for routing in (*self._of_gates(seen), *self._of_scores(seen, x)):
            try:
                routed = routing(self._module, x)
                dense_TE = _dense(routed, self._experts)
            except Exception:  # noqa: S112  A guess that does not fit the gate.
                continue
            if len(routed.ids) == x.numel() // x.shape[-1] and not any(
                torch.allclose(dense_TE, other, rtol=1e-6, atol=1e-9) for other in known
            ):
                known.append(dense_TE)
                found.append((routing, routed))
        return found

    def _of_gates(self, seen: Observation) -> Iterator[Routing]:
        """Yields routings by gates that return the experts and their weights."""
        for call in seen.calls:
            tensors = [(i, leaf) for i, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)]
            for ids, chosen in tensors:
                if chosen.dtype not in (torch.int32, torch.int64):
                    continue
                for weights, leaf in tensors:
                    if leaf.is_floating_point() and leaf.shape == chosen.shape:
                        for weighting in get_args(Weighting):
                            yield ChosenByGate(call.call, ids, weights, weighting)

    def _of_scores(self, seen: Observation, x: Tensor) -> Iterator[Routing]:
        """Yields routings by the largest of E scores."""
        choices = [k for k in seen.choices if 1 <= k <= self._experts]
        choices += self._small_numbers()
        biases = [None, *self._selection_biases()]
        for source, leaf in self._sources(seen, x):
            for top_k in dict.fromkeys((*choices, self._experts)):
                for bias in biases:
                    for scoring, weighting in _SCORINGS:
                        yield ChosenByScores(source, leaf, top_k, scoring, bias, weighting)

    def _small_numbers(self) -> list[int]:
        values = (value for part in self._parts() for value in vars(part).values())
        return sorted({v for v in values if type(v) is int and 1 <= v < self._experts})

    def _selection_biases(self) -> list[str]:
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        return [
            name
            for name, tensor in named
            if tensor.is_floating_point()
            and tensor.numel() == self._experts
            and tensor.shape[-1:] == (self._experts,)
            and name not in self._taken
        ]

    def _sources(self, seen: Observation, x: Tensor) -> Iterator[tuple[Call | Product, int]]:
        tokens = x.numel() // x.shape[-1]
        for call in seen.calls:
            for place, leaf in enumerate(call.leaves):
                if (
                    isinstance(leaf, Tensor)
                    and leaf.is_floating_point()
                    and leaf.ndim >= 2
                    and leaf.shape[-1] == self._experts
                    and leaf.numel() == tokens * self._experts
                ):
                    yield call.call, place
        experts, width = self._experts, x.shape[-1]
        named = dict(self._module.named_parameters())
        for name, parameter in named.items():
            if parameter.ndim != 2 or name in self._taken:
                continue
            bias = name.removesuffix("weight") + "bias" if name.endswith("weight") else None
            biased = bias is not None and bias in named and named[bias].shape == (experts,)
            for transposed in (False, True):
                if tuple(parameter.shape) == ((width, experts) if transposed else (experts, width)):
                    yield Product(name, bias if biased else None, transposed), 0

    # --- What all tokens get ---

    def _biases(self, x: Tensor) -> list[str | None]:
        """Returns what may be added to the result, behind the experts: parameters ``[D]``."""
        named = self._module.named_parameters()
        hidden = {id(p) for each in self._unseen for p in each.parameters()}
        return [
            None,
            *(
                name
                for name, p in named
                if p.shape == x.shape[-1:] and id(p) not in hidden and name not in self._taken
            ),
        ]

    def _shared(self, seen: Observation, x: Tensor) -> list[tuple[Shared, ...]]:
        """Returns the sets of experts of every token to try."""
        single = [
            (call.call, call.leaves[0])
            for call in seen.calls
            if len(call.leaves) == 1 and isinstance(call.leaves[0], Tensor)
        ]
        mlps = [
            c for c, leaf in single if leaf.numel() == x.numel() and leaf.shape[-1] == x.shape[-1]
        ]
        outer = [c for c in mlps if not any(c.path.startswith(f"{o.path}.") for o in mlps)]
        gates = [c for c, leaf in single if leaf.numel() * x.shape[-1] == x.numel()]
        found: list[tuple[Shared, ...]] = []
        if outer:
            found.append(tuple(Shared(call) for call in outer))
            found += [tuple(Shared(call, gate) for call in outer) for gate in gates]
            found += [(Shared(call),) for call in outer]
        return list(dict.fromkeys([*found, ()]))


def _on_input(experts: Experts) -> Experts:
    return replace(experts, options=replace(experts.options, weight_on_input=True))


def _arguments(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Returns what a forward takes by name; a default that is no plain value is as good as none."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(
        (p.name, p.default if p.default is None or type(p.default) in _PLAIN_TYPES else ...)
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )


def _tokens(*shape: int, like: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    parameter = next((p for p in like.parameters() if p.is_floating_point()), torch.empty(0))
    x = torch.randn(*shape, generator=generator) * 2
    return x.to("cpu" if parameter.is_meta else parameter.device, parameter.dtype)


def _dense(routed: Routed, experts: int) -> Tensor:
    """Returns the weight ``[T, E]`` of every expert."""
    ids_TK, weights_TK = routed.ids.long(), routed.weights.double()
    none = ids_TK < 0
    zeros_TE = weights_TK.new_zeros(len(ids_TK), experts)
    return zeros_TE.scatter_add(1, ids_TK.clamp_min(0), weights_TK.masked_fill(none, 0))


def _same(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


def _one_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
