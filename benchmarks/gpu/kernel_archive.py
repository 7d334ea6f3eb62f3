"""Triton's cache of compiled kernels as one file, to carry to a machine with a GPU.

An entry's folder is named by a hash of the kernel's source and options and of Triton itself. Its
list of files has absolute paths, which are written anew where the cache is unpacked.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

# Of the stages of a compilation, a launch reads the last alone.
_KEPT = {".cubin", ".json"}
_GROUP = "__grp__"


def kernel_count(cache: Path) -> int:
    """Returns the number of kernels in a cache."""
    return sum(1 for _ in cache.glob("*/*.cubin"))


def pack(cache: Path, archive: Path) -> None:
    """Writes the kernels of a cache to a file, beside it and renamed."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    beside = archive.with_name(f".{archive.name}")
    with tarfile.open(beside, "w:xz") as packed:
        # Kernels that are alike lie together, which xz makes use of.
        for path in sorted(cache.glob("*/*"), key=lambda path: (path.name, path)):
            if path.suffix in _KEPT and path.is_file():
                packed.add(path, path.relative_to(cache))
    beside.replace(archive)


def unpack(archive: Path, cache: Path) -> None:
    """Adds the kernels of a file to a cache."""
    with tarfile.open(archive) as packed:
        packed.extractall(cache, filter="data")
    for group in cache.glob(f"*/{_GROUP}*.json"):
        names = json.loads(group.read_text())["child_paths"]
        here = {name: str(group.parent / name) for name in names}
        group.write_text(json.dumps({"child_paths": here}))
