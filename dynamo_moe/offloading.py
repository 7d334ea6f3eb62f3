"""``offload``: a converted model whose experts do not fit on the GPU.

Legend: E experts, R of which a layer has on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

import custom_ops
from custom_ops.residency import cache_bytes
from dynamo_moe.conversion import transformers_experts
from dynamo_moe.conversion.layer_spec import ConvertedLayer
from dynamo_moe.modules import ConvertedModule


def offload(
    model: nn.Module,
    resident_experts: int | Mapping[str, int] | None = None,
    *,
    memory: int | None = None,
    device: torch.device | str = "cuda",
) -> dict[str, int]:
    """Moves the experts of a converted model to host memory, and all else to a CUDA device.

    The device keeps R experts of each layer. A call copies those that it needs and that are not
    there in place of those that were used the longest time ago, and computes the same bits as with
    all of them there. Nothing waits for the host; a CUDA graph captures the model once it has run.
    Each layer takes :func:`custom_ops.residency.cache_bytes` of the device's memory.

    The weights are pinned, for which PyTorch may take up to twice their size of host memory. From
    then on the model computes forward only; it must not be moved, and its experts not change. Call
    it again for another R.

    Args:
        model: The model, after :func:`convert`, wherever it is.
        resident_experts: R, or R by the path of a layer; layers that the mapping leaves out move to
            the device. A layer with fewer experts takes all of them.
        memory: Instead of R: as many experts, the same number in each layer, as fit in so many
            bytes of the device's memory.
        device: Where the model computes.

    Returns:
        R of each layer by its path.

    Raises:
        ValueError: If there is no layer, or none of a path; if not exactly one of
            ``resident_experts`` and ``memory`` is given; if R is below 1, or ``memory`` is too
            little for an expert of each layer; or if a layer's weights do not lie in memory as the
            operators read them, such as gate and up in stacks of their own.
    """
    if (resident_experts is None) == (memory is None):
        raise ValueError("offload needs either resident_experts or memory")
    layers = _layers(model)
    if isinstance(resident_experts, Mapping):
        unknown = [path for path in resident_experts if path not in layers]
        if unknown:
            raise ValueError(f"no layers {unknown}; there are {[*layers]}")
        layers = {path: layers[path] for path in resident_experts}
    if not layers:
        raise ValueError("the model has no layers on torch.ops.moe; convert it first")
    weights = {path: _weights(path, module) for path, module in layers.items()}
    if memory is not None:
        resident_experts = _fitting(weights.values(), memory)
    residents = _residents(weights, resident_experts)

    experts = [weight for pair in weights.values() for weight in pair]
    parts: dict[int, list[Tensor]] = {weight.data_ptr(): [] for weight in experts}
    by_storage: dict[int, list[Tensor]] = {}
    for weight in experts:
        by_storage.setdefault(weight.untyped_storage().data_ptr(), []).append(weight)
    for each in chain(model.parameters(), model.buffers()):
        near = by_storage.get(each.untyped_storage().data_ptr(), ())
        around = next((weight for weight in near if _is_part(each, weight)), None)
        if around is None:
            each.data = each.data.to(device)
        else:
            parts[around.data_ptr()].append(each)
    for path, pair in weights.items():
        w1, w2 = (_pinned(weight, parts[weight.data_ptr()]) for weight in pair)
        module = layers[path]
        if isinstance(module, ConvertedLayer):
            module.keep_weights(w1, w2, device)
        custom_ops.offload_experts(w1, w2, residents[path], device)
    return residents


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, ConvertedModule) or transformers_experts.is_selected(module)
    }


def _weights(path: str, module: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns w1 and w2 as they lie in the memory of parameters, ``[E, ...]`` each."""
    if isinstance(module, ConvertedModule):
        parameters = module.experts_parameters()
    else:
        parameters = transformers_experts.experts_parameters(module)
    w1: Tensor
    w2: Tensor
    if isinstance(module, ConvertedLayer):
        w1, w2 = module.kept_weights()
    else:
        w1, w2 = (each for each in parameters.values() if each.ndim == 3)
    memory = {each.untyped_storage().data_ptr() for each in parameters.values()}
    for weight in (w1, w2):
        if weight.untyped_storage().data_ptr() not in memory:
            raise ValueError(
                f"the experts of {path!r} cannot be offloaded: their weights do not lie as the "
                "operators read them, which therefore take a copy"
            )
    return w1.detach(), w2.detach()


def _residents(
    weights: Mapping[str, tuple[Tensor, Tensor]], given: int | Mapping[str, int] | None
) -> dict[str, int]:
    residents = {}
    for path, (w1, _) in weights.items():
        slots = given[path] if isinstance(given, Mapping) else given
        if slots is None or slots < 1:
            raise ValueError(f"resident_experts must be at least 1, got {slots} for {path!r}")
        residents[path] = min(slots, w1.shape[0])
    return residents


def _fitting(weights: Iterable[tuple[Tensor, Tensor]], memory: int) -> int:
    """Returns the largest R with which the caches of all layers fit."""
    pairs = [*weights]

    def taken(resident: int) -> int:
        return sum(
            cache_bytes(len(w1), min(resident, len(w1)), w1[0].nbytes, w2[0].nbytes)
            for w1, w2 in pairs
        )

    most = max(len(w1) for w1, _ in pairs)
    fitting = next((each for each in range(most, 0, -1) if taken(each) <= memory), None)
    if fitting is None:
        raise ValueError(
            f"one expert of each layer takes {taken(1):,} bytes of the device's memory, more than "
            f"memory={memory:,}"
        )
    return fitting


def _is_part(tensor: Tensor, weight: Tensor) -> bool:
    """Whether all of a tensor lies in a weight's memory, both being dense."""
    first = tensor.data_ptr() - weight.data_ptr()
    return 0 <= first <= weight.nbytes - tensor.nbytes


def _pinned(weight: Tensor, parts: Iterable[Tensor]) -> Tensor:
    """Returns a weight in pinned memory, into which the parameters that lie in it move too."""
    start = weight.storage_offset()
    memory = weight.as_strided((weight.numel(),), (1,), start)
    pinned = memory if memory.is_pinned() else memory.cpu().pin_memory()
    first = pinned.storage_offset() - start
    for each in parts:
        each.data = pinned.as_strided(each.shape, each.stride(), first + each.storage_offset())
    return pinned.as_strided(weight.shape, weight.stride(), first + start)
