"""``convert``: walk the model, replace what an adapter recognises, name what none does."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dynamo_moe._modes import evaluating
from dynamo_moe.conversion._registry import Adapter, adapters
from dynamo_moe.modules import ConvertedModule

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["ConversionReport", "Replacement", "Unrecognised", "convert", "convertible_modules"]

# Relative to the RMS of the original's result, both in at least float32: a different activation or
# routing differs by 1e-1, another order of summation by 1e-6.
_PROBE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Replacement:
    """One module that was replaced.

    Attributes:
        module: Its path in the model.
        adapter: The adapter that recognised it.
        original: Its class's name.
        compared: Whether the two were seen to give the same numbers; False where the module could
            not run, as on the meta device.
    """

    module: str
    adapter: str
    original: str
    compared: bool


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

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain lists and dictionaries, for JSON."""
        return asdict(self)

    def __rich__(self) -> Table:
        """Returns a table for the terminal."""
        from rich.markup import escape
        from rich.table import Table

        plural = "" if len(self.replaced) == 1 else "s"
        title = f"{len(self.replaced)} MoE module{plural} replaced"
        table = Table(title=title, title_justify="left")
        for column in ("module", "was", "now"):
            table.add_column(column)
        for replacement in self.replaced:
            how = "same numbers" if replacement.compared else "not compared"
            now = f"{replacement.adapter} ({how})"
            table.add_row(replacement.module, replacement.original, now)
        for left in self.unrecognised:
            table.add_row(left.module, left.original, f"[yellow]left: {escape(left.reason)}[/]")
        return table


def convert(model: nn.Module, *, experts_dtype: torch.dtype | None = None) -> ConversionReport:
    """Replaces a model's MoE modules, in place, by modules on ``torch.ops.moe``.

    Each module is recognised by its structure, and replaced only if its replacement gives the
    same numbers on a few random tokens, in evaluation mode: what a module does in training
    besides, such as an auxiliary loss, is not in the replacement. The parameters are shared, not
    copied.

    Args:
        model: The model; its parameters stay where they are.
        experts_dtype: Cast the experts' weights, also of modules converted before, to this dtype;
            the routers keep theirs.

    Returns:
        What was replaced, and which modules look like a mixture of experts but were not
        recognised, with the reason.

    Raises:
        ValueError: If ``model`` itself is the MoE module, which cannot be replaced in place.
        TypeError: If ``experts_dtype`` is not a floating dtype.

    Example:
        >>> import torch
        >>> from dynamo_moe.models import DroplessMoEMlp
        >>> model = torch.nn.Sequential(DroplessMoEMlp(8, 16, num_experts=4, top_k=2))
        >>> [replacement.module for replacement in convert(model).replaced]
        ['0']
    """
    if experts_dtype is not None and not experts_dtype.is_floating_point:
        raise TypeError(f"experts_dtype must be a floating dtype, got {experts_dtype}")
    if _find_adapter(model) is not None:
        raise ValueError("the model itself is an MoE module: wrap it, as in nn.Sequential(model)")
    replaced, unrecognised = [], []
    handled: set[nn.Module] = set()
    for path, module in list(model.named_modules()):
        if module in handled:
            continue
        adapter = _find_adapter(module)
        if adapter is None:
            reason = _why_it_looks_like_moe(module)
        else:
            compared, reason = _compare(adapter, module)
            if reason is None:
                _replace(model, module, adapter.convert(module).train(module.training))
                replaced.append(Replacement(path, adapter.name, type(module).__name__, compared))
        if adapter is not None or reason is not None:
            handled.update(module.modules())
        if reason is not None:
            unrecognised.append(Unrecognised(path, type(module).__name__, reason))
    if experts_dtype is not None:
        _cast_experts(model, experts_dtype)
    return ConversionReport(tuple(replaced), tuple(unrecognised))


def convertible_modules(model: nn.Module) -> list[str]:
    """Returns the paths of the modules that :func:`convert` would try to replace."""
    return [path for path, module in model.named_modules() if _find_adapter(module)]


def _find_adapter(module: nn.Module) -> Adapter | None:
    if isinstance(module, ConvertedModule):
        return None
    return next((a for a in adapters() if a.recognise(module) is None), None)


def _compare(adapter: Adapter, module: nn.Module) -> tuple[bool, str | None]:
    """Returns whether module and replacement were run, and None or what forbids to replace it."""
    if any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
        return False, "it has forward hooks, which its replacement would not run"
    if any(parameter.is_meta for parameter in module.parameters()):
        return False, None
    if any(parameter.dtype.itemsize < 4 for parameter in module.parameters()):
        # Near-ties of the router fall differently in half precision, whatever is computed.
        module = copy.deepcopy(module).float()
    replacement = adapter.convert(module)
    tokens = adapter.example_tokens(module)
    try:
        with torch.no_grad(), evaluating(module, replacement):
            expected, result = module(tokens), replacement(tokens)
    except Exception as failure:  # The module is the user's: anything can come out of it.
        return False, f"it has the shape of {adapter.name} but fails on tokens [T, D]: {failure}"
    if not isinstance(expected, torch.Tensor) or expected.shape != result.shape:
        return False, f"it has the shape of {adapter.name} but does not return one tensor [T, D]"
    scale = expected.double().square().mean().sqrt().clamp_min(1e-30)
    error = float((expected.double() - result.double()).abs().max() / scale)
    if not error <= _PROBE_TOLERANCE:
        return True, (
            f"it has the shape of {adapter.name} but computes something else: "
            f"relative error {error:.1e} on random tokens, above {_PROBE_TOLERANCE:.0e}"
        )
    return True, None


def _cast_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the experts' parameters of all converted modules; shared ones stay shared."""
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, ConvertedModule):
            for name, parameter in module.experts_parameters().items():
                if parameter not in cast:
                    half = parameter.detach().to(dtype)
                    cast[parameter] = nn.Parameter(half, parameter.requires_grad)
                setattr(module, name, cast[parameter])


def _replace(model: nn.Module, module: nn.Module, replacement: nn.Module) -> None:
    """Replaces the module at every place that holds it."""
    for path, child in list(model.named_modules(remove_duplicate=False)):
        if child is module:
            model.set_submodule(path, replacement)


def _why_it_looks_like_moe(module: nn.Module) -> str | None:
    """Returns why the module looks like a mixture of experts, or None."""
    if isinstance(module, ConvertedModule):
        return None
    children = dict(module.named_children())
    experts = children.get("experts")
    if isinstance(experts, nn.ModuleList):
        return f"holds a list of {len(experts)} experts; no adapter knows its structure"
    stacked = [
        name for name, p in module.named_parameters(recurse=False) if p.ndim == 3 and p.shape[0] > 1
    ]
    counts = {getattr(module, name).shape[0] for name in stacked}
    routed = {"router", "gate", "top_k", "num_experts"} & {*children, *vars(module)}
    if len(stacked) >= 2 and len(counts) == 1 and routed:
        return (
            f"stacks {counts.pop()} experts in {', '.join(stacked)}; no adapter knows its structure"
        )
    return None
