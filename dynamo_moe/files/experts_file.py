"""A safetensors file of weights that are copied from other files, a few megabytes at a time."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path

import onnx_ir as ir

from custom_ops.offload import FileIdentity, WeightSource

Progress = Callable[[int, int], None]
"""Called with the bytes written so far, and all of them."""

_DTYPES = {
    ir.DataType.FLOAT: "F32",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.INT8: "I8",
}
# Kernels may read whole cache lines: tensors follow one another from a multiple of this on.
_ALIGNMENT = 256
_CHUNK_BYTES = 2**23


@dataclass(frozen=True)
class ExpertsFile:
    """A file of :func:`write_experts`.

    Attributes:
        path: The file.
        is_new: Whether it was written; otherwise a file with its content was there.
        sources: Where each tensor lies.
    """

    path: Path
    is_new: bool
    sources: tuple[WeightSource, ...]


def write_experts(
    tensors: Sequence[ir.TensorProtocol], path: Path, progress: Progress | None = None
) -> ExpertsFile:
    """Writes tensors into one file, which takes its place when it is whole.

    The safetensors package would hold all of them in memory. The header's metadata has a hash of
    the values, so that a file of other values has another header, and another name: an engine that
    reads a file of older values keeps it.

    Args:
        tensors: Float tensors, or bytes. Those that leave the next one aligned come first.
        path: The file, but for its header's checksum: of ``a.safetensors``,
            ``a.0123abcd.safetensors`` is written.
        progress: Shown how far it is.

    Returns:
        The file, with the sources in the tensors' order. One that is there already stays as it is.

    Raises:
        OSError: If a file cannot be read or written, or the disk has no room for it.
    """
    # By the largest power of two that divides their bytes.
    order = sorted(range(len(tensors)), key=lambda at: -(tensors[at].nbytes & -tensors[at].nbytes))
    tensors = [tensors[at] for at in order]
    total = sum(tensor.nbytes for tensor in tensors)
    free = shutil.disk_usage(path.parent).free
    if total > free:
        reason = f"{path.name} needs {total} bytes, {path.parent} has {free} left"
        raise OSError(errno.ENOSPC, reason)
    digest, done = hashlib.sha256(), 0
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        part = Path(folder) / path.name
        with part.open("wb") as file:
            file.write(_header(tensors, digest.hexdigest()))
            for chunk in (chunk for tensor in tensors for chunk in _chunks(tensor)):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
            file.seek(0)
            file.write(_header(tensors, digest.hexdigest()))
        identity = FileIdentity.of(part)
        path = path.with_suffix(f".{identity.header_crc32:08x}{path.suffix}")
        is_new = not _is(path, identity)
        if is_new:
            part.replace(path)
    sizes = [tensor.nbytes for tensor in tensors]
    starts = accumulate(sizes, initial=identity.header_bytes)
    stretches = zip(starts, sizes, strict=False)
    sources = (WeightSource.of(path, *stretch) for stretch in stretches)
    in_order = sorted(zip(order, sources, strict=True), key=lambda item: item[0])
    return ExpertsFile(path, is_new, tuple(source for _, source in in_order))


def _is(path: Path, identity: FileIdentity) -> bool:
    try:
        return FileIdentity.of(path) == identity
    except (OSError, ValueError):
        return False


def _header(tensors: Sequence[ir.TensorProtocol], sha256: str) -> bytes:
    """The length word and the header; format: https://huggingface.co/docs/safetensors."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "sha256": sha256}}
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        # Each branch of a graph may have a weight of that name.
        names = (f"{tensor.name}.{at}" if at else str(tensor.name) for at in count())
        entries[next(name for name in names if name not in entries)] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": [*tensor.shape.numpy()],
            "data_offsets": [start, end],
        }
        start = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def _chunks(tensor: ir.TensorProtocol) -> Iterator[bytes | memoryview]:
    if not isinstance(tensor, ir.ExternalTensor):
        # It lies in the ONNX file, which has at most 2 GB.
        yield memoryview(tensor.tobytes())
        return
    left = tensor.nbytes
    with Path(tensor.path).open("rb") as file:
        file.seek(tensor.offset or 0)
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise OSError(f"{tensor.path} ends {left} bytes before the end of {tensor.name}")
            yield chunk
            left -= len(chunk)
