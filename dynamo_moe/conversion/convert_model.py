"""``convert``: walk the model, convert what is recognised, name what only looks like it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from custom_ops.options import ExpertOptions
from dynamo_moe.conversion import transformers_experts
from dynamo_moe.conversion.comparing import check_comparable, compare_shapes, has_values
from dynamo_moe.conversion.mixture_search import Found
from dynamo_moe.conversion.mixtures import MIXTURE, RefusedError, convert_mixture, mixtures
from dynamo_moe.conversion.observing import on_any_device, undisturbed
from dynamo_moe.conversion.registry import Adapter, adapters
from dynamo_moe.evaluation import check_model, evaluating
from dynamo_moe.modules import ConvertedModule

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "ADAPTER_PAGE",
    "ConversionReport",
    "Replacement",
    "Unrecognised",
    "convert",
    "convertible_modules",
]


ADAPTER_PAGE = "docs/how-to/add_an_adapter.md"
"""What messages refer to for modules that are left."""


@dataclass(frozen=True)
class Replacement:
    """One module that was converted.

    Attributes:
        module: Its path in the model.
        adapter: The adapter that recognised it.
        original: Its class's name.
        compared: Whether the two were seen to give the same numbers; False where the module could
            not run, as on the meta device.
        notes: What the module did that it does no longer.
    """

    module: str
    adapter: str
    original: str
    compared: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unrecognised:
    """One module that looks like a mixture of experts and was left as it is."""

    module: str
    original: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did."""

    replaced: tuple[Replacement, ...]
    unrecognised: tuple[Unrecognised, ...]

    @property
    def advice(self) -> str | None:
        """What to know of modules that were left, or of a model that has none, in one line."""
        if self.unrecognised:
            return (
                f"Left modules become many nodes, or fail: {ADAPTER_PAGE} tells how to convert "
                "them."
            )
        if not self.replaced:
            return (
                "Nothing to convert: no module looks like a router with experts that is not "
                f"converted yet. Where one routes all the same, write an adapter: {ADAPTER_PAGE}."
            )
        return None

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain lists and dictionaries, for JSON."""
        return asdict(self)

    def __rich__(self) -> RenderableType:
        """Returns a table for the terminal, and what to know of it."""
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table
        from rich.text import Text

        plural = "" if len(self.replaced) == 1 else "s"
        title = f"{len(self.replaced)} MoE module{plural} converted"
        table = Table(title=title, title_justify="left")
        for column in ("module", "was", "now"):
            table.add_column(column)
        for replacement in self.replaced:
            how = "same numbers" if replacement.compared else "not compared"
            notes = "".join(f"; {note}" for note in replacement.notes)
            now = f"{replacement.adapter} ({how}){escape(notes)}"
            table.add_row(replacement.module or "the model", replacement.original, now)
        for left in self.unrecognised:
            table.add_row(
                left.module or "the model", left.original, f"[yellow]left: {escape(left.reason)}[/]"
            )
        return Group(table, Text(self.advice)) if self.advice else table


def convert(
    model: nn.Module,
    *,
    experts_dtype: torch.dtype | None = None,
    fallback: str | None = None,
) -> ConversionReport:
    """Makes a model's MoE modules compute through ``torch.ops.moe``, in place.

    Modules are recognised by their structure: stacked weights or a list of experts, and what
    chooses among them. Each is converted only if that gives the same numbers as before, on random
    tokens of several shapes and with random weights, in evaluation mode. It stays the module that
    it is, with its parameters, attributes and methods; in training, and for calls that were not
    compared, its own forward computes. A loss beside its result, which only training needs, is 0
    in evaluation; the report notes what a module does no longer.

    Convert last: what is set, hooked or wrapped in a module afterwards, such as another number of
    choices or a LoRA of its experts, has no part in what it computes in evaluation.

    Experts of transformers' models stay the modules they are, routers too: the experts
    implementation ``"dynamo_moe"`` is registered with transformers and selected.
    ``model.set_experts_implementation("eager")`` undoes that. Which of their routers become part of
    the node, :func:`export` decides.

    Args:
        model: The model; its parameters stay where they are.
        experts_dtype: Cast the experts' weights, also of modules converted before, to this dtype;
            the routers keep theirs. For inference: in training a module's own forward computes,
            which may not take them.
        fallback: What computes those experts of transformers' models that ``torch.ops.moe`` cannot:
            another implementation registered there, such as ``"batched_mm"``, which can be
            exported. None: they stay as they are.

    Returns:
        What was converted, and which modules look like a mixture of experts but were not
        recognised, with the reason.

    Raises:
        ValueError: If ``model`` itself is the MoE module, which cannot be replaced in place, or
            transformers knows no implementation ``fallback``.
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
    replaced, unrecognised = _convert_transformers(model, fallback)
    handled = _handled(model)
    by_adapters, refused = _convert_by_adapters(model, handled)
    mixed, left = _convert_mixtures(model, handled)
    replaced += [*by_adapters, *mixed]
    unrecognised += _joined(each for each in (*refused, *left) if not _is_among(each, mixed))
    if experts_dtype is not None:
        _cast_experts(model, experts_dtype)
    order = {path: place for place, (path, _) in enumerate(model.named_modules())}
    return ConversionReport(
        tuple(sorted(replaced, key=lambda each: order.get(each.module, 0))),
        tuple(sorted(unrecognised, key=lambda each: order.get(each.module, 0))),
    )


def convertible_modules(model: nn.Module) -> list[str]:
    """Returns the paths of the modules that :func:`convert` would try to convert."""
    found = {
        path: module
        for path, module in model.named_modules()
        if _adapters_of(module)
        or (
            transformers_experts.is_experts(module) and not transformers_experts.is_selected(module)
        )
    }
    within = _handled(model) | {part for module in found.values() for part in module.modules()}
    paths = {*found, *(mixture.path for mixture in mixtures(model, within))}
    return [path for path, _ in model.named_modules() if path in paths]


def _handled(model: nn.Module) -> set[nn.Module]:
    """Returns the modules that transformers computes, and those in converted ones."""
    return {
        part
        for module in model.modules()
        if isinstance(module, ConvertedModule) or transformers_experts.is_experts(module)
        for part in module.modules()
    }


def _convert_transformers(
    model: nn.Module, fallback: str | None
) -> tuple[list[Replacement], list[Unrecognised]]:
    """Selects our implementation for the experts of transformers' models, as far as it is exact."""
    replaced, unrecognised = [], []
    decisions: list[tuple[nn.Module, ExpertOptions | None]] = []
    for path, module in model.named_modules():
        if not transformers_experts.is_experts(module) or transformers_experts.is_selected(module):
            continue
        name, options = type(module).__name__, None
        try:
            options, compared = transformers_experts.decide(module)
            replaced.append(Replacement(path, transformers_experts.ADAPTER, name, compared))
        except ValueError as refusal:
            computed = "left as it is" if fallback is None else f"computed by {fallback!r}"
            unrecognised.append(Unrecognised(path, name, f"{refusal}; {computed}"))
        decisions.append((module, options))
    # Modules of one config share its implementation, so all of them must know what to compute.
    useful = {id(module.config) for module, options in decisions if options is not None or fallback}
    for module, options in decisions:
        if id(module.config) in useful:
            transformers_experts.select(module, options, fallback)
    return replaced, unrecognised


def _convert_by_adapters(
    model: nn.Module, handled: set[nn.Module]
) -> tuple[list[Replacement], list[Unrecognised]]:
    """Replaces the modules that an adapter recognises, in place; adds them to ``handled``."""
    replaced, unrecognised = [], []
    for path, module in list(model.named_modules()):
        if module in handled:
            continue
        reasons = []
        for adapter in _adapters_of(module):
            try:
                replacement, compared = _replacement(adapter, module)
            except Exception as refusal:  # An adapter is the user's: anything can come out of it.
                plain = isinstance(refusal, ValueError)
                said = str(refusal) if plain else f"{type(refusal).__name__}: {refusal}"
                reasons.append(f"adapter {adapter.name!r}: {said}")
                continue
            if module is model:
                raise ValueError(
                    "the model itself is an MoE module: wrap it, as in nn.Sequential(model)"
                )
            _replace(model, module, replacement)
            replaced.append(Replacement(path, adapter.name, type(module).__name__, compared))
            handled.update((*module.modules(), *replacement.modules()))
            reasons = []
            break
        if reasons:
            unrecognised.append(Unrecognised(path, type(module).__name__, "; ".join(reasons)))
    return replaced, unrecognised


def _joined(lefts: Iterable[Unrecognised]) -> list[Unrecognised]:
    """Returns one for each module, with all reasons."""
    found: dict[str, Unrecognised] = {}
    for left in lefts:
        known = found.get(left.module)
        found[left.module] = (
            left if known is None else replace(known, reason=f"{known.reason}; {left.reason}")
        )
    return list(found.values())


def _is_among(left: Unrecognised, replaced: list[Replacement]) -> bool:
    """Whether a module that adapters could not convert was converted otherwise."""
    prefix = f"{left.module}." if left.module else ""
    return any(f"{each.module}.".startswith(prefix) for each in replaced)


def _convert_mixtures(
    model: nn.Module, handled: set[nn.Module]
) -> tuple[list[Replacement], list[Unrecognised]]:
    """Converts whatever else routes, in place."""
    replaced, unrecognised = [], []
    known: dict[Any, Found] = {}
    for mixture in mixtures(model, handled):
        try:
            path, found, compared = convert_mixture(model, mixture, known)
        except RefusedError as refusal:
            if not refusal.routes:
                continue
            name = type(model.get_submodule(refusal.path)).__name__
            unrecognised.append(Unrecognised(refusal.path, name, str(refusal)))
        else:
            module = model.get_submodule(path)
            name = type(module).__bases__[1].__name__
            replaced.append(Replacement(path, MIXTURE, name, compared, found.notes))
    return replaced, unrecognised


def _adapters_of(module: nn.Module) -> list[Adapter]:
    """Returns the adapters that recognise a module, in the order to ask them."""
    if isinstance(module, ConvertedModule):
        return []
    return [adapter for adapter in adapters() if adapter.recognise(module) is None]


def _replacement(adapter: Adapter, module: nn.Module) -> tuple[ConvertedModule, bool]:
    """Returns what replaces a module, and whether the two were compared.

    Raises:
        ValueError: If nothing may replace it; with the reason.
    """
    check_comparable(module)
    replacement = adapter.convert(module).train(module.training)
    _check_arguments(module, replacement)
    if not has_values(module):
        return replacement, False
    original, candidate = module, replacement
    if any(parameter.dtype.itemsize < 4 for parameter in module.parameters()):
        # Near-ties of the router fall differently in half precision, whatever is computed.
        original = copy.deepcopy(module).float()
        candidate = adapter.convert(original)
    with evaluating(original, candidate), undisturbed(original):
        example = adapter.example_tokens(original)
        compare_shapes(on_any_device(original), candidate, example, adapter.name)
    return replacement, True


def _check_arguments(module: nn.Module, replacement: nn.Module) -> None:
    """Raises ValueError if a replacement's forward does not take what the module's takes."""
    theirs, ours = (inspect.signature(each.forward).parameters for each in (module, replacement))
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in ours.values()):
        return
    if len(ours) < len(theirs):
        raise ValueError(
            f"its forward takes {', '.join(theirs)}, that of its replacement only {', '.join(ours)}"
        )


def _cast_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the experts' parameters of all converted modules; shared ones stay shared."""
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        if isinstance(module, ConvertedModule) or transformers_experts.is_selected(module):
            _check_castable(path, module)
    for module in model.modules():
        for name, parameter in _experts_parameters(module).items():
            if parameter not in cast:
                half = parameter.detach().to(dtype)
                cast[parameter] = nn.Parameter(half, parameter.requires_grad)
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, cast[parameter])


def _check_castable(path: str, module: nn.Module) -> None:
    """Raises ValueError if a module's weights are no parameters."""
    for place, part in module.named_modules(prefix=path):
        if parametrize.is_parametrized(part):
            weight = ".".join(filter(None, (place, next(iter(part.parametrizations)))))
            raise ValueError(
                f"experts_dtype cannot cast {weight!r}: each forward computes it anew, as LoRA "
                "does; merge it first"
            )


def _experts_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    if isinstance(module, ConvertedModule):
        return module.experts_parameters()
    return (
        transformers_experts.experts_parameters(module)
        if transformers_experts.is_selected(module)
        else {}
    )


def _replace(model: nn.Module, module: nn.Module, replacement: nn.Module) -> None:
    """Replaces the module at every place that holds it."""
    for path, child in list(model.named_modules(remove_duplicate=False)):
        if child is module:
            model.set_submodule(path, replacement)
