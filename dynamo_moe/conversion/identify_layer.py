"""What an MoE layer computes, whatever its class: found by running it and trying candidates.

The layer runs once, watched, on random weights: that shows its gate, its shared experts and what
it returns. Then routings, made of the gate's own results, are combined with what the experts may
compute, until one combination gives the layer's numbers. It is proved elsewhere
(``convert_layers``).

Legend: T tokens, D model width, E experts, K choices, R candidate routings.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any, get_args

import torch
from torch import Tensor, nn

import custom_ops
from dynamo_moe import pytree
from dynamo_moe.conversion.comparison import relative_error
from dynamo_moe.conversion.expert_weights import ExpertsSpec
from dynamo_moe.conversion.identify_experts import identify_experts
from dynamo_moe.conversion.layer_spec import (
    GateRouting,
    LayerSpec,
    LinearRouter,
    ReturnValue,
    Routed,
    Routing,
    Scoring,
    SharedExpert,
    SubmoduleCall,
    TopKRouting,
    Weighting,
    is_plain,
    tokens_per_expert,
)
from dynamo_moe.conversion.locate_layers import ExpertList, ExpertStacks
from dynamo_moe.conversion.observation import (
    ObservedForward,
    observe_forward,
    on_any_device,
    on_tokens,
    random_tokens,
    random_weights,
    using_tensors,
)
from dynamo_moe.process_state import exclusive

__all__ = ["IdentifiedLayer", "NotRoutedError", "identify_layer", "side_effects"]

# Relative to the RMS of the result. Another routing or activation differs by 1e-2 and more.
_TOLERANCE = 1e-4
# How far a factor on the weights that is solved for may be from a known number, relative to it.
_SCALE_TOLERANCE = 1e-4
# How much larger the weights of every second expert are.
_LARGE = 4
# Above this many numbers, experts keep their weights in a trial: others would need as much memory.
_MOST_RANDOM = 1 << 27
# Leading dimensions of the tokens that layers take, and whether as images with channels first.
_LEADING = (((2, 5), False), ((10,), False), ((2, 1, 5), False), ((2, 1, 5), True))

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


class NotRoutedError(ValueError):
    """The module does not choose among the experts itself; a module around it may."""


@dataclass(frozen=True)
class IdentifiedLayer:
    """What a layer computes, and what it was found with.

    Attributes:
        spec: What the layer computes.
        weights: The random parameters and buffers, by path.
        leading: The leading dimensions of the tokens.
    """

    spec: LayerSpec
    weights: dict[str, Tensor]
    leading: tuple[int, ...]

    def example(self, module: nn.Module) -> Tensor:
        """Returns tokens of the shape that it was found with, in the dtype of the layer."""
        shape = (*self.leading, self.spec.experts.width(module))
        generator = torch.Generator().manual_seed(2)
        return random_tokens(*shape, like=_floating(module), generator=generator)


def identify_layer(module: nn.Module, experts: ExpertList | ExpertStacks) -> IdentifiedLayer:
    """Returns what a layer in evaluation mode, in at least float32, computes.

    Raises:
        NotRoutedError: If it does not route, as far as can be seen.
        ValueError: If it is not an MoE layer that the operators compute; with the reason.
    """
    candidates = identify_experts(module, experts)
    hidden = [module.get_submodule(experts.path)] if isinstance(experts, ExpertList) else []
    weights = random_weights(module, _names_to_draw(module, candidates))
    _enlarge_every_second_expert(weights, candidates[0])
    with torch.no_grad(), using_tensors(module, weights):
        spec, leading = _search(module, candidates, hidden)
    return IdentifiedLayer(spec, weights, leading)


def side_effects(
    module: nn.Module, identified: IdentifiedLayer
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Returns what a layer's forward does beside its result, which a converted one does not.

    Returns:
        The attributes that it sets on itself, by submodule, with the values that they have from
        now on; and what the user should know of these, its buffers and its losses.
    """
    spec = identified.spec
    run = on_tokens(on_any_device(module), channels_first=spec.channels_first)
    with using_tensors(module, identified.weights):
        seen = observe_forward(module, run, identified.example(module), [module])
    notes = [f"{name} is no longer updated" for name in seen.changed_buffers]
    if seen.casts_to_half:
        notes.append("it computes in half precision in between; now, in the dtype of its weights")
    if any(value.kind == "zero" for value in spec.return_values()):
        notes.append("the loss that it returns beside its result is 0")
    attributes: dict[str, dict[str, Any]] = {}
    for path, values in seen.attributes.items():
        if any(f"{path}.".startswith(f"{call.path}.") for call in spec.calls()):
            continue  # Such a submodule still runs.
        for name, value in values.items():
            kept = value if is_plain(value) else None
            if isinstance(value, Tensor) and value.ndim == 0:
                kept = torch.zeros_like(value)
                notes.append(f"{name} stays 0")
            elif not is_plain(value):
                notes.append(f"{name} is no longer set: it is None")
            elif value is not None:
                notes.append(f"{name} stays {value!r}")
            attributes.setdefault(path, {})[name] = kept
    return attributes, tuple(notes)


# --- Weights for the trials ---


def _names_to_draw(module: nn.Module, candidates: list[ExpertsSpec]) -> set[str]:
    """Returns the names of the parameters and buffers to draw at random."""
    named = dict((*module.named_parameters(), *module.named_buffers()))
    if sum(tensor.numel() for tensor in named.values()) <= _MOST_RANDOM:
        return set(named)
    kept = {name for experts in candidates for name in experts.parameter_names()}
    if any(named[name].is_meta for name in kept):
        raise ValueError("it is too large for a trial without its weights")
    return set(named) - kept


def _enlarge_every_second_expert(weights: dict[str, Tensor], experts: ExpertsSpec) -> None:
    """Clamps show with large numbers, everything else with ordinary ones."""
    for stack in experts.stacks():
        for place, name in enumerate(stack.names):
            if name in weights and len(stack.names) == 1:
                weights[name].view(stack.num_experts, -1)[1::2] *= _LARGE
            elif name in weights and place % 2:
                weights[name] *= _LARGE


# --- The search ---


def _search(
    module: nn.Module, candidates: list[ExpertsSpec], hidden: list[nn.Module]
) -> tuple[LayerSpec, tuple[int, ...]]:
    """Returns the first that gives the layer's numbers, and the tokens' leading dimensions.

    What is hidden, a list of experts, holds neither gates nor shared experts.

    Raises:
        NotRoutedError: If the layer does not route, as far as can be seen.
        ValueError: If none does.
    """
    refusals: list[NotRoutedError] = []
    failures: list[NotRoutedError] = []
    routes = False
    for width in dict.fromkeys(each.width(module) for each in candidates):
        try:
            x, channels_first, seen = _observe(module, width, hidden)
        except NotRoutedError as failure:
            failures.append(failure)
            continue
        try:
            spec = _Trial(module, candidates, hidden, x, seen).spec()
        except NotRoutedError as refusal:
            refusals.append(refusal)
            continue
        if spec is not None:
            return replace(spec, channels_first=channels_first), tuple(x.shape[:-1])
        routes = True
    if not routes and (reasons := [*refusals, *failures]):
        raise reasons[0]
    count = candidates[0].num_experts
    raise ValueError(f"no known way to choose among its {count} experts gives its numbers")


def _observe(
    module: nn.Module, width: int, hidden: list[nn.Module]
) -> tuple[Tensor, bool, ObservedForward]:
    """Returns tokens that a layer takes, whether as images, and what it does with them.

    Raises:
        NotRoutedError: If it takes none.
        ValueError: If it gives other numbers each time.
    """
    first_failure: Exception | None = None
    for leading, channels_first in _LEADING:
        x = random_tokens(*leading, width, like=_floating(module))
        run = on_tokens(on_any_device(module), channels_first=channels_first)
        try:
            seen = observe_forward(module, run, x, hidden)
        except Exception as failure:  # The module is the user's: anything can come out of it.
            first_failure = first_failure or failure
            continue
        with exclusive(), torch.random.fork_rng(()):
            torch.default_generator.manual_seed(torch.initial_seed() + 1)
            again = observe_forward(module, run, x, hidden)
        if not _same(seen.result, again.result):
            raise ValueError("it gives other numbers each time, in evaluation mode too")
        return x, channels_first, seen
    first_line = str(first_failure).strip().split("\n")[0]
    raise NotRoutedError(f"it fails on random tokens: {first_line}") from first_failure


@dataclass(frozen=True)
class _Trial:
    """What a layer did with tokens ``[..., D]``, and the candidates to try against that."""

    module: nn.Module
    candidates: list[ExpertsSpec]
    hidden: list[nn.Module]
    x: Tensor
    seen: ObservedForward

    @property
    def num_experts(self) -> int:
        """E."""
        return self.candidates[0].num_experts

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.x.shape[:-1].numel()

    @functools.cached_property
    def expert_parameters(self) -> set[str]:
        """The names of the experts' parameters."""
        return {name for each in self.candidates for name in each.parameter_names()}

    @functools.cached_property
    def numbers(self) -> list[float]:
        """The positive numbers among the attributes of all modules that are not experts."""
        inner = {part for each in self.hidden for part in each.modules()}
        parts = [part for part in self.module.modules() if part not in inner]
        values = [value for part in parts for value in vars(part).values()]
        return [value for value in values if type(value) in (int, float) and value > 0]

    def spec(self) -> LayerSpec | None:
        """Returns the first combination that gives the layer's numbers, or None."""
        leaves, structure = pytree.tree_flatten(self.seen.result)
        results = [place for place, leaf in enumerate(leaves) if _is_like_tokens(leaf, self.x)]
        if not results:
            raise NotRoutedError(
                f"it does not return a tensor of its tokens' shape {list(self.x.shape)}"
            )
        routings = self._routings()
        if not routings:
            raise NotRoutedError(
                f"it calls no gate with {self.num_experts} scores, and has no weight of one"
            )
        added = list(itertools.product(self._shared(), self._output_biases(), results))
        for experts, y_RTD in self._results(routings):
            for shared, bias, place in added:
                expected = leaves[place].reshape(self.x.shape)
                for each in shared:
                    expected = expected - each(self.module, self.x).view_as(self.x)
                if bias is not None:
                    expected = expected - attrgetter(bias)(self.module)
                if not expected.any():  # Any experts that give zeros would do.
                    continue
                number, scale, error = self._best(
                    y_RTD,
                    expected.reshape(y_RTD.shape[1:]),
                    scaled=not experts.options.weight_on_input,
                )
                if error <= _TOLERANCE:
                    routing, routed = routings[number]
                    returned = [
                        ReturnValue("result", keeps_shape=leaf.ndim == self.x.ndim)
                        if position == place
                        else _return_value(leaf, routed, self.x, self.num_experts)
                        for position, leaf in enumerate(leaves)
                    ]
                    attributes = {
                        name: _return_value(value, routed, self.x, self.num_experts)
                        for name, value in vars(leaves[place]).items()
                    }
                    return LayerSpec(
                        arguments=_arguments(self.module),
                        routing=replace(routing, scale=scale),
                        experts=experts,
                        shared=shared,
                        returned=pytree.tree_unflatten(returned, structure),
                        result_attributes=tuple(attributes.items()),
                        bias=bias,
                    )
        return None

    # --- Routing ---

    def _routings(self) -> list[tuple[Routing, Routed]]:
        """Returns the routings to try, with what they give; those that give the same, once."""
        found: list[tuple[Routing, Routed]] = []
        known: list[Tensor] = []
        for routing in (*self._gate_routings(), *self._top_k_routings()):
            try:
                routed = routing(self.module, self.x)
                dense_TE = _dense_weights(routed, self.num_experts)
            except Exception:  # noqa: S112  A routing that does not fit the gate.
                continue
            if len(routed.ids) == self.num_tokens and not any(
                torch.allclose(dense_TE, other, rtol=1e-6, atol=1e-9) for other in known
            ):
                known.append(dense_TE)
                found.append((routing, routed))
        return found

    def _gate_routings(self) -> Iterator[Routing]:
        """Yields routings by gates that return the experts and their weights."""
        for observed in self.seen.calls:
            outputs = [(i, o) for i, o in enumerate(observed.outputs) if isinstance(o, Tensor)]
            for (ids, chosen), (weights, output) in itertools.product(outputs, repeat=2):
                is_ids = chosen.dtype in (torch.int32, torch.int64)
                if is_ids and output.is_floating_point() and output.shape == chosen.shape:
                    for weighting in get_args(Weighting):
                        yield GateRouting(observed.call, ids, weights, weighting)

    def _top_k_routings(self) -> Iterator[Routing]:
        """Yields routings by the largest of E scores."""
        integers = {number for number in self.numbers if type(number) is int}
        top_ks = [*self.seen.top_ks, *sorted(integers), self.num_experts]
        top_ks = [k for k in dict.fromkeys(top_ks) if 1 <= k <= self.num_experts]
        biases = [None, *self._selection_biases()]
        sources: list[tuple[SubmoduleCall | LinearRouter, int]] = [
            *self._score_calls(),
            *self._linear_routers(),
        ]
        for source, output in sources:
            for top_k, bias in itertools.product(top_ks, biases):
                for scoring, weighting in _SCORINGS:
                    yield TopKRouting(source, output, top_k, scoring, bias, weighting)

    def _selection_biases(self) -> list[str]:
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        return [
            name
            for name, tensor in named
            if tensor.is_floating_point()
            and tensor.numel() == self.num_experts
            and tensor.shape[-1:] == (self.num_experts,)
            and name not in self.expert_parameters
        ]

    def _score_calls(self) -> Iterator[tuple[SubmoduleCall, int]]:
        """Yields the calls that return E numbers for each token, and which output these are."""
        for observed in self.seen.calls:
            for place, output in enumerate(observed.outputs):
                if (
                    isinstance(output, Tensor)
                    and output.is_floating_point()
                    and output.ndim >= 2
                    and output.shape[-1] == self.num_experts
                    and output.numel() == self.num_tokens * self.num_experts
                ):
                    yield observed.call, place

    def _linear_routers(self) -> Iterator[tuple[LinearRouter, int]]:
        """Yields products with parameters that give E numbers for each token."""
        count, width = self.num_experts, self.x.shape[-1]
        named = dict(self.module.named_parameters())
        for name, parameter in named.items():
            if parameter.ndim != 2 or name in self.expert_parameters:
                continue
            bias = name.removesuffix("weight") + "bias" if name.endswith("weight") else None
            if bias not in named or named[bias].shape != (count,):
                bias = None
            for transposed in (False, True):
                if parameter.shape == ((width, count) if transposed else (count, width)):
                    yield LinearRouter(name, bias, transposed), 0

    # --- Experts behind each routing ---

    def _results(
        self, routings: list[tuple[Routing, Routed]]
    ) -> Iterator[tuple[ExpertsSpec, Tensor]]:
        """Yields what the experts may compute, with the result for each routing ``[R, T, D]``."""
        width = self.x.shape[-1]
        x_TD = self.x.reshape(-1, width)
        candidates = [each for each in self.candidates if each.width(self.module) == width]
        dense_RTE = torch.stack(
            [_dense_weights(routed, self.num_experts) for _, routed in routings]
        )
        for experts in candidates:
            yield experts, torch.einsum("rte,ted->rtd", dense_RTE, self._each_expert(experts, x_TD))
        for each in candidates:
            experts = replace(each, options=replace(each.options, weight_on_input=True))
            weights, options = experts.weights(self.module), asdict(experts.options)
            results = [
                custom_ops.experts(x_TD, routed.ids, routed.weights, *weights, **options)
                for _, routed in routings
            ]
            yield experts, torch.stack(results).double()

    def _each_expert(self, experts: ExpertsSpec, x_TD: Tensor) -> Tensor:
        """Returns what each expert gives for each token, ``[T, E, D]``, in float64."""
        tokens, count = len(x_TD), self.num_experts
        ids = torch.arange(count, device=x_TD.device).repeat(tokens)[:, None]
        rows = x_TD.repeat_interleave(count, dim=0)
        ones = torch.ones_like(ids, dtype=x_TD.dtype)
        weights = experts.weights(self.module)
        y = custom_ops.experts(rows, ids, ones, *weights, **asdict(experts.options))
        return y.view(tokens, count, -1).double()

    def _best(
        self, y_RTD: Tensor, expected_TD: Tensor, *, scaled: bool
    ) -> tuple[int, float, float]:
        """Returns the routing that comes nearest, the factor on its weights, and its error."""
        expected_TD = expected_TD.double()
        factors_R = (y_RTD * expected_TD).sum((1, 2)) / y_RTD.square().sum((1, 2)).clamp_min(1e-30)
        best = 0, 1.0, float("inf")
        for number, factor in enumerate(factors_R.tolist()):
            nearest = float(min((1.0, *self.numbers), key=lambda known: abs(known - factor)))
            is_known = abs(nearest - factor) <= _SCALE_TOLERANCE * abs(factor)
            scale = nearest if scaled and is_known else 1.0
            error = relative_error(y_RTD[number] * scale, expected_TD)
            if error < best[2]:
                best = number, scale, error
        return best

    # --- What every token gets besides ---

    def _shared(self) -> list[tuple[SharedExpert, ...]]:
        """Returns the sets of shared experts to try."""
        single = [
            (observed.call, observed.outputs[0])
            for observed in self.seen.calls
            if len(observed.outputs) == 1 and isinstance(observed.outputs[0], Tensor)
        ]
        mlps = [call for call, output in single if _is_like_tokens(output, self.x)]
        outer = [c for c in mlps if not any(c.path.startswith(f"{o.path}.") for o in mlps)]
        gates = [call for call, output in single if output.numel() == self.num_tokens]
        found: list[tuple[SharedExpert, ...]] = []
        if outer:
            found.append(tuple(SharedExpert(call) for call in outer))
            found += [tuple(SharedExpert(call, gate) for call in outer) for gate in gates]
            found += [(SharedExpert(call),) for call in outer]
        return list(dict.fromkeys([*found, ()]))

    def _output_biases(self) -> list[str | None]:
        """Returns the parameters ``[D]`` that may be added behind the experts, and None."""
        named = self.module.named_parameters()
        names = [name for name, p in named if p.shape == self.x.shape[-1:]]
        return [None, *(name for name in names if name not in self.expert_parameters)]


def _return_value(value: Any, routed: Routed, x: Tensor, num_experts: int) -> ReturnValue:
    """Returns how a value that the layer returns beside its result comes about.

    Raises:
        ValueError: If it is not known.
    """
    if not isinstance(value, Tensor):
        return ReturnValue("constant", value)
    if value.ndim == 0 and value.is_floating_point():
        return ReturnValue("zero")
    counts_E = tokens_per_expert(routed.ids, num_experts)
    if value.shape == counts_E.shape and torch.equal(value.long(), counts_E.long()):
        return ReturnValue("counts", (num_experts, value.dtype))
    sources: list[tuple[Any, int | None, Any]] = [
        *(("gate_output", place, output) for place, output in enumerate(routed.gate_outputs)),
        ("ids", None, routed.ids),
        ("weights", None, routed.weights),
    ]
    for kind, place, source in sources:
        if (
            isinstance(source, Tensor)
            and source.numel() == value.numel()
            and (source.shape[-1:] == value.shape[-1:] or source.shape[-1] == 1)
            and torch.allclose(
                source.reshape(value.shape).double(), value.double(), rtol=1e-5, atol=1e-7
            )
        ):
            squeezed = source.shape[-1:] != value.shape[-1:]
            leading = value.shape if squeezed else value.shape[:-1]
            return ReturnValue(kind, place, leading == x.shape[:-1], squeezed)
    raise ValueError(
        f"it returns a tensor {list(value.shape)} that is neither its result nor its routing"
    )


def _arguments(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Returns the names of what a forward takes, each with its default if that is plain."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(
        (p.name, p.default if is_plain(p.default) else ...)
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )


def _floating(module: nn.Module) -> Tensor:
    """Returns a parameter that says in which dtype, and where, a layer takes its tokens."""
    return next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))


def _is_like_tokens(value: Any, x: Tensor) -> bool:
    """Whether a value is a tensor with D numbers for each token."""
    return (
        isinstance(value, Tensor) and value.numel() == x.numel() and value.shape[-1] == x.shape[-1]
    )


def _dense_weights(routed: Routed, num_experts: int) -> Tensor:
    """Returns the weight ``[T, E]`` of every expert."""
    ids_TK, weights_TK = routed.ids.long(), routed.weights.double()
    zeros_TE = weights_TK.new_zeros(len(ids_TK), num_experts)
    chosen_TK = weights_TK.masked_fill(ids_TK < 0, 0)
    return zeros_TE.scatter_add(1, ids_TK.clamp_min(0), chosen_TK)


def _same(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
