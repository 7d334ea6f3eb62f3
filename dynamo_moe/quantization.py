"""``quantize``: a model's experts and its other linear layers, rounded to packed formats.

Legend: E experts, N rows (out), K columns (in) of an expert's matrix, G columns of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from custom_ops.packed_weights import (
    ENCODINGS,
    WHOLE,
    Encoding,
    PackedWeight,
    blocks_of,
    divides,
    encoding_of,
)
from dynamo_moe import local_experts, packed_experts
from dynamo_moe.conversion.linear_layers import IGNORED, linear_layers
from dynamo_moe.conversion.packing import (
    converted_layers,
    experts_weights,
    pack_layer,
    shared_weights,
)
from dynamo_moe.json_values import json_values
from dynamo_moe.packed_experts import PackedExperts
from dynamo_moe.tensor_parallel import ColumnLinear, RowLinear
from dynamo_moe.weights import packed_linear
from dynamo_moe.weights.lazy_tensors import LazyTensor
from dynamo_moe.weights.rounding import rounded, scales_dtype

if TYPE_CHECKING:
    from rich.text import Text

Scales = Callable[[str, int, Tensor], Tensor]
"""From a weight's path, an expert and its matrix ``[N, K]`` to its scales."""

#: Columns that share a scale, where they are not said and the format does not say.
_GROUPS = {"int4": 32, "int8": WHOLE}


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer whose experts, or whose weight, are packed now.

    Attributes:
        module: Its path.
        bytes_before: Bytes of its experts' weights, or of its weight, biases not counted.
        bytes_after: The same, now.
    """

    module: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class QuantizationReport:
    """The result of :func:`quantize`.

    Attributes:
        weight_format: The format of the experts; None if they stay.
        layers: The layers whose experts are packed now.
        left: The paths of layers that were packed already.
        linear_format: The format of other linear layers; None if they stay.
        linear: Those that are packed now.
        plain: Those that stay as they are, by path, with the reason.
    """

    weight_format: str | None
    layers: tuple[QuantizedLayer, ...]
    left: tuple[str, ...] = ()
    linear_format: str | None = None
    linear: tuple[QuantizedLayer, ...] = ()
    plain: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and numbers, ready for ``json.dumps``."""
        return json_values(self)

    def __str__(self) -> str:
        lines = [*self._packed(self.weight_format, self.layers, "layers", "experts")]
        lines += [f"{path} was packed already" for path in self.left]
        lines += self._packed(self.linear_format, self.linear, "linear layers", "weights")
        lines += self._plain()
        return "\n".join(lines)

    def __rich__(self) -> Text:
        """Returns the lines for the terminal."""
        from rich.text import Text

        return Text(str(self))

    @staticmethod
    def _packed(
        name: str | None, layers: tuple[QuantizedLayer, ...], kind: str, what: str
    ) -> Iterator[str]:
        if name is not None:
            before = sum(layer.bytes_before for layer in layers)
            after = sum(layer.bytes_after for layer in layers)
            yield (f"{len(layers)} {kind} in {name}: {before:,} bytes of {what} are {after:,} now")

    def _plain(self) -> Iterator[str]:
        """Names a layer for each reason, and says how many more there are."""
        paths: dict[str, list[str]] = {}
        for path, reason in self.plain.items():
            paths.setdefault(reason, []).append(path)
        for reason, (first, *others) in paths.items():
            more = f", and {len(others)} more" if others else ""
            yield f"{first} stays plain{more}: {reason}"


@torch.no_grad()
def quantize(
    model: nn.Module,
    weight_format: str | None = "int4",
    *,
    group: int | None = None,
    zero_points: bool = False,
    scales: Scales | None = None,
    linear: str | None = None,
    ignore: Collection[str] = IGNORED,
) -> QuantizationReport:
    """Rounds the experts' weights of a converted model to a packed format, in place.

    Every weight becomes the nearest that the format has, given the scale of its block, which the
    block's greatest magnitude decides. Routers, biases and all else stay, and so do other linear
    layers without ``linear``.

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

    The weights are released layer by layer, and experts' biases are buffers from then on: for
    inference. A linear layer is a :class:`torch.nn.Linear` still, whose ``weight`` is decoded at
    each call. The weights of a model that :func:`open_checkpoint` opened are rounded as they are
    written.

    Args:
        model: The model, after :func:`convert`.
        weight_format: One of those above; None: the experts stay.
        group: How many values along a row share a scale, in ``int4`` and ``int8``; it must divide D
            and H of every layer.
        zero_points: Whether a group of ``int4`` has a zero point, or is symmetric.
        scales: Scales from elsewhere, such as a calibration: a function from the path of a weight,
            ending in ``.w1`` or ``.w2``, an expert and its matrix ``[N, K]`` to the scales of its
            blocks, all positive; in ``int4``, ``int8`` and ``fp8``. A linear layer's path ends in
            ``.weight``, and its expert is 0. None: as above.
        linear: The format of the other linear layers, such as those of attention, dense MLPs and
            shared experts; None: they stay. A router, or a gate of one row beside experts, always
            stays, and so does a layer whose weight something else has too, such as an embedding, or
            whose rows ``group`` does not divide: the report says which.
        ignore: Linear layers that stay, by their paths or the last parts of them; ``*`` stands for
            anything. ``()``: a language model's head is rounded too.

    Returns:
        What was done.

    Raises:
        ValueError: If there is no layer, a format is unknown or lacks an option that is given,
            ``group`` does not divide a row of experts, or experts' weights are shared with another
            layer; if a weight in memory is not finite, or ``ignore`` names no linear layer; nothing
            is packed then. If scales have another shape or are not
            positive, layers before the one that is named are packed.
    """
    options = group, zero_points, scales
    given = [name for name in (weight_format, linear) if name is not None]
    if not given:
        raise ValueError("there is nothing to quantize: weight_format and linear are both None")
    if linear is not None and linear not in ENCODINGS:
        raise ValueError(f"linear must be one of {', '.join(ENCODINGS)}; got {linear!r}")
    _check_options([encoding_of(name) for name in given], *options)
    layers = converted_layers(model)
    if weight_format is not None and not layers:
        raise ValueError("the model has no layers on torch.ops.moe; convert it first")
    left = [path for path, module in layers.items() if packed_experts.of(module) is not None]
    taken = {path: module for path, module in layers.items() if path not in left}
    done: list[QuantizedLayer] = []
    found: dict[str, nn.Linear] = {}
    plain: dict[str, str] = {}
    if weight_format is not None:
        experts = _Rounding.to(weight_format, *options)
        _check_experts(model, taken, experts)
    if linear is not None:
        others = _Rounding.to(linear, *options)
        found, plain = _linear_layers(model, layers, ignore, others)
    if weight_format is not None:
        done = [_pack_experts(path, module, experts) for path, module in taken.items()]
    packed = [_pack_linear(path, layer, others) for path, layer in found.items()]
    return QuantizationReport(
        weight_format,
        tuple(done),
        tuple(left) if weight_format is not None else (),
        linear,
        tuple(packed),
        plain,
    )


@torch.no_grad()
def round_linear(
    model: nn.Module,
    paths: Collection[str],
    weight_format: str,
    *,
    group: int | None = None,
    zero_points: bool = False,
) -> None:
    """Rounds the linear layers at some paths, as :func:`quantize` has those of the same options.

    Raises:
        ValueError: If there is no plain linear layer at a path.
    """
    rounding = _Rounding.to(weight_format, group, zero_points, None)
    found, plain = linear_layers(model, converted_layers(model), ())
    for path in paths:
        if path not in found:
            why = plain.get(path, "there is none")
            raise ValueError(f"{path} cannot be rounded as a linear layer: {why}")
        _pack_linear(path, found[path], rounding)


def _check_options(
    encodings: Sequence[Encoding], group: int | None, zero_points: bool, scales: Scales | None
) -> None:
    """Checks that each option is one of a format's, and is in range."""
    names = " and ".join(dict.fromkeys(encoding.name for encoding in encodings))
    if group is not None and all(encoding.block is not None for encoding in encodings):
        raise ValueError(f"{names} has blocks of its own, got group={group}")
    if group is not None and group < 1:
        raise ValueError(f"group must be at least 1, got {group}")
    if zero_points and not any(encoding.has_zero_points for encoding in encodings):
        raise ValueError(f"{names} has no zero points")
    if scales is not None and all(encoding.scale_elements for encoding in encodings):
        raise ValueError(f"{names} takes no scales from elsewhere")


@dataclass(frozen=True)
class _Rounding:
    """How matrices are rounded to a format.

    Attributes:
        encoding: The format.
        block: The rows and columns that share a scale.
        zero_points: Whether blocks have one.
        scales: Scales from elsewhere, or None.
    """

    encoding: Encoding
    block: tuple[int, int]
    zero_points: bool
    scales: Scales | None

    @classmethod
    def to(
        cls, name: str, group: int | None, zero_points: bool, scales: Scales | None
    ) -> _Rounding:
        """Returns the rounding to a format, with those of the options that it has."""
        encoding = encoding_of(name)
        return cls(
            encoding,
            encoding.block or (1, group or _GROUPS[name]),
            zero_points and encoding.has_zero_points,
            None if encoding.scale_elements else scales,
        )

    def misfit(self, path: str, weight: Tensor) -> str:
        """Says why the format does not hold rows of a weight ``[..., N, K]``, or nothing."""
        columns, encoding = weight.shape[-1], self.encoding
        if not divides(self.block, columns):
            said = "group=" if encoding.block is None else f"{encoding.name}'s groups of "
            return f"{path} has rows of {columns} values, which {said}{self.block[1]} must divide"
        if columns % encoding.per_byte:
            return f"{path} has rows of {columns} values, of which a byte takes {encoding.per_byte}"
        return ""

    def packed(self, path: str, expert: int, matrix: Tensor) -> PackedWeight:
        """Packs a matrix ``[N, K]``; a lazy one lazily."""
        given = None
        if self.scales is not None:
            matrix = matrix.read() if isinstance(matrix, LazyTensor) else matrix
            given = self.scales(path, expert, matrix)
            given = given.to(scales_dtype(self.encoding, matrix.dtype))
            _check_scales(
                path, expert, given, blocks_of(matrix.shape[0], matrix.shape[1], self.block)
            )
        return rounded(
            matrix, self.encoding, self.block, zero_points=self.zero_points, scales=given
        )


# --- Experts ---


def _check_experts(model: nn.Module, layers: Mapping[str, nn.Module], rounding: _Rounding) -> None:
    """Checks that the experts of layers can be packed.

    Raises:
        ValueError: If they cannot.
    """
    if shared := shared_weights(model, layers):
        first = next(iter(shared.values()))
        raise ValueError(f"{first}: weights that are shared cannot be packed")
    for path, module in layers.items():
        for name, weight in _detached(module).items():
            if misfit := rounding.misfit(f"{path}.{name}", weight):
                raise ValueError(misfit)
            for expert, matrix in enumerate(weight, _first(module)) if _has_values(weight) else ():
                _check_finite(f"{path}.{name}, expert {expert},", matrix)


def _pack_experts(path: str, module: nn.Module, rounding: _Rounding) -> QuantizedLayer:
    weights, first = _detached(module), _first(module)
    w1, w2 = (
        PackedWeight.stacked([
            rounding.packed(f"{path}.{name}", first + place, weight[place])
            for place in range(len(weight))
        ])
        for name, weight in weights.items()
    )  # fmt: skip
    b1, b2 = (None if b is None else b.detach() for b in experts_weights(module)[1::2])
    pack_layer(module, PackedExperts(rounding.encoding.name, w1, b1, w2, b2))
    before = sum(weight.nbytes for weight in weights.values())
    return QuantizedLayer(path, before, _bytes(w1) + _bytes(w2))


def _first(module: nn.Module) -> int:
    """Returns the number of the first expert that a layer has."""
    local = local_experts.of(module)
    return local.share.start if local is not None and local.share else 0


def _detached(module: nn.Module) -> dict[str, Tensor]:
    """Returns a layer's weights ``[E, N, K]``, by name."""
    weights = experts_weights(module)
    return {"w1": weights.w1.detach(), "w2": weights.w2.detach()}


# --- Other linear layers ---


def _linear_layers(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    ignore: Collection[str],
    rounding: _Rounding,
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Returns the linear layers that are to be packed, and the others with the reason, by path.

    Raises:
        ValueError: If a weight in memory is not finite, or ``ignore`` names no layer.
    """
    found, plain = linear_layers(model, layers, ignore)
    misfits = {path: rounding.misfit("it", layer.weight) for path, layer in found.items()}
    plain |= {path: misfit for path, misfit in misfits.items() if misfit}
    plain |= {
        path: "it is split among ranks"
        for path, module in model.named_modules()
        if isinstance(module, (ColumnLinear, RowLinear))
    }
    found = {path: layer for path, layer in found.items() if not misfits[path]}
    for path, layer in found.items():
        if _has_values(layer.weight):
            _check_finite(f"{path}.weight", layer.weight)
    return found, plain


def _pack_linear(path: str, layer: nn.Linear, rounding: _Rounding) -> QuantizedLayer:
    weight = layer.weight.detach()
    packed = rounding.packed(f"{path}.weight", 0, weight)
    packed_linear.pack(layer, rounding.encoding.name, packed)
    return QuantizedLayer(path, weight.nbytes, _bytes(packed))


# --- Weights ---


def _bytes(packed: PackedWeight) -> int:
    return sum(tensor.nbytes for tensor in packed if tensor is not None)


def _has_values(weight: Tensor) -> bool:
    return not isinstance(weight, LazyTensor) and not weight.is_meta


def _check_finite(name: str, matrix: Tensor) -> None:
    if not bool(matrix.isfinite().all()):
        raise ValueError(f"{name} has weights that are not finite")


def _check_scales(path: str, expert: int, scales: Tensor, wanted: tuple[int, int]) -> None:
    if tuple(scales.shape) != wanted:
        raise ValueError(
            f"the scales of {path}, expert {expert}, must have the shape {list(wanted)}, "
            f"got {list(scales.shape)}"
        )
    if not bool(((scales > 0) & scales.isfinite()).all()):
        raise ValueError(f"the scales of {path}, expert {expert}, must be positive and finite")
