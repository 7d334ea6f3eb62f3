"""Keeps compiled kernels in the user's cache folder, under a hash of all that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from pathlib import Path

from trt_plugin.compiling.tasks import Compiled, Task
from trt_plugin.output import write_whole

# Change it when entries, or the way kernels are compiled, change.
_FORMAT = "2"
_DIGEST = hashlib.sha256
_DIGEST_BYTES = 32


def default_folder() -> Path | None:
    """Returns ``$DYNAMO_MOE_CACHE_DIR``, or else ``dynamo-moe`` in the user's cache folder.

    None if the variable is empty.
    """
    configured = os.environ.get("DYNAMO_MOE_CACHE_DIR")
    if configured is not None:
        return Path(configured) if configured else None
    users = os.environ.get("XDG_CACHE_HOME")
    return (Path(users) if users else Path.home() / ".cache") / "dynamo-moe"


class KernelCache:
    """Compiled kernels in files, one each; safe to share between processes.

    Args:
        folder: The cache's folder; None keeps nothing.
        compiler: Name and version of the compiler.
        sources: Hash of each module's sources.
    """

    def __init__(self, folder: Path | None, compiler: str, sources: dict[str, str]) -> None:
        self.folder = None if folder is None else folder / f"kernels-{_FORMAT}"
        self.compiler = compiler
        self.sources = sources

    def get(self, task: Task) -> Compiled | None:
        """Returns a kernel from the cache; None if it is not there, or its file is damaged."""
        path = self._path(task)
        try:
            content = path.read_bytes() if path else b""
        except OSError:
            return None
        digest, rest = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if digest != _DIGEST(rest).digest():
            return None
        metadata, _, cubin = rest.partition(b"\n")
        return Compiled.of(cubin, json.loads(metadata))

    def put(self, task: Task, compiled: Compiled) -> None:
        """Keeps a kernel. If that fails, there is only a warning."""
        path = self._path(task)
        if path is None:
            return
        content = json.dumps(compiled.metadata).encode() + b"\n" + compiled.cubin
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, _DIGEST(content).digest() + content)
        except OSError as error:
            warnings.warn(f"the kernel cache cannot keep {path}: {error}", stacklevel=2)

    def _path(self, task: Task) -> Path | None:
        if self.folder is None:
            return None
        parts = (self.compiler, self.sources[task.module], task.to_json())
        key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return self.folder / key[:2] / key
