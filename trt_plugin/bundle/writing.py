"""The bytes of programs and bundles; equal ones give equal bytes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from struct import Struct
from typing import Generic, TypeVar
from zlib import crc32

from trt_plugin.bundle import records
from trt_plugin.bundle.launches import (
    Argument,
    Buffer,
    Expression,
    Kernel,
    Launch,
    Range,
    TensorMap,
)

# Where the headers of files and of programs have the checksum.
_CHECKSUM_AT = 24
_Item = TypeVar("_Item", bound=Hashable)


def bundle_bytes(programs: Sequence[bytes]) -> bytes:
    """Returns the file that holds programs.

    Raises:
        ValueError: If there are none.
    """
    if not programs:
        raise ValueError("a bundle needs a program")
    offset = records.FILE_HEADER.size + len(programs) * records.DIRECTORY_ENTRY.size
    directory, body = b"", b""
    for program in programs:
        padding = -offset % records.IMAGE_ALIGNMENT
        directory += records.DIRECTORY_ENTRY.pack(offset + padding, len(program))
        body += bytes(padding) + program
        offset += padding + len(program)
    header = records.FILE_HEADER.pack(
        records.FILE_MAGIC, records.VERSION, len(programs), offset, 0, 0
    )
    return _with_checksum(header + directory + body)


def program_bytes(
    layer: records.LayerRecord,
    architecture: int,
    ranges: Sequence[Range],
    kernels: Sequence[Kernel],
    state: Sequence[Buffer] = (),
) -> bytes:
    """Returns a program by itself."""
    writer = _Writer()
    writer.state = [writer.buffer(buffer) for buffer in state]
    for kernel in kernels:
        writer.kernel(kernel)
    for token_range in ranges:
        writer.range(token_range)
    tables = writer.tables()
    offset, directory, body = records.PROGRAM_HEADER_BYTES, b"", b""
    for name, record_bytes in records.TABLES.items():
        padding = -offset % (records.IMAGE_ALIGNMENT if name == "images" else 8)
        table = tables[name]
        directory += records.TABLE_ENTRY.pack(offset + padding, len(table) // record_bytes)
        body += bytes(padding) + table
        offset += padding + len(table)
    header = records.PROGRAM_HEADER.pack(
        records.PROGRAM_MAGIC, records.VERSION, architecture, offset, 0, 0
    )
    return _with_checksum(header + layer.to_bytes() + directory + body)


def _with_checksum(data: bytes) -> bytes:
    checksum = crc32(data).to_bytes(4, "little")
    return data[:_CHECKSUM_AT] + checksum + data[_CHECKSUM_AT + 4 :]


class _Shared(Generic[_Item]):
    """A table that stores equal items once."""

    def __init__(self) -> None:
        self.index: dict[_Item, int] = {}

    def add(self, item: _Item) -> int:
        return self.index.setdefault(item, len(self.index))


class _Blob:
    """Bytes that hold equal strings once, each at a multiple of `alignment`."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.data = b""
        self.offsets: dict[bytes, int] = {}

    def add(self, item: bytes) -> tuple[int, int]:
        if item not in self.offsets:
            self.data += bytes(-len(self.data) % self.alignment)
            self.offsets[item] = len(self.data)
            self.data += item
        return self.offsets[item], len(item)


class _Writer:
    """Collects a program's tables."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, ...]] = []
        self.state: list[tuple[int, ...]] = []
        self.buffers: list[tuple[int, ...]] = []
        self.launches: list[tuple[int, ...]] = []
        self.arguments: list[tuple[int, ...]] = []
        self.kernels: list[tuple[int, ...]] = []
        self.maps: _Shared[TensorMap] = _Shared()
        self.expressions: _Shared[Expression] = _Shared()
        self.strings = _Blob(1)
        self.images = _Blob(records.IMAGE_ALIGNMENT)

    def range(self, token_range: Range) -> None:
        launches = [self._launch(launch) for launch in token_range.all_launches]
        waves = 0 if token_range.waves is None else self.expressions.add(token_range.waves)
        self.ranges.append(
            (
                *(token_range.first, token_range.last),
                *(
                    len(self.launches),
                    len(token_range.launches),
                    len(token_range.wave),
                    len(token_range.epilogue),
                ),
                *(len(self.buffers), len(token_range.buffers), waves, 0),
            )
        )
        self.launches += launches
        self.buffers += [self.buffer(buffer) for buffer in token_range.buffers]

    def kernel(self, kernel: Kernel) -> None:
        self.kernels.append(
            (
                *self.strings.add(kernel.name.encode()),
                *self.strings.add(kernel.description.encode()),
                *self.images.add(kernel.image),
                kernel.num_warps,
                kernel.shared_memory,
                records.DEPENDENT_LAUNCH if kernel.dependent_launch else 0,
                *(kernel.registers, kernel.local_memory, 0),
            )
        )

    def buffer(self, buffer: Buffer) -> tuple[int, ...]:
        flags = records.ZEROED if buffer.zeroed else 0
        return (*self.strings.add(buffer.name.encode()), self.expressions.add(buffer.size), flags)

    def _launch(self, launch: Launch) -> tuple[int, ...]:
        first = len(self.arguments)
        self.arguments += [self._argument(argument) for argument in launch.arguments]
        grid = (self.expressions.add(axis) for axis in launch.grid)
        flags = records.ON_SIDE if launch.side else 0
        after = sum(1 << index for index in launch.after)
        return (launch.kernel, first, len(launch.arguments), *grid, flags, after)

    def _argument(self, argument: Argument) -> tuple[int, int]:
        kind = list(records.PARAMETER_BYTES).index(argument.kind)
        match argument.value:
            case None:
                return kind, 0
            case str(tensor):
                return kind, records.TENSORS.index(tensor)
            case int(buffer):
                return kind, buffer
            case Expression() as expression:
                return kind, self.expressions.add(expression)
            case TensorMap() as tensor_map:
                return kind, self.maps.add(tensor_map)

    def tables(self) -> dict[str, bytes]:
        """Each table's bytes by its name."""
        expressions: list[tuple[int, ...]] = []
        instructions: list[tuple[int, ...]] = []
        for expression in self.expressions.index:
            expressions.append((len(instructions), len(expression.instructions)))
            instructions += [(opcode, 0, value) for opcode, value in expression.instructions]
        return {
            "ranges": _packed(records.RANGE, self.ranges),
            "state": _packed(records.BUFFER, self.state),
            "buffers": _packed(records.BUFFER, self.buffers),
            "launches": _packed(records.LAUNCH, self.launches),
            "arguments": _packed(records.ARGUMENT, self.arguments),
            "tensor maps": b"".join(_map_bytes(tensor_map) for tensor_map in self.maps.index),
            "kernels": _packed(records.KERNEL, self.kernels),
            "expressions": _packed(records.EXPRESSION, expressions),
            "instructions": _packed(records.INSTRUCTION, instructions),
            "strings": self.strings.data,
            "images": self.images.data,
        }


def _packed(record: Struct, rows: Sequence[tuple[int, ...]]) -> bytes:
    return b"".join(record.pack(*row) for row in rows)


def _map_bytes(tensor_map: TensorMap) -> bytes:
    rank = len(tensor_map.sizes)
    absent = (0,) * (5 - rank)
    kinds = list(records.PARAMETER_BYTES)
    match tensor_map.tensor:
        case str(tensor):
            kind, index = kinds.index("tensor"), records.TENSORS.index(tensor)
        case int(part):
            kind, index = kinds.index("state"), part
    return records.TENSOR_MAP.pack(
        *(index, tensor_map.dtype, rank, tensor_map.swizzle),
        *(*tensor_map.sizes, *absent),
        *(*tensor_map.strides, *absent),
        *(*tensor_map.box, *absent),
        *(kind, *(0,) * 6),
    )
