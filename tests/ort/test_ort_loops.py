"""The loops over vectors of ONNX Runtime's operators, at every size, under sanitizers."""

from __future__ import annotations

import subprocess

import pytest

from standin import CSRC, ROOT, build, sanitizing

PACKED_MATRIX = ["onnxruntime/few_rows.cc", "onnxruntime/packed_matrix.cc", "bundle/layer.cc"]
ACTIVATION = ["onnxruntime/activation.cc", "node/node.cc", "bundle/layer.cc"]


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("sanitizer", "widest"),
    [("address", 128), ("undefined", 128), ("address", 512), ("address", 256)],
)
@pytest.mark.parametrize(
    ("name", "sources", "said"),
    [
        ("packed_matrix", PACKED_MATRIX, "2000 matrices\n"),
        ("activation", ACTIVATION, "15 activations\n"),
    ],
    ids=["packed_matrix", "activation"],
)
def test_results_are_right_and_nothing_beyond_is_read(
    name: str, sources: list[str], said: str, sanitizer: str, widest: int
) -> None:
    """Each CPU has vectors up to a width, and loops of its own.

    One sanitizer at a time: with both, GCC 12 compiles the packed matrix in 44 s, with one in 12.
    """
    flags = (*sanitizing(sanitizer), f"-DDYNAMO_MOE_WIDEST={widest}")
    check = build(
        name, [ROOT / "tests" / "native" / f"{name}.cc", *(CSRC / s for s in sources)], *flags
    )
    done = subprocess.run([check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == said
