"""Inputs to try an ONNX file with, by what each is for: tokens, masks, ids; of many sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import onnx
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch import Tensor

from custom_ops.dtypes import FLOATS
from dynamo_moe.files.index_ranges import index_limits
from dynamo_moe.private.pytorch import FakeTensor
from dynamo_moe.tracing.dynamic_shapes import BATCH

KEY = "dynamo_moe.integers"
"""Metadata key: the least and the greatest of the example's integers or booleans, by input."""
MASKS_KEY = "dynamo_moe.masks"
"""Metadata key: by input, what an additive mask of the example has where tokens are hidden."""
ARGUMENTS_KEY = "dynamo_moe.arguments"
"""Metadata key: the example's numbers and texts by argument, where they are not the defaults."""
SIZES_KEY = "dynamo_moe.sizes"
"""Metadata key: the greatest size that a condition of the model's trace names."""

Pattern = Literal["full", "right", "left", "causal", "some"]
"""Which tokens a mask leaves: all; the first of each row; the last; those up to each token's own,
where the mask is square; any."""


@dataclass(frozen=True)
class _Sizes:
    """Sizes and values of a case.

    Attributes:
        batch: The size of the batch.
        other: Of every other symbolic dimension, which differ by one each unless this is 1.
        pattern: Of masks.
        scale: Of floats.
        optional: Whether a model may refuse such inputs, as for too many positions.
    """

    batch: int
    other: int
    pattern: Pattern = "full"
    scale: float = 1.0
    optional: bool = False


_CASES = (
    _Sizes(1, 4),
    _Sizes(3, 7, "right"),
    _Sizes(2, 1),
    _Sizes(5, 12, "left", optional=True),
    _Sizes(4, 19, "causal", scale=20.0, optional=True),
    _Sizes(2, 40, "some", scale=0.01, optional=True),
)
# Multiples of what networks divide a picture's sides by: 32, and patches and windows of 7 or 14.
# Volumes of three such sides would take gigabytes.
_SIDE, _SIDE_OF_VOLUME = 224, 32
# Attention of one head takes 0.3 GB for so many tokens, and 69 GB for 131,072.
_MOST_NAMED = 8192
# The least and the greatest integer where nothing is known.
_SOME = (0, 9)
# Of more integers, which come next is not remembered.
_MOST_NUMBERED = 2**24
# A number that hides a token is at most the first; without an example of one, it is the second.
_HIDING, _HIDDEN = -1e4, -float("inf")
_INTS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_DTYPES = {
    tensor_adapters.from_torch_dtype(dtype): dtype for dtype in (*FLOATS, *_INTS, torch.bool)
}


@dataclass(frozen=True)
class DrawnCase:
    """Random inputs of a model.

    Attributes:
        inputs: By graph input, or as the arguments of a model's forward.
        optional: Whether the model may refuse them.
        kept: Which tokens masks leave, ``[B, L]``; None if no mask has this shape. What a model
            returns for others means nothing: a causal one's first token may see none.
    """

    inputs: dict[str, Any]
    optional: bool = False
    kept: Tensor | None = None


def store(
    model: ir.Model,
    example: Sequence[Tensor],
    sizes: Collection[int] = (),
    constants: Mapping[str, Any] | None = None,
) -> None:
    """Writes as metadata what shows, for :func:`random_inputs`, what the inputs are for.

    Args:
        model: The model.
        example: The example that it was traced with, a tensor by input.
        sizes: Those that conditions of its trace name, of which only one above all sizes that are
            tried anyway is written.
        constants: The arguments that are no tensors, with which it was traced too.
    """
    known = {
        str(value.name): tensor
        for value, tensor in zip(model.graph.inputs, example, strict=False)
        if tensor.numel() and not tensor.is_meta and not isinstance(tensor, FakeTensor)
    }
    ranges = {
        name: [int(tensor.min()), int(tensor.max())]
        for name, tensor in known.items()
        if tensor.dtype in _INTS or tensor.dtype == torch.bool
    }
    masks = {
        name: str(hidden)  # JSON has no infinity.
        for name, tensor in known.items()
        if tensor.is_floating_point() and (hidden := _hiding(name, tensor))
    }
    named = max((size for size in sizes if size >= _CASES[-1].other), default=None)
    stored = {KEY: ranges, MASKS_KEY: masks, ARGUMENTS_KEY: constants, SIZES_KEY: named}
    for key, value in stored.items():
        if value:
            model.metadata_props[key] = json.dumps(value)


def constants_in(model: onnx.ModelProto) -> dict[str, Any]:
    """Returns the arguments that a file has as constants, where they are not the defaults."""
    stored = {entry.key: entry.value for entry in model.metadata_props}
    constants: dict[str, Any] = json.loads(stored.get(ARGUMENTS_KEY, "{}"))
    return constants


def _hiding(name: str, tensor: Tensor) -> float:
    """Returns what hides a token in an additive mask; 0 if a tensor is none."""
    if not ((tensor == 0) | (tensor <= _HIDING)).all():
        return 0.0
    return float(tensor.min()) or (_HIDDEN if "mask" in name else 0.0)


def random_inputs(
    model: ir.Model,
    seed: int = 20,
    *,
    rows_of_zeros: bool = True,
    as_pictures: bool = False,
) -> list[DrawnCase]:
    """Returns cases of several batch sizes and lengths, the same for a seed.

    Floats are normally distributed, of three scales, and some rows are zeros, if that is wanted.
    Masks, which the example or their dtype shows, hide tokens at the beginning, at the end or
    anywhere, but never all; the first case's hide none. Ids are below the size of what they index,
    where the graph shows it, else between the least and the greatest of the example's. For each
    symbol but the batch, one case has it larger than any size that a condition of the trace names,
    and the others 1: which of them is the batch under another name is not known.

    Args:
        model: The model.
        seed: Of the generator.
        rows_of_zeros: Whether some rows of floats are zeros.
        as_pictures: Whether the sizes are such as the sides of pictures have, and batches larger
            than 1, for models that refuse others.

    Raises:
        ValueError: If a dimension is an expression, or a dtype has no random values here.
    """
    sizes_of = {str(value.name): _sizes(value) for value in model.graph.inputs}
    symbols = {size for sizes in sizes_of.values() for size in sizes if isinstance(size, str)}
    if as_pictures:
        trials = _of_pictures(symbols, {sizes[0] for sizes in sizes_of.values() if sizes})
    else:
        trials = _of_many_sizes(model, sorted(symbols - {BATCH}))
    roles = _Roles(model, seed, rows_of_zeros=rows_of_zeros)
    cases = []
    for case, chosen in trials:
        chosen[BATCH] = case.batch
        inputs = {
            name: roles.drawn(
                value, [chosen[size] if isinstance(size, str) else size for size in sizes], case
            )
            for value, (name, sizes) in zip(model.graph.inputs, sizes_of.items(), strict=True)
        }
        cases.append(DrawnCase(inputs, case.optional, roles.tokens_kept(inputs)))
    return cases


def _of_many_sizes(model: ir.Model, symbols: list[str]) -> list[tuple[_Sizes, dict[str, int]]]:
    # Each symbol has a size of its own, so that axes taken for one another show.
    trials = [
        (case, {name: 1 if case.other == 1 else case.other + i for i, name in enumerate(symbols)})
        for case in _CASES
    ]
    named = json.loads(model.metadata_props.get(SIZES_KEY, "0"))
    if 0 < named <= _MOST_NAMED:
        beyond = _Sizes(1, named + 1, optional=True)
        alone = dict.fromkeys(symbols, 1)
        trials += [(beyond, {**alone, symbol: beyond.other}) for symbol in symbols]
    return trials


def _of_pictures(symbols: set[str], first: set[Any]) -> list[tuple[_Sizes, dict[str, int]]]:
    batch = first & symbols if len(first) == 1 else {BATCH}
    names = sorted(symbols - batch)
    unit = _SIDE if len(names) < 3 else _SIDE_OF_VOLUME
    sides = [unit * number for number in range(1, len(names) + 1)]
    cases = [
        (_Sizes(2, unit), dict(zip(names, sides, strict=True))),
        (_Sizes(3, unit, scale=20.0), dict(zip(names, reversed(sides), strict=True))),
    ]
    return [(case, {**sizes, **dict.fromkeys(batch, case.batch)}) for case, sizes in cases]


def _sizes(value: ir.Value) -> list[int | str]:
    """Returns an input's sizes, the symbolic ones by name."""
    sizes = [size if isinstance(size, int) else str(size.value or "") for size in value.shape or ()]
    for size in sizes:
        if isinstance(size, str) and not size.isidentifier():
            raise ValueError(
                f"input {value.name!r} has a dimension {size!r}: pass inputs of your own"
            )
    return sizes


class _Roles:
    """What the inputs of a graph are for."""

    def __init__(self, model: ir.Model, seed: int, *, rows_of_zeros: bool) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._rows_of_zeros = rows_of_zeros
        self._remaining: dict[str, Tensor] = {}
        ranges = json.loads(model.metadata_props.get(KEY, "{}"))
        limits = index_limits(model.graph)
        self._hidden = json.loads(model.metadata_props.get(MASKS_KEY, "{}"))
        self._masks = {
            name
            for name, (least, greatest) in ranges.items()
            if (least, greatest) in {(0, 1), (1, 1)} and name not in limits
        }
        # Where all of the example's are false, true hides a token.
        self._hiding = {name for name, (_, greatest) in ranges.items() if not greatest}
        # Zeros alone stand for anything.
        self._ranges = {name: (a, b) for name, (a, b) in ranges.items() if (a, b) != (0, 0)}
        self._ranges |= {name: (0, limit - 1) for name, limit in limits.items()}

    def drawn(self, value: ir.Value, shape: Sequence[int], case: _Sizes) -> Tensor:
        """Returns random values of an input.

        Raises:
            ValueError: If its dtype has no random values here.
        """
        name = str(value.name)
        dtype = None if value.dtype is None else _DTYPES.get(value.dtype)
        if dtype in FLOATS:
            return self._floats(name, shape, case).to(dtype)
        if dtype == torch.bool:
            return self._kept(shape, case.pattern).logical_xor(torch.tensor(name in self._hiding))
        if dtype in _INTS and name in self._masks:
            return self._kept(shape, case.pattern).to(dtype)
        if dtype in _INTS:
            return self._integers(name, shape).to(dtype)
        raise ValueError(
            f"input {name!r} is {value.dtype}: pass inputs of your own, as in "
            f"verify(path, model, inputs=[{{{name!r}: ...}}])"
        )

    def tokens_kept(self, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """Returns which tokens all masks ``[B, L]`` of a case leave; None if there are none."""
        kept = [
            (value == 0) == (name in self._hiding or name in self._hidden)
            for name, value in inputs.items()
            if value.ndim == 2
            if value.dtype == torch.bool or name in self._masks or name in self._hidden
        ]
        same = bool(kept) and all(mask.shape == kept[0].shape for mask in kept)
        return torch.stack(kept).all(dim=0) if same else None

    def _integers(self, name: str, shape: Sequence[int]) -> Tensor:
        """Draws integers, each as often as any other before it comes again."""
        least, greatest = self._ranges.get(name, _SOME)
        if greatest - least >= _MOST_NUMBERED:
            return torch.randint(least, greatest + 1, tuple(shape), generator=self._generator)
        remaining = self._remaining.get(name, torch.empty(0, dtype=torch.int64))
        count = math.prod(shape)
        while len(remaining) < count:
            order = torch.randperm(greatest - least + 1, generator=self._generator)
            remaining = torch.cat((remaining, least + order))
        self._remaining[name] = remaining[count:]
        return remaining[:count].reshape(tuple(shape))

    def _floats(self, name: str, shape: Sequence[int], case: _Sizes) -> Tensor:
        if name in self._hidden:
            hidden = torch.full(shape, float(self._hidden[name]))
            return hidden.masked_fill(self._kept(shape, case.pattern), 0.0)
        x = torch.randn(shape, generator=self._generator) * case.scale
        if self._rows_of_zeros and case.pattern == "left" and len(shape) > 1:
            x.view(-1, shape[-1])[::4] = 0
        return x

    def _kept(self, shape: Sequence[int], pattern: Pattern) -> Tensor:
        """Returns which tokens of the last axis a mask leaves: of each row at least one."""
        length = shape[-1] if shape else 1
        kept = torch.ones(tuple(shape), dtype=torch.bool)
        if pattern == "full" or length < 2:
            return kept
        if pattern == "causal" and len(shape) > 1 and shape[-2] == length:
            return kept.tril()
        rows = kept.view(-1, length)
        if pattern == "some":
            chosen = torch.randint(length, (len(rows), 1), generator=self._generator)
            kept = torch.rand(rows.shape, generator=self._generator) < 0.6
            return kept.scatter(1, chosen, value=True).view(tuple(shape))
        counts = torch.randint(1, length, (len(rows), 1), generator=self._generator)
        # A row that is whole, as in a batch of sequences that is padded to its longest.
        counts[0] = length
        positions = torch.arange(length)
        if pattern == "left":
            positions = positions.flip(0)
        return (positions < counts).view(tuple(shape))
