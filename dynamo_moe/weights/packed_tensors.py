"""Weights that decode when they are read, and the packed tensors that they stand for.

A quantised weight is a lazy tensor that decodes. Whatever prepares a model, such as transformers'
loader, stacks and orders these as it would plain ones; :func:`packed_weight` then does with the
packed tensors what was done with the decoded.

Legend: E experts, N rows (out), K columns (in) of a matrix, G columns of a group, B bytes of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from custom_ops.packed_weights import ENCODINGS, PackedWeight
from dynamo_moe.weights.lazy_tensors import LazyTensor, computed, origin_of

_aten = torch.ops.aten
# What leaves each value's bits alone.
_SAME = (
    _aten.alias.default, _aten.detach.default, _aten.lift_fresh.default, _aten.clone.default,
    _aten._to_copy.default,
)  # fmt: skip
# What moves values, and may move groups of them in the same way.
_TURNS = (_aten.transpose.int, _aten.permute.default, _aten.t.default)
_MOVES = (
    *_TURNS, _aten.stack.default, _aten.cat.default, _aten.unsqueeze.default, _aten.select.int,
)  # fmt: skip


class Decoding:
    """What makes a matrix of tensors that store it otherwise; a function of these."""


@dataclass(frozen=True)
class _Unpacking(Decoding):
    """From the tensors that store a matrix as one of the operators' formats to the matrix.

    ``fields`` are those of :class:`PackedWeight` that the tensors are, and ``order``.
    """

    encoding: str
    dtype: torch.dtype
    fields: tuple[str, ...]

    def __call__(self, *tensors: Tensor) -> Tensor:
        stored = dict(zip(self.fields, tensors, strict=True))
        order = stored.pop(_ORDER, None)
        encoding = ENCODINGS[self.encoding]
        matrix = encoding.decode(*PackedWeight(**stored), dtype=torch.float32).to(self.dtype)
        return matrix if order is None else matrix.index_select(-1, order.flatten().argsort())


_ORDER = "order"


class StoredWeight(NamedTuple):
    """How a weight ``[..., N, K]`` is stored.

    Attributes:
        encoding: Its format, one of :data:`custom_ops.packed_weights.ENCODINGS`.
        packed: Its packed tensors.
        order: Where its columns are stored in another order, ``[..., K]``, int64: the weight's
            column for each that is stored. None: as they are.
    """

    encoding: str
    packed: PackedWeight
    order: Tensor | None = None


def decoded(
    encoding: str,
    weight: PackedWeight,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    order: Tensor | None = None,
) -> LazyTensor:
    """Returns a matrix ``[N, K]``, or ``[E, N, K]``, that is decoded when it is read.

    Args:
        encoding: The format.
        weight: The packed tensors.
        shape: The matrix's.
        dtype: The matrix's.
        order: Of a matrix, as in :class:`StoredWeight`.
    """
    tensors = {field: t for field, t in weight._asdict().items() if t is not None}
    if order is not None:
        tensors[_ORDER] = order.unsqueeze(0)  # A row, which moves as the others do.
    unpacking = _Unpacking(encoding, dtype, tuple(tensors))
    return computed(unpacking, tuple(tensors.values()), shape, dtype)


def packed_weight(tensor: Tensor) -> StoredWeight | None:
    """Returns how a weight ``[E, N, K]`` is stored; None if it is plain.

    None also where not all of it is packed in one way, or something was done with the decoded
    values that cannot be done with packed ones.
    """
    return _packed(tensor, [])


def packed_matrix(tensor: Tensor) -> StoredWeight | None:
    """Returns the same of a matrix ``[N, K]`` whose numbers are products rounded to its dtype.

    None also where they were rounded to another dtype before.
    """
    leaves: list[tuple[_Unpacking, tuple[Tensor, ...]]] = []
    found = _packed(tensor, leaves)
    dtypes = {unpacking.dtype for unpacking, _ in leaves}
    return found if dtypes <= {torch.float32, tensor.dtype} else None


def stored_tensors(tensor: Any) -> Iterator[Tensor]:
    """Yields the tensors that a lazy tensor is decoded from, in an order that its making sets."""
    function, args, *_ = origin_of(tensor) or (None, ())
    if isinstance(function, Decoding):
        yield from (arg for arg in args if isinstance(arg, Tensor))
        return
    for arg in args:
        for part in arg if isinstance(arg, (list, tuple)) else [arg]:
            yield from stored_tensors(part)


def _packed(
    tensor: Tensor, leaves: list[tuple[_Unpacking, tuple[Tensor, ...]]]
) -> StoredWeight | None:
    """Returns how a weight is stored; ``leaves`` has what decodes it."""
    try:
        parts = {field: _remade(tensor, field, leaves) for field in PackedWeight._fields}
        order = _common_order(_remade(tensor, _ORDER, leaves))
    except _OtherwiseError:
        return None
    kinds = {(unpacking.encoding, unpacking.fields) for unpacking, _ in leaves}
    if len(kinds) != 1:
        return None
    ((encoding, _),) = kinds
    packed = PackedWeight(**parts)
    values, scales = packed.values, packed.scales
    *rows, columns = tensor.shape
    known = ENCODINGS[encoding]
    if list(values.shape) != [*rows, columns // known.per_byte] or scales.ndim != tensor.ndim:
        return None
    if not known.blocks(rows[-1], columns, scales.shape[-2:]):
        return None
    return StoredWeight(encoding, packed, order)


def _common_order(order: Tensor | None) -> Tensor | None:
    """Returns the order ``[..., K]`` that all rows have of ``[..., R, K]``; None if it is none."""
    if order is None:
        return None
    if order.shape[-2] > 1:
        values = order.read() if isinstance(order, LazyTensor) else order
        if bool((values != values[..., :1, :]).any()):
            raise _OtherwiseError
    return order.select(-2, 0)


def packed_pair(w1: Tensor, w2: Tensor) -> tuple[StoredWeight, StoredWeight] | None:
    """Returns how a layer's two weights are stored, both in one format, for the operators.

    In ``int4`` and ``int8``, the scales of larger groups are repeated, so that both weights have
    groups of one size; which changes no number. None if they are not packed, or not alike.
    """
    first, second = packed_weight(w1), packed_weight(w2)
    if first is None or second is None or first.encoding != second.encoding:
        return None
    one, two = first.packed, second.packed
    known = ENCODINGS[first.encoding]
    if known.block is None:
        sizes = [w.shape[-1] // p.scales.shape[-1] for w, p in ((w1, one), (w2, two))]
        has_zero_points = one.zero_points is not None or two.zero_points is not None
        group = math.gcd(*sizes)
        one = _in_groups(one, sizes[0] // group, has_zero_points)
        two = _in_groups(two, sizes[1] // group, has_zero_points)
    blocks, others = (
        known.blocks(w.shape[-2], w.shape[-1], p.scales.shape[-2:])
        for w, p in ((w1, one), (w2, two))
    )
    if one.scales.dtype != two.scales.dtype or not any(block in others for block in blocks):
        return None
    return first._replace(packed=one), second._replace(packed=two)


def _in_groups(packed: PackedWeight, times: int, has_zero_points: bool) -> PackedWeight:
    """Returns the same with each scale repeated, and with zero points of 8 where it has none."""
    scales, zero_points = packed.scales, packed.zero_points
    if times > 1:
        scales = scales.repeat_interleave(times, -1)
        zero_points = None if zero_points is None else zero_points.repeat_interleave(times, -1)
    if zero_points is None and has_zero_points:
        zero_points = torch.full(tuple(scales.shape), 8, dtype=torch.int8)
    return PackedWeight(packed.values, scales, zero_points)


def is_decoding(tensor: Any) -> bool:
    """Whether a lazy tensor is made of decoded ones, alone or among others."""
    return next(stored_tensors(tensor), None) is not None


class _OtherwiseError(Exception):
    """A tensor is made otherwise than by moving decoded ones."""


def _remade(tensor: Any, part: str, leaves: list[tuple[_Unpacking, tuple[Tensor, ...]]]) -> Any:
    """Returns what the same moves make of a field of the packed weights."""
    function, args, kwargs, index = origin_of(tensor) or (None, (), {}, None)
    if isinstance(function, _Unpacking):
        leaves.append((function, args))
        return dict(zip(function.fields, args, strict=True)).get(part)
    if function in _SAME:
        return _remade(args[0], part, leaves)
    if function not in _MOVES or index is not None or kwargs:
        raise _OtherwiseError
    first, *rest = args
    if function in _TURNS and (before := _transposed_back(tensor)) is not None:
        return _remade(before, part, leaves)
    if isinstance(first, (list, tuple)):
        moved: Any = [_remade(each, part, leaves) for each in first]
        missing = any(each is None for each in moved)
    else:
        moved = _remade(first, part, leaves)
        missing = moved is None
    if missing:
        return None
    try:
        return function(moved, *rest)
    except RuntimeError as error:  # Their sizes differ where the decoded ones' do not.
        raise _OtherwiseError from error


def _transposed_back(tensor: Tensor) -> Tensor | None:
    """Returns what a transpose of a transpose is, whose bytes may lie in a file; or None."""
    orders: list[list[int]] = []
    before: Any = tensor
    while len(orders) < 2:
        function, args, *_ = origin_of(before) or (None, (None,))
        if function in _TURNS:
            # A tensor without values whose sizes are the axes' numbers.
            axes = torch.empty(tuple(range(tensor.ndim)), device="meta")
            orders.append(list(function(axes, *args[1:]).shape))
        elif function not in _SAME:
            return None
        before = args[0]
    second, first = orders
    return before if [first[axis] for axis in second] == sorted(first) else None
