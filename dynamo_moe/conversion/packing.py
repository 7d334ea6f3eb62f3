"""The weights of converted layers, and those that a checkpoint has packed, which stay packed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from custom_ops.expert_weights import ExpertWeights
from custom_ops.options import ExpertOptions
from dynamo_moe import local_experts, packed_experts
from dynamo_moe.conversion import transformers_experts
from dynamo_moe.conversion.layer_spec import ConvertedLayer
from dynamo_moe.local_experts import PlainExperts
from dynamo_moe.modules import ConvertedModule
from dynamo_moe.packed_experts import PackedExperts
from dynamo_moe.weights.packed_tensors import is_decoding, packed_pair


def converted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns all modules on ``torch.ops.moe``, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, ConvertedModule) or transformers_experts.is_selected(module)
    }


def experts_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a layer's experts by their path in it; none if they are packed.

    Of a layer that is sharded, these are the rank's.
    """
    if packed_experts.of(layer) is not None:
        return {}
    local = local_experts.of(layer)
    if local is not None:
        prefix = f"{local_experts.NAME}.part"
        return {f"{prefix}.{name}": weight for name, weight in local.part.named_parameters()}
    if isinstance(layer, ConvertedModule):
        return layer.experts_parameters()
    return transformers_experts.experts_parameters(layer)


def experts_weights(layer: nn.Module) -> ExpertWeights:
    """Returns the weights of a layer's experts as the operators take them; not of packed ones.

    Of a layer that is sharded, these are the rank's.
    """
    local = local_experts.of(layer)
    if local is not None and isinstance(local.part, PlainExperts):
        return local.part.weights()
    if isinstance(layer, ConvertedModule):
        return layer.experts_weights()
    return transformers_experts.experts_weights(layer)


def keep_packed(model: nn.Module) -> dict[str, str]:
    """Gives layers whose weights a checkpoint has packed these in the place of decoded ones.

    Returns:
        A note of each layer that has quantised weights, by its path.
    """
    notes = {}
    layers = {
        path: layer
        for path, layer in converted_layers(model).items()
        if any(map(is_decoding, experts_parameters(layer).values()))
    }
    shared = shared_weights(model, layers)
    for path, layer in layers.items():
        packed = None if path in shared else _packed_experts(layer)
        if packed is None:
            reason = shared.get(path, "not all of them are packed, or not alike")
            notes[path] = f"its experts are decoded: {reason}"
            continue
        notes[path] = f"its experts stay packed ({packed.weight_format})"
        if packed.w1_order is not None:
            notes[path] += ", with columns in the order of their groups"
        pack_layer(layer, packed)
    return notes


def _packed_experts(layer: nn.Module) -> PackedExperts | None:
    """Returns a layer's experts as a checkpoint has packed them; None if they have no such form."""
    try:
        weights = experts_weights(layer)
    except NotImplementedError:  # An adapter of somebody else's, without experts_weights.
        return None
    pair = packed_pair(weights.w1, weights.w2)
    if pair is None:
        return None
    first, second = pair
    w1, b1 = first.packed, weights.b1
    if second.order is not None:
        options = _experts_options(layer)
        if options is None:
            return None
        rows_EF = _rows_in_order(second.order, options)
        w1 = w1.each(partial(_in_order, rows_EF))
        b1 = None if b1 is None else _in_order(rows_EF, b1)
    b1, b2 = (None if bias is None else bias.detach() for bias in (b1, weights.b2))
    return PackedExperts(first.encoding, w1, b1, second.packed, b2, first.order)


def _experts_options(layer: nn.Module) -> ExpertOptions | None:
    if isinstance(layer, ConvertedModule):
        return layer.experts_options()
    return transformers_experts.experts_options(layer)


def _rows_in_order(order_EH: Tensor, options: ExpertOptions) -> Tensor:
    """Returns the rows ``[E, F]`` of ``w1`` that give hidden units in an order."""
    if not options.gated:
        return order_EH
    if options.interleaved:
        return torch.stack((2 * order_EH, 2 * order_EH + 1), dim=-1).flatten(1)
    return torch.cat((order_EH, order_EH + order_EH.shape[1]), dim=1)


def _in_order(rows_EF: Tensor, tensor: Tensor) -> Tensor:
    """Returns ``[E, F, ...]`` with each expert's rows in an order; experts are read one by one."""
    experts = range(tensor.shape[0])
    return torch.stack([tensor[e].index_select(0, rows_EF[e]) for e in experts])


def shared_weights(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Returns the layers whose experts' weights are not theirs alone, with what shares them.

    Args:
        model: The model.
        layers: Some of its converted layers, by path.
    """
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(f"{path}." if path else "")
    owners: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(path)
    shared: dict[str, str] = {}
    for path, layer in layers.items():
        prefix = f"{path}." if path else ""
        for name, parameter in experts_parameters(layer).items():
            own = tuple(paths[id(layer)])
            others = [p for p in owners.get(id(parameter), []) if not p.startswith(own)]
            if others:
                shared.setdefault(path, f"{prefix}{name} is also {others[0]}")
    return shared


def pack_layer(layer: nn.Module, packed: PackedExperts) -> None:
    """Gives a layer packed experts in the place of its own, which it releases."""
    packed_experts.pack(layer, packed, [*experts_parameters(layer)])
    if isinstance(layer, ConvertedLayer):
        layer.forget_weights()
