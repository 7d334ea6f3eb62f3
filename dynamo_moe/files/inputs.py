"""Random inputs for an ONNX file, of other sizes than the example it was exported with."""

from __future__ import annotations

import json
from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch import Tensor

from custom_ops.dtypes import FLOATS
from dynamo_moe.files.index_ranges import index_limits
from dynamo_moe.private.pytorch import FakeTensor
from dynamo_moe.tracing.dynamic_shapes import BATCH

KEY = "dynamo_moe.integers"
"""Metadata key: the least and the greatest of the example's integers, by input."""

# Per case: the size of the batch, and of every other symbolic dimension.
_CASES = ((1, 4), (3, 7), (2, 1))
# The least and the greatest integer where nothing is known.
_SOME = (0, 9)
_INTS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_DTYPES = {
    tensor_adapters.from_torch_dtype(dtype): dtype for dtype in (*FLOATS, *_INTS, torch.bool)
}


def store(model: ir.Model, example: Sequence[Tensor]) -> None:
    """Writes the least and the greatest integer of an example, a tensor by input, as metadata."""
    ranges = {
        str(value.name): [int(tensor.min()), int(tensor.max())]
        for value, tensor in zip(model.graph.inputs, example, strict=False)
        if tensor.dtype in _INTS and tensor.numel()
        if not tensor.is_meta and not isinstance(tensor, FakeTensor)
    }
    if ranges:
        model.metadata_props[KEY] = json.dumps(ranges)


def random_inputs(model: ir.Model) -> list[dict[str, Tensor]]:
    """Returns a few cases, each a tensor by graph input, the same in every run.

    Raises:
        ValueError: If a dimension is an expression, or a dtype has no random values here.
    """
    generator = torch.Generator().manual_seed(20)
    sizes_of = {str(value.name): _sizes(value) for value in model.graph.inputs}
    symbols = {size for sizes in sizes_of.values() for size in sizes if isinstance(size, str)}
    ranges = _ranges(model)
    cases = []
    for batch, other in _CASES:
        # Each symbol has a size of its own, so that axes taken for one another show.
        numbered = enumerate(sorted(symbols - {BATCH}))
        chosen = {symbol: 1 if other == 1 else other + number for number, symbol in numbered}
        chosen[BATCH] = batch
        cases.append(
            {
                name: _random(
                    value,
                    [chosen[size] if isinstance(size, str) else size for size in sizes],
                    ranges.get(name, _SOME),
                    generator,
                )
                for value, (name, sizes) in zip(model.graph.inputs, sizes_of.items(), strict=True)
            }
        )
    return cases


def _ranges(model: ir.Model) -> dict[str, tuple[int, int]]:
    """Returns the integers that an input may hold: by the graph, or else by the example."""
    ranges: dict[str, tuple[int, int]] = {}
    for name, (least, greatest) in json.loads(model.metadata_props.get(KEY, "{}")).items():
        if greatest == 1 and least >= 0:
            ranges[name] = (1, 1)  # A mask, most likely: tokens that see none have no result.
        elif (least, greatest) != (0, 0):  # Zeros alone stand for anything.
            ranges[name] = (least, greatest)
    return ranges | {name: (0, limit - 1) for name, limit in index_limits(model.graph).items()}


def _sizes(value: ir.Value) -> list[int | str]:
    """Returns an input's sizes, the symbolic ones by name."""
    sizes = [size if isinstance(size, int) else str(size.value or "") for size in value.shape or ()]
    for size in sizes:
        if isinstance(size, str) and not size.isidentifier():
            raise ValueError(
                f"input {value.name!r} has a dimension {size!r}: pass inputs of your own"
            )
    return sizes


def _random(
    value: ir.Value, shape: Sequence[int], limits: tuple[int, int], generator: torch.Generator
) -> Tensor:
    dtype = None if value.dtype is None else _DTYPES.get(value.dtype)
    if dtype in FLOATS:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype in _INTS:
        least, greatest = limits
        return torch.randint(least, greatest + 1, shape, generator=generator, dtype=dtype)
    if dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    raise ValueError(f"input {value.name!r} is {value.dtype}: pass inputs of your own to verify")
