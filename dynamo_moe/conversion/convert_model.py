"""``convert``: a model's MoE layers, converted to ``torch.ops.moe`` in one of three ways.

Experts of transformers' models go through transformers' own interface, modules that a registered
adapter recognises are replaced by what it builds, and all other layers are identified by numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dynamo_moe.conversion import transformers_experts
from dynamo_moe.conversion.convert_layers import convert_layers
from dynamo_moe.conversion.locate_layers import locate_layers
from dynamo_moe.conversion.packing import converted_layers, experts_parameters, keep_packed
from dynamo_moe.conversion.registry import convert_by_adapters, matching_adapters
from dynamo_moe.conversion.reports import ConversionReport, Replacement, Unrecognised
from dynamo_moe.conversion.torchao_weights import TorchaoWeights
from dynamo_moe.conversion.unlocated import unlocated_layers
from dynamo_moe.evaluation import check_model
from dynamo_moe.modules import ConvertedModule
from dynamo_moe.private.pytorch import modules_by_path


def convert(
    model: nn.Module,
    args: tuple[Any, ...] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    experts_dtype: torch.dtype | None = None,
    fallback: str | None = None,
) -> ConversionReport:
    """Makes a model's MoE modules compute through ``torch.ops.moe``, in place.

    Modules are recognised by their structure: stacked weights or a list of experts, and what
    chooses among them. Each is converted only if that gives the same numbers as before, on random
    tokens of several shapes and with random weights, in evaluation mode; where its code and all
    that this reads are equal to those of a module before it, on many tokens with its own weights.
    It stays the module that it is, with its parameters, attributes and methods; in training, and
    for calls unlike those compared, its own forward computes. A loss beside its result, which only
    training needs, is 0 in evaluation; the report notes what a module no longer does.

    Convert last: what is set, hooked or wrapped in a module afterwards, such as another number of
    choices or a LoRA of its experts, has no part in what it computes in evaluation. Frozen weights
    that lie otherwise than the operator takes them are copied at a module's first call, and again
    once PyTorch counts a change of them. Through ``.data`` it counts none: write ``p.mul_(decay)``
    under ``torch.no_grad()``, not ``p.data.mul_(decay)``. That call also turns parameters of
    experts that are modules into views of one tensor: ``safetensors.torch.save_file`` of the state
    dict takes them, ``save_model`` only those of ``copy.deepcopy(model)``.

    What a module computes is compared in float32 on random tokens, finite and not zero. Code of its
    own for half precision, for NaN or for tokens of zeros is not seen, and has no part either.

    Experts of transformers' models stay the modules they are, and so do their routers: the experts
    implementation ``"dynamo_moe"`` is registered with transformers and selected.
    ``model.set_experts_implementation("eager")`` undoes that. Which of their routers become part of
    the node, :func:`export` decides.

    Args:
        model: The model; its parameters stay where they are.
        args: An example of its arguments, for models whose MoE layers get more than tokens: a
            condition, ids, a mask. It shows what, and in which sizes. The model runs once, if there
            are any.
        kwargs: An example of its keyword arguments, likewise.
        experts_dtype: Cast the experts' weights to this dtype, also those of modules converted
            before; the routers keep theirs. Weights that a checkpoint has packed are decoded. For
            inference: in training a module's own forward computes, which may not take them.
        fallback: The way to compute experts of transformers' models that ``torch.ops.moe`` cannot:
            another implementation registered there, such as ``"batched_mm"``, which can be
            exported. None: they stay as they are.

    Returns:
        The converted modules, and those that look like a mixture of experts but were not
        recognised, with the reason.

    Raises:
        ValueError: If an adapter would replace ``model`` itself, which cannot be done in place;
            if transformers knows no implementation ``fallback``; or if ``experts_dtype`` is given
            and weights of experts are parametrized; or if the model does not take ``args`` and
            ``kwargs``.
        TypeError: If ``experts_dtype`` is not a floating dtype.

    Example:
        >>> import torch
        >>> from dynamo_moe.models import DroplessMoEMlp
        >>> model = torch.nn.Sequential(DroplessMoEMlp(8, 16, num_experts=4, top_k=2))
        >>> [replacement.module for replacement in convert(model).replaced]
        ['0']
    """
    check_model(model)
    if experts_dtype is not None and not experts_dtype.is_floating_point:
        raise TypeError(f"experts_dtype must be a floating dtype, got {experts_dtype}")
    by_torchao = TorchaoWeights(model)
    by_torchao.decode()
    try:
        try:
            outcomes, layers, modules = _converted(model, args, kwargs, fallback)
        finally:
            by_torchao.encode(model)
        if experts_dtype is not None:
            _cast_experts(model, experts_dtype)
        else:
            outcomes = _noted(outcomes, keep_packed(model))
    finally:
        by_torchao.read(model)
    outcomes = by_torchao.explained(model, outcomes)
    if outcomes:
        order = {path: position for position, (path, _) in enumerate(modules)}
        outcomes.sort(key=lambda outcome: order.get(outcome.module, 0))
    reasons: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        if isinstance(outcome, Unrecognised) and not _is_around(outcome.module, layers):
            reasons.setdefault((outcome.module, outcome.original), []).append(outcome.reason)
    return ConversionReport(
        tuple(outcome for outcome in outcomes if isinstance(outcome, Replacement)),
        tuple(Unrecognised(*module, "; ".join(said)) for module, said in reasons.items()),
    )


_Outcomes = list[Replacement | Unrecognised]


def _converted(
    model: nn.Module,
    args: tuple[Any, ...] | Tensor,
    kwargs: Mapping[str, Any] | None,
    fallback: str | None,
) -> tuple[_Outcomes, _Outcomes, list[tuple[str, nn.Module]]]:
    """Converts layers; returns all outcomes, those by numbers, and the model's modules."""
    modules = modules_by_path(model)
    experts = _experts(modules)
    outcomes = transformers_experts.convert_experts(model, experts, fallback)
    handled = _handled_modules(modules, experts)
    if by_adapters := convert_by_adapters(model, modules, handled):
        outcomes += by_adapters
        modules = modules_by_path(model)
        handled = _handled_modules(modules, _experts(modules))
    given = args if isinstance(args, tuple) else (args,)
    example = (given, kwargs or {}) if given or kwargs else None
    layers = convert_layers(model, modules, handled, example)
    outcomes += layers
    known = [*(outcome.module for outcome in outcomes), *_paths_of(modules, handled)]
    outcomes += unlocated_layers(modules, known)
    return outcomes, layers, modules


def convertible_modules(model: nn.Module) -> list[str]:
    """Returns the paths of the modules that :func:`convert` would try to convert."""
    modules = modules_by_path(model)
    experts = _experts(modules)
    paths = {
        path for path, module in experts.items() if not transformers_experts.is_selected(module)
    }
    matching = {path: module for path, module in modules if matching_adapters(module)}
    handled = _handled_modules(modules, {**experts, **matching})
    located = locate_layers(model, modules, handled)
    paths |= {
        *matching,
        *(candidate.path for candidate in located if candidate.looks_like_moe(model)),
    }
    return [path for path, _ in modules if path in paths]


def _experts(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Returns the modules that transformers computes through its experts interface, by path."""
    return {path: module for path, module in modules if transformers_experts.is_experts(module)}


def _handled_modules(
    modules: Sequence[tuple[str, nn.Module]], others: Mapping[str, nn.Module]
) -> set[nn.Module]:
    """Returns the converted modules and others, with all their parts."""
    converted = (module for _, module in modules if isinstance(module, ConvertedModule))
    return {part for module in (*converted, *others.values()) for part in module.modules()}


def _paths_of(modules: Sequence[tuple[str, nn.Module]], chosen: Set[nn.Module]) -> list[str]:
    return [path for path, module in modules if module in chosen]


def _is_around(path: str, outcomes: list[Replacement | Unrecognised]) -> bool:
    """Whether a module holds, or is, one that was converted."""
    prefix = f"{path}." if path else ""
    replaced = (outcome for outcome in outcomes if isinstance(outcome, Replacement))
    return any(f"{outcome.module}.".startswith(prefix) for outcome in replaced)


def _noted(
    outcomes: list[Replacement | Unrecognised], packed: Mapping[str, str]
) -> list[Replacement | Unrecognised]:
    """Returns the outcomes with the notes of layers whose weights are quantised."""
    return [
        replace(outcome, notes=(*outcome.notes, packed[path]))
        if isinstance(outcome, Replacement) and (path := outcome.module) in packed
        else outcome
        for outcome in outcomes
    ]


# --- Casting the experts ---


def _cast_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the experts' parameters of all converted modules; shared ones stay shared."""
    converted = converted_layers(model)
    for path, module in converted.items():
        _check_not_parametrized(path, module)
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for module in converted.values():
        for name, parameter in experts_parameters(module).items():
            if parameter not in cast:
                cast[parameter] = nn.Parameter(
                    parameter.detach().to(dtype), parameter.requires_grad
                )
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, cast[parameter])


def _check_not_parametrized(path: str, module: nn.Module) -> None:
    for part_path, part in module.named_modules(prefix=path):
        if parametrize.is_parametrized(part):
            weight = ".".join(filter(None, (part_path, next(iter(part.parametrizations)))))
            raise ValueError(
                f"experts_dtype cannot cast {weight!r}: each forward computes it anew, as LoRA "
                "does; merge it first"
            )
