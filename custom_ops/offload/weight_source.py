"""Where the weights of an offloaded layer lie: a stretch of a safetensors file, and its text.

The text is what a node of an ONNX file, the plugin and an engine hold of it. This module needs
neither PyTorch's tensors nor the safetensors package, which gives no offsets.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Self

#: Names a folder of weight files that comes before the folder that a source names.
FOLDER_VARIABLE = "DYNAMO_MOE_WEIGHTS"
#: A file's name ends with this, by which its path is found in an engine.
SUFFIX = ".safetensors"
#: Kernels read so many bytes at a time, so only such multiples of a file are mapped.
ALIGNMENT = 16
#: States of a file, see :meth:`WeightSource.state`.
FOUND, MISSING, CHANGED = "found", "missing", "changed"

# A header longer than this is not read: the format's own limit.
_MAX_HEADER_BYTES = 100_000_000
_TEXT = re.compile(r"(\d+) (\d+) (\d+) (\d+) ([0-9a-f]{8}) (/.+)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class FileIdentity:
    """The identity of a safetensors file, which is found without reading its tensors.

    Attributes:
        file_bytes: The file's size.
        header_bytes: Bytes before its tensors: the length word and the header.
        header_crc32: CRC-32, as zlib computes it, of these bytes.
    """

    file_bytes: int
    header_bytes: int
    header_crc32: int

    @classmethod
    def of(cls, path: str | PathLike[str]) -> Self:
        """Reads a file's header.

        Format: https://huggingface.co/docs/safetensors.

        Raises:
            OSError: If it cannot be read.
            ValueError: If it is not a safetensors file.
        """
        path = Path(path)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            # To open a named pipe would wait for its writer.
            raise ValueError(f"{path} is not a safetensors file: it is not a regular file")
        size = status.st_size
        with path.open("rb") as file:
            word = file.read(8)
            length = int.from_bytes(word, "little")
            if len(word) < 8 or not length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"{path} is not a safetensors file: its header has {length} bytes")
            header = file.read(length)
        try:
            json.loads(header)
        except ValueError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from None
        return cls(size, 8 + length, zlib.crc32(header, zlib.crc32(word)))


@dataclass(frozen=True)
class WeightSource:
    """The bytes of one tensor in a safetensors file.

    Attributes:
        path: The file, absolute.
        offset: Offset of the first byte in the file.
        bytes: Number of bytes.
        file: The file as it was when the source was made.
    """

    path: Path
    offset: int
    bytes: int
    file: FileIdentity

    def __str__(self) -> str:
        """``<offset> <bytes> <file_bytes> <header_bytes> <header_crc32> <path>``."""
        file = self.file
        return (
            f"{self.offset} {self.bytes} {file.file_bytes} {file.header_bytes} "
            f"{file.header_crc32:08x} {self.path}"
        )

    @classmethod
    def of(cls, path: str | PathLike[str], offset: int, size: int) -> Self:
        """Returns the source of ``size`` bytes from ``offset`` on in a file.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it is not a safetensors file, or does not have these bytes.
        """
        file = FileIdentity.of(path)
        if offset < file.header_bytes or offset + size > file.file_bytes:
            raise ValueError(f"{path} has no tensor in its bytes {offset} to {offset + size}")
        # A link keeps its name, by which the file is looked for elsewhere.
        path = Path(path)
        return cls(path.parent.resolve() / path.name, offset, size, file)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the text that ``str`` gives.

        Raises:
            ValueError: If it is no such text.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                "a weight's source must be <offset> <bytes> <file_bytes> <header_bytes> "
                f"<header_crc32> <absolute path>, got {text!r}"
            )
        *numbers, checksum, path = match.groups()
        offset, size, file_bytes, header_bytes = map(int, numbers)
        identity = FileIdentity(file_bytes, header_bytes, int(checksum, 16))
        return cls(Path(path), offset, size, identity)

    @classmethod
    def parse_lines(cls, weight: str, text: str, suffixes: Sequence[str]) -> dict[str, Self]:
        """Reads the sources of the tensors that store ``w1`` or ``w2``, by the tensors' names.

        Args:
            weight: The weight's name.
            text: A line for each tensor: the values, then those beside them.
            suffixes: Those of the tensors' names, see
                ``custom_ops.weight_formats.suffixes_of``.

        Raises:
            ValueError: If a line is no source, or there are more.
        """
        lines = text.split("\n")
        if len(lines) > len(suffixes):
            raise ValueError(
                f"{weight} has at most {len(suffixes)} tensors, got {len(lines)} sources"
            )
        named = zip(suffixes, lines, strict=False)
        return {weight + suffix: cls.parse(line) for suffix, line in named}

    def to_dict(self) -> dict[str, int | str]:
        """Where the bytes are now, and the state of their file."""
        return {
            "path": str(self.locate()),
            "offset": self.offset,
            "bytes": self.bytes,
            "state": self.state(),
        }

    def locate(self) -> Path:
        """Returns where the file is looked for.

        In the folder that the environment variable ``DYNAMO_MOE_WEIGHTS`` names, if it has a file
        of that name, and else where it was.
        """
        folder = os.environ.get(FOLDER_VARIABLE)
        moved = Path(folder) / self.path.name if folder else self.path
        return moved if moved.exists() else self.path

    def state(self) -> str:
        """Returns ``found``; ``missing`` without the file; ``changed`` if it is another one."""
        try:
            identity = FileIdentity.of(self.locate())
        except OSError:
            return MISSING
        except ValueError:
            return CHANGED
        return FOUND if identity == self.file else CHANGED
