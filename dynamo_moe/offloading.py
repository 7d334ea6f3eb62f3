"""``offload``: a converted model whose experts do not fit on the GPU.

Legend: E experts, R of which a layer has on the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

import custom_ops
from custom_ops.offload import cache_bytes
from dynamo_moe import local_experts, packed_experts
from dynamo_moe.conversion.layer_spec import ConvertedLayer
from dynamo_moe.conversion.packing import converted_layers, experts_parameters


# Weights made in inference mode would not count their changes.
@torch.inference_mode(mode=False)
@torch.no_grad()
def offload(
    model: nn.Module,
    resident_experts: int | Mapping[str, int] | None = None,
    *,
    memory: int | None = None,
    device: torch.device | str = "cuda",
) -> dict[str, int]:
    """Moves the experts of a converted model to host memory, and all else to a CUDA device.

    Of a model that is sharded, these are the rank's own experts.

    The device keeps R experts of each layer. A call copies those that it needs and that are not
    there in place of those that were used the longest time ago, and computes the same bits as with
    all of them there. Nothing waits for the host; a CUDA graph captures the model once it has run.
    Each layer takes :func:`custom_ops.offload.cache_bytes` of the device's memory.

    The weights are pinned, for which PyTorch may take up to twice their size of host memory, and
    each layer's old memory is given back before the next layer's is taken. Should that fail, the
    model computes where it was, and calling it again resumes. From then on the model computes
    forward only, and must not be moved. Call it again for another R, but not while the device
    computes; CUDA graphs of the model must then be captured anew.

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
        TypeError: If R is no integer.
    """
    if (resident_experts is None) == (memory is None):
        raise ValueError("offload needs either resident_experts or memory")
    layers = converted_layers(model)
    if not layers:
        raise ValueError("the model has no layers on torch.ops.moe; convert it first")
    if isinstance(resident_experts, Mapping):
        unknown = [path for path in resident_experts if path not in layers]
        if unknown:
            raise ValueError(f"no layers {unknown}; there are {[*layers]}")
        if not resident_experts:
            raise ValueError(f"resident_experts names none of the layers {[*layers]}")
        layers = {path: layers[path] for path in resident_experts}
    sizes = {path: _sizes(path, module) for path, module in layers.items()}
    if memory is not None:
        resident_experts = _fitting(sizes.values(), memory)
    residents = _residents(sizes, resident_experts)

    near = _by_storage(chain(model.parameters(), model.buffers()))
    weights = {path: _pin(path, module, near) for path, module in layers.items()}
    around = _by_storage(chain.from_iterable(weights.values()))
    for tensor in chain(model.parameters(), model.buffers()):
        if not any(_is_part(tensor, weight) for weight in around[_storage(tensor)]):
            tensor.data = tensor.data.to(device)
    for path, moved in weights.items():
        module = layers[path]
        packed = packed_experts.of(module)
        if packed is None:
            w1, w2 = moved
            if _keeps_weights(module):
                module.keep_weights(w1, w2)
            custom_ops.offload_experts(w1, w2, residents[path], device)
        else:
            custom_ops.offload_experts(*packed.packed_weights(), residents[path], device)
    return residents


class _Sizes(NamedTuple):
    """E, and the bytes of one expert's part of each tensor that stores w1 or w2."""

    experts: int
    tensor_bytes: tuple[int, ...]

    def cache(self, resident: int) -> int:
        return cache_bytes(self.experts, min(resident, self.experts), self.tensor_bytes)


def _weights(path: str, module: nn.Module) -> tuple[Tensor, ...]:
    """Returns what stores w1 and w2 as it lies in the memory of parameters, ``[E, ...]`` each."""
    packed = packed_experts.of(module)
    if packed is not None:
        return tuple(each for w in packed.packed_weights() for each in w if each is not None)
    parameters = experts_parameters(module)
    w1: Tensor
    w2: Tensor
    if _keeps_weights(module):
        w1, w2 = module.kept_weights()
    else:
        w1, w2 = (parameter for parameter in parameters.values() if parameter.ndim == 3)
    memory = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
    for weight in (w1, w2):
        if weight.untyped_storage().data_ptr() not in memory:
            raise ValueError(
                f"the experts of {path!r} cannot be offloaded: their weights do not lie as the "
                "operators read them, which therefore take a copy"
            )
    return w1.detach(), w2.detach()


def _keeps_weights(module: nn.Module) -> TypeGuard[ConvertedLayer]:
    """Whether a layer's own weights are made of its parameters: not packed, nor a rank's share."""
    return (
        isinstance(module, ConvertedLayer)
        and packed_experts.of(module) is None
        and local_experts.of(module) is None
    )


def _sizes(path: str, module: nn.Module) -> _Sizes:
    weights = _weights(path, module)
    return _Sizes(len(weights[0]), tuple(weight[0].nbytes for weight in weights))


def _residents(
    sizes: Mapping[str, _Sizes], requested: int | Mapping[str, int] | None
) -> dict[str, int]:
    residents = {}
    for path, size in sizes.items():
        slots = requested[path] if isinstance(requested, Mapping) else requested
        if isinstance(slots, bool) or not isinstance(slots, int):
            raise TypeError(f"resident_experts must be an integer, got {slots!r} for {path!r}")
        if slots < 1:
            raise ValueError(f"resident_experts must be at least 1, got {slots} for {path!r}")
        residents[path] = min(slots, size.experts)
    return residents


def _fitting(sizes: Iterable[_Sizes], memory: int) -> int:
    """Returns the largest R with which the caches of all layers fit."""
    layers = [*sizes]

    def taken(resident: int) -> int:
        return sum(size.cache(resident) for size in layers)

    most = max(size.experts for size in layers)
    fitting = next((count for count in range(most, 0, -1) if taken(count) <= memory), None)
    if fitting is None:
        raise ValueError(
            f"one expert of each layer takes {taken(1):,} bytes of the device's memory, more than "
            f"memory={memory:,}"
        )
    return fitting


def _by_storage(tensors: Iterable[Tensor]) -> defaultdict[int, list[Tensor]]:
    by_storage = defaultdict(list)
    for tensor in tensors:
        by_storage[_storage(tensor)].append(tensor)
    return by_storage


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_part(tensor: Tensor, weight: Tensor) -> bool:
    """Whether all of a tensor lies in a weight's memory, both being dense."""
    first = tensor.data_ptr() - weight.data_ptr()
    return 0 <= first <= weight.nbytes - tensor.nbytes


def _pin(path: str, module: nn.Module, near: Mapping[int, list[Tensor]]) -> tuple[Tensor, ...]:
    """Moves a layer's weights to pinned memory, and returns them; nothing keeps the old memory.

    Args:
        path: The layer's.
        module: The layer.
        near: The model's parameters and buffers by their storage.
    """
    weights = _weights(path, module)
    # Both before a parameter moves, so that a failure leaves the layer as it was.
    pinned = [_pinned(weight) for weight in weights]
    moved = tuple(
        _moved(weight, memory, near[_storage(weight)])
        for weight, memory in zip(weights, pinned, strict=True)
    )
    if _keeps_weights(module):
        module.keep_weights(*moved)
    return moved


def _pinned(weight: Tensor) -> Tensor:
    """Returns a weight's numbers as they lie, in pinned memory: its own, if that is."""
    memory = weight.as_strided((weight.numel(),), (1,))
    return memory if memory.is_pinned() else memory.cpu().pin_memory()


def _moved(weight: Tensor, pinned: Tensor, near: Iterable[Tensor]) -> Tensor:
    """Returns a weight in pinned memory, into which the parameters that lie in it move too."""
    first = pinned.storage_offset() - weight.storage_offset()
    for tensor in [tensor for tensor in near if _is_part(tensor, weight)]:
        tensor.data = pinned.as_strided(
            tensor.shape, tensor.stride(), first + tensor.storage_offset()
        )
    return pinned.as_strided(weight.shape, weight.stride(), pinned.storage_offset())
