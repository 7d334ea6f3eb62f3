"""The native library: where it is, its C interface through ctypes, and its errors.

``csrc/dynamo_moe.h`` describes the functions. The TensorRT plugin is in the same library.
"""

from __future__ import annotations

import ctypes
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

#: Names of the library's statuses, by their numbers.
STATUSES = (
    *("ok", "invalid argument", "invalid bundle", "not found", "no driver"),
    *("CUDA error", "out of memory"),
)

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "bundle_describe": (ctypes.c_char_p, _SIZE, _POINTER),
    "bundle_find": (ctypes.c_char_p, _SIZE, _POINTER, ctypes.c_uint32, _POINTER, _POINTER),
    "layer_describe": (ctypes.c_char_p, _POINTER),
    "expression_evaluate": (ctypes.c_char_p, _SIZE, _POINTER, _POINTER),
    "program_open": (ctypes.c_char_p, _SIZE, _POINTER),
    "program_workspace": (_POINTER, ctypes.c_int64, _POINTER),
    "program_prepare": (_POINTER,),
    "program_enqueue": (_POINTER, ctypes.c_int64, _POINTER, _POINTER, _SIZE, _POINTER),
    "program_state": (_POINTER, _POINTER),
    "cache_open": (_POINTER, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, _POINTER),
    "cache_prepare": (_POINTER,),
    "cache_note": (_POINTER, _POINTER),
    "cache_enqueue": (_POINTER, ctypes.c_int64, _POINTER, _POINTER, _SIZE, _POINTER),
    "kernels_begin": (ctypes.c_char_p, ctypes.c_char_p, _SIZE),
    "kernels_end": (),
    "sharing_begin": (),
    "sharing_end": (),
}


class LauncherError(RuntimeError):
    """The library refused or failed.

    Attributes:
        status: One of :data:`STATUSES`.
        message: The error, without the status.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


def library_path(*, self_registering: bool = False) -> Path:
    """Returns the native library's file.

    Args:
        self_registering: Whether of the small one beside it, which registers the plugins with
            TensorRT when it is opened. TensorRT itself has to be in the process, or where the
            loader of libraries finds it.

    Raises:
        FileNotFoundError: If it is missing: it is built with the wheel, on Linux.
    """
    name = "libdynamo_moe_self_registering.so" if self_registering else "libdynamo_moe.so"
    path = Path(str(files("trt_plugin") / name))
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: bundles are read and kernels launched by the native library, "
            "which is built when dynamo-moe is installed on Linux with a C++ compiler"
        )
    return path


def call(name: str, *arguments: Any) -> None:
    """Calls ``dynamo_moe_<name>``.

    Raises:
        LauncherError: If its status is not ok.
        FileNotFoundError: If the library is missing.
    """
    library = _library()
    status = getattr(library, f"dynamo_moe_{name}")(*arguments)
    if status:
        message = library.dynamo_moe_last_error().decode(errors="replace")
        raise LauncherError(STATUSES[status], message)


def close(kind: str, handle: ctypes.c_void_p) -> None:
    """Closes a ``program`` or ``cache`` that ``<kind>_open`` has opened."""
    getattr(_library(), f"dynamo_moe_{kind}_close")(handle)


def call_for_json(name: str, *arguments: Any) -> Any:
    """Calls ``dynamo_moe_<name>``, whose last result is a JSON text, and returns its value.

    Raises:
        LauncherError: If its status is not ok.
        FileNotFoundError: If the library is missing.
    """
    text = ctypes.c_char_p()
    call(name, *arguments, ctypes.byref(text))
    try:
        return json.loads(text.value or b"")
    finally:
        _library().dynamo_moe_json_free(text)


@cache
def _library() -> Any:
    library = ctypes.CDLL(str(library_path()))
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, f"dynamo_moe_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_int
    for name in ("program_close", "cache_close", "json_free"):
        function = getattr(library, f"dynamo_moe_{name}")
        function.argtypes, function.restype = (_POINTER,), None
    library.dynamo_moe_last_error.restype = ctypes.c_char_p
    return library
