"""Converting MoE layers of any class: locate, identify, prove, install.

``locate_layers`` says where a model may have them, ``identify_layer`` what one computes. Here that
is proved against the layer, with its own weights and with random ones, and installed in it. Where
a layer has the same code as one that was proved (``equal_layers``), only its own weights are tried.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dynamo_moe import pytree
from dynamo_moe.conversion.comparison import compare, compare_shapes, equal_scores, fewer_cases
from dynamo_moe.conversion.equal_layers import layer_key
from dynamo_moe.conversion.identify_layer import (
    IdentifiedLayer,
    TakesNoTokensError,
    drops_tokens,
    identify_layer,
    side_effects,
)
from dynamo_moe.conversion.layer_spec import LayerSpec, install, share_weights
from dynamo_moe.conversion.layer_trial import (
    IsMixtureError,
    NoKnownRouterError,
    NotRoutedError,
    PlacesError,
    Way,
)
from dynamo_moe.conversion.locate_layers import LayerCandidate, LocatedExperts, locate_layers
from dynamo_moe.conversion.observation import (
    FullPrecision,
    few_threads,
    has_values,
    in_float32,
    keeping_parameters,
    preserving_state,
    using_tensors,
)
from dynamo_moe.conversion.other_arguments import OtherArguments, observe_calls
from dynamo_moe.conversion.probed_routing import ProbedRouting
from dynamo_moe.conversion.reports import Replacement, Unrecognised
from dynamo_moe.evaluation import evaluating
from dynamo_moe.modules import ConvertedModule
from dynamo_moe.private.pytorch import has_forward_hooks
from dynamo_moe.restoring import state_kept

_NAME = "mixture"
# Factors on tokens: clamps and such show with large ones only, what is added to avoid a division
# by zero with small ones.
_SCALES = (0.01, 5.0)
# With these scores may be equal; a clamp at 100 or a threshold of large numbers shows.
_EXTREMES = (1e-3, 1e2, 1e4)
# The most tokens in a trial, and a capacity that neither a trial nor a model can reach.
_MOST_TOKENS, _NO_CAPACITY = 8192, 2**31
# Equal tokens that are tried, at least and at most, and multiplications for which they are fewer.
_FEWEST_EQUAL, _MANY, _MOST_OPERATIONS = 301, 4099, 2**33
# Kinds of reasons against a conversion; later ones leave more open whether it is an MoE layer.
_DOUBTS = (IsMixtureError, ValueError, NotRoutedError, TakesNoTokensError, PlacesError)


@dataclass(frozen=True)
class _Proof:
    """A layer for which agreement was proved.

    Attributes:
        identified: The record that it agrees with.
        key: The key that layers like it share.
        casts_to_half: Whether it casts numbers to half precision.
        attributes: The values of its submodules' attributes from now on, by path: those that its
            own forward set.
        notes: The effects that it no longer has.
        ties: For what tokens it finds equal scores.
    """

    identified: IdentifiedLayer
    key: Hashable
    casts_to_half: bool
    attributes: dict[str, dict[str, Any]]
    notes: tuple[str, ...]
    ties: tuple[str, ...] = ()


def convert_layers(
    model: nn.Module,
    modules: Sequence[tuple[str, nn.Module]],
    handled: Set[nn.Module],
    example: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None,
) -> list[Replacement | Unrecognised]:
    """Converts the MoE layers among a model's modules, except in those that are handled.

    The example, arguments and keyword arguments of the model, shows what its layers are called with
    beside tokens.
    """
    located = locate_layers(model, modules, handled)
    if not located:
        return []
    known: dict[Any, _Proof] = {}
    calls: dict[str, OtherArguments] = {}
    if example is not None:
        paths = [path for candidate in located for path in candidate.paths]
        with state_kept(model), ExitStack() as removed:
            for candidate in located:
                if candidate.looks_like_moe(model):
                    removed.enter_context(_parameters_kept_in_calls(model, candidate))
            calls = observe_calls(model, *example, paths)
    # What a layer remembers of its weights, it remembers of those that it was tried with.
    with state_kept(model, attributes=False):
        outcomes = [_convert_candidate(model, candidate, known, calls) for candidate in located]
    share_weights(
        model.get_submodule(outcome.module)
        for outcome in outcomes
        if isinstance(outcome, Replacement)
    )
    return [outcome for outcome in outcomes if outcome is not None]


@contextmanager
def _parameters_kept_in_calls(model: nn.Module, candidate: LayerCandidate) -> Iterator[None]:
    """Restores, after each call of a candidate, the parameters beside its experts."""
    module = model.get_submodule(candidate.path)
    prefix = f"{candidate.path}." if candidate.path else ""
    calls: list[AbstractContextManager[Any]] = []

    def before(*_: Any) -> None:
        named = module.named_parameters()
        beside = {n: p for n, p in named if not candidate.experts.holds(prefix + n)}
        calls.append(keeping_parameters(beside))
        calls[-1].__enter__()

    def after(*_: Any) -> None:
        calls.pop().__exit__(None, None, None)

    handles = module.register_forward_pre_hook(before), module.register_forward_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _convert_candidate(
    model: nn.Module,
    candidate: LayerCandidate,
    known: dict[Any, _Proof],
    calls: Mapping[str, OtherArguments],
) -> Replacement | Unrecognised | None:
    """Converts the innermost module around the experts that can be converted, in place.

    Layers identified before, by class and shapes, are tried first.

    Returns:
        The outcome; None if it does not look like an MoE layer, or is in one that was converted.
    """
    if _is_in_converted(model, candidate.path):
        return None
    if not candidate.paths:
        name = type(model.get_submodule(candidate.path)).__name__
        experts_name = candidate.experts.path.rpartition(".")[2]
        reason = f"{experts_name!r} is one of several sets of experts in it"
        return Unrecognised(candidate.path, name, reason)
    reasons: dict[str, ValueError] = {}
    for path in candidate.paths:
        module = model.get_submodule(path)
        name = type(module).__name__
        inner_path = candidate.experts.path[len(path) :].removeprefix(".")
        others = calls.get(path, OtherArguments())
        shapes = tuple((n, p.shape) for n, p in module.named_parameters())
        key = (type(module), shapes, others.form)
        try:
            experts = replace(candidate.experts, path=inner_path)
            proof = known[key] = _convert_layer(module, experts, others, known.get(key))
            return Replacement(path, _NAME, name, has_values(module), proof.notes, proof.ties)
        except ValueError as refusal:
            reasons[path] = refusal
        except Exception as failure:  # The module is the user's: anything can come out of it.
            reasons[path] = ValueError(f"{type(failure).__name__}: {failure}")
    # Of equal reasons, that of the module that has the gate.
    path = min(reasons, key=lambda path: (_doubt(reasons[path]), len(path) > len(candidate.path)))
    if _doubt(reasons[path]) > _most_doubt(model, candidate, calls):
        return None
    module = model.get_submodule(path)
    inner_path = candidate.experts.path[len(path) :].removeprefix(".")
    others = calls.get(path, OtherArguments())
    hint = _capacity_hint(module, replace(candidate.experts, path=inner_path), others)
    return Unrecognised(path, type(module).__name__, f"{reasons[path]}{hint}")


def _is_in_converted(model: nn.Module, path: str) -> bool:
    names = path.split(".") if path else []
    around = (".".join(names[:count]) for count in range(len(names)))
    return any(isinstance(model.get_submodule(each), ConvertedModule) for each in around)


def _doubt(reason: ValueError) -> int:
    """Returns how open a reason against a conversion leaves whether it is an MoE layer at all."""
    return next(_DOUBTS.index(kind) for kind in type(reason).__mro__ if kind in _DOUBTS)


def _most_doubt(
    model: nn.Module, candidate: LayerCandidate, calls: Mapping[str, OtherArguments]
) -> int:
    """Returns how open it may be whether a layer is an MoE layer for it to be reported."""
    is_named, stacks = candidate.is_named(model), candidate.experts.stacks
    if is_named or (stacks and candidate.looks_like_moe(model)):
        return len(_DOUBTS)
    is_list = candidate.is_gated and not candidate.experts.stacks
    return 1 if is_list or _gets_scores(candidate, calls) else 0


def _gets_scores(candidate: LayerCandidate, calls: Mapping[str, OtherArguments]) -> bool:
    """Whether a layer is called with a tensor that may have a score for each of its experts."""
    given = [calls[path].tensors.values() for path in candidate.paths if path in calls]
    shapes = [tensor.shape for tensors in given for tensor in tensors]
    return any(shape[-1:] == (candidate.experts.num_experts,) for shape in shapes)


def _convert_layer(
    module: nn.Module, experts: LocatedExperts, others: OtherArguments, known: _Proof | None
) -> _Proof:
    """Converts a layer in place; returns the proof of its record.

    Raises:
        ValueError: If it cannot be converted; with the reason.
    """
    if "forward" in vars(module):
        raise ValueError("its forward has been replaced in the instance")
    values = has_values(module)
    tried = in_float32(module)
    with evaluating(tried), evaluating(module), few_threads(module):
        proof = None
        with suppress(ValueError):  # It has the same shapes, and may compute something else.
            proof = known and _prove_again(module, tried, known)
        proof = proof or _identify_and_prove(module, tried, experts, others)
        _check_hooks(module, proof.identified.spec)
        _check_rest(module, proof.identified.spec)
        if tried is not module and values:
            _check_dtype(module, proof.identified)
        if values:
            with _trial(module, proof.identified, {}) as (original, _, example, _):
                proof = replace(proof, ties=equal_scores(original, example))
    install(module, proof.identified.spec)
    for path, changed in copy.deepcopy(proof.attributes).items():
        for name, value in changed.items():
            setattr(module.get_submodule(path), name, value)
    return proof


def _check_rest(module: nn.Module, spec: LayerSpec) -> None:
    """Refuses float16 where weights are read beside something that is added to them."""
    is_float16 = any(tensor.dtype == torch.float16 for tensor in module.parameters())
    if is_float16 and isinstance(spec.routing, ProbedRouting) and spec.routing.rest != "nothing":
        raise ValueError(
            "its weights are in float16: beside what it adds to its experts' results, the weights "
            "of experts lose their digits; convert it in float32 or bfloat16"
        )


def _identify_and_prove(
    module: nn.Module, tried: nn.Module, experts: LocatedExperts, others: OtherArguments
) -> _Proof:
    """Returns the first record that can be proved: of a known router, else of the layer's own code.

    Raises:
        ValueError: If none can; the reason why that of a known router cannot.
    """
    reasons: list[ValueError] = []
    for way in get_args(Way):
        try:
            candidates = identify_layer(tried, experts, others, way)
        except PlacesError:  # What the other ways have seen is sorting, too.
            raise
        except ValueError as refusal:
            reasons.append(refusal)
            continue
        except Exception as failure:  # The module is the user's: anything can come out of it.
            reasons.append(ValueError(f"{type(failure).__name__}: {failure}"))
            continue
        for identified in candidates:
            try:
                return _prove(module, tried, identified)
            except Exception as refusal:  # Its code runs where it has not run before.
                reasons.append(IsMixtureError(str(refusal)))
    # The first that shows that it is a mixture, unless it only lacks a known router.
    raise min(
        reasons,
        key=lambda reason: (
            not isinstance(reason, IsMixtureError),
            isinstance(reason, NoKnownRouterError),
        ),
    )


def _prove_again(module: nn.Module, tried: nn.Module, known: _Proof) -> _Proof:
    """Proves that a layer computes the same as an earlier one; in fewer ways, if it looks the same.

    Raises:
        ValueError: If it does not.
    """
    identified = known.identified
    if known.key == layer_key(module, identified.weights.keys()):
        # A mode sees each operator, which takes longer than a small layer's operators.
        precision = FullPrecision() if known.casts_to_half else nullcontext()
        with suppress(Exception), precision:
            for weights in _weights_to_try(module, identified):
                with _trial(tried, identified, weights) as (original, candidate, example, kind):
                    for tokens in fewer_cases(example, _scales(identified)):
                        compare(original, candidate, [tokens], kind)
            return known
    return _prove(module, tried, identified)


def _weights_to_try(
    module: nn.Module, identified: IdentifiedLayer
) -> Iterator[Mapping[str, Tensor]]:
    """Yields random weights, and those that stand for the layer's own, if it has these."""
    yield identified.weights
    if has_values(module):
        yield {}


def _prove(module: nn.Module, tried: nn.Module, identified: IdentifiedLayer) -> _Proof:
    """Proves a record, and for which numbers of token dimensions.

    Args:
        module: The layer.
        tried: The layer, or a copy in float32.
        identified: The record to prove.

    Raises:
        ValueError: If it does not compute that, with random weights and with its own.
    """
    spec = identified.spec
    thresholds, many = _thresholds(tried), _many_tokens(identified)
    proved: list[set[int]] = []
    key = layer_key(module, identified.weights.keys())
    precision = FullPrecision()
    with precision:
        for weights in _weights_to_try(module, identified):
            with _trial(tried, identified, weights) as compared:
                dimensions = compare_shapes(
                    *compared,
                    optional_dimensions=True,
                    thresholds=thresholds,
                    scales=_scales(identified),
                    extremes=_scales(identified, _EXTREMES),
                    many=many,
                )
                many = 0  # Once, as weights do not decide what an expert drops.
            proved.append({*dimensions})
    dimensions = tuple(sorted(set.intersection(*proved)))
    identified = replace(identified, spec=replace(spec, dimensions=dimensions))
    return _Proof(identified, key, precision.has_cast, *side_effects(tried, identified))


def _many_tokens(identified: IdentifiedLayer) -> int:
    """Returns how many equal tokens to try, which all go to the same experts and show capacities.

    They are thousands, or hundreds where an expert takes many operations for each.
    """
    experts = identified.spec.experts
    operations = sum(math.prod(stack.shape[1:]) for stack in experts.stacks)
    return min(_MANY, max(_FEWEST_EQUAL, _MOST_OPERATIONS // operations))


def _scales(identified: IdentifiedLayer, scales: tuple[float, ...] = _SCALES) -> tuple[float, ...]:
    """Returns those factors on the tokens that a layer is tried with."""
    builtin = identified.spec.routing.builtin()
    # The operator compares logits; the module compares sigmoids, which are all 1 for large tokens.
    is_sigmoid = builtin is not None and builtin[1].scoring == "sigmoid"
    return tuple(scale for scale in scales if scale < 1 or not is_sigmoid)


@contextmanager
def _trial(
    module: nn.Module, identified: IdentifiedLayer, weights: Mapping[str, Tensor]
) -> Iterator[tuple[Callable[[Tensor], Any], Callable[[Tensor], Any], Tensor, str]]:
    """Yields the arguments of a comparison with other weights, and leaves the layer as it was."""
    with preserving_state(module), using_tensors(module, weights):
        forward, example = identified.own_forward(module), identified.example(module)
        yield forward, identified.record(module), example, "a mixture of experts"


# --- Reasons against converting a layer ---


def _check_hooks(module: nn.Module, spec: LayerSpec) -> None:
    """Raises ValueError if a submodule has hooks that would not run."""
    for path, part in module.named_modules():
        if path and not spec.still_runs(path) and has_forward_hooks(part):
            raise ValueError(f"its submodule {path!r} has forward hooks, which would not run")


def _check_dtype(module: nn.Module, identified: IdentifiedLayer) -> None:
    """Raises ValueError if a module in half precision returns another dtype than its tokens'."""
    x = torch.zeros_like(identified.example(module))
    with preserving_state(module), torch.no_grad():
        result = identified.own_forward(module)(x)
    dtypes = {
        leaf.dtype
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() == x.numel()
    }
    if dtypes and x.dtype not in dtypes:
        raise ValueError(f"it returns {dtypes.pop()} for tokens in {x.dtype}")


def _thresholds(module: nn.Module) -> list[int]:
    """Returns the numbers of tokens above which a module may compute something else."""
    capacities = sorted(
        value for _, value in _capacities(module) if type(value) is int and value > 1
    )
    if capacities and capacities[-1] > _MOST_TOKENS:
        raise ValueError(f"a capacity of {capacities[-1]} tokens is more than can be tried")
    return capacities


def _capacity_hint(module: nn.Module, experts: LocatedExperts, others: OtherArguments) -> str:
    """Returns the attribute that makes a module drop tokens, if it does."""
    name, value = next(_capacities(module), ("", 0))
    drops = False
    if name:
        with suppress(Exception), evaluating(module):  # The module is the user's.
            drops = drops_tokens(in_float32(module), experts, others)
    how = f"{name} is {value}"
    return f"; it drops tokens by a capacity ({how}): set it so that none is dropped" * drops


def _capacities(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yields the attributes that may make a module drop tokens."""
    for part in module.modules():
        configs = [vars(value) for value in vars(part).values() if _is_config(value)]
        for name, value in (
            item for attributes in (vars(part), *configs) for item in attributes.items()
        ):
            limits = "capacity" in name or ("max" in name and "token" in name)
            if limits and type(value) in (int, float) and 0 < value < _NO_CAPACITY:
                yield name, value


def _is_config(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, type))
