"""Weights of an ONNX graph that are written from files, never held.

While a model with lazy parameters is traced, placeholders stand for them: tensors of the same
shape, strides and device, on reserved addresses that take no memory. So both kinds of model give
the same graph.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
import onnx_ir.tensor_adapters
import torch
from torch import Tensor, nn

from dynamo_moe.private.pytorch import tensors_replaced
from dynamo_moe.process_state import ProcessState
from dynamo_moe.weights.lazy_tensors import LazyTensor, Stored
from dynamo_moe.weights.packed_linear import packed_layers


class Lazies(dict[int, LazyTensor]):
    """Lazy tensors by the address of their placeholder.

    Attributes:
        placeholders: The placeholders, by their addresses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.placeholders: dict[int, Tensor] = {}

    @property
    def are_in_memory(self) -> bool:
        """Whether all can be computed of tensors in memory, so that a model can run with them."""
        return all(lazy.is_in_memory for lazy in self.values())

    def fill(self) -> None:
        """Gives the placeholders their values, which take their memory."""
        for address, tensor in self.placeholders.items():
            tensor.detach().copy_(self[address].read())
        self.placeholders.clear()


# Bytes of a view that are copied at a time.
_CHUNK = 2**24
# Python names it from 3.13 on; the value is that of Linux.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class _Weight(ir.tensor_adapters.TorchTensor):
    """A tensor as a weight of an ONNX graph."""

    @property
    def nbytes(self) -> int:
        """Its bytes, which are asked for several times, and which PyTorch knows."""
        return int(self.raw.nbytes)


class _LazyWeight(_Weight):
    """A lazy tensor as a weight of an ONNX graph."""

    raw: LazyTensor

    def numpy(self) -> np.ndarray:
        return ir.tensor_adapters.TorchTensor(self.raw.read()).numpy()

    def tobytes(self) -> bytes:
        return b"".join(bytes(_bytes(chunk)) for chunk in self.raw.chunks())

    def tofile(self, file: BinaryIO) -> None:
        # The next chunk is read while one is written.
        chunks = self.raw.chunks()
        with _reading():
            pending = _reader.submit(next, chunks, None)
            while (chunk := pending.result()) is not None:
                pending = _reader.submit(next, chunks, None)
                file.write(_bytes(chunk))


class _PairedWeight(_LazyWeight):
    """Integers of 4 bits, of which a byte of the lazy tensor holds two along the last axis."""

    def __init__(self, tensor: LazyTensor, name: str | None, dtype: ir.DataType) -> None:
        shape = ir.Shape([*tensor.shape[:-1], 2 * tensor.shape[-1]])
        ir.Tensor.__init__(self, tensor, dtype, shape=shape, name=name)

    def numpy(self) -> np.ndarray:
        return ir.PackedTensor(_flat(self.raw.read()), self.dtype, shape=self.shape).numpy()


class _StridedWeight(_Weight):
    """A view, such as a transposed matrix, as a weight of an ONNX graph."""

    def tofile(self, file: BinaryIO) -> None:
        # Never the whole of it at once: a transposed head of a language model has a gigabyte.
        rows = max(1, _CHUNK * len(self.raw) // max(1, self.nbytes))
        for part in self.raw.split(rows):
            ir.tensor_adapters.TorchTensor(part).tofile(file)


def as_ir(
    tensor: Tensor, name: str | None, dtype: ir.DataType | None = None
) -> ir.tensor_adapters.TorchTensor:
    """Returns the tensor as a weight of an ONNX graph.

    Args:
        tensor: Its values.
        name: Its name.
        dtype: Where that is one of 4 bits, each byte of the lazy ``tensor`` holds two values.
    """
    kind = _Weight
    if dtype is not None and dtype.bitwidth == 4 and isinstance(tensor, LazyTensor):
        return _PairedWeight(tensor, name, dtype)
    if isinstance(tensor, LazyTensor):
        kind = _LazyWeight
    elif not tensor.is_contiguous():
        kind = _StridedWeight
    return kind(tensor, name=name)


@contextlib.contextmanager
def placeholders(model: nn.Module) -> Iterator[Lazies]:
    """Replaces a model's lazy parameters and buffers until the context ends.

    Packed linear layers have a lazy weight for that time.
    """
    lazies = Lazies()
    made: dict[int, Tensor] = {}

    def placeholder(_path: str, tensor: Any) -> Any:
        if not isinstance(tensor, LazyTensor):
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = _placeholder(tensor)
            address = made[id(tensor)].data_ptr()
            lazies[address], lazies.placeholders[address] = tensor, made[id(tensor)]
        return made[id(tensor)]

    with contextlib.ExitStack() as exported:
        for layer in packed_layers(model).values():
            exported.enter_context(layer.exported())
        with tensors_replaced(model, placeholder):
            yield lazies


def attach(model: ir.Model, lazies: Lazies) -> None:
    """Gives the graph's initializers their lazy tensors in place of the placeholders."""
    for value in model.graph.initializers.values():
        raw = getattr(value.const_value, "raw", None)
        if isinstance(raw, Tensor):
            value.const_value = as_ir(lazies.get(raw.data_ptr(), raw), value.name)


def detach(model: ir.Model, names: Collection[str]) -> None:
    """Takes the values of these names from the initializers of a graph, as it was translated."""
    for name in model.graph.initializers.keys() & names:
        model.graph.initializers[name].const_value = None


def attach_named(model: ir.Model, tensors: Mapping[str, Tensor], lazies: Lazies) -> None:
    """Gives the initializers that have no values the tensors of their names."""
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            tensor = tensors[name]
            value.const_value = as_ir(lazies.get(tensor.data_ptr(), tensor), name)


def linkable(model: ir.Model) -> set[str]:
    """Returns the names of the initializers whose values lie in a file as they are."""
    initializers = model.graph.initializers
    return {name for name, value in initializers.items() if _origin(value) is not None}


def link(model: ir.Model, folder: Path) -> None:
    """Lets initializers whose values lie in a file as they are refer to that file.

    Raises:
        ValueError: If such a file is not in ``folder`` or below it: ONNX files name their data
            relative to their own folder, and runtimes look nowhere else.
    """
    folder = folder.resolve()

    @functools.cache
    def location(file: Path) -> str:  # Most weights lie in few files.
        path = file.resolve()
        if not path.is_relative_to(folder):
            raise ValueError(
                f"weights can be linked from files in {folder} or below it only, not from {path}: "
                "write the ONNX file beside the checkpoint"
            )
        return path.relative_to(folder).as_posix()

    for value in model.graph.initializers.values():
        weight, origin = value.const_value, _origin(value)
        if weight is None or origin is None:
            continue
        value.const_value = ir.ExternalTensor(
            location(origin.path),
            origin.offset,
            origin.nbytes,
            weight.dtype,
            shape=ir.Shape(weight.shape.numpy()),
            name=weight.name or "",
            base_dir=folder,
        )


def written_in_turn(model: ir.Model) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which lazy weights share the thread that reads them.

    One of its own takes each weight 1 to 4 ms: as long as reading 8 MiB.
    """
    values = model.graph.initializers.values()
    is_any_lazy = any(isinstance(value.const_value, _LazyWeight) for value in values)
    return _reading() if is_any_lazy else contextlib.nullcontext()


def _origin(value: ir.Value) -> Stored | None:
    weight = value.const_value
    origin = weight.raw.origin if isinstance(weight, _LazyWeight) else None
    return origin if origin is not None and origin.nbytes else None


def _placeholder(lazy: LazyTensor) -> Tensor:
    flags = {}
    if hasattr(mmap, "MAP_ANONYMOUS"):
        flags["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    buffer = mmap.mmap(-1, max(1, lazy.numel() * lazy.dtype.itemsize), **flags)
    tensor = torch.frombuffer(buffer, dtype=lazy.dtype, count=lazy.numel()).view(lazy.shape)
    if isinstance(lazy, nn.Parameter):
        return nn.Parameter(tensor, lazy.requires_grad)
    return tensor


@contextlib.contextmanager
def _one_for_new_threads() -> Iterator[None]:
    """Keeps new threads from starting PyTorch's, which wait in a loop on the core that writes.

    A thread takes the number that was set last when it first computes, and keeps it. So the number
    is set in a thread that ends: those that run already keep theirs, whoever is the last to leave.
    """
    threads = torch.get_num_threads()
    _set_for_new_threads(1)
    try:
        yield
    finally:
        _set_for_new_threads(threads)


def _set_for_new_threads(count: int) -> None:
    thread = Thread(target=torch.set_num_threads, args=(count,))
    thread.start()
    thread.join()


class _Reader:
    """The thread that reads lazy weights, and computes them, for all threads that write some."""

    _pool: ThreadPoolExecutor

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        with _one_for_new_threads(), ThreadPoolExecutor(1) as self._pool:
            yield

    def submit(self, read: Callable[..., Tensor | None], *args: Any) -> Future[Tensor | None]:
        return self._pool.submit(read, *args)


_reader = _Reader()

_reading = ProcessState(_reader.started, side_by_side=True)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(_flat(tensor))  # type: ignore[arg-type]


def _flat(tensor: Tensor) -> np.ndarray:
    flat: np.ndarray = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat
