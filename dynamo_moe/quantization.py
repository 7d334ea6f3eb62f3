"""``quantize``: the experts of a converted model, rounded to a packed format.

Legend: E experts, N rows (out), K columns (in) of an expert's matrix, G columns of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from custom_ops.expert_weights import ExpertWeights
from custom_ops.packed_weights import ENCODINGS, PackedWeight
from dynamo_moe import packed_experts
from dynamo_moe.conversion.packing import (
    converted_layers,
    experts_parameters,
    experts_weights,
    pack_layer,
)
from dynamo_moe.json_values import json_values
from dynamo_moe.packed_experts import PackedExperts
from dynamo_moe.weights.lazy_tensors import LazyTensor

Scales = Callable[[str, int, Tensor], Tensor]
"""From a weight's path, an expert and its matrix ``[N, K]`` to its scales ``[N, K / G]``."""

#: The formats that weights are rounded to.
ROUNDED = ("int4",)
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer whose experts are packed now.

    Attributes:
        module: Its path.
        bytes_before: Bytes of its experts' weights, biases not counted.
        bytes_after: The same, now.
    """

    module: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class QuantizationReport:
    """The result of :func:`quantize`.

    Attributes:
        weight_format: The format.
        layers: The layers whose experts are packed now.
        left: The paths of layers that were packed already.
    """

    weight_format: str
    layers: tuple[QuantizedLayer, ...]
    left: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and numbers, ready for ``json.dumps``."""
        return json_values(self)

    def __str__(self) -> str:
        before = sum(layer.bytes_before for layer in self.layers)
        after = sum(layer.bytes_after for layer in self.layers)
        first = (
            f"{len(self.layers)} layers in {self.weight_format}: {before:,} bytes of experts are "
            f"{after:,} now"
        )
        return "\n".join([first, *(f"{path} was packed already" for path in self.left)])


@torch.no_grad()
def quantize(
    model: nn.Module,
    weight_format: str = "int4",
    *,
    group: int = 32,
    zero_points: bool = False,
    scales: Scales | None = None,
) -> QuantizationReport:
    """Rounds the experts' weights of a converted model to a packed format, in place.

    Every weight becomes the nearest that the format has, given a scale for each group of values
    along a row: ``max |w| / 7.5`` without zero points; with them ``(max w - min w) / 15``, where
    the range includes 0. That is how compressed-tensors rounds to 4 bits. Scales have the weights'
    dtype where that is half precision, else float32. Routers, biases and all else stay.

    The weights are released layer by layer, and biases are buffers from then on: for inference.
    The weights of a model that :func:`open_checkpoint` opened are rounded as they are written.

    Args:
        model: The model, after :func:`convert`.
        weight_format: ``int4``.
        group: How many values along a row share a scale; it must divide D and H of every layer.
        zero_points: Whether a group has a zero point, or is symmetric.
        scales: Scales from elsewhere, such as a calibration: a function from the path of a weight,
            ending in ``.w1`` or ``.w2``, an expert and its matrix ``[N, K]`` to ``[N, K / G]``, all
            positive. None: as above.

    Returns:
        What was done.

    Raises:
        ValueError: If there is no layer, the format is unknown, ``group`` does not divide a row, or
            weights are shared with another layer; if a weight in memory is not finite; nothing is
            packed then. If scales have another shape or are not positive, layers before the one
            that is named are packed.
    """
    if weight_format not in ROUNDED:
        names = ", ".join(ROUNDED)
        raise ValueError(
            f"weight_format must be one of {names} to be rounded to; got {weight_format!r}"
        )
    layers = converted_layers(model)
    if not layers:
        raise ValueError("the model has no layers on torch.ops.moe; convert it first")
    if group < 1:
        raise ValueError(f"group must be at least 1, got {group}")
    taken = {p: module for p, module in layers.items() if packed_experts.of(module) is None}
    _check_owners(model, taken)
    for path, module in taken.items():
        weights = _detached(module)
        for name, weight in (("w1", weights.w1), ("w2", weights.w2)):
            _check_group(f"{path}.{name}", weight, weight_format, group)
            _check_finite(f"{path}.{name}", weight)
    done = []
    for path, module in taken.items():
        weights = _detached(module)
        packed = {
            name: _packed(f"{path}.{name}", weight, group, zero_points, scales)
            for name, weight in (("w1", weights.w1), ("w2", weights.w2))
        }
        before = weights.w1.nbytes + weights.w2.nbytes
        after = sum(t.nbytes for weight in packed.values() for t in weight if t is not None)
        experts = PackedExperts(weight_format, packed["w1"], weights.b1, packed["w2"], weights.b2)
        pack_layer(module, experts)
        done.append(QuantizedLayer(path, before, after))
    left = tuple(path for path in layers if path not in taken)
    return QuantizationReport(weight_format, tuple(done), left)


# --- Layers ---


def _detached(module: nn.Module) -> ExpertWeights:
    w1, b1, w2, b2 = experts_weights(module)
    b1, b2 = (None if bias is None else bias.detach() for bias in (b1, b2))
    return ExpertWeights(w1.detach(), b1, w2.detach(), b2)


def _check_owners(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Checks that what is released is nobody else's."""
    owners: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(path)
    for layer, module in layers.items():
        prefix = f"{layer}." if layer else ""
        for name, parameter in experts_parameters(module).items():
            others = [p for p in owners.get(id(parameter), []) if not p.startswith(prefix)]
            if others:
                raise ValueError(
                    f"{prefix}{name} is also {others[0]}: weights that are shared cannot be packed"
                )


def _check_group(path: str, weight: Tensor, weight_format: str, group: int) -> None:
    columns = weight.shape[-1]
    if columns % group:
        raise ValueError(f"{path} has rows of {columns} values, which group={group} must divide")
    per_byte = ENCODINGS[weight_format].per_byte
    if columns % per_byte:
        raise ValueError(f"{path} has rows of {columns} values, of which a byte takes {per_byte}")


# --- Rounding ---


def _packed(
    path: str, weight: Tensor, group: int, zero_points: bool, scales: Scales | None
) -> PackedWeight:
    """Packs ``[E, N, K]``, an expert at a time."""
    experts = []
    for expert in range(weight.shape[0]):
        matrix = weight[expert]
        if scales is not None and isinstance(matrix, LazyTensor):
            matrix = matrix.read()
        given = None if scales is None else scales(path, expert, matrix)
        if given is not None:
            _check_scales(path, expert, given, matrix, group)
        experts.append(rounded_int4(matrix, group, zero_points=zero_points, scales=given))
    values, their_scales, zeros = zip(*experts, strict=True)
    return PackedWeight(
        torch.stack(values),
        torch.stack(their_scales),
        torch.stack(zeros) if zero_points else None,
    )


def rounded_int4(
    matrix_NK: Tensor, group: int, *, zero_points: bool = False, scales: Tensor | None = None
) -> PackedWeight:
    """Returns the nearest matrix in ``int4``; of a lazy one, lazy tensors.

    Args:
        matrix_NK: ``[N, K]``.
        group: G.
        zero_points: Whether groups have one.
        scales: ``[N, K / G]``; None: from the greatest and least value of each group.
    """
    dtype = matrix_NK.dtype if matrix_NK.dtype in _HALF else torch.float32
    groups = matrix_NK.float().reshape(matrix_NK.shape[0], -1, group)
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    if zero_points:
        low, high = low.clamp(max=0), high.clamp(min=0)
    if scales is None:
        scales = (high - low) / 15 if zero_points else torch.maximum(high, -low) / 7.5
        scales = scales.to(dtype).float()
        scales = torch.where(scales == 0, 1.0, scales)
    scales = scales.to(dtype)
    wide = scales.float().unsqueeze(-1)
    zeros = (-low.unsqueeze(-1) / wide).round().clamp(0, 15) if zero_points else None
    codes = (groups / wide).round() + (8 if zeros is None else zeros)
    flat = codes.clamp(0, 15).to(torch.int16).reshape(matrix_NK.shape[0], -1, 2)
    pairs = flat[..., 0] + flat[..., 1] * 16
    values = torch.where(pairs < 128, pairs, pairs - 256).to(torch.int8)
    return PackedWeight(values, scales, None if zeros is None else zeros[..., 0].to(torch.int8))


def _check_scales(path: str, expert: int, scales: Tensor, matrix: Tensor, group: int) -> None:
    wanted = [matrix.shape[0], matrix.shape[1] // group]
    if list(scales.shape) != wanted:
        raise ValueError(
            f"the scales of {path}, expert {expert}, must have the shape {wanted}, "
            f"got {list(scales.shape)}"
        )
    if not bool(((scales > 0) & scales.isfinite()).all()):
        raise ValueError(f"the scales of {path}, expert {expert}, must be positive and finite")


def _check_finite(path: str, weight: Tensor) -> None:
    if isinstance(weight, LazyTensor) or weight.is_meta:
        return
    for expert, matrix in enumerate(weight):
        if not bool(matrix.isfinite().all()):
            raise ValueError(f"{path}, expert {expert}, has weights that are not finite")
