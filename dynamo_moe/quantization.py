"""``quantize``: the experts of a converted model, rounded to a packed format.

Legend: E experts, N rows (out), K columns (in) of an expert's matrix, G columns of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from custom_ops.expert_weights import ExpertWeights
from custom_ops.packed_weights import (
    WHOLE,
    Encoding,
    PackedWeight,
    blocks_of,
    divides,
    encoding_of,
)
from dynamo_moe import packed_experts
from dynamo_moe.conversion.packing import (
    converted_layers,
    experts_weights,
    pack_layer,
    shared_weights,
)
from dynamo_moe.json_values import json_values
from dynamo_moe.packed_experts import PackedExperts
from dynamo_moe.weights.lazy_tensors import LazyTensor
from dynamo_moe.weights.rounding import rounded, scales_dtype

Scales = Callable[[str, int, Tensor], Tensor]
"""From a weight's path, an expert and its matrix ``[N, K]`` to its scales."""

#: Columns that share a scale, where they are not said and the format does not say.
_GROUPS = {"int4": 32, "int8": WHOLE}


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
    group: int | None = None,
    zero_points: bool = False,
    scales: Scales | None = None,
) -> QuantizationReport:
    """Rounds the experts' weights of a converted model to a packed format, in place.

    Every weight becomes the nearest that the format has, given the scale of its block, which the
    block's greatest magnitude decides. Routers, biases and all else stay.

    ========== ============================ ================================================
    format     block                        scale
    ========== ============================ ================================================
    ``int4``   ``group`` of a row, or 32    ``max |w| / 7.5``, as compressed-tensors has it;
                                            with zero points ``(max w - min w) / 15``, where
                                            the range includes 0
    ``int8``   ``group`` of a row, or all   ``max |w| / 127.5``, likewise
    ``fp8``    128 x 128                    ``max |w| / 448``, in float32
    ``mxfp4``  32 of a row                  ``2 ** (floor(log2(max |w|)) - 2)``, as the OCP
                                            Microscaling Formats Specification 1.0 has it
    ``nvfp4``  16 of a row                  ``max |w| / 6`` rounded to E4M3 times the global
                                            scale, the matrix's ``max |w| / (6 * 448)``
    ========== ============================ ================================================

    Scales of integers have the weights' dtype where that is half precision, else float32.

    The weights are released layer by layer, and biases are buffers from then on: for inference.
    The weights of a model that :func:`open_checkpoint` opened are rounded as they are written.

    Args:
        model: The model, after :func:`convert`.
        weight_format: One of those above.
        group: How many values along a row share a scale, in ``int4`` and ``int8``; it must divide D
            and H of every layer.
        zero_points: Whether a group of ``int4`` has a zero point, or is symmetric.
        scales: Scales from elsewhere, such as a calibration: a function from the path of a weight,
            ending in ``.w1`` or ``.w2``, an expert and its matrix ``[N, K]`` to the scales of its
            blocks, all positive; in ``int4``, ``int8`` and ``fp8``. None: as above.

    Returns:
        What was done.

    Raises:
        ValueError: If there is no layer, the format is unknown or lacks an option that is given,
            ``group`` does not divide a row, or weights are shared with another layer; if a weight
            in memory is not finite; nothing is packed then. If scales have another shape or are not
            positive, layers before the one that is named are packed.
    """
    encoding = encoding_of(weight_format)
    _check_options(encoding, group, zero_points, scales)
    block = encoding.block or (1, group or _GROUPS[encoding.name])
    layers = converted_layers(model)
    if not layers:
        raise ValueError("the model has no layers on torch.ops.moe; convert it first")
    taken = {p: module for p, module in layers.items() if packed_experts.of(module) is None}
    if shared := shared_weights(model, taken):
        first = next(iter(shared.values()))
        raise ValueError(f"{first}: weights that are shared cannot be packed")
    for path, module in taken.items():
        weights = _detached(module)
        for name, weight in (("w1", weights.w1), ("w2", weights.w2)):
            _check_columns(f"{path}.{name}", weight, encoding, block)
            _check_finite(f"{path}.{name}", weight)
    done = []
    for path, module in taken.items():
        weights = _detached(module)
        packed = {
            name: _packed(f"{path}.{name}", weight, encoding, block, zero_points, scales)
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


def _check_options(
    encoding: Encoding, group: int | None, zero_points: bool, scales: Scales | None
) -> None:
    if group is not None and encoding.block is not None:
        raise ValueError(f"{encoding.name} has blocks of its own, got group={group}")
    if group is not None and group < 1:
        raise ValueError(f"group must be at least 1, got {group}")
    if zero_points and not encoding.has_zero_points:
        raise ValueError(f"{encoding.name} has no zero points")
    if scales is not None and encoding.scale_elements:
        raise ValueError(f"{encoding.name} takes no scales from elsewhere")


def _check_columns(path: str, weight: Tensor, encoding: Encoding, block: tuple[int, int]) -> None:
    columns = weight.shape[-1]
    if not divides(block, columns):
        said = "group=" if encoding.block is None else f"{encoding.name}'s groups of "
        raise ValueError(f"{path} has rows of {columns} values, which {said}{block[1]} must divide")
    if columns % encoding.per_byte:
        raise ValueError(
            f"{path} has rows of {columns} values, of which a byte takes {encoding.per_byte}"
        )


# --- Rounding ---


def _packed(
    path: str,
    weight: Tensor,
    encoding: Encoding,
    block: tuple[int, int],
    zero_points: bool,
    scales: Scales | None,
) -> PackedWeight:
    """Packs ``[E, N, K]``, an expert at a time."""
    experts = []
    for expert in range(weight.shape[0]):
        matrix = weight[expert]
        if scales is not None and isinstance(matrix, LazyTensor):
            matrix = matrix.read()
        given = None if scales is None else scales(path, expert, matrix)
        if given is not None:
            given = given.to(scales_dtype(encoding, matrix.dtype))
            _check_scales(path, expert, given, blocks_of(matrix.shape[0], matrix.shape[1], block))
        experts.append(rounded(matrix, encoding, block, zero_points=zero_points, scales=given))
    return PackedWeight.stacked(experts)


def _check_scales(path: str, expert: int, scales: Tensor, wanted: tuple[int, int]) -> None:
    if tuple(scales.shape) != wanted:
        raise ValueError(
            f"the scales of {path}, expert {expert}, must have the shape {list(wanted)}, "
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
