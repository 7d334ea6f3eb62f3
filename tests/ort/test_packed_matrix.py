"""Packed matrices in the native library, of any size and format, under sanitizers."""

from __future__ import annotations

import subprocess

import pytest

from standin import CSRC, ROOT, build, sanitizing


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [sanitizing("address,undefined"), (*sanitizing("address"), "-DDYNAMO_MOE_NARROW")],
    ids=["widest", "narrow"],
)
def test_nothing_beyond_a_matrix_is_read(flags: tuple[str, ...]) -> None:
    """The loops are other ones where a CPU has vectors of 64 bytes."""
    sources = [
        ROOT / "tests" / "native" / "packed_matrix.cc",
        CSRC / "onnxruntime" / "few_rows.cc",
        CSRC / "onnxruntime" / "packed_matrix.cc",
        CSRC / "bundle" / "layer.cc",
    ]
    check = build("packed_matrix", sources, *flags)
    done = subprocess.run([check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "2000 matrices\n"
