"""The C++ launcher from Python: runs programs of a bundle on device memory.

The TensorRT plugin uses the same library through the same C interface.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import TracebackType

from trt_plugin.bundle import TENSORS, LayerRecord
from trt_plugin.bundle.records import LAYER
from trt_plugin.native import LauncherError, call, close

__all__ = ["LauncherError", "OpenProgram", "find_program"]

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


class OpenProgram:
    """A program that is ready to be enqueued; a context manager.

    Args:
        data: The program's bytes, which are copied.

    Raises:
        LauncherError: If they are not a program.
    """

    def __init__(self, data: bytes) -> None:
        self._handle = ctypes.c_void_p()
        call("program_open", data, len(data), ctypes.byref(self._handle))

    def workspace_size(self, max_tokens: int) -> int:
        """Returns the bytes of workspace that suffice for every T in ``0..max_tokens``."""
        size = ctypes.c_size_t()
        call("program_workspace", self._handle, max_tokens, ctypes.byref(size))
        return size.value

    def prepare(self) -> None:
        """Loads the kernels into the current CUDA context; does nothing if there is none."""
        call("program_prepare", self._handle)

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
            "program_enqueue",
            *(self._handle, tokens, ctypes.byref(_Tensors(**tensors))),
            *(workspace, workspace_size, stream),
        )

    def close(self) -> None:
        """Frees it; no launch may be running."""
        if self._handle:
            close(self._handle)
            self._handle = ctypes.c_void_p()

    def __enter__(self) -> OpenProgram:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
