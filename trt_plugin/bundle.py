"""Bundles of compiled kernels: what is in one, reading and writing.

The format is in docs/reference/bundle.md. Nothing here needs PyTorch or Triton.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_plugin._expressions import Expression
from trt_plugin._records import FILE_MAGIC, SYMBOLS, TENSORS, LayerRecord

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "PARAMETER_BYTES",
    "Argument",
    "Buffer",
    "Bundle",
    "BundleError",
    "Expression",
    "Kernel",
    "Launch",
    "LayerRecord",
    "Program",
    "Range",
    "SYMBOLS",
    "TENSORS",
    "TensorMap",
    "is_bundle",
    "read",
]

#: Bytes of a kernel's parameter by its kind.
PARAMETER_BYTES = {"null": 8, "tensor": 8, "workspace": 8, "i32": 4, "i64": 8, "tensor_map": 128}

_WORKSPACE_ALIGNMENT = 256


class BundleError(ValueError):
    """The bytes are not a bundle that this version reads; the message says where and why."""


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        name: Of the entry point in the image.
        description: JSON: module, function and the values compiled in.
        image: The ELF image (cubin).
        num_warps: Warps of a block.
        shared_memory: Dynamic shared memory of a block in bytes.
        dependent_launch: Whether it may start before the kernel ahead of it ends.
        registers: Of a thread.
        local_memory: Of a thread, in bytes: spilled registers and stack.
    """

    name: str
    description: str
    image: bytes = field(repr=False)
    num_warps: int
    shared_memory: int
    dependent_launch: bool
    registers: int
    local_memory: int


@dataclass(frozen=True)
class TensorMap:
    """What a tensor map is encoded from, innermost dimension first.

    Attributes:
        tensor: One of :data:`TENSORS`.
        dtype: ``CUtensorMapDataType``.
        swizzle: ``CUtensorMapSwizzle``.
        sizes: In elements.
        strides: In bytes; the first is the size of an element.
        box: In elements.
    """

    tensor: str
    dtype: int
    swizzle: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class Argument:
    """A parameter of a kernel.

    Attributes:
        kind: A key of :data:`PARAMETER_BYTES`.
        value: None for ``null``; one of :data:`TENSORS` for ``tensor``; the buffer's index in its
            range for ``workspace``; an :class:`Expression` for ``i32`` and ``i64``; a
            :class:`TensorMap` for ``tensor_map``.
    """

    kind: str
    value: str | int | Expression | TensorMap | None = None


@dataclass(frozen=True)
class Launch:
    """The launch of a kernel.

    Attributes:
        kernel: Index into the program's kernels.
        arguments: In the kernel's order.
        grid: Blocks along x, y and z.
    """

    kernel: int
    arguments: tuple[Argument, ...]
    grid: tuple[Expression, Expression, Expression]


@dataclass(frozen=True)
class Buffer:
    """A part of the workspace: its name, and its size in bytes."""

    name: str
    size: Expression


@dataclass(frozen=True)
class Range:
    """What runs for ``first`` to ``last`` tokens.

    Attributes:
        first: Fewest tokens.
        last: Most tokens.
        buffers: The workspace, each at a multiple of 256 bytes.
        launches: In order, on one stream.
    """

    first: int
    last: int
    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]

    def workspace_size(self, sizes: Mapping[str, int]) -> int:
        """Returns the bytes of workspace for the values of all symbols."""
        return sum(
            -(-each.size.evaluate(sizes) // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
            for each in self.buffers
        )


@dataclass(frozen=True)
class Program:
    """A layer, compiled for an architecture.

    Attributes:
        layer: The layer.
        architecture: 90 for sm_90.
        ranges: Ascending from 1 token, without gaps.
        kernels: What the launches refer to.
    """

    layer: LayerRecord
    architecture: int
    ranges: tuple[Range, ...]
    kernels: tuple[Kernel, ...]

    def workspace_size(self, max_tokens: int) -> int:
        """Returns the bytes of workspace that suffice for every T in ``0..max_tokens``."""
        return max(
            (
                each.workspace_size({**self.layer.sizes, "T": min(max_tokens, each.last)})
                for each in self.ranges
                if each.first <= max_tokens
            ),
            default=0,
        )

    @cached_property
    def data(self) -> bytes:
        """The program's bytes, which the TensorRT plugin stores in an engine."""
        from trt_plugin._writing import program_bytes

        return program_bytes(self)


@dataclass(frozen=True)
class Bundle:
    """Programs; rich prints them as a table.

    Attributes:
        programs: In the file's order.
    """

    programs: tuple[Program, ...]

    @cached_property
    def data(self) -> bytes:
        """The file's bytes."""
        from trt_plugin._writing import bundle_bytes

        return bundle_bytes([program.data for program in self.programs])

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the file; a reader sees the old one or the new one, never a part.

        Raises:
            OSError: If it cannot be written.
        """
        path = Path(path)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            beside = Path(folder) / path.name
            beside.write_bytes(self.data)
            beside.replace(path)

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and numbers, ready for ``json.dumps``."""
        return {
            "bytes": len(self.data),
            "programs": [_program_dict(program) for program in self.programs],
        }

    def __rich__(self) -> RenderableType:
        """What rich prints."""
        from trt_plugin._view import bundle_view

        return bundle_view(self)


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
        OSError: If the file cannot be read.
    """
    from trt_plugin._reading import read_bundle

    if isinstance(source, bytes):
        return read_bundle(source)
    try:
        return read_bundle(Path(source).read_bytes())
    except BundleError as error:
        raise BundleError(f"{source}: {error}") from None


def _program_dict(program: Program) -> dict[str, Any]:
    return {
        "layer": program.layer.to_dict(),
        "architecture": f"sm_{program.architecture}",
        "bytes": len(program.data),
        "ranges": [
            {
                "first": each.first,
                "last": each.last,
                "kernels": [launch.kernel for launch in each.launches],
                "workspace": {buffer.name: str(buffer.size) for buffer in each.buffers},
            }
            for each in program.ranges
        ],
        "kernels": [
            {
                "name": kernel.name,
                "image_bytes": len(kernel.image),
                "num_warps": kernel.num_warps,
                "registers": kernel.registers,
                "shared_memory": kernel.shared_memory,
                "local_memory": kernel.local_memory,
                "dependent_launch": kernel.dependent_launch,
                "description": _json_or_text(kernel.description),
            }
            for kernel in program.kernels
        ],
    }


def _json_or_text(text: str) -> Any:
    # Readers do not interpret the description, so nothing checked it.
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
