"""Reads a cubin's attributes of its kernel: parameters, registers, shared and local memory.

A cubin is an ELF file. Its sections ``.nv.info`` and ``.nv.info.<kernel>`` are lists of attributes:
a byte for the form, a byte for the attribute, then two bytes of value, or two bytes of length and
the value. NVIDIA does not document them; codes and layouts are those that ``cuobjdump -elf``
prints, checked against the PTX and ``ptxas -v`` of CUDA 12.8, 12.9 and 13.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct, error, unpack_from

_ELF_HEADER = Struct("<16s2HI3QI6H")
_SECTION = Struct("<2I4Q2I2Q")
_SYMBOL = Struct("<I2BH2Q")
_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_ENTRY = 0x10  # st_other of a kernel
_EMPTY = 8  # NOBITS: the section has no content in the file

_SIZED = 4  # An attribute's form: a length and a value follow.
_FRAME_SIZE = 0x11
_KERNEL_THREADS = 0x10
_PARAMETER = 0x17
_PARAMETERS_SIZE = 0x19
_REGISTERS = 0x2F

# From sm_90 on, the system reserves the first KiB of a block's shared memory, which counts as the
# kernel's.
_RESERVED_SHARED = 1024


class CubinError(ValueError):
    """The bytes are not a cubin of one kernel."""


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter: its place in the parameters' memory, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True)
class CubinInfo:
    """The attributes of a cubin's kernel.

    Attributes:
        name: The entry point.
        parameters: In order.
        threads: Threads per block that it was compiled for; 0 if any number.
        registers: Registers per thread.
        local_memory: Bytes of spilled registers and stack per thread.
        static_shared_memory: Bytes per block, besides those that a launch asks for.
    """

    name: str
    parameters: tuple[Parameter, ...]
    threads: int
    registers: int
    local_memory: int
    static_shared_memory: int


def inspect_cubin(image: bytes) -> CubinInfo:
    """Reads a cubin.

    Raises:
        CubinError: If it is not a cubin, or does not have exactly one kernel.
    """
    try:
        return _inspect(image)
    except CubinError:
        raise
    except (error, ValueError, IndexError, KeyError, OverflowError) as cause:
        raise CubinError(f"the cubin of {len(image)} bytes is damaged: {cause}") from cause


def _inspect(image: bytes) -> CubinInfo:
    sections = dict(_sections(image))
    entries = [(index, name) for index, name, other in _symbols(image, sections) if other & _ENTRY]
    if len(entries) != 1:
        names = ", ".join(name for _, name in entries) or "none"
        raise CubinError(f"a cubin must have one kernel, got {names}")
    symbol, name = entries[0]
    by_symbol = {
        (code, unpack_from("<I", value)[0]): unpack_from("<I", value, 4)[0]
        for code, value in _attributes(_content(image, sections[".nv.info"]))
        if code in (_REGISTERS, _FRAME_SIZE)
    }
    attributes = list(_attributes(_content(image, sections[f".nv.info.{name}"])))
    rows = sorted(unpack_from("<I2HI", value) for code, value in attributes if code == _PARAMETER)
    parameters = tuple(Parameter(offset, packed >> 18) for _, _, offset, packed in rows)
    total = next(
        (unpack_from("<H", value)[0] for c, value in attributes if c == _PARAMETERS_SIZE), 0
    )
    end = max((parameter.offset + parameter.size for parameter in parameters), default=0)
    if [ordinal for _, ordinal, _, _ in rows] != list(range(len(rows))) or end != total:
        raise CubinError(f"{name}: {len(rows)} parameters end at byte {end}, not at {total}")
    threads = next(
        (unpack_from("<I", value)[0] for c, value in attributes if c == _KERNEL_THREADS), 0
    )
    shared = sections.get(f".nv.shared.{name}", (0,) * 10)[5]
    reserves = ".nv.shared.reserved.0" in sections
    return CubinInfo(
        name=name,
        parameters=parameters,
        threads=threads,
        registers=by_symbol[_REGISTERS, symbol],
        local_memory=by_symbol.get((_FRAME_SIZE, symbol), 0),
        static_shared_memory=max(0, shared - _RESERVED_SHARED * reserves),
    )


def _sections(image: bytes) -> Iterator[tuple[str, tuple[int, ...]]]:
    if not image.startswith(_MAGIC):
        raise CubinError(f"a cubin must begin with {_MAGIC!r}, got {image[: len(_MAGIC)]!r}")
    header = _ELF_HEADER.unpack_from(image)
    table, count, names = header[6], header[12], header[13]
    headers = [_SECTION.unpack_from(image, table + at * _SECTION.size) for at in range(count)]
    strings = _content(image, headers[names])
    for section in headers:
        yield _string(strings, section[0]), section


def _symbols(image: bytes, sections: dict[str, tuple[int, ...]]) -> Iterator[tuple[int, str, int]]:
    table = _content(image, sections[".symtab"])
    strings = _content(image, sections[".strtab"])
    for index, (name, _, other, _, _, _) in enumerate(_SYMBOL.iter_unpack(table)):
        yield index, _string(strings, name), other


def _content(image: bytes, section: tuple[int, ...]) -> bytes:
    if section[1] == _EMPTY:
        return b""
    offset, size = section[4], section[5]
    return image[offset : offset + size]


def _string(strings: bytes, at: int) -> str:
    return strings[at : strings.index(0, at)].decode()


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(info):
        form, code, value = unpack_from("<2BH", info, at)
        if form == _SIZED:
            yield code, info[at + 4 : at + 4 + value]
            at += 4 + value
        else:
            yield code, value.to_bytes(2, "little")
            at += 4
