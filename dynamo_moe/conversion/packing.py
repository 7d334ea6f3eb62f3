"""The weights of converted layers, and those that a checkpoint has packed, which stay packed."""

from __future__ import annotations

from torch import nn

from custom_ops.expert_weights import ExpertWeights
from dynamo_moe.conversion import transformers_experts
from dynamo_moe.modules import ConvertedModule
from dynamo_moe.packed_experts import PackedExperts, pack
from dynamo_moe.weights.lazy_tensors import LazyTensor
from dynamo_moe.weights.quantized import packed_weight


def converted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns all modules on ``torch.ops.moe``, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, ConvertedModule) or transformers_experts.is_selected(module)
    }


def experts_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a layer's experts by their path in it; none if they are packed."""
    if isinstance(layer, ConvertedModule):
        return layer.experts_parameters()
    return transformers_experts.experts_parameters(layer)


def experts_weights(layer: nn.Module) -> ExpertWeights:
    """Returns the weights of a layer's experts as the operators take them; not of packed ones."""
    if isinstance(layer, ConvertedModule):
        return layer.experts_weights()
    return transformers_experts.experts_weights(layer)


def keep_packed(model: nn.Module) -> dict[str, str]:
    """Gives layers whose weights a checkpoint has packed these in the place of decoded ones.

    Returns:
        The formats, by the layers' paths.
    """
    kept = {}
    for path, layer in converted_layers(model).items():
        lazy = any(isinstance(p, LazyTensor) for p in experts_parameters(layer).values())
        if not lazy:
            continue
        weights = experts_weights(layer)
        first, second = packed_weight(weights.w1), packed_weight(weights.w2)
        if first is None or second is None or first[0] != second[0]:
            continue
        kept[path], w1 = first
        experts = PackedExperts(kept[path], w1, weights.b1, second[1], weights.b2)
        pack(layer, experts, [*experts_parameters(layer)])
    return kept
