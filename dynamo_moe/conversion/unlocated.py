"""MoE layers that nothing but their attributes tell of: numbers of experts, or numbered experts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from dynamo_moe.conversion.identify_experts import LORAS, is_lora
from dynamo_moe.conversion.locate_layers import is_numbered, is_within, numbers_of_experts
from dynamo_moe.conversion.reports import Unrecognised


def unlocated_layers(
    modules: Sequence[tuple[str, nn.Module]], known: Collection[str]
) -> list[Unrecognised]:
    """Returns the modules with experts that are neither in a list nor stacks of matrices.

    Of a layer and its router, which both say so, it is the layer.

    Args:
        modules: A model's modules by path.
        known: The paths of modules that are MoE layers, or parts of some.
    """
    counts = {
        path: numbers_of_experts(_computing(module)) or _numbered_experts(module)
        for path, module in modules
    }
    found: list[Unrecognised] = []
    for path, module in modules:
        parent = path.rpartition(".")[0]
        of_parent = {*counts.get(parent, {}).values()} if path else set()
        if not counts[path] or not of_parent.isdisjoint(counts[path].values()):
            continue
        if not any(is_within(other, parent) or is_within(path, other) for other in known):
            found.append(Unrecognised(path, type(module).__name__, _reason(module)))
    return found


def _computing(module: nn.Module) -> nn.Module:
    """Returns the module that computes a module's result: another one, if its forward is that's."""
    owner = getattr(vars(module).get("forward"), "__self__", module)
    return owner if isinstance(owner, nn.Module) else module


def _numbered_experts(module: nn.Module) -> dict[str, int]:
    """Returns how many experts are attributes of their own, such as ``expert_1``, by the first."""
    names = [name for name, _ in module.named_children() if is_numbered(name)]
    return {names[0]: len(names)} if len(names) > 1 else {}


def _reason(module: nn.Module) -> str:
    computing = _computing(module)
    if any(map(is_lora, (type(computing).__name__, *dict(computing.named_parameters())))):
        return LORAS
    if computing is not module:
        return "its forward has been replaced in the instance"
    if numbered := _numbered_experts(module):
        [(name, count)] = numbered.items()
        return f"its {count} experts are attributes from {name!r} on: put them into a ModuleList"
    name, count = max(numbers_of_experts(module).items(), key=lambda item: item[1])
    return (
        f"its {count} experts ({name}) are neither modules in a list nor two or three stacks of as "
        "many matrices"
    )
