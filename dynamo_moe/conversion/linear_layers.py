"""The linear layers of a model beside its experts: which can be packed, and why others cannot."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from dynamo_moe import local_experts, packed_experts
from dynamo_moe.conversion.packing import experts_parameters, experts_weights
from dynamo_moe.modules import ConvertedModule
from dynamo_moe.weights.lazy_tensors import LazyTensor
from dynamo_moe.weights.packed_linear import PackedLinear
from dynamo_moe.weights.packed_tensors import is_decoding


def linear_layers(
    model: nn.Module, layers: Mapping[str, nn.Module], ignore: Collection[str]
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Returns the linear layers that can be packed, and the others with the reason, by path.

    Those of experts are in neither.

    Args:
        model: The model.
        layers: Its converted layers, by path.
        ignore: Patterns of layers that are not to be packed.

    Raises:
        ValueError: If a pattern fits no linear layer; that of a head, which not all models have,
            may.
    """
    of_experts = {
        id(parameter)
        for layer in layers.values()
        for parameter in experts_parameters(layer).values()
    }
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    experts = {path: _scope(path, layer) for path, layer in layers.items()}
    found: dict[str, nn.Linear] = {}
    plain: dict[str, str] = {}
    seen: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if isinstance(module, PackedLinear):
            plain[path] = "it was packed already"
        elif weight is None or id(weight) in of_experts:
            continue
        elif any(fits(path, pattern) for pattern in ignore):
            plain[path] = "it is to be ignored"
        elif reason := _reason(path, module, weight, owners[id(weight)]):
            plain[path] = reason
        elif any(_is_router(path, module, scope, layers[p]) for p, scope in experts.items()):
            plain[path] = "it is a router"
        else:
            found[path] = module
        seen.append(path)
    for pattern in ignore:
        if pattern not in IGNORED and not any(fits(path, pattern) for path in seen):
            raise ValueError(f"ignore has {pattern!r}, which is no linear layer of the model")
    return found, plain


IGNORED = ("lm_head",)
"""The layers that stay where a user names none: language models' heads."""


def fits(path: str, pattern: str) -> bool:
    """Whether a pattern describes a path, or the last parts of it.

    >>> fits("model.layers.0.mlp.up_proj", "mlp.*"), fits("model.lm_head", "head")
    (True, False)
    """
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


def _reason(path: str, module: nn.Linear, weight: Tensor, owners: Collection[str]) -> str:
    """Says why a layer cannot be packed; nothing if it can."""
    others = [name for name in owners if name.rpartition(".")[0] != path]
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}"
    if others:
        return f"its weight is {others[0]} too"
    if is_decoding(weight):
        return "it is packed in the checkpoint"
    if type(weight.data) not in (Tensor, LazyTensor) or not weight.is_floating_point():
        return f"its weight is a {type(weight.data).__name__} of {weight.dtype}"
    return ""


def _scope(path: str, layer: nn.Module) -> str:
    """Returns the path of the module that has a converted layer's experts and their router."""
    return path if isinstance(layer, ConvertedModule) else path.rpartition(".")[0]


def _is_router(path: str, module: nn.Linear, scope: str, layer: nn.Module) -> bool:
    """Whether a layer gives a score to each of the experts beside it, or one to all of them."""
    inside = not scope or path.startswith(f"{scope}.")
    return inside and module.out_features in (1, _experts(layer))


def _experts(layer: nn.Module) -> int:
    local = local_experts.of(layer)
    if local is not None:
        return local.total
    packed = packed_experts.of(layer)
    if packed is not None:
        return len(packed.packed_weights()[0].values)
    return len(experts_weights(layer).w1)
