"""Tensors whose values stay on disk until they are written somewhere else.

A :class:`LazyTensor` knows its shape and dtype, and how its values come about: a stretch of a
safetensors file, a tensor in memory, or an operation on other lazy tensors. PyTorch's functions
work on it without reading anything (``torch.stack``, ``cat``, ``transpose``, ``to`` a dtype, …), so
whatever prepares a checkpoint for a model, such as transformers' own loader, prepares lazy ones
too. Values are then produced a few rows at a time.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from dynamo_moe.private.pytorch import OpOverload, schema_of, wrapper_subclass
from dynamo_moe.pytree import tree_leaves, tree_map_only

CHUNK_BYTES = 2**23
"""The memory that :meth:`LazyTensor.chunks` takes, unless one row is larger."""

_aten = torch.ops.aten


@dataclass(frozen=True)
class Stored:
    """A contiguous tensor in a file.

    Attributes:
        path: The file.
        offset: Offset of its first byte.
        shape: Its shape.
        dtype: Its dtype.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> Tensor:
        """Reads rows ``start`` to ``stop`` of its first dimension.

        Raises:
            OSError: If the file ends before.
        """
        row = self.nbytes // self.shape[0]
        return self._read(start * row, (stop - start) * row, (stop - start, *self.shape[1:]))

    def read(self) -> Tensor:
        """Reads all of it."""
        return self._read(0, self.nbytes, self.shape)

    def _read(self, skip: int, size: int, shape: tuple[int, ...]) -> Tensor:
        values = torch.empty(size, dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset + skip)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), file.tell(), size, os.POSIX_FADV_WILLNEED)
            view = memoryview(values.numpy())  # type: ignore[arg-type]
            while view:
                count = file.readinto(view)
                if not count:
                    raise OSError(f"{self.path} ends {len(view)} bytes before its last tensor")
                view = view[count:]
        return values.view(self.dtype).view(shape)


@dataclass(frozen=True)
class _Result:
    """The result of an operation; ``index`` among its results where it has several."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None

    def of(self, *args: Any) -> Tensor:
        """Runs the operation on values."""
        result = self.function(*args, **self.kwargs)
        return result if self.index is None else result[self.index]  # type: ignore[no-any-return]


class LazyTensor(Tensor):
    """A tensor on the CPU whose values are not in memory.

    Operations on it are recorded. Whatever needs its values, or would change them, raises
    ``NotImplementedError``: :meth:`read` it first.
    """

    _meta: Tensor
    _source: Stored | _Result

    def __new__(cls, meta: Tensor, source: Stored | _Result) -> Self:
        """Makes a tensor of the shape, strides and dtype of ``meta``."""
        lazy = wrapper_subclass(cls, meta)
        lazy._meta, lazy._source = meta, source
        return lazy

    @classmethod
    def stored(cls, source: Stored) -> LazyTensor:
        """Returns the tensor of a stretch of a file."""
        return cls(torch.empty(source.shape, dtype=source.dtype, device="meta"), source)

    @classmethod
    def of_memory(cls, tensor: Tensor) -> LazyTensor:
        """Returns a tensor in memory, such that what is made of it is computed when it is read."""
        known = tensor.detach()
        return cls(known.to("meta"), _Result(_aten.alias.default, (known,), {}, None))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if schema_of(func).is_mutable:
            raise NotImplementedError(f"{func} would change a tensor that lies in a checkpoint")
        meta_args, meta_kwargs = tree_map_only(Tensor, _as_meta, (args, kwargs))
        if meta_kwargs.get("device") is not None:
            # A cast may name the device that a lazy tensor is on already.
            meta_kwargs["device"] = torch.device("meta")
        try:
            results = func(*meta_args, **meta_kwargs)
        except NotImplementedError:
            results = None
        if isinstance(results, Tensor):
            return cls(results, _Result(func, args, kwargs, None))
        if not isinstance(results, (list, tuple)):
            raise NotImplementedError(f"{func} needs the values of a tensor in a checkpoint")
        return [cls(r, _Result(func, args, kwargs, index)) for index, r in enumerate(results)]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={list(self.shape)}, dtype={self.dtype})"

    @property
    def origin(self) -> Stored | None:
        """Where its values lie in a file as they are; None if they have to be computed."""
        source = self._source
        if isinstance(source, Stored):
            return source
        first = source.args[0] if source.args else None
        whole = first.origin if isinstance(first, LazyTensor) else None
        start = _first_row(source)
        if whole is None or start is None:
            return whole if source.function in _SAME_BYTES else None
        row = whole.nbytes // max(1, source.args[0].shape[0])
        return Stored(whole.path, whole.offset + start * row, (*self.shape,), self.dtype)

    @property
    def is_in_memory(self) -> bool:
        """Whether it is made of tensors in memory alone."""
        if isinstance(self._source, Stored):
            return False
        parts = tree_leaves((self._source.args, self._source.kwargs))
        return all(part.is_in_memory for part in parts if isinstance(part, LazyTensor))

    def of_others(self, other: Callable[[Tensor], Tensor | None]) -> LazyTensor:
        """Returns this tensor as it would be if it had been made of other tensors.

        Args:
            other: From a tensor to what takes its place; None: it is made of others in turn.

        Raises:
            ValueError: If nothing takes the place of a tensor that lies in a file or in memory.
        """

        def replaced(tensor: Tensor) -> Tensor:
            substitute = other(tensor)
            if substitute is not None:
                return substitute
            source = tensor._source if isinstance(tensor, LazyTensor) else None
            if not isinstance(source, _Result):
                raise ValueError("a tensor has no counterpart")
            args, kwargs = tree_map_only(Tensor, replaced, (source.args, source.kwargs))
            made = _Result(source.function, args, kwargs, source.index)
            return LazyTensor(_as_meta(tensor), made)

        tensor = replaced(self)
        return tensor if isinstance(tensor, LazyTensor) else LazyTensor.of_memory(tensor)

    def read(self) -> Tensor:
        """Returns the values, all in memory; of rows of a tensor, these alone are read."""
        if isinstance(self._source, Stored):
            return self._source.read()
        taken = _rows_taken(self._source)
        rows = None if taken is None else _row_reader(self._source.args[0])
        if taken is not None and rows is not None:
            values = rows(taken.start, taken.stop)
            return values if self.ndim == self._source.args[0].ndim else values[0]
        return self._source.of(*tree_map_only(LazyTensor, LazyTensor.read, self._source.args))

    def chunks(self) -> Iterator[Tensor]:
        """Yields the values in order, contiguous, about ``CHUNK_BYTES`` at a time."""
        if not self.ndim or not self.numel():
            yield self.read().contiguous()
            return
        length = self.shape[0]
        step = max(1, CHUNK_BYTES * length // (self.numel() * self.dtype.itemsize))
        rows = _row_reader(self) or _rows_of(self.read())
        for start in range(0, length, step):
            yield rows(start, min(start + step, length)).contiguous()


def _as_meta(tensor: Tensor) -> Tensor:
    return tensor._meta if isinstance(tensor, LazyTensor) else tensor.to("meta")


def lazy_cast(tensor: Tensor, dtype: torch.dtype) -> LazyTensor:
    """Returns a tensor, lazy or in memory, in another dtype; it is cast when it is read."""
    meta = torch.empty(tensor.shape, dtype=dtype, device="meta")
    cast = _Result(_aten._to_copy.default, (tensor.detach(),), {"dtype": dtype}, None)
    return LazyTensor(meta, cast)


def computed(
    function: Callable[..., Tensor],
    args: Sequence[Any],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> LazyTensor:
    """Returns what a function computes of tensors once it is read, which has this shape."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    return LazyTensor(meta, _Result(function, tuple(args), {}, None))


def origin_of(
    tensor: Any,
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int | None] | None:
    """Returns the operation that makes a lazy tensor, its arguments, and which result it is.

    None for what is not lazy, or lies in a file.
    """
    source = tensor._source if isinstance(tensor, LazyTensor) else None
    if not isinstance(source, _Result):
        return None
    return source.function, source.args, source.kwargs, source.index


# --- Rows ---

# A matrix that is larger is transposed in parts.
_MOST_TURNED_BYTES = 256 * 2**20

_Rows = Callable[[int, int], Tensor]

_SAME = frozenset({_aten.alias.default, _aten.detach.default, _aten.lift_fresh.default})
_POINTWISE = _SAME | {_aten.clone.default, _aten._to_copy.default}
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
# Of what is contiguous, as all is that lies in a file.
_SAME_BYTES = _SAME | {*_VIEWS, _aten.view.dtype}


def _row_reader(tensor: Tensor) -> _Rows | None:
    """Returns a function that computes rows start to stop alone; None if rows are mixed."""
    if not isinstance(tensor, LazyTensor):
        return _rows_of(tensor)
    source = tensor._source
    if isinstance(source, Stored):
        return source.rows
    function, (first, *rest) = source.function, source.args
    if not isinstance(function, OpOverload):
        return None
    if function is _aten.stack.default and _dimension(tensor, rest) == 0:
        return lambda start, stop: source.of([part.read() for part in first[start:stop]], *rest)
    if function in (_aten.stack.default, _aten.cat.default):
        readers = [_row_reader(part) for part in first]
        if _dimension(tensor, rest) == 0 or None in readers:
            return None
        return lambda a, b: source.of([read(a, b) for read in readers if read], *rest)
    read = _row_reader(first) if isinstance(first, Tensor) and first.ndim else None
    skipped = _first_row(source)
    if read is not None and skipped is not None:
        return lambda start, stop: read(start + skipped, stop + skipped)
    if read is not None and _turns(first, function, rest) and first.nbytes > _MOST_TURNED_BYTES:
        return _TurnedRows(read, tensor)
    if read is None or not _keeps_rows(first, tensor, function, rest):
        return None
    if function in _VIEWS:
        return lambda a, b: read(a, b).reshape(b - a, *tensor.shape[1:])
    return lambda a, b: source.of(read(a, b), *rest)


class _TurnedRows:
    """Rows of a transposed matrix: of a quarter of them at a time, for which all of it is read."""

    def __init__(self, read: _Rows, tensor: Tensor) -> None:
        self._read, (self._length, self._columns) = read, tensor.shape
        self._panel_rows = -(-self._length // 4)
        self._step = max(1, CHUNK_BYTES // (self._length * tensor.dtype.itemsize))
        self._panel: tuple[int, Tensor | None] = (0, None)

    def __call__(self, start: int, stop: int) -> Tensor:
        """Returns rows start to stop."""
        parts = []
        while start < stop:
            first, panel = self._panel
            if panel is None or not first <= start < first + len(panel):
                self._panel = (0, None)  # One at a time.
                first = start // self._panel_rows * self._panel_rows
                panel = self._read_panel(first, min(first + self._panel_rows, self._length))
                self._panel = first, panel
            end = min(stop, first + len(panel))
            parts.append(panel[start - first : end - first])
            start = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_panel(self, first: int, last: int) -> Tensor:
        panel: Tensor | None = None
        for row in range(0, self._columns, self._step):
            rows = self._read(row, min(row + self._step, self._columns))[:, first:last]
            if panel is None:
                panel = rows.new_empty((last - first, self._columns))
            panel[:, row : row + len(rows)] = rows.T
        if panel is None:
            raise ValueError("a matrix without rows has no transposed rows")
        return panel


def _turns(before: Tensor, function: Callable[..., Any], rest: list[Any]) -> bool:
    """Whether the result is a matrix, transposed."""
    if before.ndim != 2:
        return False
    if function is _aten.permute.default:
        return [axis % 2 for axis in rest[0]] == [1, 0]
    swapped = function is _aten.transpose.int and rest[0] % 2 != rest[1] % 2
    return function is _aten.t.default or swapped


def _rows_of(tensor: Tensor) -> _Rows:
    return lambda start, stop: tensor[start:stop]


def _keeps_rows(
    before: Tensor, after: Tensor, function: Callable[..., Any], rest: list[Any]
) -> bool:
    """Whether row i of the result comes from row i of the operand alone."""
    if function in _VIEWS:
        return before.shape[0] == after.shape[0]
    if function is _aten.transpose.int:
        return 0 not in (axis % before.ndim for axis in rest)
    if function is _aten.permute.default:
        return bool(rest[0][0] % before.ndim == 0)
    if function is _aten.slice.Tensor:
        return _dimension(before, rest) != 0
    if function in (_aten.split.Tensor, _aten.split_with_sizes.default):
        return _dimension(before, rest[1:]) != 0
    return function in _POINTWISE


def _first_row(source: _Result) -> int | None:
    """Returns the first of the rows that a slice takes; None if it is no slice of rows alone."""
    if source.function is not _aten.slice.Tensor:
        return None
    tensor, *given = source.args
    arguments = dict(zip(("dim", "start", "end", "step"), given, strict=False))
    if arguments.get("dim", 0) % tensor.ndim or arguments.get("step", 1) != 1:
        return None
    return range(tensor.shape[0])[arguments.get("start") :].start


def _rows_taken(source: _Result) -> range | None:
    """Returns the rows that a slice or a choice of one takes; None if it takes no rows alone."""
    if source.function is _aten.select.int:
        tensor, dimension, index = source.args
        row = index % tensor.shape[0]
        return None if dimension % tensor.ndim else range(row, row + 1)
    first = _first_row(source)
    if first is None:
        return None
    tensor, *given = source.args
    end = given[2] if len(given) > 2 else None
    return range(tensor.shape[0])[first:end]


def _dimension(tensor: Tensor, rest: list[Any]) -> int:
    return operator.index(rest[0]) % tensor.ndim if rest else 0
