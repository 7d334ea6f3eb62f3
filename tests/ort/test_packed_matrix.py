"""Packed matrices in the native library, of any size and format, under sanitizers."""

from __future__ import annotations

import subprocess

import pytest

from standin import CSRC, ROOT, build, sanitizing


@pytest.mark.slow
def test_nothing_beyond_a_matrix_is_read() -> None:
    sources = [
        ROOT / "tests" / "native" / "packed_matrix.cc",
        CSRC / "onnxruntime" / "packed_matrix.cc",
        CSRC / "bundle" / "layer.cc",
    ]
    check = build("packed_matrix", sources, *sanitizing("address,undefined"))
    done = subprocess.run([check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "2000 matrices\n"
