"""The C++ launcher from Python: runs programs of a bundle on device memory.

It is the same library, through the same C interface, that the TensorRT plugin stands on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any

from trt_plugin._records import TENSORS, LayerRecord

__all__ = ["STATUSES", "LauncherError", "OpenProgram", "find_program", "library_path"]

#: Names of the library's statuses, by their numbers.
STATUSES = (
    *("ok", "invalid argument", "invalid bundle", "not found", "no driver"),
    *("CUDA error", "out of memory"),
)

_LAYER_BYTES = 64


class LauncherError(RuntimeError):
    """The launcher refused or failed.

    Attributes:
        status: One of :data:`STATUSES`.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class _Tensors(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in TENSORS)


def library_path() -> Path:
    """Returns the native library's file.

    Raises:
        FileNotFoundError: If it is not there: it is built with the wheel, on Linux.
    """
    path = Path(str(files("trt_plugin") / "libdynamo_moe.so"))
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: the native library is built when dynamo-moe is installed on "
            "Linux with a C++ compiler"
        )
    return path


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
    _check(
        _library().dynamo_moe_bundle_find(
            bundle, len(bundle), record, architecture, ctypes.byref(program), ctypes.byref(size)
        )
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
        _check(_library().dynamo_moe_program_open(data, len(data), ctypes.byref(self._handle)))

    def workspace_size(self, max_tokens: int) -> int:
        """Returns the bytes of workspace that suffice for every T in ``0..max_tokens``."""
        size = ctypes.c_size_t()
        _check(
            _library().dynamo_moe_program_workspace(self._handle, max_tokens, ctypes.byref(size))
        )
        return size.value

    def prepare(self) -> None:
        """Loads the kernels into the current CUDA context; does nothing where there is none."""
        _check(_library().dynamo_moe_program_prepare(self._handle))

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
            tensors: Device addresses by the names of :data:`custom_ops.kernels.spec.TENSORS`, of
                those that the layer has; multiples of 16.
            workspace: Device address, a multiple of 256.
            workspace_size: Its bytes.
            stream: A ``CUstream``; 0 is the current context's default stream.

        Raises:
            LauncherError: With what was wrong; y is undefined then.
        """
        _check(
            _library().dynamo_moe_program_enqueue(
                self._handle,
                tokens,
                ctypes.byref(_Tensors(**tensors)),
                workspace,
                workspace_size,
                stream,
            )
        )

    def close(self) -> None:
        """Frees it; no launch may be running."""
        if self._handle:
            _library().dynamo_moe_program_close(self._handle)
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


@cache
def _library() -> Any:
    library = ctypes.CDLL(str(library_path()))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    signatures: dict[str, tuple[Any, ...]] = {
        "bundle_find": (ctypes.c_char_p, size, pointer, ctypes.c_uint32, pointer, pointer),
        "program_open": (ctypes.c_char_p, size, pointer),
        "program_workspace": (pointer, ctypes.c_int64, pointer),
        "program_prepare": (pointer,),
        "program_enqueue": (pointer, ctypes.c_int64, pointer, pointer, size, pointer),
    }
    for name, arguments in signatures.items():
        function = getattr(library, f"dynamo_moe_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_int
    library.dynamo_moe_program_close.argtypes = (pointer,)
    library.dynamo_moe_program_close.restype = None
    library.dynamo_moe_last_error.restype = ctypes.c_char_p
    return library


def _check(status: int) -> None:
    if status:
        message = _library().dynamo_moe_last_error().decode(errors="replace")
        raise LauncherError(STATUSES[status], message)
