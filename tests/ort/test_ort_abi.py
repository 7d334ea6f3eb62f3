"""Our declaration of ONNX Runtime's C interface, and what the library shows of itself.

No package has the header: ONNXRUNTIME_INCLUDE_DIR names a folder with ``onnxruntime_c_api.h``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from standin import CSRC, build
from trt_plugin.native import library_path


@pytest.fixture
def header() -> list[str]:
    """The compiler's flags for ONNX Runtime's header."""
    folder = os.environ.get("ONNXRUNTIME_INCLUDE_DIR")
    if not folder:
        pytest.skip("ONNXRUNTIME_INCLUDE_DIR names no folder with ONNX Runtime's header")
    if not (Path(folder) / "onnxruntime_c_api.h").is_file():
        pytest.fail(f"ONNXRUNTIME_INCLUDE_DIR={folder} has no onnxruntime_c_api.h")
    return ["-DDYNAMO_MOE_ONNXRUNTIME_SDK", "-isystem", folder]


def test_the_declaration_is_the_headers(header: list[str]) -> None:
    check = build("ort_abi_check", [CSRC / "onnxruntime" / "abi_check.cc"], *header)
    done = subprocess.run([check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert ": 0 of 1" in done.stdout


def test_differences_are_found(header: list[str], tmp_path: Path) -> None:
    declaration = (CSRC / "onnxruntime" / "ort_abi.h").read_text()
    (tmp_path / "onnxruntime").mkdir()
    source = tmp_path / "abi_check.cc"
    source.write_text((CSRC / "onnxruntime" / "abi_check.cc").read_text())
    for old, new, difference in (
        ("ENTRY(ReleaseOp, 215,", "ENTRY(ReleaseOp, 216,", "place of ReleaseOp: declared 216"),
        ("const char* name, float* value)", "const char* name, double* value)", "_float: declared"),
        ("std::int32_t (*get_end_version)", "std::int64_t (*get_end_version)", "GetEndVersion"),
        ("kBfloat16Elements = 16", "kBfloat16Elements = 17", "BFLOAT16: declared 17"),
    ):
        assert old in declaration
        (tmp_path / "onnxruntime" / "ort_abi.h").write_text(declaration.replace(old, new))
        command = ["g++", "-std=c++17", f"-I{tmp_path}", *header, str(source), "-o"]
        subprocess.run([*command, str(tmp_path / "check")], check=True)
        done = subprocess.run([tmp_path / "check"], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert difference in done.stdout


def test_an_older_runtime_gets_a_message() -> None:
    said = []
    create_status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    get_version = ctypes.CFUNCTYPE(ctypes.c_void_p)
    version = ctypes.create_string_buffer(b"1.16.3")

    def create(code: int, message: bytes) -> int:
        said.append((code, message))
        return 1

    entries = (ctypes.c_void_p * 1)()
    callbacks = [
        create_status(create),
        get_api(lambda wanted: ctypes.addressof(entries) if wanted < 17 else None),
        get_version(lambda: ctypes.addressof(version)),
    ]
    entries[0], *base = (ctypes.cast(callback, ctypes.c_void_p).value for callback in callbacks)
    register = ctypes.CDLL(str(library_path())).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, (ctypes.c_void_p * 2)(*base)) == 1
    assert said == [(1, b"libdynamo_moe.so needs ONNX Runtime 1.17 or later, got 1.16.3")]


def test_the_library_needs_no_onnxruntime() -> None:
    command = ["readelf", "-d", str(library_path())]
    needed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "onnxruntime" not in needed.replace(str(library_path()), "")
    command = ["nm", "-D", "--defined-only", str(library_path())]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert " T RegisterCustomOps" in shown
