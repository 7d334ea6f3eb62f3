"""An export's warnings of MoE modules that are not converted, or not called as converted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.utils import parametrize

from dynamo_moe.conversion.convert_model import convertible_modules
from dynamo_moe.conversion.layer_spec import ConvertedLayer
from dynamo_moe.conversion.reports import ADAPTER_PAGE, Unrecognised, few
from dynamo_moe.modules import ConvertedModule
from dynamo_moe.private.pytorch import modules_by_path

# How many names a message of one line has.
_SHOWN = 3
_WHAT_TO_DO = f"dynamo_moe.convert(model) converts them or says why not ({ADAPTER_PAGE})"


def unconverted_modules(model: nn.Module) -> tuple[Unrecognised, ...]:
    """Returns the modules that look like a mixture of experts and are not converted, in order."""
    return tuple(
        Unrecognised(path, type(model.get_submodule(path)).__name__, "not converted")
        for path in convertible_modules(model)
        if model.get_submodule(path) not in _unused(model)
    )


def converted_modules(model: nn.Module) -> list[str]:
    """Returns the paths of the converted modules that a model's forward may call."""
    unused = _unused(model)
    return [
        path
        for path, module in modules_by_path(model)
        if isinstance(module, ConvertedModule) and module not in unused
    ]


def _unused(model: nn.Module) -> set[nn.Module]:
    """Returns the modules that a forward, put in place of the model's own, says it never calls."""
    unused: nn.Module | None = getattr(model.forward, "unused", None)
    return set() if unused is None else set(unused.modules())


def own_forward_warning(paths: Sequence[str]) -> str:
    """Returns the warning that converted modules have no node in a file, in one line."""
    which = few([repr(path) for path in paths], _SHOWN)
    return (
        f"{len(paths)} converted module{' is' if len(paths) == 1 else 's are'} called otherwise "
        f"than compared, or not at all, so each is many nodes, of its own forward: {which}"
    )


def training_warning(model: nn.Module) -> str:
    """Returns the warning that converted modules are in training mode, or an empty string."""
    named = model.named_modules()
    paths = [
        path for path, module in named if isinstance(module, ConvertedLayer) and module.training
    ]
    if not paths:
        return ""
    which = few([repr(path) for path in paths], _SHOWN)
    return (
        f"{len(paths)} converted module{' is' if len(paths) == 1 else 's are'} in training mode, "
        f"so each is many nodes, of its own forward: {which}; call eval() of what computes the "
        "same there"
    )


def listing(modules: Sequence[Unrecognised]) -> str:
    """Returns the first few modules by path and class, and how many more there are."""
    return few([f"{left.module!r} ({left.original})" for left in modules], _SHOWN)


def warning(left: Sequence[Unrecognised]) -> str:
    """Returns the warning that a file holds unconverted modules, in one line."""
    return f"{_are_not_converted(left)}, so each is many nodes: {listing(left)}; {_WHAT_TO_DO}"


def hint(left: Sequence[Unrecognised], model: nn.Module) -> str:
    """Returns possible causes of a failed export, or an empty string."""
    cause = f"{_are_not_converted(left)}, which is often why: {listing(left)}; {_WHAT_TO_DO}."
    return " ".join(filter(None, (cause if left else "", merge_hint(model))))


def merge_hint(model: nn.Module) -> str:
    """Returns a sentence about weights that are not merged; empty if there are none."""
    unmerged = [
        repr(path) for named_module in model.named_modules() for path in _unmerged(*named_module)
    ]
    if not unmerged:
        return ""
    how = (
        "merge them first, in peft by model.merge_and_unload(), else by "
        "torch.nn.utils.parametrize.remove_parametrizations()"
    )
    return f"Each forward computes some weights anew, as LoRA does: {few(unmerged, _SHOWN)}; {how}."


def _unmerged(path: str, module: nn.Module) -> Iterator[str]:
    if hasattr(module, "lora_A") and hasattr(module, "lora_B"):  # A layer of peft.
        if not getattr(module, "merged", False):
            yield path
    elif parametrize.is_parametrized(module) and isinstance(module.parametrizations, nn.ModuleDict):
        yield from (f"{path}.{name}".lstrip(".") for name in module.parametrizations)


def _are_not_converted(left: Sequence[Unrecognised]) -> str:
    return f"{len(left)} MoE module{' is' if len(left) == 1 else 's are'} not converted"
