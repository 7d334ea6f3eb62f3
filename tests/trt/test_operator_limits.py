"""Standard operators that TensorRT for RTX does not take, as docs/reference/tensorrt.md lists them.

If a later version takes one, its row goes, and perhaps a detour in an export with it.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest

from tensorrt_builds import build

# Inputs, outputs and nodes of a graph, and what is said of it.
REFUSED = {
    "ScatterElements": (
        "(float[4,8] x, int64[4,2] i, float[4,2] u) => (float[4,8] y)",
        '{ y = ScatterElements <axis = 1, reduction = "add"> (x, i, u) }',
        "Unsupported reduction type",
    ),
    "ScatterND": (
        "(float[4,8] x, int64[2,1] i, float[2,8] u) => (float[4,8] y)",
        '{ y = ScatterND <reduction = "add"> (x, i, u) }',
        "ScatterND with reduction is not supported",
    ),
    "NonZero": (
        "(float[4,8] x) => (int64[2,n] y)",
        "{ y = NonZero (x) }",
        "NonZero plugin creator version 1 was not found",
    ),
    "Compress": (
        "(float[4,8] x, bool[4] c) => (float[n,8] y)",
        "{ y = Compress <axis = 0> (x, c) }",
        "(Compress)",
    ),
    "Unique": ("(float[8] x) => (float[n] y)", "{ y = Unique (x) }", "(Unique)"),
    "SequenceInsert": (
        "(float[4,8] x) => (float[n,8] y)",
        "{ s = SequenceEmpty () t = SequenceInsert (s, x) y = ConcatFromSequence <axis = 0> (t) }",
        "(SequenceInsert)",
    ),
    "Scan": (
        "(float[4,8] x) => (float[4,8] y)",
        "{ y = Scan <body = b (float[8] e) => (float[8] f) {f = Abs(e)}, num_scan_inputs=1> (x) }",
        "(Scan): Invalid Node",
    ),
    "TopK": (
        "(float[5000] x) => (float[3841] y, int64[3841] i)",
        "<int64[1] k = {3841}> { y, i = TopK (x, k) }",
        "K exceeds the maximum value allowed (3840)",
    ),
}
# The same operators where they are taken.
TAKEN = {
    "ScatterElements": (
        REFUSED["ScatterElements"][0],
        "{ y = ScatterElements <axis = 1> (x, i, u) }",
    ),
    "ScatterND": (REFUSED["ScatterND"][0], "{ y = ScatterND (x, i, u) }"),
    "Scan": (
        "(float[4,8] x, float[8] z) => (float[8] o, float[4,8] y)",
        (
            "{ o, y = Scan <num_scan_inputs = 1, body = b (float[8] s, float[8] e) => (float[8] t,"
            " float[8] u) { t = Add (s, e) u = Abs (e) }> (z, x) }"
        ),
    ),
    "TopK": (
        "(float[5000] x) => (float[3840] y, int64[3840] i)",
        "<int64[1] k = {3840}> { y, i = TopK (x, k) }",
    ),
}


def file(folder: Path, signature: str, graph: str) -> Path:
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g {signature} {graph}'
    )
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.parametrize("operator", REFUSED)
def test_refused(operator: str, tmp_path: Path) -> None:
    signature, graph, message = REFUSED[operator]
    built = build(file(tmp_path, signature, graph), "SM89", "SM120")
    assert not built.built
    assert built.parsed == (operator == "TopK")
    assert message in built.reason()


@pytest.mark.parametrize("operator", TAKEN)
def test_taken(operator: str, tmp_path: Path) -> None:
    built = build(file(tmp_path, *TAKEN[operator]), "SM89", "SM120")
    assert built.built, built.reason()
