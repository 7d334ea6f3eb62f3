"""Weights that torchao has quantised: converted as the numbers they stand for, and then packed.

Legend: N rows (out), K columns (in) of a matrix, R and C its blocks that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from custom_ops.packed_weights import ENCODINGS, PackedWeight
from dynamo_moe import packed_experts
from dynamo_moe.conversion.packing import converted_layers, experts_parameters
from dynamo_moe.conversion.reports import Replacement, Unrecognised
from dynamo_moe.weights.lazy_tensors import LazyTensor
from dynamo_moe.weights.packed_tensors import decoded
from dynamo_moe.weights.rounding import packed_pairs


@dataclass(frozen=True)
class _Weight:
    """A parameter of torchao's.

    Attributes:
        owner: The module that has it.
        name: Its name there.
        parameter: What torchao made of it.
        encoding: What it is packed as; "": in no way that the operators have.
        packed: The tensors, if it is.
        reason: Else, why not.
    """

    owner: nn.Module
    name: str
    parameter: nn.Parameter
    encoding: str = ""
    packed: PackedWeight | None = None
    reason: str = ""

    def put(self, value: Tensor) -> None:
        """Puts a parameter in its place."""
        self.owner.register_parameter(self.name, nn.Parameter(value, requires_grad=False))

    def lazy(self, packed: PackedWeight) -> LazyTensor:
        """Returns the matrix of the packed tensors, decoded when it is read."""
        shape, dtype = tuple(self.parameter.shape), self.parameter.dtype
        return decoded(self.encoding, packed.each(LazyTensor.of_memory), shape, dtype)


class TorchaoWeights:
    """The weights of a model that torchao has quantised, which are plain while it is converted."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = [
            _weight(owner, name, parameter)
            for owner in model.modules()
            for name, parameter in owner.named_parameters(recurse=False)
            if _is_torchao(parameter)
        ]

    def decode(self) -> None:
        """Puts plain parameters in their place, of those that the operators can have packed."""
        for weight in self._weights:
            if weight.packed is not None:
                weight.put(weight.lazy(weight.packed).read())

    def encode(self, model: nn.Module) -> None:
        """Puts back what torchao made, and in converted layers what they can have packed."""
        if not self._weights:
            return
        inside = {
            id(parameter)
            for layer in converted_layers(model).values()
            for parameter in experts_parameters(layer).values()
        }
        for weight in self._weights:
            if weight.packed is None:
                continue
            if id(getattr(weight.owner, weight.name, None)) in inside:
                weight.put(weight.lazy(weight.packed))
            else:
                weight.owner.register_parameter(weight.name, weight.parameter)

    def read(self, model: nn.Module) -> None:
        """Reads what :meth:`encode` left to be read: the packed tensors, or decoded ones."""
        for layer in converted_layers(model).values() if self._weights else ():
            packed = packed_experts.of(layer)
            for name, buffer in list(packed.named_buffers()) if packed is not None else ():
                if isinstance(buffer, LazyTensor):
                    setattr(packed, name, buffer.read())
        for weight in self._weights:
            current = getattr(weight.owner, weight.name, None)
            if isinstance(current, LazyTensor):
                weight.put(current.read())

    def explained(
        self, model: nn.Module, outcomes: Sequence[Replacement | Unrecognised]
    ) -> list[Replacement | Unrecognised]:
        """Returns the outcomes; where an error of torchao's tensors is the reason, why they are."""
        left = {id(weight.owner): weight for weight in self._weights if weight.packed is None}

        def reason(outcome: Unrecognised) -> str:
            parts = map(id, model.get_submodule(outcome.module).modules())
            weights = [left[part] for part in parts if part in left]
            named = (w for w in weights if type(w.parameter).__name__ in outcome.reason)
            return next((weight.reason for weight in named), outcome.reason)

        return [
            replace(outcome, reason=reason(outcome))
            if isinstance(outcome, Unrecognised)
            else outcome
            for outcome in outcomes
        ]


def _is_torchao(tensor: Tensor) -> bool:
    return type(tensor).__module__.partition(".")[0] == "torchao"


def _weight(owner: nn.Module, name: str, parameter: nn.Parameter) -> _Weight:
    try:
        encoding, packed = _packed(parameter)
    except ValueError as error:
        reason = f"torchao's {type(parameter).__name__} {error}: dequantise it, then convert"
        return _Weight(owner, name, parameter, reason=reason)
    return _Weight(owner, name, parameter, encoding, packed)


def _packed(tensor: Any) -> tuple[str, PackedWeight]:
    """Returns the format and the tensors of what torchao has quantised, ``[N, K]`` or of experts.

    Raises:
        ValueError: If the operators have no such format.
    """
    of_activations = ("act_quant_kwargs", "activation_quantization", "act_quant_scale")
    if any(getattr(tensor, name, None) is not None for name in of_activations):
        raise ValueError("quantises activations too, which the operators do not")
    kind = type(tensor).__name__
    if kind == "Float8Tensor" and tensor.qdata.dtype == torch.float8_e4m3fn:
        rows, columns = tensor.shape[-2:]
        scales = tensor.scale
        if scales.shape[-2:] == (1, 1) and ENCODINGS["fp8"].blocks(rows, columns, (rows, 1)):
            # As rows', since gate and up may have two.
            scales = scales.expand(*scales.shape[:-2], rows, 1)
        packed = PackedWeight(tensor.qdata.view(torch.int8), scales.contiguous())
        return _checked("fp8", packed)
    of = {"Int8Tensor": torch.int8, "IntxUnpackedToInt8Tensor": _target(tensor)}.get(kind)
    has_zero_points = _any(getattr(tensor, "zero_point", None))
    if of == torch.int8 and has_zero_points:
        raise ValueError("has zero points, which int8 has not")
    if of == torch.int8:
        rows = tensor.shape[-2]
        one = tensor.scale.shape[-2:] == (1, 1)
        scales = tensor.scale.expand(*tensor.shape[:-2], rows, 1) if one else tensor.scale
        return _checked("int8", PackedWeight(tensor.qdata, scales.contiguous()))
    if str(of) == "torch.int4" and tensor.shape[-1] % 2 == 0:
        values = packed_pairs(tensor.qdata + 8)
        zeros = (tensor.zero_point + 8).to(torch.int8) if has_zero_points else None
        return _checked("int4", PackedWeight(values, tensor.scale, zeros))
    dtype = of or getattr(tensor, "qdata", tensor).dtype
    raise ValueError(f"of {dtype} and shape {list(tensor.shape)} has no format of the operators")


def _target(tensor: Any) -> torch.dtype | None:
    target: torch.dtype | None = getattr(tensor, "target_dtype", None)
    return target


def _any(tensor: Tensor | None) -> bool:
    return tensor is not None and bool((tensor != 0).any())


def _checked(encoding: str, packed: PackedWeight) -> tuple[str, PackedWeight]:
    known = ENCODINGS[encoding]
    rows, columns = packed.values.shape[-2], packed.values.shape[-1] * known.per_byte
    fits = packed.scales.ndim == packed.values.ndim and packed.scales.dtype in known.scales_dtypes
    if not fits or not known.blocks(rows, columns, packed.scales.shape[-2:]):
        raise ValueError(f"has scales {list(packed.scales.shape)}, which {encoding} has not")
    return encoding, packed
