"""A small bundle with every kind of record, and what it becomes when bytes are changed."""

from __future__ import annotations

import struct
from dataclasses import replace
from zlib import crc32

from standin import fake_cubin
from trt_plugin import Bundle
from trt_plugin.bundle import (
    Argument,
    Buffer,
    Expression,
    Kernel,
    Launch,
    LayerRecord,
    Program,
    Range,
    TensorMap,
    records,
)

LAYER = LayerRecord(
    *(0, 2, 2, 2, 0, 0x24, 2, 0),
    *(8, 2, 64, 128),
    *(1.0, 0.0, 0.0),
)
ONE = Expression(((0, 1),))
TOKENS = Expression(((1, 0),))
# cdiv(T * K, 16)
TILES = Expression(((1, 0), (1, 2), (4, 0), (0, 16), (6, 0)))
MAP = TensorMap("w1", 6, 3, (64, 128, 8), (2, 128, 16384), (64, 32, 1))


def kernel(name: str = "up", image: bytes = fake_cubin(b"any")) -> Kernel:
    return Kernel(name, '{"function":"up"}', image, 4, 49152, True, 64, 16)


def program(**changes: object) -> Program:
    buffers = (Buffer("rows", TILES), Buffer("hidden", TOKENS))
    arguments = (
        Argument("tensor", "x"),
        Argument("workspace", 1),
        Argument("i32", TOKENS),
        Argument("i64", TILES),
        Argument("tensor_map", MAP),
        Argument("null"),
    )
    few = Range(1, 16, (), (Launch(0, (Argument("tensor", "y"),), (TOKENS, ONE, ONE)),))
    many = Range(17, 2**31 - 1, buffers, (Launch(1, arguments, (TILES, ONE, TOKENS)),) * 2)
    whole = Program(LAYER, 90, (few, many), (kernel(), kernel("down", fake_cubin(b"other"))))
    return replace(whole, **changes)  # type: ignore[arg-type]


SMALL = Bundle((program(), program(architecture=80)))


def repaired(data: bytes) -> bytes:
    """The small bundle, altered, with the right checksums of its programs and its own."""
    for offset, size in records.DIRECTORY_ENTRY.iter_unpack(data[32:64]):
        data = data[:offset] + checked(data[offset : offset + size]) + data[offset + size :]
    return checked(data)


def checked(data: bytes) -> bytes:
    """A file or program with the right checksum."""
    if len(data) < 28:
        return data
    zeroed = data[:24] + bytes(4) + data[28:]
    return data[:24] + struct.pack("<I", crc32(zeroed)) + data[28:]


def altered(offset: int, form: str, *values: float) -> bytes:
    """The small bundle with values written over it, from the first program's start on."""
    data = bytearray(SMALL.data)
    struct.pack_into(f"<{form}", data, 64 + offset, *values)
    return repaired(bytes(data))


def record(table: str, index: int = 0) -> int:
    """Where a record of the first program lies, from the program's start."""
    at = list(records.TABLES).index(table)
    offset, _ = records.TABLE_ENTRY.unpack_from(SMALL.data, 64 + 112 + 16 * at)
    return int(offset) + index * records.TABLES[table]
