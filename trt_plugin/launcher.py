"""The C++ launcher from Python: runs programs of a bundle on device memory.

The TensorRT plugin uses the same library through the same C interface.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from trt_plugin.bundle import TENSORS, LayerRecord
from trt_plugin.bundle.records import LAYER
from trt_plugin.native import LauncherError, call, close

__all__ = ["Cache", "LauncherError", "OpenProgram", "find_program"]

_LAYER_BYTES = LAYER.size


class _Tensors(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in TENSORS)


def find_program(bundle: bytes, layer: LayerRecord, architecture: int) -> bytes:
    """Returns the bytes of the program that runs a layer on an architecture.

    Args:
        bundle: A whole bundle.
        layer: The layer's record.
        architecture: 90 for sm_90.

    Raises:
        LauncherError: If the bundle is damaged, or has no such program.
    """
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    record = (ctypes.c_char * _LAYER_BYTES).from_buffer_copy(layer.to_bytes())
    call(
        "bundle_find",
        *(bundle, len(bundle), record, architecture, ctypes.byref(program), ctypes.byref(size)),
    )
    return ctypes.string_at(program.value or 0, size.value)


class _Handle:
    """An object that the library has opened; a context manager."""

    _kind: str

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()

    def close(self) -> None:
        """Frees it; no launch may be running."""
        if self._handle:
            close(self._kind, self._handle)
            self._handle = ctypes.c_void_p()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def prepare(self) -> None:
        """Loads the kernels into the current CUDA context; does nothing if there is none."""
        call(f"{self._kind}_prepare", self._handle)

    def enqueue(
        self,
        tokens: int,
        tensors: Mapping[str, int],
        workspace: int,
        workspace_size: int,
        stream: int = 0,
    ) -> None:
        """Enqueues the layer.

        Args:
            tokens: T.
            tensors: Device addresses, multiples of 16, of the tensors that the layer has, by their
                names in :data:`trt_plugin.bundle.TENSORS`.
            workspace: Device address, a multiple of 256.
            workspace_size: Its bytes.
            stream: A ``CUstream``; 0 is the current context's default stream.

        Raises:
            LauncherError: If the launch fails; y is undefined then.
        """
        call(
            f"{self._kind}_enqueue",
            *(self._handle, tokens, ctypes.byref(_Tensors(**tensors))),
            *(workspace, workspace_size, stream),
        )


class OpenProgram(_Handle):
    """A program that is ready to be enqueued; a context manager.

    Args:
        data: The program's bytes, which are copied.

    Raises:
        LauncherError: If they are not a program.
    """

    _kind = "program"

    def __init__(self, data: bytes) -> None:
        super().__init__()
        call("program_open", data, len(data), ctypes.byref(self._handle))

    def workspace_size(self, max_tokens: int) -> int:
        """Returns the bytes of workspace that suffice for every T in ``0..max_tokens``."""
        size = ctypes.c_size_t()
        call("program_workspace", self._handle, max_tokens, ctypes.byref(size))
        return size.value

    def state_size(self) -> int:
        """Returns the bytes of a cache's device memory; 0 where all experts are resident."""
        size = ctypes.c_size_t()
        call("program_state", self._handle, ctypes.byref(size))
        return size.value

    def open_cache(self, sources: tuple[str, str] | None = None, *, shared: bool = False) -> Cache:
        """Returns an empty cache of the experts of a layer that is offloaded.

        Args:
            sources: Where w1 and w2 lie in safetensors files, as ``dynamo_moe.h`` says; None where
                each call passes addresses of pinned host memory.
            shared: Whether calls may be on any streams; they then wait for one another. Such caches
                of equal layers with the same sources are one in a context.

        Raises:
            LauncherError: If a file is missing, or is not the one that was meant.
        """
        return Cache(self._handle, sources, shared)


class Cache(_Handle):
    """The experts of an offloaded layer that are on the device; a context manager.

    :meth:`OpenProgram.open_cache` opens it. :meth:`prepare` also allocates its memory and pins the
    weights; it is in the context where it was first used.
    """

    _kind = "cache"

    def __init__(
        self, program: ctypes.c_void_p, sources: tuple[str, str] | None, shared: bool
    ) -> None:
        super().__init__()
        w1, w2 = (None, None) if sources is None else (source.encode() for source in sources)
        call("cache_open", program, w1, w2, int(shared), ctypes.byref(self._handle))

    def note(self) -> str:
        """Returns why weights were copied to pinned memory; "" if the files' pages are pinned."""
        note = ctypes.c_char_p()
        call("cache_note", self._handle, ctypes.byref(note))
        return (note.value or b"").decode()
