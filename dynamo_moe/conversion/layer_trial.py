"""Which records give the numbers of a layer's run: of a router, of its own code, or of probes.

Routings, made of the gate's own results or of what the layer's own code computes, are combined with
the candidates for the experts, until one combination gives what the run gave.

Legend: T tokens, D model width, E experts, K choices, R candidate routings.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import custom_ops
from dynamo_moe import pytree
from dynamo_moe.conversion.comparison import relative_errors
from dynamo_moe.conversion.expert_weights import ExpertsSpec
from dynamo_moe.conversion.find_own_routing import (
    are_constant,
    find_routings,
    solve_weights,
    values_ahead_of_experts,
)
from dynamo_moe.conversion.find_probed_routing import ProbedTrial
from dynamo_moe.conversion.layer_spec import (
    LayerSpec,
    ReturnValue,
    Routing,
    SharedExpert,
)
from dynamo_moe.conversion.observation import (
    ObservedForward,
    same_draws,
)
from dynamo_moe.conversion.other_arguments import OtherArguments, call_with, is_plain, positions
from dynamo_moe.conversion.own_routing import (
    Value,
    dense_weights,
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


class PlacesError(NotRoutedError):
    """The experts' weights are the same whatever the tokens are: they come sorted by expert."""


class NoKnownRouterError(ValueError):
    """The module is none of the known routers with its experts; its own code may tell more."""


class IsMixtureError(ValueError):
    """The module's result is a weighted sum of the experts' results, and cannot be converted."""


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
class _Sum:
    """A part of a layer's result as a sum of its experts' results.

    Attributes:
        part: The part.
        experts: The experts.
        tokens: What they get instead of the layer's tokens, or None.
        residual: Whether the layer's tokens are added.
        weights_TE: The weights.
    """

    part: _RoutedPart
    experts: ExpertsSpec
    tokens: Value | None
    residual: bool
    weights_TE: Tensor


@dataclass(frozen=True)
class LayerTrial:
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
                return self._that_choose(self.specs_of_own_code())
            case "probes":
                return self._that_choose(self.specs_of_probes())

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
                f"it calls no gate with {self.num_experts} scores, and has no weight of one, for "
                f"tokens as wide as its experts take them: {self.x.shape[-1]}"
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

        def run(x: Tensor) -> Any:
            return call_with(self.module, x, others)

        with same_draws():
            values, early = values_ahead_of_experts(run, image, parameters)
        # First those ahead of a number that the forward reads from a tensor, if it does.
        searched = [dict(itertools.islice(values.items(), early))] * (early < len(values))
        searched.append(values)
        width = self.x.shape[-1]
        normed = [v for v, t in values.items() if self._is_per_token(t, width)]
        is_sum = False
        # Experts of the layer's tokens, else of others that it computes, as a block with its norm.
        for tokens in (None, *normed):
            x_TD = (self.x if tokens is None else values[tokens]).reshape(-1, width)
            # Of the sum alone, else with the layer's tokens added to it.
            sums = dict[bool, list[_Sum]]({False: [], True: []})
            for experts in self._experts():
                y_TED = self._each_expert(experts, x_TD)
                for residual, part in itertools.product(sums, parts):
                    rest_TD = self.x.reshape(-1, width) * residual
                    weights_TE = solve_weights(y_TED, part.expected_TD - rest_TD)
                    if weights_TE is not None:
                        sums[residual].append(_Sum(part, experts, tokens, residual, weights_TE))
                        is_sum |= not are_constant(weights_TE)
            for found in sums.values():
                specs = [
                    spec
                    for known in searched
                    for each in found
                    for spec in self._specs_of_sum(each, known)
                ]
                if specs:
                    return specs
        if is_sum:
            raise IsMixtureError(
                f"{self._unknown()}, and its own code does not compute their weights ahead of them"
            )
        raise self._not_a_sum()

    def _specs_of_sum(self, found: _Sum, values: dict[Value, Tensor]) -> Iterator[LayerSpec]:
        """Yields the records whose routing gives a sum's weights, of what the layer computes."""
        others = self.others.of_size(self.x)
        outputs = self._returned_values(values)
        rates = [1 - number for number in self.numbers if 0.01 < number < 1]  # Of dropouts.
        for scale in dict.fromkeys((1.0, *self.numbers, *rates)):
            for routing in find_routings(
                values, found.weights_TE / scale, channels_first=self.channels_first
            ):
                own = replace(
                    routing,
                    scale=scale,
                    outputs=outputs,
                    tokens=found.tokens,
                    residual=found.residual,
                )
                with same_draws():
                    routed = own(self.module, self.x, others)
                yield self._spec(found.part, found.experts, own, routed)

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

    def _that_choose(self, specs: list[LayerSpec]) -> list[LayerSpec]:
        """Returns records whose experts depend on more than on a token's place.

        What gives each expert its part of a tensor is inside of the layer that sorts tokens so.

        Raises:
            PlacesError: If there are none.
        """
        if self.others.tensors or self.draws:
            return specs
        others = self.others.of_size(self.x)

        def weights(spec: LayerSpec, x: Tensor) -> Tensor:
            with same_draws():
                routed = spec.routing(self.module, x, others)
            return dense_weights(routed.ids, routed.weights, self.num_experts)

        # Opposite tokens have the opposite scores, whose largest is another.
        other_tokens = (self.x.roll(1, -1), -self.x)
        choosing = [
            spec
            for spec in specs
            if any(not torch.equal(weights(spec, self.x), weights(spec, x)) for x in other_tokens)
        ]
        if not choosing:
            raise PlacesError("a token's place alone says which of its experts gets it")
        return choosing

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
            arguments=_arguments(self.module, self.others),
            routing=routing,
            experts=experts,
            shared=(),
            returned=pytree.tree_unflatten(
                [returned(number, leaf) for number, leaf in enumerate(leaves)], structure
            ),
            channels_first=self.channels_first,
            others=self.others.form,
            keyword_only=_keyword_only(self.module),
        )

    def _returned_values(self, values: dict[Value, Tensor]) -> tuple[Value, ...]:
        """Returns the values of a forward that it also returns, or sets on the layer."""
        leaves = [
            leaf
            for leaf in (*pytree.tree_leaves(self.seen.result), *self._tensors_set().values())
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
            arguments=_arguments(self.module, self.others),
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
            keyword_only=_keyword_only(self.module),
            attributes=tuple(self._attributes(routed)),
        )

    def _attributes(self, routed: Routed) -> Iterator[tuple[str, ReturnValue]]:
        """Yields the tensors that the forward sets on the layer and that its routing gives."""
        for name, value in self._tensors_set().items():
            with contextlib.suppress(ValueError):  # A note says that it is no longer set.
                yield name, self._return_value(value, routed)

    def _tensors_set(self) -> dict[str, Tensor]:
        """Returns the tensors that the forward sets on the layer; a scalar is a loss."""
        values = self.seen.attributes.get("", {})
        return {n: v for n, v in values.items() if isinstance(v, Tensor) and v.ndim}

    def _is_per_token(self, value: Any, size: int) -> bool:
        """Whether a value is a floating tensor with so many numbers for each token."""
        return is_matrix(value, self.x.shape[:-1].numel(), size)

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
        vectors = [name for name, tensor in named if is_matrix(tensor, 1, count)]
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
        # One after the other in one call, whose tokens have choices that are none.
        count = len(routings)
        most = max(routed.ids.shape[1] for _, routed in routings)
        missing = [(0, most - routed.ids.shape[1]) for _, routed in routings]
        ids = [F.pad(r.ids, pad, value=-1) for (_, r), pad in zip(routings, missing, strict=True)]
        weights = [F.pad(r.weights, pad) for (_, r), pad in zip(routings, missing, strict=True)]
        chosen = x_TD.repeat(count, 1), torch.cat(ids), torch.cat(weights)
        for candidate in self._experts():
            experts = replace(candidate, options=replace(candidate.options, weight_on_input=True))
            yield experts, self._compute(experts, *chosen).view(count, *x_TD.shape)

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


def _keyword_only(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of a forward's arguments that have no position."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def _arguments(module: nn.Module, others: OtherArguments) -> tuple[tuple[str, Any], ...]:
    """Returns the names of a forward's arguments, each with its default if that is plain."""
    names: list[tuple[str, Any]] = []
    for p in inspect.signature(module.forward).parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            known = [name for name in others.values if name.startswith(f"{p.name}[")]
            # The first one is the tokens, unless they have a name.
            names += [(name, ...) for name in positions(p.name, len(known) + (not names))]
        elif p.kind is not p.VAR_KEYWORD:
            names.append((p.name, p.default if is_plain(p.default) else ...))
    return tuple(names)


def is_matrix(value: Any, rows: int, columns: int) -> bool:
    """Whether a value is a floating tensor of so many numbers in its last dimension, and rows."""
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return is_floating and value.shape[-1:] == (columns,) and value.numel() == rows * columns
