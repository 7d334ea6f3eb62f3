"""Identifies an MoE layer of any class, by running it and trying candidates.

The layer runs once, watched, on random weights: that shows its gate, its shared experts and its
result. ``layer_trial`` looks for records that give the same; they are proved elsewhere
(``convert_layers``).

Legend: T tokens, D model width, E experts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_moe import pytree
from dynamo_moe.conversion.comparison import relative_error
from dynamo_moe.conversion.expert_weights import ExpertsSpec
from dynamo_moe.conversion.identify_experts import identify_experts
from dynamo_moe.conversion.layer_spec import (
    LayerSpec,
)
from dynamo_moe.conversion.layer_trial import LayerTrial, NotRoutedError, Way, is_matrix
from dynamo_moe.conversion.locate_layers import LocatedExperts
from dynamo_moe.conversion.observation import (
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
    line_that_decides,
)
from dynamo_moe.conversion.probed_routing import ProbedRouting

# How much larger the weights of every second expert are.
_LARGE = 4
# Above this many numbers, experts keep their weights in a trial: others would need as much memory.
_MOST_RANDOM = 1 << 27
# Equal tokens that all go to the same experts, and by how much the result of a dropped one differs.
_MANY_EQUAL, _DROPPED = 4099, 1e-2
# Leading dimensions of the tokens that layers take, and whether as images with channels first.
_LEADING = (((2, 5), False), ((10,), False), ((2, 1, 5), False), ((2, 1, 5), True))


class TakesNoTokensError(NotRoutedError):
    """The module takes no tokens of the experts' width, so it is none that has them."""


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
        """Returns the layer's own forward, from and to tokens ``[..., D]``.

        Of a record with attributes, these are in its result.
        """
        run = on_tokens(on_any_device(module), self.others, channels_first=self.spec.channels_first)
        return self._restoring(module, self._with_attributes(module, run))

    def record(self, module: nn.Module) -> Callable[[Tensor], Any]:
        """Returns what the record computes of the same."""
        spec = self.spec

        def run(x: Tensor, others: Mapping[str, Any]) -> Any:
            return spec(module, x, others)

        run_tokens = on_tokens(run, self.others, channels_first=spec.channels_first)
        return self._restoring(module, self._with_attributes(module, run_tokens))

    def _with_attributes(
        self, module: nn.Module, run: Callable[[Tensor], Any]
    ) -> Callable[[Tensor], Any]:
        """Returns a function that gives the attributes of the record, too."""
        names = [name for name, _ in self.spec.attributes]

        def with_attributes(x: Tensor) -> Any:
            return run(x), [getattr(module, name) for name in names]

        return with_attributes if names else run

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
    _check_finite(module, weights)
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
                specs = [each for spec in trial.specs(way) for each in _with_and_without(spec)]
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
            line = line_that_decides(
                spec.routing,
                module,
                x,
                identified.others.of_size(x),
                is_read=isinstance(spec.routing, OwnRouting),  # It cannot read how probes are made.
            )
        if line is not None:
            notes.append(f"its router decides by values at {line}, which an export may refuse")
    if isinstance(spec.routing, ProbedRouting):
        notes.append("its own loop over the experts stays beside the node, and takes its time")
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


def _check_finite(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Raises ValueError if a parameter near whose values others are drawn is infinite or NaN."""
    for name, _ in module.named_parameters():
        if name in weights and not weights[name].isfinite().all():
            raise ValueError(f"its parameter {name!r} has numbers that are not finite")


def _enlarge_every_second_expert(weights: dict[str, Tensor], experts: ExpertsSpec) -> None:
    """Clamps show with large numbers, everything else with ordinary ones."""
    for stack in experts.stacks:
        for index, name in enumerate(stack.names):
            if name in weights and len(stack.names) == 1:
                weights[name].view(stack.shape[0], -1)[1::2] *= _LARGE
            elif name in weights and index % 2:
                weights[name] *= _LARGE


# --- The search ---


def _with_and_without(spec: LayerSpec) -> list[LayerSpec]:
    """Returns a record, then the one without the attributes that it may set wrongly."""
    return [spec, replace(spec, attributes=())] if spec.attributes else [spec]


def _observe(
    module: nn.Module,
    candidates: list[ExpertsSpec],
    hidden: dict[str, nn.Module],
    width: int,
    others: OtherArguments,
) -> LayerTrial:
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
        return LayerTrial(
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
                    if is_matrix(leaf, _MANY_EQUAL, len(x_D))
                ]
                return any(
                    relative_error(row_TD, row_TD[:1].expand_as(row_TD)) > _DROPPED
                    for row_TD in rows
                )
    return False


def _floating(module: nn.Module) -> Tensor:
    """Returns a parameter that says in which dtype, and where, a layer takes its tokens."""
    return next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))


def _same(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
