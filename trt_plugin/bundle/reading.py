"""Reads bundles: the native library checks them and says what is in them."""

from __future__ import annotations

from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

from trt_plugin.bundle.parts import Argument, Buffer, Expression, Kernel, Launch, Range, TensorMap
from trt_plugin.bundle.programs import Bundle, Program
from trt_plugin.bundle.records import FILE_MAGIC, LayerRecord
from trt_plugin.native import LauncherError, call_for_json


class BundleError(ValueError):
    """The bytes are not a bundle that this version reads; the message says where and why."""


def is_bundle(path: str | PathLike[str]) -> bool:
    """Whether a file is meant to be a bundle, by its name or its first bytes."""
    path = Path(path)
    if path.suffix == ".moek":
        return True
    with path.open("rb") as file:
        return file.read(4) == FILE_MAGIC[:4]


def read(source: str | PathLike[str] | bytes) -> Bundle:
    """Reads a bundle and checks all of it.

    Args:
        source: A file, or its content.

    Raises:
        BundleError: If it is not a bundle that this version reads.
        OSError: If the file cannot be read, or the native library is missing.
    """
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    try:
        programs: list[dict[str, Any]] = call_for_json("bundle_describe", data, len(data))
    except LauncherError as error:
        if error.status != "invalid bundle":
            raise
        where = "" if isinstance(source, bytes) else f"{source}: "
        raise BundleError(f"{where}{error.message}") from None
    return Bundle(tuple(_program(each, data) for each in programs))


def _program(described: dict[str, Any], data: bytes) -> Program:
    expressions = [
        Expression(tuple(map(tuple, each["instructions"])), each["text"])
        for each in described["expressions"]
    ]
    maps = [
        TensorMap(**each | {name: tuple(each[name]) for name in ("sizes", "strides", "box")})
        for each in described["tensor_maps"]
    ]
    tables: dict[str, list[Any]] = {"i32": expressions, "i64": expressions, "tensor_map": maps}

    def argument(kind: str, value: Any) -> Argument:
        return Argument(kind, tables[kind][value] if kind in tables else value)

    launches = [
        Launch(
            kernel=each["kernel"],
            arguments=tuple(argument(**given) for given in each["arguments"]),
            grid=tuple(expressions[axis] for axis in each["grid"]),
            side=each["side"],
            after=tuple(bit for bit in range(32) if each["after"] >> bit & 1),
        )
        for each in described["launches"]
    ]
    buffers = [Buffer(each["name"], expressions[each["size"]]) for each in described["buffers"]]
    return Program(
        layer=LayerRecord(**described["layer"]),
        architecture=described["architecture"],
        ranges=tuple(_range(each, buffers, launches, expressions) for each in described["ranges"]),
        kernels=tuple(_kernel(each, data) for each in described["kernels"]),
        state=tuple(
            Buffer(**each | {"size": expressions[each["size"]]}) for each in described["state"]
        ),
    )


def _range(
    described: dict[str, Any],
    buffers: list[Buffer],
    launches: list[Launch],
    expressions: list[Expression],
) -> Range:
    following = iter(launches[described["first_launch"] :])
    waves = described["waves"]
    return Range(
        first=described["first"],
        last=described["last"],
        buffers=tuple(buffers[described["first_buffer"] :][: described["buffers"]]),
        launches=tuple(islice(following, described["launches"])),
        wave=tuple(islice(following, described["wave_launches"])),
        waves=None if waves is None else expressions[waves],
        epilogue=tuple(islice(following, described["epilogue_launches"])),
    )


def _kernel(described: dict[str, Any], data: bytes) -> Kernel:
    image_at, image_bytes = described.pop("image_offset"), described.pop("image_bytes")
    return Kernel(image=data[image_at : image_at + image_bytes], **described)
