"""Reads bundles: the native library checks them and describes their contents."""

from __future__ import annotations

from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

from trt_plugin.bundle.launches import (
    Argument,
    Buffer,
    Expression,
    Kernel,
    Launch,
    Range,
    TensorMap,
)
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
    return Bundle(tuple(_program(program, data) for program in programs))


def _program(described: dict[str, Any], data: bytes) -> Program:
    expressions = [
        Expression(tuple(map(tuple, expression["instructions"])), expression["text"])
        for expression in described["expressions"]
    ]
    maps = [
        TensorMap(**fields | {name: tuple(fields[name]) for name in ("sizes", "strides", "box")})
        for fields in described["tensor_maps"]
    ]
    tables: dict[str, list[Any]] = {"i32": expressions, "i64": expressions, "tensor_map": maps}

    def argument(kind: str, value: Any) -> Argument:
        return Argument(kind, tables[kind][value] if kind in tables else value)

    launches = [
        Launch(
            kernel=launch["kernel"],
            arguments=tuple(argument(**fields) for fields in launch["arguments"]),
            grid=tuple(expressions[axis] for axis in launch["grid"]),
            side=launch["side"],
            after=tuple(bit for bit in range(32) if launch["after"] >> bit & 1),
        )
        for launch in described["launches"]
    ]
    buffers = [
        Buffer(buffer["name"], expressions[buffer["size"]]) for buffer in described["buffers"]
    ]
    return Program(
        layer=LayerRecord(**described["layer"]),
        architecture=described["architecture"],
        ranges=tuple(
            _range(token_range, buffers, launches, expressions)
            for token_range in described["ranges"]
        ),
        kernels=tuple(_kernel(kernel, data) for kernel in described["kernels"]),
        state=tuple(
            Buffer(**buffer | {"size": expressions[buffer["size"]]})
            for buffer in described["state"]
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
