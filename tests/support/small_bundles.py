"""A small bundle with every kind of record, and what it becomes when bytes are changed."""

from __future__ import annotations

import struct
from dataclasses import replace
from zlib import crc32

import pytest

import trt_plugin
from standin import fake_cubin
from trt_plugin import Bundle, BundleError
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
    weight_format=2,
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

WAVE = Expression(((1, 5),))
SLOTS = TensorMap(1, 6, 3, (64, 128, 4), (2, 128, 16384), (64, 32, 1))


def offloaded(**changes: object) -> Program:
    """A program of a layer with 4 of 8 experts on the device, which runs in waves."""
    state = (
        Buffer("expert_of_slot", Expression(((0, 16),)), zeroed=True),
        Buffer("w1_slots", Expression(((0, 65536),))),
    )
    grid = (ONE, ONE, ONE)
    wave = (
        Launch(0, (Argument("tensor", "w1"), Argument("state", 1)), grid, side=True, after=(1,)),
        Launch(1, (Argument("tensor_map", SLOTS), Argument("i32", WAVE)), grid, after=(0,)),
    )
    ahead = Launch(1, (Argument("state", 0), Argument("workspace", 0)), grid)
    end = Launch(1, (Argument("tensor", "y"),), grid)
    only = Range(1, 99, (Buffer("rows", TOKENS),), (ahead,), wave, TILES, (end,))
    kernels = tuple(replace(each, dependent_launch=False) for each in program().kernels)
    layer = LAYER._replace(resident_experts=4)
    whole = Program(layer, 90, (only,), kernels, state)
    return replace(whole, **changes)  # type: ignore[arg-type]


OFFLOADED = Bundle((offloaded(), offloaded(architecture=80)))


def repaired(data: bytes) -> bytes:
    """A bundle of two programs, altered, with the right checksums of its programs and its own."""
    for offset, size in records.DIRECTORY_ENTRY.iter_unpack(data[32:64]):
        data = data[:offset] + checked(data[offset : offset + size]) + data[offset + size :]
    return checked(data)


def checked(data: bytes) -> bytes:
    """A file or program with the right checksum."""
    if len(data) < 28:
        return data
    zeroed = data[:24] + bytes(4) + data[28:]
    return data[:24] + struct.pack("<I", crc32(zeroed)) + data[28:]


def altered(offset: int, form: str, *values: float, bundle: Bundle = SMALL) -> bytes:
    """A bundle with values written over it, from the first program's start on."""
    data = bytearray(bundle.data)
    struct.pack_into(f"<{form}", data, 64 + offset, *values)
    return repaired(bytes(data))


def record(table: str, index: int = 0, bundle: Bundle = SMALL) -> int:
    """Where a record of the first program lies, from the program's start."""
    at = list(records.TABLES).index(table)
    entries = records.PROGRAM_HEADER_BYTES - len(records.TABLES) * records.TABLE_ENTRY.size
    offset, _ = records.TABLE_ENTRY.unpack_from(bundle.data, 64 + entries + 16 * at)
    return int(offset) + index * records.TABLES[table]


def sized(*expressions: Expression, last: int = 2**31 - 1) -> Program:
    """A program whose workspace has buffers of some sizes."""
    buffers = tuple(Buffer(f"part {at}", each) for at, each in enumerate(expressions))
    return program(ranges=(Range(1, last, buffers, ()),))


def refusal(data: bytes) -> str:
    """Returns why a bundle is refused."""
    with pytest.raises(BundleError) as raised:
        trt_plugin.read(data)
    return str(raised.value)
