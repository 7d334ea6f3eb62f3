"""Reads bundles; everything is checked before it is used, and the first fault is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, TypeVar
from zlib import crc32

from trt_plugin import _records as records
from trt_plugin._expressions import Expression
from trt_plugin.bundle import (
    Argument,
    Buffer,
    Bundle,
    BundleError,
    Kernel,
    Launch,
    LayerRecord,
    Program,
    Range,
    TensorMap,
)
from trt_plugin.cubin import check_image

__all__ = ["read_bundle", "read_program"]

_CHECKSUM_AT = 24
_MAX_TOKENS = 2**31 - 1
_MAX_SHARED_MEMORY = 2**20
_MAX_WARPS = 32
_MAX_BOX = 256
_Item = TypeVar("_Item")


def read_bundle(data: bytes) -> Bundle:
    """Reads a bundle's bytes.

    Raises:
        BundleError: If they are not a bundle.
    """
    version, count, size, checksum, reserved = _header(
        data, records.FILE_HEADER, "bundle", records.FILE_MAGIC
    )
    _check_header(data, "bundle", version, size, checksum, reserved)
    if count < 1:
        raise BundleError("a bundle must have 1 program or more, it has 0")
    end = records.FILE_HEADER.size + count * records.DIRECTORY_ENTRY.size
    if end > len(data):
        raise BundleError(
            f"the directory of {count} programs ends at byte {end}, the bundle at byte {len(data)}"
        )
    programs = []
    directory = data[records.FILE_HEADER.size : end]
    for at, (offset, length) in enumerate(records.DIRECTORY_ENTRY.iter_unpack(directory)):
        where = f"program {at}"
        _check_place(data, where, offset, length, end, records.IMAGE_ALIGNMENT)
        try:
            programs.append(read_program(data[offset : offset + length]))
        except BundleError as error:
            raise BundleError(f"{where}: {error}") from None
        end = offset + length
    if end != len(data):
        raise BundleError(f"the last program ends at byte {end}, the bundle at byte {len(data)}")
    return Bundle(tuple(programs))


def read_program(data: bytes) -> Program:
    """Reads a program's bytes.

    Raises:
        BundleError: If they are not a program.
    """
    version, architecture, size, checksum, reserved = _header(
        data, records.PROGRAM_HEADER, "program", records.PROGRAM_MAGIC
    )
    _check_header(data, "program", version, size, checksum, reserved)
    if len(data) < records.PROGRAM_HEADER_BYTES:
        raise BundleError(
            f"a program has {records.PROGRAM_HEADER_BYTES} bytes or more, there are {len(data)}"
        )
    layer = LayerRecord(*records.LAYER.unpack_from(data, records.PROGRAM_HEADER.size))
    _check_layer(layer)
    return _ProgramReader(data, layer).program(architecture)


def _header(data: bytes, record: Struct, what: str, magic: bytes) -> tuple[Any, ...]:
    if data[: len(magic)] != magic[: len(data)] or not data:
        raise BundleError(f"not a {what}: it must begin with {magic!r}, got {data[:8]!r}")
    if len(data) < record.size:
        raise BundleError(
            f"the {what} is cut off: its header has {record.size} bytes, there are {len(data)}"
        )
    return record.unpack_from(data)[1:]


def _check_header(
    data: bytes, what: str, version: int, size: int, checksum: int, reserved: int
) -> None:
    if version != records.VERSION:
        raise BundleError(f"the {what}'s version must be {records.VERSION}, got {version}")
    if size != len(data):
        raise BundleError(f"the {what} says that it has {size} bytes, there are {len(data)}")
    zeroed = data[:_CHECKSUM_AT] + bytes(4) + data[_CHECKSUM_AT + 4 :]
    actual = crc32(zeroed)
    if checksum != actual:
        raise BundleError(
            f"the {what} is damaged: its checksum is {actual:08x}, its header says {checksum:08x}"
        )
    _zero(f"the reserved field of the {what}'s header", reserved)


def _check_place(
    data: bytes, what: str, offset: int, size: int, earliest: int, alignment: int
) -> None:
    """Checks that a part lies behind an earlier one, with zeros between, and within the whole."""
    if offset % alignment:
        raise BundleError(f"{what} must begin at a multiple of {alignment}, got byte {offset}")
    if offset < earliest:
        raise BundleError(
            f"{what} begins at byte {offset}, before the end of what precedes it at byte {earliest}"
        )
    if offset + size > len(data):
        raise BundleError(f"{what} ends at byte {offset + size}, the whole at byte {len(data)}")
    if any(data[earliest:offset]):
        raise BundleError(f"the bytes before {what}, from byte {earliest}, must be 0")


def _zero(what: str, *values: int) -> None:
    for value in values:
        if value:
            raise BundleError(f"{what} must be 0, got {value}")


def _below(what: str, value: int, limit: int) -> None:
    if value >= limit:
        raise BundleError(f"{what} must be below {limit}, got {value}")


def _at_most(what: str, count: int, most: int) -> None:
    if count > most:
        raise BundleError(f"there must be at most {most} {what}, got {count}")


def _check_layer(layer: LayerRecord) -> None:
    for name, codes in (
        ("operator", records.OPERATORS),
        ("activation", records.ACTIVATIONS),
        ("scoring", records.SCORINGS),
    ):
        _below(f"the layer's {name}", getattr(layer, name), len(codes))
    _below("the layer's flags", layer.flags, 2 * max(records.LAYER_FLAGS.values()))
    router = records.OPERATORS[layer.operator] == "dropless"
    floats = (1, 2, 3)
    dtypes = {
        "tokens_dtype": floats,
        "experts_dtype": floats,
        "routing_dtype": floats if router else (4, 5),
        "weights_dtype": (0, *floats) if router else floats,
    }
    for name, allowed in dtypes.items():
        value = getattr(layer, name)
        if value not in allowed:
            names = ", ".join(f"{code} ({records.DTYPES[code]})" for code in allowed)
            raise BundleError(f"the layer's {name} must be one of {names}; got {value}")
    most = min(32, layer.experts) if router else 32
    for name, value, high in (("E", layer.experts, 1024), ("K", layer.top_k, most)):
        if not 1 <= value <= high:
            raise BundleError(f"the layer's {name} must be in 1..{high}, got {value}")
    for name, value in (("D", layer.width), ("H", layer.hidden)):
        if value < 8 or value % 8:
            raise BundleError(f"the layer's {name} must be a multiple of 8, got {value}")
    _check_layer_options(layer, router)


def _check_layer_options(layer: LayerRecord, router: bool) -> None:
    activation = records.ACTIVATIONS[layer.activation]
    clamped = activation in records.CLAMPED
    if (clamped or layer.has("interleaved")) and not layer.has("gated"):
        option = f"activation {activation}" if clamped else "flag interleaved"
        raise BundleError(f"the layer's {option} needs gated")
    numbers = {
        "routed_scaling": layer.routed_scaling,
        "alpha": layer.alpha,
        "limit": layer.limit,
        "norm_eps": layer.norm_eps,
    }
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise BundleError(f"the layer's {name} must be finite, got {value}")
    renormalizes = router and records.SCORINGS[layer.scoring] != "topk_softmax"
    float32 = records.DTYPES[layer.experts_dtype] == "float32"
    for name, applies, value in (
        ("scoring", router, layer.scoring),
        ("routed_scaling", router, layer.routed_scaling),
        ("flag renormalize", renormalizes, layer.has("renormalize")),
        ("flag tf32", float32, layer.has("tf32")),
        ("alpha", activation == "clamped_swiglu", layer.alpha),
        ("limit", clamped, layer.limit),
        ("norm_eps", layer.has("rms_norm"), layer.norm_eps),
    ):
        if value and not applies:
            raise BundleError(f"the layer's {name} does not apply and must be 0, got {value}")


class _ProgramReader:
    """Reads a program's tables, those first that others refer to."""

    def __init__(self, data: bytes, layer: LayerRecord) -> None:
        self.data = data
        self.layer = layer
        self.tables: dict[str, bytes] = {}
        end = records.PROGRAM_HEADER_BYTES
        entries = data[records.PROGRAM_HEADER.size + records.LAYER.size : end]
        for (name, record_bytes), (offset, count) in zip(
            records.TABLES.items(), records.TABLE_ENTRY.iter_unpack(entries), strict=True
        ):
            size = count * record_bytes
            _check_place(data, f"the table of {name}", offset, size, end, 8)
            self.tables[name] = data[offset : offset + size]
            end = offset + size
        if end != len(data):
            raise BundleError(f"the last table ends at byte {end}, the program at {len(data)}")
        self.images_at = end - len(self.tables["images"])

    def program(self, architecture: int) -> Program:
        """Reads all tables."""
        self.expressions = self._all("expressions", records.EXPRESSION, self._expression)
        self.maps = self._all("tensor maps", records.TENSOR_MAP, self._tensor_map)
        self.arguments = self._all("arguments", records.ARGUMENT, self._argument)
        self.buffers = self._all("buffers", records.BUFFER, self._buffer)
        kernels = self._all("kernels", records.KERNEL, self._kernel)
        self.kernel_count = len(kernels)
        self.launches = self._all("launches", records.LAUNCH, self._launch)
        count = len(self.tables["ranges"]) // records.RANGE.size
        if not 1 <= count <= records.MAX_RANGES:
            raise BundleError(
                f"a program must have 1 to {records.MAX_RANGES} ranges of tokens, it has {count}"
            )
        ranges = self._all("ranges", records.RANGE, self._range)
        first = 1
        for each in ranges:
            if each.first != first or not first <= each.last <= _MAX_TOKENS:
                raise BundleError(
                    f"ranges of tokens must follow one another from 1 to at most {_MAX_TOKENS}, "
                    f"got {each.first} to {each.last} where {first} comes next"
                )
            first = each.last + 1
        return Program(self.layer, architecture, tuple(ranges), tuple(kernels))

    def _all(self, table: str, record: Struct, read: Callable[..., _Item]) -> list[_Item]:
        items = []
        for at, row in enumerate(record.iter_unpack(self.tables[table])):
            try:
                items.append(read(*row))
            except ValueError as error:
                raise BundleError(f"record {at} of the {table}: {error}") from None
        return items

    def _slice(
        self, what: str, items: Sequence[_Item], first: int, count: int, most: int
    ) -> tuple[_Item, ...]:
        if first + count > len(items):
            raise BundleError(
                f"{what} {first} to {first + count - 1} must be below {len(items)}, their number"
            )
        _at_most(what, count, most)
        return tuple(items[first : first + count])

    def _text(self, what: str, offset: int, length: int) -> str:
        strings = self.tables["strings"]
        if offset + length > len(strings):
            raise BundleError(
                f"{what} ends at byte {offset + length} of the strings, which have {len(strings)}"
            )
        raw = strings[offset : offset + length]
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise BundleError(f"{what} must be UTF-8, got {raw!r}") from None
        if any(ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0 for character in text):
            raise BundleError(f"{what} must have no control characters, got {text!r}")
        return text

    def _expression(self, first: int, count: int) -> Expression:
        step = records.INSTRUCTION.size
        table = self.tables["instructions"]
        if (first + count) * step > len(table):
            raise BundleError(
                f"instructions {first} to {first + count - 1} must be below {len(table) // step}"
            )
        _at_most("instructions", count, records.MAX_INSTRUCTIONS)
        instructions = []
        for opcode, reserved, value in records.INSTRUCTION.iter_unpack(
            table[first * step : (first + count) * step]
        ):
            _zero("an instruction's reserved field", reserved)
            instructions.append((opcode, value))
        return Expression(tuple(instructions))

    def _expression_at(self, what: str, index: int) -> Expression:
        _below(what, index, len(self.expressions))
        return self.expressions[index]

    def _tensor_map(
        self, tensor: int, dtype: int, rank: int, swizzle: int, *rest: int
    ) -> TensorMap:
        sizes, strides, box, reserved = rest[:5], rest[5:10], rest[10:15], rest[15:]
        _below("tensor", tensor, len(records.TENSORS))
        _below("swizzle", swizzle, 4)
        if dtype not in records.MAP_DTYPES:
            known = ", ".join(f"{code} ({name})" for code, (name, _) in records.MAP_DTYPES.items())
            raise BundleError(f"dtype must be one of {known}; got {dtype}")
        if not 2 <= rank <= 5:
            raise BundleError(f"rank must be in 2..5, got {rank}")
        _zero("fields beyond the rank", *sizes[rank:], *strides[rank:], *box[rank:])
        _zero("the reserved fields", *reserved)
        element = records.MAP_DTYPES[dtype][1]
        if strides[0] != element:
            raise BundleError(f"the first stride must be {element}, got {strides[0]}")
        for at in range(rank):
            if not 1 <= sizes[at] <= 2**32:
                raise BundleError(f"size {at} must be in 1..2^32, got {sizes[at]}")
            if at and (strides[at] % 16 or not 16 <= strides[at] < 2**40):
                raise BundleError(
                    f"stride {at} must be a multiple of 16 in 16..2^40, got {strides[at]}"
                )
            if not 1 <= box[at] <= _MAX_BOX:
                raise BundleError(f"box {at} must be in 1..{_MAX_BOX}, got {box[at]}")
        if box[0] * element % 16:
            raise BundleError(f"box 0 must be a multiple of 16 bytes, got {box[0] * element}")
        span = 16 << swizzle
        if swizzle and box[0] * element > span:
            raise BundleError(
                f"box 0 must have at most {span} bytes, the swizzle's span, got {box[0] * element}"
            )
        return TensorMap(
            records.TENSORS[tensor], dtype, swizzle, sizes[:rank], strides[:rank], box[:rank]
        )

    def _argument(self, kind: int, index: int) -> Argument:
        _below("kind", kind, len(records.ARGUMENT_KINDS))
        name = records.ARGUMENT_KINDS[kind]
        if name == "null":
            _zero("a null pointer's index", index)
            return Argument(name)
        if name == "tensor":
            _below("tensor", index, len(records.TENSORS))
            return Argument(name, records.TENSORS[index])
        if name == "tensor_map":
            _below("tensor map", index, len(self.maps))
            return Argument(name, self.maps[index])
        if name == "workspace":
            # Checked where the launch's range is known.
            return Argument(name, index)
        return Argument(name, self._expression_at("expression", index))

    def _buffer(self, offset: int, length: int, size: int, reserved: int) -> Buffer:
        _zero("the reserved field", reserved)
        return Buffer(self._text("the name", offset, length), self._expression_at("size", size))

    def _kernel(self, *row: int) -> Kernel:
        name_at, name_length, text_at, text_length, image_at, image_size, *numbers = row
        num_warps, shared_memory, flags, registers, local_memory, reserved = numbers
        _zero("the reserved field", reserved)
        _below("flags", flags, 2 * records.DEPENDENT_LAUNCH)
        if not 1 <= num_warps <= _MAX_WARPS:
            raise BundleError(f"warps must be in 1..{_MAX_WARPS}, got {num_warps}")
        if shared_memory > _MAX_SHARED_MEMORY:
            raise BundleError(
                f"shared memory must be at most {_MAX_SHARED_MEMORY} bytes, got {shared_memory}"
            )
        images = self.tables["images"]
        if image_at + image_size > len(images):
            raise BundleError(
                f"the image ends at byte {image_at + image_size} of the images, "
                f"which have {len(images)}"
            )
        if (self.images_at + image_at) % records.IMAGE_ALIGNMENT:
            raise BundleError(
                f"the image must begin at a multiple of {records.IMAGE_ALIGNMENT} bytes from the "
                f"program's start, got {self.images_at + image_at}"
            )
        if not name_length or not image_size:
            raise BundleError(
                f"name and image must have 1 byte or more, have {name_length} and {image_size}"
            )
        image = images[image_at : image_at + image_size]
        check_image(image)
        return Kernel(
            name=self._text("the name", name_at, name_length),
            description=self._text("the description", text_at, text_length),
            image=image,
            num_warps=num_warps,
            shared_memory=shared_memory,
            dependent_launch=bool(flags & records.DEPENDENT_LAUNCH),
            registers=registers,
            local_memory=local_memory,
        )

    def _launch(self, kernel: int, first: int, count: int, *rest: int) -> Launch:
        *grid, reserved = rest
        _zero("the reserved field", reserved)
        _below("kernel", kernel, self.kernel_count)
        x, y, z = (
            self._expression_at(f"grid's {axis}", index)
            for axis, index in zip("xyz", grid, strict=True)
        )
        arguments = self._slice("arguments", self.arguments, first, count, records.MAX_ARGUMENTS)
        maps = sum(argument.kind == "tensor_map" for argument in arguments)
        _at_most("tensor maps", maps, records.MAX_TENSOR_MAPS)
        return Launch(kernel, arguments, (x, y, z))

    def _range(self, first: int, last: int, *rest: int) -> Range:
        first_launch, launch_count, first_buffer, buffer_count = rest
        launches = self._slice(
            "launches", self.launches, first_launch, launch_count, records.MAX_LAUNCHES
        )
        for at, launch in enumerate(launches):
            for argument in launch.arguments:
                if argument.kind == "workspace" and isinstance(argument.value, int):
                    _below(f"a buffer of launch {at}", argument.value, buffer_count)
        buffers = self._slice(
            "buffers", self.buffers, first_buffer, buffer_count, records.MAX_BUFFERS
        )
        return Range(first, last, buffers, launches)
