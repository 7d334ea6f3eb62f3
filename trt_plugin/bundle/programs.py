"""Programs, and the bundles that hold them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_plugin.bundle.launches import Buffer, Kernel, Range
from trt_plugin.bundle.records import LayerRecord
from trt_plugin.bundle.writing import bundle_bytes, program_bytes
from trt_plugin.output import write_whole

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Program:
    """A layer, compiled for an architecture.

    Attributes:
        layer: The layer.
        architecture: 90 for sm_90.
        ranges: Ascending from 1 token, without gaps.
        kernels: The kernels that the launches refer to.
        state: Device memory that persists from call to call, each part at a multiple of 256 bytes;
            none where all experts are resident.
    """

    layer: LayerRecord
    architecture: int
    ranges: tuple[Range, ...]
    kernels: tuple[Kernel, ...]
    state: tuple[Buffer, ...] = ()

    @cached_property
    def data(self) -> bytes:
        """The program's bytes."""
        return program_bytes(self.layer, self.architecture, self.ranges, self.kernels, self.state)

    def to_dict(self) -> dict[str, Any]:
        """The program as dicts, lists, strings and numbers; kernels without their images."""
        return {
            "layer": self.layer.to_dict(),
            "architecture": f"sm_{self.architecture}",
            "bytes": len(self.data),
            "ranges": [
                {
                    "first": token_range.first,
                    "last": token_range.last,
                    "kernels": [launch.kernel for launch in token_range.all_launches],
                    "workspace": {buffer.name: str(buffer.size) for buffer in token_range.buffers},
                }
                for token_range in self.ranges
            ],
            "state": {buffer.name: str(buffer.size) for buffer in self.state},
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
                for kernel in self.kernels
            ],
        }


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
        return bundle_bytes([program.data for program in self.programs])

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the file; a reader sees the old one or the new one, never a part.

        Raises:
            OSError: If it cannot be written.
        """
        write_whole(Path(path), self.data)

    def to_dict(self) -> dict[str, Any]:
        """The bundle as dicts, lists, strings and numbers, ready for ``json.dumps``."""
        return {
            "bytes": len(self.data),
            "programs": [program.to_dict() for program in self.programs],
        }

    def __rich__(self) -> RenderableType:
        """The table that rich prints."""
        from trt_plugin.bundle.view import bundle_view

        return bundle_view(self.to_dict())


def _json_or_text(text: str) -> Any:
    # Nothing interprets the description, so nothing has checked it.
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
