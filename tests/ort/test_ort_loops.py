"""The loops over vectors of ONNX Runtime's operators, at every size, under sanitizers."""

from __future__ import annotations

import subprocess

import pytest

from standin import CSRC, ROOT, build, sanitizing

PACKED_MATRIX = ["onnxruntime/few_rows.cc", "onnxruntime/packed_matrix.cc", "bundle/layer.cc"]
ACTIVATION = ["onnxruntime/activation.cc", "node/node.cc", "bundle/layer.cc"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [sanitizing("address,undefined"), (*sanitizing("address"), "-DDYNAMO_MOE_NARROW")],
    ids=["widest", "narrow"],
)
@pytest.mark.parametrize(
    ("name", "sources", "said"),
    [
        ("packed_matrix", PACKED_MATRIX, "2000 matrices\n"),
        ("activation", ACTIVATION, "14 activations\n"),
    ],
    ids=["packed_matrix", "activation"],
)
def test_results_are_right_and_nothing_beyond_is_read(
    name: str, sources: list[str], said: str, flags: tuple[str, ...]
) -> None:
    """The loops are other ones where a CPU has vectors of 64 bytes."""
    check = build(
        name, [ROOT / "tests" / "native" / f"{name}.cc", *(CSRC / s for s in sources)], *flags
    )
    done = subprocess.run([check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == said
