"""``convert``: walk the model, replace what an adapter recognises, name what none does."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dynamo_moe.conversion._registry import Adapter, adapters

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["ConversionReport", "Replacement", "Unrecognised", "convert", "convertible_modules"]

# Relative to the RMS of the original's result: a different activation or routing differs by 1e-1,
# another order of summation by 1e-6 (float32) or 1e-2 (half precision).
_PROBE_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
_PROBE_TOLERANCE_HALF = 5e-2


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
        from rich.table import Table

        table = Table(title=f"{len(self.replaced)} MoE modules replaced", title_justify="left")
        for column in ("module", "was", "now"):
            table.add_column(column)
        for replacement in self.replaced:
            how = "same numbers" if replacement.compared else "not compared"
            now = f"{replacement.adapter} ({how})"
            table.add_row(replacement.module, replacement.original, now)
        for left in self.unrecognised:
            table.add_row(left.module, left.original, f"[yellow]left: {left.reason}[/]")
        return table


def convert(model: nn.Module, *, experts_dtype: torch.dtype | None = None) -> ConversionReport:
    """Replaces a model's MoE modules, in place, by modules on ``torch.ops.moe``.

    Each module is recognised by its structure, and replaced only if its replacement gives the
    same numbers on a few random tokens. The parameters are shared, not copied.

    Args:
        model: The model; its parameters stay where they are.
        experts_dtype: Cast the experts' weights to this dtype; the routers keep theirs.

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
            replacement = adapter.convert(module).train(module.training)
            compared, reason = _compare(adapter, module, replacement)
            if reason is None:
                if experts_dtype is not None:
                    replacement.experts_to(experts_dtype)  # type: ignore[operator]
                _replace(model, module, replacement)
                name = type(module).__name__
                replaced.append(Replacement(path, adapter.name, name, compared))
        if adapter is not None or reason is not None:
            handled.update(module.modules())
        if reason is not None:
            unrecognised.append(Unrecognised(path, type(module).__name__, reason))
    return ConversionReport(tuple(replaced), tuple(unrecognised))


def convertible_modules(model: nn.Module) -> list[str]:
    """Returns the paths of the modules that :func:`convert` would try to replace."""
    return [path for path, module in model.named_modules() if _find_adapter(module)]


def _find_adapter(module: nn.Module) -> Adapter | None:
    from dynamo_moe.modules import DroplessMoE

    if isinstance(module, DroplessMoE):
        return None
    return next((a for a in adapters() if a.recognise(module) is None), None)


def _compare(
    adapter: Adapter, module: nn.Module, replacement: nn.Module
) -> tuple[bool, str | None]:
    """Returns whether the two were run, and None or how they differ."""
    tokens = adapter.example_tokens(module)
    if tokens.is_meta:
        return False, None
    training = module.training
    try:
        with torch.no_grad():
            expected, result = module.eval()(tokens), replacement.eval()(tokens)
    except Exception as failure:  # The module is the user's: anything can come out of it.
        return False, f"it has the shape of {adapter.name} but fails on tokens [T, D]: {failure}"
    finally:
        module.train(training)
        replacement.train(training)
    if not isinstance(expected, torch.Tensor) or expected.shape != result.shape:
        return False, f"it has the shape of {adapter.name} but does not return one tensor [T, D]"
    scale = expected.double().square().mean().sqrt().clamp_min(1e-30)
    error = float((expected.double() - result.double()).abs().max() / scale)
    limit = _PROBE_TOLERANCE.get(tokens.dtype, _PROBE_TOLERANCE_HALF)
    if not error <= limit:
        return True, (
            f"it has the shape of {adapter.name} but computes something else: "
            f"relative error {error:.1e} on random tokens, above {limit:.0e}"
        )
    return True, None


def _replace(model: nn.Module, module: nn.Module, replacement: nn.Module) -> None:
    """Replaces the module at every place that holds it."""
    for path, child in list(model.named_modules(remove_duplicate=False)):
        if child is module:
            model.set_submodule(path, replacement)


def _why_it_looks_like_moe(module: nn.Module) -> str | None:
    """Returns why the module looks like a mixture of experts, or None."""
    from dynamo_moe.modules import DroplessMoE

    if isinstance(module, DroplessMoE):
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
