"""Reads an engine's file without TensorRT and without a GPU: its kernels, experts, library."""

from __future__ import annotations

import math
import mmap
import os
import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_plugin.bundle import Bundle, BundleError, LayerRecord, Program, read
from trt_plugin.bundle.records import FILE_HEADER, FILE_MAGIC, VERSION
from trt_plugin.native import library_path

if TYPE_CHECKING:
    from rich.console import RenderableType

    from custom_ops.offload import WeightSource

    _Sources = tuple[tuple[str, WeightSource], ...]

#: The properties that cannot be known without loading the engine.
UNKNOWN = (
    "names and number of its layers, its inputs and shapes, and the GPUs that the rest of it is "
    "built for: TensorRT reads them where there is such a GPU"
)

_SUFFIXES = {".engine", ".plan", ".trt"}
# Every version of the plugin's library exports this function.
_EXPORTED = b"\0dynamo_moe_program_open\0"
# The plugin's field of that name: one 32-bit integer.
_EXPERT_CACHE = re.compile(rb"expert_cache\0\x05\0{3}\x01\0{3}([\0\x01])\0{3}")
# Where an offloaded layer's weights lie. An engine need not end a text by a character of its own.
_LINE = rb"\d+ \d+ \d+ \d+ [0-9a-f]{8} /[^\x00-\x1f]*\.safetensors"
# The tensors that store a weight: its values, and up to two beside them.
_SOURCE = re.compile(_LINE + rb"(?:\n" + _LINE + rb"){0,2}")


@dataclass(frozen=True)
class StoredProgram:
    """A program of MoE kernels, and how often the file has it.

    Attributes:
        program: The layer, its architecture and kernels.
        copies: How many times its bytes are in the file.
    """

    program: Program
    copies: int

    def to_dict(self) -> dict[str, Any]:
        """The program as dicts, lists, strings and numbers."""
        return {**self.program.to_dict(), "copies": self.copies}


@dataclass(frozen=True)
class OffloadedExperts:
    """Experts' weights that an engine does not hold, but copies to the GPU when they are needed.

    Attributes:
        tensors: Where each tensor lies that stores them: ``w1`` and ``w2``, with ``w1_scales`` and
            the like where they are packed.
        layers: The layers that have these weights and as many slots. An engine does not name its
            layers, but stores them equally often: if every number of layers has a common factor,
            they are fewer by it.
        experts: Number of experts; None if no such layer stands before the weights.
        resident_experts: A layer's slots on the GPU; None if the layer is not known.
    """

    tensors: Mapping[str, WeightSource]
    layers: int
    experts: int | None
    resident_experts: int | None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all experts, in host memory."""
        return sum(source.bytes for source in self.tensors.values())

    @property
    def device_bytes(self) -> int | None:
        """Bytes of all slots and their tables in device memory, for each layer and cache."""
        from custom_ops.offload import cache_bytes

        if self.experts is None or self.resident_experts is None:
            return None
        sizes = [source.bytes // self.experts for source in self.tensors.values()]
        return cache_bytes(self.experts, self.resident_experts, sizes)

    def to_dict(self) -> dict[str, Any]:
        """The experts as dicts, strings and numbers."""
        return {
            "layers": self.layers,
            "experts": self.experts,
            "resident_experts": self.resident_experts,
            "device_bytes": self.device_bytes,
            "weight_bytes": self.weight_bytes,
            "tensors": {name: source.to_dict() for name, source in self.tensors.items()},
        }


@dataclass(frozen=True)
class EngineContents:
    """The contents of an engine's file; rich prints them as a table.

    Attributes:
        path: The file.
        bytes: Its size.
        programs: Programs of MoE layers, each once, in the file's order. Equal layers share one.
        offloaded: The experts of offloaded layers, in the order of their files. Layers that share
            all their weights are one if they have as many slots.
        shared_cache: Whether the contexts of the engine share the slots of offloaded layers; None
            if there are none, or it is not known.
        library: ``"installed"`` if the file holds the plugin's library that is installed here,
            ``"other"`` for another version of it, None if it holds none.
    """

    path: Path
    bytes: int
    programs: tuple[StoredProgram, ...]
    offloaded: tuple[OffloadedExperts, ...]
    shared_cache: bool | None
    library: str | None

    @property
    def architectures(self) -> tuple[str, ...]:
        """Architectures that the MoE kernels are compiled for: ``("sm_89", "sm_120")``."""
        capabilities = {stored.program.architecture for stored in self.programs}
        return tuple(f"sm_{capability}" for capability in sorted(capabilities))

    @property
    def program_bytes(self) -> int:
        """The size of all programs, repeated ones included."""
        return sum(len(stored.program.data) * stored.copies for stored in self.programs)

    def to_dict(self) -> dict[str, Any]:
        """The contents as dicts, lists, strings and numbers, ready for ``json.dumps``."""
        return {
            "path": str(self.path),
            "bytes": self.bytes,
            "architectures": list(self.architectures),
            "program_bytes": self.program_bytes,
            "programs": [stored.to_dict() for stored in self.programs],
            "offloaded": [experts.to_dict() for experts in self.offloaded],
            "shared_cache": self.shared_cache,
            "library": self.library,
            "unknown": UNKNOWN,
        }

    def __rich__(self) -> RenderableType:
        """The table that rich prints."""
        from trt_plugin.engine.view import contents_view

        return contents_view(self.to_dict())


def is_engine(path: str | PathLike[str]) -> bool:
    """Whether a file is meant to be an engine, by its name: ``.engine``, ``.plan`` or ``.trt``."""
    return Path(path).suffix in _SUFFIXES


def read_engine(path: str | PathLike[str]) -> EngineContents:
    """Searches an engine's file for the kernels of MoE layers and the plugin's library.

    The file is searched, not interpreted: its format is TensorRT's own. A program counts if the
    native library accepts all of its bytes.

    Raises:
        OSError: If the file cannot be read, or the native library is missing.
        ValueError: If the file is empty.
    """
    path = Path(path)
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty: that is no engine")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        copies: dict[bytes, int] = {}
        programs: dict[bytes, Program] = {}
        for bundle in _bundles(data):
            for program in bundle.programs:
                programs[program.data] = program
                copies[program.data] = copies.get(program.data, 0) + 1
        return EngineContents(
            path=path,
            bytes=len(data),
            offloaded=tuple(_offloaded(data, programs.values())),
            shared_cache=_shared_cache(data),
            programs=tuple(
                StoredProgram(program, copies[content]) for content, program in programs.items()
            ),
            library=_library(data),
        )


def _bundles(data: mmap.mmap) -> Iterator[Bundle]:
    at = data.find(FILE_MAGIC)
    while at >= 0:
        following = data.find(FILE_MAGIC, at + len(FILE_MAGIC))
        # No bundle contains another, so each byte is copied and checked at most once.
        room = (following if following >= 0 else len(data)) - at
        if room >= FILE_HEADER.size:
            _, version, _, size, *_ = FILE_HEADER.unpack_from(data, at)
            # The library itself holds the magic too.
            if version == VERSION and size <= room:
                with suppress(BundleError):
                    yield read(data[at : at + size])
        at = following


def _offloaded(data: mmap.mmap, programs: Iterable[Program]) -> Iterator[OffloadedExperts]:
    texts = [*_SOURCE.finditer(data)]
    if not texts:
        return
    # It comes with PyTorch, which nothing else here needs.
    from custom_ops.offload import WeightSource
    from custom_ops.packed_weights import ENCODINGS
    from custom_ops.weight_formats import SCALES, suffixes_of

    # A layer's w2 follows its w1, which follows its programs or their name; both have its record.
    # TensorRT stores all of it several times.
    records = {program.layer.to_bytes(): program.layer for program in programs}
    matches = [*re.finditer(b"|".join(map(re.escape, records)), data)] if records else []
    starts = [match.start() for match in matches]
    stored: Counter[tuple[_Sources, _Sources, LayerRecord | None]] = Counter()
    for pair in zip(texts[::2], texts[1::2], strict=False):
        before = bisect(starts, pair[0].start())
        layer = records[matches[before - 1][0]] if before else None
        # Without a layer, it is not known what a third tensor is.
        suffixes: Sequence[str] = ("", SCALES, "_third_tensor")
        if layer:
            suffixes = suffixes_of(ENCODINGS.get(str(layer.to_dict()["weight_format"])))
        w1, w2 = (
            tuple(WeightSource.parse_lines(weight, os.fsdecode(text[0]), suffixes).items())
            for weight, text in zip(("w1", "w2"), pair, strict=True)
        )
        sizes = tuple(sum(source.bytes for _, source in sources) for sources in (w1, w2))
        if layer and (not layer.resident_experts or _weight_bytes(layer) != sizes):
            layer = None
        stored[w1, w2, layer] += 1
    copies = math.gcd(*stored.values())
    for (w1, w2, layer), count in sorted(stored.items(), key=_order):
        experts, slots = (layer.experts, layer.resident_experts) if layer else (None, None)
        yield OffloadedExperts(dict((*w1, *w2)), count // copies, experts, slots)


def _order(
    item: tuple[tuple[_Sources, _Sources, LayerRecord | None], int],
) -> tuple[Path, int, int, int]:
    ((_, w1), *_), ((_, w2), *_), layer = item[0]
    return w1.path, w1.offset, w2.offset, layer.resident_experts if layer else 0


def _shared_cache(data: mmap.mmap) -> bool | None:
    values = {match[1] for match in _EXPERT_CACHE.finditer(data)}
    return values == {b"\x01"} if len(values) == 1 else None


def _weight_bytes(layer: LayerRecord) -> tuple[int, int]:
    """The bytes of a layer's w1 and w2."""
    words = layer.to_dict()
    return int(words.get("w1_bytes", 0)), int(words.get("w2_bytes", 0))


def _library(data: mmap.mmap) -> str | None:
    if data.find(library_path().read_bytes()) >= 0:
        return "installed"
    return "other" if data.find(_EXPORTED) >= 0 else None
