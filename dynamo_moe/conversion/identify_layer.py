"""Identifies an MoE layer of any class, by running it and trying candidates.

The layer runs once, watched, on random weights: that shows its gate, its shared experts and its
result. Then routings, made of the gate's own results, are combined with the candidates for the
experts, until one combination gives the layer's numbers. It is proved elsewhere
(``convert_layers``).

Legend: T tokens, D model width, E experts, K choices, R candidate routings.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

import custom_ops
from dynamo_moe import pytree
from dynamo_moe.conversion.comparison import relative_error, relative_errors
from dynamo_moe.conversion.expert_weights import ExpertsSpec
from dynamo_moe.conversion.find_own_routing import (
    are_constant,
    find_routings,
    solve_weights,
    values_ahead_of_experts,
)
from dynamo_moe.conversion.find_probed_routing import ProbedTrial
from dynamo_moe.conversion.identify_experts import identify_experts
from dynamo_moe.conversion.layer_spec import (
    LayerSpec,
    ReturnValue,
    Routing,
    SharedExpert,
)
from dynamo_moe.conversion.locate_layers import LocatedExperts
from dynamo_moe.conversion.observation import (
    ObservedForward,
    keeping_parameters,
    observe_forward,
    on_any_device,
    on_tokens,
    preserving_state,
    random_tokens,
    random_weights,
    same_draws,
    using_tensors,
)
from dynamo_moe.conversion.other_arguments import OtherArguments, is_plain
from dynamo_moe.conversion.own_routing import (
    OwnRouting,
    Value,
    dense_weights,
    line_that_decides,
)
from dynamo_moe.conversion.probed_routing import ProbedRouting
from dynamo_moe.conversion.routing import (
    GateRouting,
    LinearRouter,
    Routed,
    Scoring,
    SubmoduleCall,
    TopKRouting,
    Weighting,
)

# Relative to the RMS of the result. Another routing or activation differs by 1e-2 and more.
_TOLERANCE = 1e-4
# How far a factor on the weights that is solved for may be from a known number, relative to it.
_SCALE_TOLERANCE = 1e-4
# How much larger the weights of every second expert are.
_LARGE = 4
# Above this many numbers, experts keep their weights in a trial: others would need as much memory.
_MOST_RANDOM = 1 << 27
# Equal tokens that all go to the same experts, and by how much the result of a dropped one differs.
_MANY_EQUAL, _DROPPED = 4099, 1e-2
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


Way: TypeAlias = Literal["router", "code", "probes"]
"""How a layer chooses its experts: by a known router, as its own code computes ahead of them, or as
its own code applies, with probes in their place."""


class NotRoutedError(ValueError):
    """The module does not choose among the experts itself; a module around it may."""


class TakesNoTokensError(NotRoutedError):
    """The module takes no tokens of the experts' width, so it is none that has them."""


class NoKnownRouterError(ValueError):
    """The module is none of the known routers with its experts; its own code may tell more."""


class IsMixtureError(ValueError):
    """The module's result is a weighted sum of the experts' results, and cannot be converted."""


@dataclass(frozen=True)
class IdentifiedLayer:
    """A layer's record, and the weights and tokens that it was found with.

    Attributes:
        spec: The record that computes the layer.
        weights: The random parameters and buffers, by path.
        leading: The leading dimensions of the tokens.
        others: What else its forward gets.
        changing: The parameters that its forward changes.
        draws: Whether its forward draws random numbers, in evaluation mode too.
    """

    spec: LayerSpec
    weights: dict[str, Tensor]
    leading: tuple[int, ...]
    others: OtherArguments
    changing: tuple[str, ...] = ()
    draws: bool = False

    def example(self, module: nn.Module) -> Tensor:
        """Returns tokens of the shape that it was found with, in the dtype of the layer."""
        shape = (*self.leading, self.spec.experts.width)
        generator = torch.Generator().manual_seed(2)
        return random_tokens(*shape, like=_floating(module), generator=generator)

    def own_forward(self, module: nn.Module) -> Callable[[Tensor], Any]:
        """Returns the layer's own forward, from and to tokens ``[..., D]``."""
        run = on_tokens(on_any_device(module), self.others, channels_first=self.spec.channels_first)
        return self._restoring(module, run)

    def record(self, module: nn.Module) -> Callable[[Tensor], Any]:
        """Returns what the record computes of the same."""
        spec = self.spec

        def run(x: Tensor, **others: Any) -> Any:
            return spec(module, x, others)

        return self._restoring(
            module, on_tokens(run, self.others, channels_first=spec.channels_first)
        )

    def _restoring(
        self, module: nn.Module, run: Callable[[Tensor], Any]
    ) -> Callable[[Tensor], Any]:
        """Returns a function that leaves the parameters as they were, and draws the same each time.

        Its result then tells how much was drawn.
        """

        def restored(x: Tensor) -> Any:
            changing = {name: attrgetter(name)(module) for name in self.changing}
            with keeping_parameters(changing):
                if not self.draws:
                    return run(x)
                with same_draws():
                    return run(x), torch.get_rng_state()

        return restored if self.changing or self.draws else run


def identify_layer(
    module: nn.Module, experts: LocatedExperts, others: OtherArguments, way: Way
) -> list[IdentifiedLayer]:
    """Returns the records that give a layer's numbers in evaluation mode, in at least float32.

    Args:
        module: The layer.
        experts: Its experts, by their path in it.
        others: What its forward gets beside tokens.
        way: How it chooses its experts; there is one record of a known router at most.

    Raises:
        NotRoutedError: If it does not route, as far as can be seen.
        ValueError: If it is not an MoE layer that the operators compute; with the reason.
    """
    candidates = identify_experts(module, experts)
    # Experts hold neither gates nor shared experts.
    hidden = {path: module.get_submodule(path) for path in _paths_of_experts(experts)}
    weights = random_weights(module, _names_to_keep(module, candidates))
    _enlarge_every_second_expert(weights, candidates[0])
    refusals: list[ValueError] = []
    failures: list[ValueError] = []
    with torch.no_grad(), preserving_state(module), using_tensors(module, weights):
        for width in dict.fromkeys(candidate.width for candidate in candidates):
            try:
                trial = _observe(module, candidates, hidden, width, others)
                if trial.draws and way == "router":
                    raise ValueError("it gives other numbers each time, in evaluation mode too")
            except NotRoutedError as failure:
                failures.append(failure)
                continue
            try:
                specs = trial.specs(way)
                leading = tuple(trial.x.shape[:-1])
                return [
                    IdentifiedLayer(spec, weights, leading, others, trial.changing, trial.draws)
                    for spec in specs
                ]
            except ValueError as refusal:
                refusals.append(refusal)
    # The first, unless another width shows that it routes.
    raise min((*refusals, *failures), key=lambda reason: isinstance(reason, NotRoutedError))


def side_effects(
    module: nn.Module, identified: IdentifiedLayer
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Returns the side effects of a layer's forward, which a converted one does not have.

    Returns:
        The attributes that it sets on itself, by submodule, with the values that they have from
        now on; and notes for the user on these, its buffers and its losses.
    """
    spec = identified.spec
    run, x = identified.own_forward(module), identified.example(module)
    with using_tensors(module, identified.weights):
        seen = observe_forward(module, run, x, [module])
        still = observe_forward(module, identified.record(module), x, [module])
    changed = [name for name in seen.changed_buffers if name not in still.changed_buffers]
    notes = [f"{name} is no longer updated" for name in changed]
    if seen.casts_to_half:
        notes.append("it computes in half precision in between; now, in the dtype of its weights")
    if isinstance(spec.routing, (OwnRouting, ProbedRouting)):
        with preserving_state(module), using_tensors(module, identified.weights):
            line = line_that_decides(spec.routing, module, x, identified.others.of_size(x))
        if line is not None:
            notes.append(f"its router decides by values at {line}, which an export may refuse")
    if identified.draws:
        notes.append("it draws random numbers in evaluation mode too, as a file of it does")
    if any(value.kind == "zero" for value in spec.return_values()):
        notes.append("the loss that it returns beside its result is 0")
    attributes: dict[str, dict[str, Any]] = {}
    for path, values in seen.attributes.items():
        for name, value in values.items():
            if name in still.attributes.get(path, {}):
                continue
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


def _paths_of_experts(experts: LocatedExperts) -> set[str]:
    """Returns the paths of the modules that are experts, or an expert's linear layers."""
    if not experts.stacks:
        return {experts.path}
    listed = {name for names in experts.stacks if len(names) > 1 for name in names}
    return {f"{experts.path}.{name}".strip(".").rpartition(".")[0] for name in listed}


def _names_to_keep(module: nn.Module, candidates: list[ExpertsSpec]) -> set[str]:
    """Returns the names of the parameters that are not drawn at random."""
    if sum(t.numel() for t in (*module.parameters(), *module.buffers())) <= _MOST_RANDOM:
        return set()
    kept = {name for experts in candidates for name in experts.parameter_names()}
    if any(module.get_parameter(name).is_meta for name in kept):
        raise ValueError("it is too large for a trial without its weights")
    return kept


def _enlarge_every_second_expert(weights: dict[str, Tensor], experts: ExpertsSpec) -> None:
    """Clamps show with large numbers, everything else with ordinary ones."""
    for stack in experts.stacks:
        for index, name in enumerate(stack.names):
            if name in weights and len(stack.names) == 1:
                weights[name].view(stack.shape[0], -1)[1::2] *= _LARGE
            elif name in weights and index % 2:
                weights[name] *= _LARGE


# --- The search ---


def _observe(
    module: nn.Module,
    candidates: list[ExpertsSpec],
    hidden: dict[str, nn.Module],
    width: int,
    others: OtherArguments,
) -> _Trial:
    """Returns the observed run of a layer with tokens of a shape that it takes.

    Raises:
        NotRoutedError: If it takes none.
    """
    if missing := others.missing(module):
        raise TakesNoTokensError(
            f"it is called with more than tokens ({', '.join(missing)}): an example of the model's "
            "arguments, as in convert(model, args), shows how"
        )
    first_failure: Exception | None = None
    of_experts = {name for experts in candidates for name in experts.parameter_names()}
    beside = {n: p for n, p in module.named_parameters() if n not in of_experts}
    for leading, channels_first in _LEADING:
        x = random_tokens(*leading, width, like=_floating(module))
        run = on_tokens(on_any_device(module), others, channels_first=channels_first)
        try:
            with same_draws(), keeping_parameters(beside) as changing:
                seen = observe_forward(module, run, x, hidden.values())
        except Exception as failure:  # The module is the user's: anything can come out of it.
            first_failure = first_failure or failure
            continue
        with same_draws():
            torch.default_generator.manual_seed(1)
            with keeping_parameters(beside):
                again = observe_forward(module, run, x, hidden.values())
        draws = not _same(seen.result, again.result)
        return _Trial(
            module, candidates, hidden, x, others, seen, channels_first, tuple(changing), draws
        )
    first_line = str(first_failure).strip().split("\n")[0]
    raise TakesNoTokensError(
        f"it takes no tokens of its experts' width {width}: {first_line}"
    ) from first_failure


def drops_tokens(module: nn.Module, experts: LocatedExperts, others: OtherArguments) -> bool:
    """Whether, of many equal tokens, a layer gives some another result, as by a capacity."""
    candidates = identify_experts(module, experts)
    weights = random_weights(module, _names_to_keep(module, candidates))
    with torch.no_grad(), preserving_state(module), using_tensors(module, weights):
        for experts_spec, (leading, channels_first) in itertools.product(candidates, _LEADING):
            x_D = random_tokens(experts_spec.width, like=_floating(module))
            x = x_D.expand(*[1] * (len(leading) - 1), _MANY_EQUAL, -1).contiguous()
            run = on_tokens(on_any_device(module), others, channels_first=channels_first)
            with contextlib.suppress(Exception):  # It takes no such tokens.
                leaves = pytree.tree_leaves(run(x))
                rows = [
                    leaf.reshape(-1, len(x_D))
                    for leaf in leaves
                    if _is_matrix(leaf, _MANY_EQUAL, len(x_D))
                ]
                return any(
                    relative_error(row_TD, row_TD[:1].expand_as(row_TD)) > _DROPPED
                    for row_TD in rows
                )
    return False


@dataclass(frozen=True)
class _RoutedPart:
    """A part of a layer's result that may come from its routed experts.

    Attributes:
        index: Which tensor of the result it is in.
        shared: The experts that give the rest of that.
        bias: A parameter ``[D]`` that is in the rest, or None.
        expected_TD: The part.
    """

    index: int
    shared: tuple[SharedExpert, ...]
    bias: str | None
    expected_TD: Tensor


@dataclass(frozen=True)
class _Trial:
    """A layer's observed run with tokens ``[..., D]``, and the candidates to try against it."""

    module: nn.Module
    candidates: list[ExpertsSpec]
    hidden: dict[str, nn.Module]
    x: Tensor
    others: OtherArguments
    seen: ObservedForward
    channels_first: bool
    changing: tuple[str, ...]
    draws: bool

    @property
    def num_experts(self) -> int:
        """E."""
        return self.candidates[0].num_experts

    @functools.cached_property
    def expert_parameters(self) -> set[str]:
        """The names of the experts' parameters: those of all candidates."""
        return set.intersection(*({*each.parameter_names()} for each in self.candidates))

    @functools.cached_property
    def numbers(self) -> list[float]:
        """The positive numbers among the attributes of all modules that are not experts."""
        inner = {part for submodule in self.hidden.values() for part in submodule.modules()}
        parts = [part for part in self.module.modules() if part not in inner]
        values = [value for part in parts for value in vars(part).values()]
        return [value for value in values if type(value) in (int, float) and value > 0]

    def specs(self, way: Way) -> list[LayerSpec]:
        """Returns the records that give the layer's numbers.

        Raises:
            NotRoutedError: If the layer does not route, as far as can be seen.
            ValueError: If there are none.
        """
        match way:
            case "router":
                return [self.spec()]
            case "code":
                return self.specs_of_own_code()
            case "probes":
                return self.specs_of_probes()

    def spec(self) -> LayerSpec:
        """Returns the first combination that gives the layer's numbers.

        Raises:
            NotRoutedError: If the layer does not route, as far as can be seen.
            ValueError: If none does.
        """
        parts = self._parts()
        routings = self._routings()
        if not routings:
            raise NotRoutedError(
                f"it calls no gate with {self.num_experts} scores, and has no weight of one"
            )
        for experts, y_RTD in self._results(routings):
            for part in parts:
                scaled = not experts.options.weight_on_input
                number, scale, error = self._best(y_RTD, part.expected_TD, scaled=scaled)
                if error <= _TOLERANCE:
                    routing, routed = routings[number]
                    return self._spec(part, experts, replace(routing, scale=scale), routed)
        raise NoKnownRouterError(self._unknown())

    def _not_a_sum(self) -> ValueError:
        if len(self.candidates) == 1:  # Its experts are known, then.
            return ValueError("its result is not a weighted sum of its experts' results")
        return NoKnownRouterError(self._unknown())

    def _unknown(self) -> str:
        return f"no known way to choose among its {self.num_experts} experts gives its numbers"

    def specs_of_own_code(self) -> list[LayerSpec]:
        """Returns the records whose routing is the layer's own code.

        Raises:
            NotRoutedError: If the layer does not route, as far as can be seen.
            ValueError: If its result is no weighted sum of its experts' results, or its code does
                not compute the weights ahead of them.
        """
        parts = self._parts()
        parameters = [attrgetter(name)(self.module) for name in self.expert_parameters]
        # As the routing will call it: the calls that draw its other arguments are none of its own.
        others = self.others.of_size(self.x)
        image = self.x.movedim(-1, 1) if self.channels_first else self.x
        run = functools.partial(self.module, **others)
        with same_draws():
            values = values_ahead_of_experts(run, image, parameters)
        rates = [1 - number for number in self.numbers if 0.01 < number < 1]  # Of dropouts.
        outputs = self._returned_values(values)
        is_sum, specs = False, list[LayerSpec]()
        width = self.x.shape[-1]
        normed = [v for v, t in values.items() if self._is_per_token(t, width)]
        # Experts of the layer's tokens, else of others that it computes, as a block with its norm.
        around = itertools.product((None, *normed), (False, True))
        for tokens, residual in around:
            if specs:
                break
            x = self.x if tokens is None else values[tokens]
            rest_TD = self.x.reshape(-1, width) * residual
            for experts, part in itertools.product(self._experts(), parts):
                y_TED = self._each_expert(experts, x.reshape(-1, width))
                weights_TE = solve_weights(y_TED, part.expected_TD - rest_TD)
                if weights_TE is None:
                    continue
                is_sum |= not are_constant(weights_TE)
                for scale in dict.fromkeys((1.0, *self.numbers, *rates)):
                    for routing in find_routings(
                        values, weights_TE / scale, channels_first=self.channels_first
                    ):
                        own = replace(
                            routing, scale=scale, outputs=outputs, tokens=tokens, residual=residual
                        )
                        with same_draws():
                            routed = own(self.module, self.x, others)
                        specs.append(self._spec(part, experts, own, routed))
        if not specs:
            if is_sum:
                raise IsMixtureError(
                    f"{self._unknown()}, and its own code does not compute their weights ahead of "
                    "them"
                )
            raise self._not_a_sum()
        return specs

    def specs_of_probes(self) -> list[LayerSpec]:
        """Returns the records that give the layer's numbers by what it does to its experts.

        Raises:
            ValueError: If its result is no sum of its experts' results and of what is without them.
        """
        # It may run twice, and half precision would round what the probes return.
        runs_alike = not (self.seen.casts_to_half or self.seen.changed_buffers or self.changing)
        specs = [
            self._spec_of_probes(experts, routing)
            for experts in self.candidates
            if runs_alike
            for routing in ProbedTrial(
                self.module,
                experts,
                self.x,
                self.others,
                pytree.tree_leaves(self.seen.result),
                functools.partial(self._each_expert, experts),
                self.channels_first,
                self.draws,
            ).routings(self.hidden)
        ]
        if not specs:
            raise self._not_a_sum()
        return specs

    def _spec_of_probes(self, experts: ExpertsSpec, routing: ProbedRouting) -> LayerSpec:
        """Returns the record of a routing; raises ValueError if it cannot return the same."""
        leaves, structure = pytree.tree_flatten(self.seen.result)

        def returned(number: int, leaf: Any) -> ReturnValue:
            if number == routing.result:
                return ReturnValue("result", keeps_shape=leaf.ndim == self.x.ndim)
            if not isinstance(leaf, Tensor):
                return ReturnValue("constant", leaf)
            is_loss = leaf.ndim == 0 and leaf.is_floating_point()
            return ReturnValue("zero") if is_loss else ReturnValue("own", number)

        if vars(leaves[routing.result]):
            raise ValueError("it sets attributes on its result")
        return LayerSpec(
            arguments=_arguments(self.module),
            routing=routing,
            experts=experts,
            shared=(),
            returned=pytree.tree_unflatten(
                [returned(number, leaf) for number, leaf in enumerate(leaves)], structure
            ),
            channels_first=self.channels_first,
            others=self.others.form,
        )

    def _returned_values(self, values: dict[Value, Tensor]) -> tuple[Value, ...]:
        """Returns the values of a forward that it also returns."""
        leaves = [
            leaf
            for leaf in pytree.tree_leaves(self.seen.result)
            if isinstance(leaf, Tensor) and leaf.ndim
        ]
        found = (
            next((v for v, tensor in values.items() if torch.equal(tensor, leaf)), None)
            for leaf in leaves
        )
        return tuple(value for value in found if value is not None)

    def _parts(self) -> list[_RoutedPart]:
        """Returns the parts of the result that may come from routed experts.

        Raises:
            NotRoutedError: If there are none.
        """
        leaves = pytree.tree_leaves(self.seen.result)
        width = self.x.shape[-1]
        results = [index for index, leaf in enumerate(leaves) if self._is_per_token(leaf, width)]
        if not results:
            raise NotRoutedError(
                f"it does not return a tensor of its tokens' shape {list(self.x.shape)}"
            )
        parts = []
        for shared, bias, index in itertools.product(
            self._shared(), self._output_biases(), results
        ):
            expected = leaves[index].reshape(self.x.shape)
            for expert in shared:
                expected = expected - expert(self.module, self.x).view_as(self.x)
            if bias is not None:
                expected = expected - attrgetter(bias)(self.module)
            if expected.any():  # Else, any experts that give zeros would do.
                expected_TD = expected.reshape(-1, width)
                parts.append(_RoutedPart(index, shared, bias, expected_TD))
        return parts

    def _spec(
        self, part: _RoutedPart, experts: ExpertsSpec, routing: Routing, routed: Routed
    ) -> LayerSpec:
        """Returns the record of these parts; raises ValueError if it cannot return the same."""
        leaves, structure = pytree.tree_flatten(self.seen.result)
        returned = [
            ReturnValue("result", keeps_shape=leaf.ndim == self.x.ndim)
            if index == part.index
            else self._return_value(leaf, routed)
            for index, leaf in enumerate(leaves)
        ]
        attributes = vars(leaves[part.index]).items()
        return LayerSpec(
            arguments=_arguments(self.module),
            routing=routing,
            experts=experts,
            shared=part.shared,
            returned=pytree.tree_unflatten(returned, structure),
            result_attributes=tuple(
                (name, self._return_value(value, routed)) for name, value in attributes
            ),
            channels_first=self.channels_first,
            bias=part.bias,
            others=self.others.form,
        )

    def _is_per_token(self, value: Any, size: int) -> bool:
        """Whether a value is a floating tensor with so many numbers for each token."""
        return _is_matrix(value, self.x.shape[:-1].numel(), size)

    # --- Routing ---

    def _routings(self) -> list[tuple[TopKRouting | GateRouting, Routed]]:
        """Returns the routings to try, with their results; those with the same result, once."""
        distinct: list[tuple[TopKRouting | GateRouting, Routed]] = []
        known: list[Tensor] = []
        candidates: Iterator[TopKRouting | GateRouting]
        candidates = itertools.chain(self._gate_routings(), self._top_k_routings())
        for routing in candidates:
            try:
                routed = routing(self.module, self.x)
                dense_TE = dense_weights(routed.ids, routed.weights, self.num_experts)
            except Exception:  # noqa: S112  A routing that does not fit the gate.
                continue
            if len(routed.ids) == self.x.shape[:-1].numel() and not any(
                torch.allclose(dense_TE, earlier, rtol=1e-6, atol=1e-9) for earlier in known
            ):
                known.append(dense_TE)
                distinct.append((routing, routed))
        return distinct

    def _gate_routings(self) -> Iterator[GateRouting]:
        """Yields routings by gates that return the experts and their weights."""
        for call, outputs in self.seen.calls:
            tensors = [(i, o) for i, o in enumerate(outputs) if isinstance(o, Tensor)]
            for (ids, chosen), (weights, output) in itertools.product(tensors, repeat=2):
                is_ids = chosen.dtype in (torch.int32, torch.int64)
                if is_ids and output.is_floating_point() and output.shape == chosen.shape:
                    for weighting in get_args(Weighting):
                        yield GateRouting(call, ids, weights, weighting)

    def _top_k_routings(self) -> Iterator[TopKRouting]:
        """Yields routings by the largest of E scores."""
        count = self.num_experts
        integers = {number for number in self.numbers if type(number) is int}
        top_ks = [*self.seen.top_ks, *sorted(integers), count]
        top_ks = [k for k in dict.fromkeys(top_ks) if 1 <= k <= count]
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        vectors = [name for name, tensor in named if _is_matrix(tensor, 1, count)]
        biases = [None, *(name for name in vectors if name not in self.expert_parameters)]
        sources: list[tuple[SubmoduleCall | LinearRouter, int]] = [
            (call, index)
            for call, outputs in self.seen.calls
            for index, output in enumerate(outputs)
            if self._is_per_token(output, count)
        ]
        sources += [(router, 0) for router in self._linear_routers()]
        for (source, output), top_k, bias in itertools.product(sources, top_ks, biases):
            for scoring, weighting in _SCORINGS:
                yield TopKRouting(source, output, top_k, scoring, bias, weighting)

    def _linear_routers(self) -> Iterator[LinearRouter]:
        """Yields products with parameters that give E numbers for each token."""
        count, width = self.num_experts, self.x.shape[-1]
        named = dict(self.module.named_parameters())
        for name, parameter in named.items():
            if parameter.ndim != 2 or name in self.expert_parameters:
                continue
            bias = name.removesuffix("weight") + "bias" if name.endswith("weight") else None
            if bias not in named or named[bias].shape != (count,):
                bias = None
            if parameter.shape == (count, width):
                yield LinearRouter(name, bias, transposed=False)
            if parameter.shape == (width, count):
                yield LinearRouter(name, bias, transposed=True)

    # --- Experts behind each routing ---

    def _results(
        self, routings: list[tuple[TopKRouting | GateRouting, Routed]]
    ) -> Iterator[tuple[ExpertsSpec, Tensor]]:
        """Yields candidates for the experts, with the result for each routing ``[R, T, D]``."""
        x_TD = self.x.reshape(-1, self.x.shape[-1])
        dense_RTE = torch.stack(
            [dense_weights(routed.ids, routed.weights, self.num_experts) for _, routed in routings]
        )
        for experts in self._experts():
            yield experts, torch.einsum("rte,ted->rtd", dense_RTE, self._each_expert(experts))
        for candidate in self._experts():
            experts = replace(candidate, options=replace(candidate.options, weight_on_input=True))
            results = [
                self._compute(experts, x_TD, chosen.ids, chosen.weights) for _, chosen in routings
            ]
            yield experts, torch.stack(results)

    def _experts(self) -> list[ExpertsSpec]:
        """Returns the candidates for experts that take the tokens."""
        return [experts for experts in self.candidates if experts.width == self.x.shape[-1]]

    def _each_expert(self, experts: ExpertsSpec, x_TD: Tensor | None = None) -> Tensor:
        """Returns every expert's result ``[T, E, D]`` for every token, the layer's or others."""
        if x_TD is None:
            x_TD = self.x.reshape(-1, self.x.shape[-1])
        count = self.num_experts
        ids = torch.arange(count, device=x_TD.device).repeat(len(x_TD))[:, None]
        ones = torch.ones_like(ids, dtype=x_TD.dtype)
        rows = x_TD.repeat_interleave(count, dim=0)
        return self._compute(experts, rows, ids, ones).view(len(x_TD), count, -1)

    def _compute(self, experts: ExpertsSpec, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        parameters, options = experts.weights(self.module), asdict(experts.options)
        return custom_ops.experts(x, ids, weights, *parameters, **options).double()

    def _best(
        self, y_RTD: Tensor, expected_TD: Tensor, *, scaled: bool
    ) -> tuple[int, float, float]:
        """Returns the routing that comes nearest, the factor on its weights, and its error."""
        expected_TD = expected_TD.double()
        factors_R = (y_RTD * expected_TD).sum((1, 2)) / y_RTD.square().sum((1, 2)).clamp_min(1e-30)
        scales = []
        for factor in factors_R.tolist():
            nearest = float(min((1.0, *self.numbers), key=lambda known: abs(known - factor)))
            is_known = abs(nearest - factor) <= _SCALE_TOLERANCE * abs(factor)
            scales.append(nearest if scaled and is_known else 1.0)
        scales_R11 = y_RTD.new_tensor(scales)[:, None, None]
        errors = relative_errors(y_RTD * scales_R11, expected_TD)
        errors = [math.inf if math.isnan(error) else error for error in errors]
        best = errors.index(min(errors))  # The first of equal ones.
        return best, scales[best], errors[best]

    # --- Shared experts, output biases, and the layer's other results ---

    def _shared(self) -> list[tuple[SharedExpert, ...]]:
        """Returns the sets of shared experts to try."""
        single = [(call, *outputs) for call, outputs in self.seen.calls if len(outputs) == 1]
        mlps = [call for call, output in single if self._is_per_token(output, self.x.shape[-1])]
        outer = [c for c in mlps if not any(c.path.startswith(f"{o.path}.") for o in mlps)]
        gates = [call for call, output in single if self._is_per_token(output, 1)]
        together = [tuple(SharedExpert(call, gate) for call in outer) for gate in (None, *gates)]
        return list(dict.fromkeys([*together, *((SharedExpert(call),) for call in outer), ()]))

    def _output_biases(self) -> list[str | None]:
        """Returns the parameters ``[D]`` that may be added behind the experts, and None."""
        named = self.module.named_parameters()
        names = [name for name, p in named if p.shape == self.x.shape[-1:]]
        return [None, *(name for name in names if name not in self.expert_parameters)]

    def _return_value(self, value: Any, routed: Routed) -> ReturnValue:
        """Returns how a value beside the result comes about, or raises ValueError."""
        if not isinstance(value, Tensor):
            return ReturnValue("constant", value)
        if value.ndim == 0 and value.is_floating_point():
            return ReturnValue("zero")
        sources: list[tuple[Any, Any]] = [
            *(
                ("gate_output", index)
                for index, output in enumerate(routed.gate_outputs)
                if isinstance(output, Tensor) and output.ndim
            ),
            ("ids", None),
            ("weights", None),
        ]
        for candidate in (
            *(
                ReturnValue(*source, keeps_shape, squeezed)
                for source in sources
                for keeps_shape, squeezed in itertools.product((True, False), (False, True))
            ),
            ReturnValue("counts", (self.num_experts, value.dtype)),
        ):
            try:
                computed = candidate.compute(self.x, routed)
            except RuntimeError:  # It is of another size.
                continue
            if computed.shape == value.shape and torch.allclose(
                computed.double(), value.double(), rtol=1e-5, atol=1e-7
            ):
                return candidate
        raise ValueError(
            f"it returns a tensor {list(value.shape)} that is neither its result nor its routing"
        )


def _arguments(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Returns the names of a forward's arguments, each with its default if that is plain."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(
        (p.name, p.default if is_plain(p.default) else ...)
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )


def _floating(module: nn.Module) -> Tensor:
    """Returns a parameter that says in which dtype, and where, a layer takes its tokens."""
    return next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))


def _is_matrix(value: Any, rows: int, columns: int) -> bool:
    """Whether a value is a floating tensor of so many numbers in its last dimension, and rows."""
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return is_floating and value.shape[-1:] == (columns,) and value.numel() == rows * columns


def _same(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
