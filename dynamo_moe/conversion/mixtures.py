"""The mixtures of experts of a model, whatever their classes: where they are, and converting them.

Legend: D model width, E experts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_moe import pytree
from dynamo_moe.conversion.comparing import compare_shapes, has_values
from dynamo_moe.conversion.expert_search import ListOfExperts, StacksOfExperts, holders
from dynamo_moe.conversion.mixture import Mixture, adopt
from dynamo_moe.conversion.mixture_search import Found, NotRoutedError, find_mixture
from dynamo_moe.conversion.observing import (
    as_tokens,
    in_full_precision,
    on_any_device,
    undisturbed,
    with_tensors,
)
from dynamo_moe.evaluation import evaluating
from dynamo_moe.modules import ConvertedModule
from dynamo_moe.private import has_forward_hooks

__all__ = ["MIXTURE", "MixtureOfExperts", "RefusedError", "convert_mixture", "mixtures"]

MIXTURE = "mixture"
"""What the report calls a module that was converted so."""

# From a list of experts up to the module that routes: experts may be in a module of their own, and
# that in another.
_LEVELS = 3
# Of tokens: clamps and such show with large ones only, what is added to avoid a zero with small.
_SCALES = (0.01, 5.0)
# Tokens of a trial, and a capacity that no trial can reach nor a model.
_LONGEST, _NO_CAPACITY = 8192, 2**31


@dataclass(frozen=True)
class MixtureOfExperts:
    """Experts, and the modules that may be theirs.

    Attributes:
        path: The innermost module around the experts that has what may choose among them.
        paths: The modules to try, the innermost first.
        held: The experts, by their path in the model.
    """

    path: str
    paths: tuple[str, ...]
    held: ListOfExperts | StacksOfExperts


class RefusedError(ValueError):
    """A mixture cannot be converted.

    Attributes:
        path: The module that comes nearest to one that can.
        routes: Whether it is a mixture at all, as far as can be seen.
    """

    def __init__(self, path: str, reason: str, *, routes: bool) -> None:
        super().__init__(reason)
        self.path, self.routes = path, routes


def mixtures(model: nn.Module, handled: Set[nn.Module]) -> list[MixtureOfExperts]:
    """Returns what looks like a mixture of experts, by names and shapes alone.

    Args:
        model: The model.
        handled: Modules that are none of those.
    """
    found: list[MixtureOfExperts] = []
    every = list(holders(model))
    places = {held.path for held in every}
    for held in every:
        known = any(each.held.path == held.path for each in found)
        if known or model.get_submodule(held.path) in handled:
            continue
        paths = []
        for path in _upwards(held):
            module = model.get_submodule(path)
            if sum(_is_within(each, path) for each in places) > 1 or module in handled:
                break
            if any(isinstance(part, ConvertedModule) for part in module.modules()):
                break
            paths.append(path)
        chosen = next((path for path in paths if _may_route(model, path, held)), None)
        alternatives = sum(each.path == held.path for each in every)
        if chosen is None and paths and alternatives == 1 and _is_named(model, held):
            # Beside experts that are handled, these are such as every token visits.
            around = model.get_submodule(paths[0].rpartition(".")[0])
            chosen = paths[0] if handled.isdisjoint(around.modules()) else None
        if chosen is not None:
            found.append(MixtureOfExperts(chosen, tuple(paths), held))
    return found


def convert_mixture(
    model: nn.Module, mixture: MixtureOfExperts, known: dict[Any, Found]
) -> tuple[str, Found, bool]:
    """Converts a mixture in place.

    Args:
        model: The model.
        mixture: One that :func:`mixtures` found in it.
        known: What has been found so far, by class and shapes; it is tried first, and added to.

    Returns:
        The module that was converted, what it computes, and whether that was compared with the
        module's own weights.

    Raises:
        RefusedError: If it cannot be converted; with the reason.
    """
    reasons: dict[str, ValueError] = {}
    for path in mixture.paths:
        module = model.get_submodule(path)
        relative = mixture.held.path[len(path) :].removeprefix(".")
        held = replace(mixture.held, path=relative)
        key = (type(module), tuple((n, p.shape) for n, p in module.named_parameters()))
        try:
            found = _converted(module, held, known.get(key))
        except ValueError as refusal:
            reasons[path] = refusal
            continue
        except Exception as failure:  # The module is the user's: anything can come out of it.
            reasons[path] = ValueError(f"{type(failure).__name__}: {failure}")
            continue
        known[key] = found
        return path, found, has_values(module)
    routed = (path for path, reason in reasons.items() if not isinstance(reason, NotRoutedError))
    path = next(routed, mixture.path)
    hint = _capacity(model.get_submodule(path))
    # A list of alike MLPs can be anything; stacks with a matrix of E rows beside them cannot.
    certain = isinstance(mixture.held, StacksOfExperts) or _is_named(model, mixture.held)
    routes = certain or not isinstance(reasons[path], NotRoutedError)
    raise RefusedError(path, f"{reasons[path]}{hint}", routes=routes)


def _capacity(module: nn.Module) -> str:
    """Returns what to say of an attribute that may make a module drop tokens."""
    for name, value in _capacities(module):
        return (
            f"; it may drop tokens by a capacity ({name} is {value}), which is not converted: set "
            "it so that none is dropped"
        )
    return ""


def _converted(
    module: nn.Module, held: ListOfExperts | StacksOfExperts, known: Found | None
) -> Found:
    values = has_values(module)
    tried = module
    if any(p.dtype.itemsize < 4 for p in module.parameters()):
        # Near-ties of the router fall differently in half precision, whatever is computed.
        tried = copy.deepcopy(module).float()
    with evaluating(tried), evaluating(module):
        found = None
        if known is not None:
            try:
                found = _proved(tried, known, values)
            except ValueError:  # It has the same shapes, and computes something else.
                found = None
        if found is None:
            found = _proved(tried, find_mixture(tried, held), values)
        _check_hooks(module, found.mixture)
        if tried is not module and values:
            _check_dtype(module, found)
    adopt(module, found.mixture)
    for path, attributes in found.attributes.items():
        for name, value in attributes.items():
            setattr(module.get_submodule(path), name, value)
    return found


def _check_hooks(module: nn.Module, mixture: Mixture) -> None:
    """Raises ValueError if a submodule has hooks that would not run."""
    runs = [call.path for call in mixture.calls()]
    for path, part in module.named_modules():
        inside = any(f"{path}.".startswith(f"{run}.") for run in runs)
        if path and not inside and has_forward_hooks(part):
            raise ValueError(f"its submodule {path!r} has forward hooks, which would not run")


def _check_dtype(module: nn.Module, found: Found) -> None:
    """Raises ValueError if a module in half precision returns another dtype than its tokens'."""
    parameter = next(module.parameters())
    width = found.mixture.experts.second.matrices(module).shape[1]
    x = torch.zeros(*found.leading, width, device=parameter.device, dtype=parameter.dtype)
    with undisturbed(module), torch.no_grad():
        result = on_any_device(module)(x.movedim(-1, 1) if found.mixture.channels_first else x)
    dtypes = {leaf.dtype for leaf in pytree.tree_leaves(result) if _is_result(leaf, x)}
    if dtypes and x.dtype not in dtypes:
        raise ValueError(f"it returns {dtypes.pop()} for tokens in {x.dtype}")


def _is_result(leaf: Any, x: Tensor) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() == x.numel()


def _proved(module: nn.Module, found: Found, values: bool) -> Found:
    """Returns what was found with the numbers of dimensions that it is known for.

    Raises:
        ValueError: If the module does not compute that, with random weights and with its own.
    """
    parameter = next(module.parameters())
    device = "cpu" if parameter.is_meta else parameter.device
    turned = found.mixture.channels_first
    original = as_tokens(on_any_device(module), channels_first=turned)
    candidate = as_tokens(partial(found.mixture, module), channels_first=turned)
    thresholds = _thresholds(module)
    plain = found.mixture.routing.plain()
    # The operator tells sigmoids apart by their logits, which are all 1 for large tokens.
    scales = _SCALES if plain is None or plain[1].scoring != "sigmoid" else _SCALES[:1]
    dimensions: set[int] = set()
    for weights in ({**found.weights}, {}):
        if not weights and not values:
            continue
        with undisturbed(module), with_tensors(module, weights), in_full_precision():
            width = found.mixture.experts.second.matrices(module).shape[1]
            generator = torch.Generator().manual_seed(2)
            x = torch.randn(*found.leading, width, generator=generator) * 2
            x = x.to(device, parameter.dtype)
            same = compare_shapes(
                original,
                candidate,
                x,
                "a mixture of experts",
                others=True,
                longer=thresholds,
                scales=scales,
            )
            dimensions = dimensions & {*same} if dimensions else {*same}
    return replace(found, mixture=replace(found.mixture, dimensions=tuple(sorted(dimensions))))


def _thresholds(module: nn.Module) -> list[int]:
    """Returns the numbers of tokens above which a module may compute something else.

    Raises:
        ValueError: If there is one that is too large to try.
    """
    found = sorted(value for _, value in _capacities(module) if type(value) is int and value > 1)
    if found and found[-1] > _LONGEST:
        raise ValueError(f"a capacity of {found[-1]} tokens is more than can be tried")
    return found


def _capacities(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yields attributes that may make a module drop tokens."""
    for part in module.modules():
        configs = [vars(value) for value in vars(part).values() if _is_config(value)]
        for name, value in (item for held in (vars(part), *configs) for item in held.items()):
            counts = "capacity" in name or ("max" in name and "token" in name)
            if counts and type(value) in (int, float) and 0 < value < _NO_CAPACITY:
                yield name, value


def _is_config(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, type))


def _upwards(held: ListOfExperts | StacksOfExperts) -> Iterator[str]:
    path = held.path
    if isinstance(held, StacksOfExperts):
        yield path
    for _ in range(_LEVELS):
        if not path:
            return
        path = path.rpartition(".")[0]
        yield path


def _is_within(path: str, ancestor: str) -> bool:
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def _may_route(model: nn.Module, path: str, held: ListOfExperts | StacksOfExperts) -> bool:
    """Whether a module around experts may choose among them: by E scores from D numbers, or so."""
    module, held_by = model.get_submodule(path), model.get_submodule(held.path)
    if isinstance(held, ListOfExperts):
        inner = {id(p) for p in held_by.parameters()}
        sizes = {size for p in held_by.parameters() for size in p.shape[-2:]}
    else:
        stacks = [held_by.get_parameter(name) for names in held.names for name in names]
        inner = {id(p) for p in stacks}
        sizes = {size for stack in stacks for size in stack.shape[-2:]}
    others: list[Tensor] = [
        p
        for name, p in module.named_parameters()
        if id(p) not in inner and p.ndim == 2 and "bias" not in name
    ]
    return any(held.experts in p.shape and sizes & set(p.shape) for p in others)


def _is_named(model: nn.Module, held: ListOfExperts | StacksOfExperts) -> bool:
    """Whether names say that these are experts."""
    owner = type(model.get_submodule(held.path)).__name__
    names = (
        (held.path.rpartition(".")[2], owner)
        if isinstance(held, StacksOfExperts)
        else (held.path.rpartition(".")[2],)
    )
    return any("expert" in name.lower() for name in names)
