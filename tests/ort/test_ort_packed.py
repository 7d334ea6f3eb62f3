"""The native library's operators for packed experts in ONNX Runtime, against the float64 oracle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor

import dynamo_moe
from custom_ops import reference
from dynamo_moe.tolerances import tolerance_for
from packed_cases import PackedCase, PackedLayer, packed_case
from trt_plugin.native import library_path

GATED: dict[str, Any] = {"activation": "silu", "gated": True}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMATS: dict[str, dict[str, Any]] = {
    "int4": {},
    "int4, zero points": GATED | {"zero_points": "groups", "biases": False},
    "int4, a zero point for each expert": {"zero_points": "experts"},
    "int4 rows": GATED | {"weight_format": "int4 rows", "biases": False},
    "int4, groups of other sizes than pieces": {"group": 4, "width": 36, "hidden": 20},
    "int4, groups of odd sizes": {"group": 3, "width": 36, "hidden": 18, "zero_points": "groups"},
    "mxfp4": GATED | {"weight_format": "mxfp4"},
    "nvfp4": GATED | {"weight_format": "nvfp4", "biases": False},
    "nvfp4, biases": {"weight_format": "nvfp4"},
    "fp8": GATED | {"weight_format": "fp8", "width": 200, "hidden": 140},
    "fp8 rows": {"weight_format": "fp8 rows", "biases": False},
    "fp8 groups": {"weight_format": "fp8 groups", "biases": False},
    "fp8 whole": GATED | {"weight_format": "fp8 whole", "width": 36, "hidden": 20},
    "int8": {"weight_format": "int8", "group": 4, "width": 36, "hidden": 20},
    "int8 rows": GATED | {"weight_format": "int8 rows", "weight_on_input": True},
}
TOKENS = (0, 1, 4, 12, 90, 400)
"""Experts then have few rows, rows that are columns of a product, and more."""


class Cast(PackedLayer):
    """The layer between tokens and results in float32, as NumPy has no bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.case.plain.arguments["x"].dtype)).float()


def exported(case: PackedCase, path: Path) -> onnx.ModelProto:
    """Writes the case's file, of which only the library can compute the layer."""
    x = case.plain.arguments["x"][:6].float()
    shapes = ({0: torch.export.Dim.DYNAMIC} if len(x) > 1 else None,)
    dynamo_moe.export(Cast(case).eval(), (x,), path, dynamic_shapes=shapes)
    proto = onnx.load(path)
    del proto.functions[:]
    return proto


def to_session(proto: onnx.ModelProto, threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(proto.SerializeToString(), options)


def node_of(proto: onnx.ModelProto) -> onnx.NodeProto:
    (node,) = (node for node in proto.graph.node if node.domain == "moe")
    return node


def run(session: ort.InferenceSession, x: Tensor) -> Tensor:
    (y,) = session.run(None, {"x": x.float().numpy()})
    return torch.from_numpy(y)


def check(case: PackedCase, session: ort.InferenceSession, tokens: int) -> None:
    given = {"x": case.plain.arguments["x"][:tokens]}
    if case.plain.op == "experts":
        for name in ("expert_ids", "expert_weights"):
            given[name] = case.plain.arguments[name][:tokens]
    found = run(session, given["x"]).double()
    if not tokens:
        assert found.shape == given["x"].shape
        return
    expected = case.changed(**given).oracle().double()
    error, scale = found - expected, expected.pow(2).mean().sqrt()
    bound = tolerance_for({given["x"].dtype})
    assert error.abs().max() <= bound.max * scale
    assert error.pow(2).mean().sqrt() <= bound.rms * scale


@pytest.mark.pairwise
@pytest.mark.parametrize("op", ["dropless", "experts"])
@pytest.mark.parametrize("scales_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format(
    name: str, dtype: torch.dtype, scales_dtype: torch.dtype, op: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"shape": (max(TOKENS),), "dtype": dtype} | FORMATS[name]
    case = packed_case(op, scales_dtype=scales_dtype, **options)
    session = to_session(exported(case, tmp_path / "layer.onnx"))
    for tokens in TOKENS if op == "dropless" else (1, 90):
        check(case, session, tokens)


def test_threads_and_leading_dimensions(tmp_path: Path) -> None:
    case = packed_case("dropless", "nvfp4", shape=(400,), width=64, hidden=96, **GATED)
    session = to_session(exported(case, tmp_path / "layer.onnx"), threads=4)
    for tokens in (1, 400):
        check(case, session, tokens)


BYTES = torch.arange(256, dtype=torch.uint8)
HALVES = torch.arange(0, 2**16, 16, dtype=torch.int32).to(torch.int16)
CODES = {  # Of 0 and 1, in every column of a byte, and of a scale of 1.
    "int4": (0x88, 0x89, 1.0),
    "mxfp4": (0x00, 0x02, 127),
    "nvfp4": (0x00, 0x02, 0x38),
    "fp8": (0x00, 0x38, 1.0),
    "int8": (0x00, 0x01, 1.0),
}


def first_column(weight_format: str, codes: Tensor | None, scales: Tensor | None) -> Tensor:
    """Returns two bytes of codes, and of scales, as the library and the oracle read them.

    Each is of a row of w2, whose first column alone meets a hidden number, 1.
    """
    zero, one, unit = CODES[weight_format]
    rows = len(codes) if codes is not None else len(scales) if scales is not None else 0
    columns = {"mxfp4": 32, "nvfp4": 16}.get(weight_format, 8)
    per_byte = 1 if weight_format in ("fp8", "int8") else 2
    dtype = torch.int8 if isinstance(unit, int) else torch.float32
    w1 = torch.full((1, columns, rows // per_byte), zero, dtype=torch.uint8)
    w2 = torch.full((1, rows, columns // per_byte), zero, dtype=torch.uint8)
    w1[0, 0, 0] = one
    w2[0, :, 0] = one if codes is None else codes
    blocks = rows // columns if weight_format in ("mxfp4", "nvfp4") else 1
    s1 = torch.full((1, columns, blocks), unit, dtype=dtype)
    s2 = torch.full((1, rows, 1), unit, dtype=dtype)
    if scales is not None:
        s1 = s1 if dtype == torch.int8 else s1.to(scales.dtype)
        s2 = scales.view(torch.int8 if dtype == torch.int8 else scales.dtype).view(1, rows, 1)
    tensors = {
        "w1": w1.view(torch.int8), "w2": w2.view(torch.int8), "w1_scales": s1, "w2_scales": s2,
    }  # fmt: skip
    if weight_format == "nvfp4":
        tensors |= {"w1_zero_points": torch.full((1, 1, 1), 8, dtype=torch.int8)}
        tensors |= {"w2_zero_points": tensors["w1_zero_points"]}
        tensors |= {"w1_global_scales": torch.ones(1, columns, 1)}
        tensors |= {"w2_global_scales": torch.ones(1, rows, 1)}
    attributes = {
        "weight_format": weight_format, "block_rows": 1,
        "block_size": columns if weight_format in ("mxfp4", "nvfp4") else 0,
        "num_experts": 1, "in_features": rows, "hidden_features": columns, "top_k": 1,
        "activation": "identity",
    }  # fmt: skip
    names = ["x", "ids", "weights", *tensors]
    node = helper.make_node(
        "DroplessMoEExpertsPacked", names, ["y"], "n", domain="moe", **attributes
    )
    kinds = (("x", 1), ("ids", 7), ("weights", 1))
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info(name, kind, ["T", None]) for name, kind in kinds],
        [helper.make_tensor_value_info("y", 1, ["T", rows])],
        [to_initializer(name, tensor) for name, tensor in tensors.items()],
    )
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("moe", 1)]
    session = to_session(helper.make_model(graph, opset_imports=imports, ir_version=10))
    results = []
    for tokens in (1, 9, 70):  # Decoded in registers, for loops, and for columns.
        x = np.zeros((tokens, rows), np.float32)
        x[:, 0] = 1
        feeds = {"x": x, "ids": np.zeros((tokens, 1), np.int64)}
        (y,) = session.run(None, feeds | {"weights": np.ones((tokens, 1), np.float32)})
        results.append(torch.from_numpy(y[-1]))
    given = (tensors["w2"], s2, None, tensors.get("w2_global_scales"))
    hidden = torch.eye(columns, dtype=torch.float64)[0]
    expected = (reference.unpacked(weight_format, *given)[0] @ hidden).float()
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    return expected


def to_initializer(name: str, tensor: Tensor) -> onnx.TensorProto:
    if tensor.dtype != torch.bfloat16:
        return numpy_helper.from_array(tensor.numpy(), name)
    bits = tensor.view(torch.int16).numpy().tobytes()
    return helper.make_tensor(name, onnx.TensorProto.BFLOAT16, tensor.shape, bits, raw=True)


@pytest.mark.parametrize(
    ("weight_format", "least"), [("int4", -8), ("mxfp4", -6), ("fp8", -448), ("int8", -128)]
)
def test_every_code(weight_format: str, least: float) -> None:
    zero, _, _ = CODES[weight_format]
    four_bits = weight_format in ("int4", "mxfp4")
    codes = (BYTES & 15) | (zero & 0xF0) if four_bits else BYTES
    expected = first_column(weight_format, codes, None)
    assert expected[~expected.isnan()].min() == least


@pytest.mark.parametrize(
    ("weight_format", "scales"),
    [
        ("mxfp4", BYTES),
        ("nvfp4", BYTES),
        ("int8", HALVES.view(torch.float16)),
        ("int4", HALVES.view(torch.bfloat16)),
    ],
)
def test_every_scale(weight_format: str, scales: Tensor) -> None:
    """Those that are infinite or NaN make their own row NaN, with its columns of 0."""
    first_column(weight_format, None, scales)


@pytest.mark.parametrize(
    ("form", "attributes", "message"),
    [
        ("int4", {"weight_format": "int3"}, "one of int4, mxfp4, fp8, nvfp4, int8; got 'int3'"),
        ("int4", {"weight_format": None}, "weight_format must be one of .*; got ''"),
        ("int4", {"block_size": None}, "attribute block_size is missing"),
        ("int4", {"block_size": -1}, "attribute block_size must be in 0..2147483647, got -1"),
        ("fp8", {"block_rows": -1}, "attribute block_rows must be in 0..2147483647, got -1"),
        ("int4", {"hidden_features": 15}, ("hidden_features must be a multiple of 2 where weights "
         "are int4, got 15")),
        ("int4", {"weight_format": "mxfp4"}, "w1_scales must be int8 in the library's operator"),
        ("int8", {"weight_format": "nvfp4"}, "w1_scales must be int8 in the library's operator"),
    ],
)  # fmt: skip
def test_wrong_attributes(
    form: str, attributes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    proto = exported(packed_case("dropless", form), tmp_path / "layer.onnx")
    node = node_of(proto)
    kept = [each for each in node.attribute if each.name not in attributes]
    given = [helper.make_attribute(n, v) for n, v in attributes.items() if v is not None]
    del node.attribute[:]
    node.attribute.extend([*kept, *given])
    with pytest.raises(Exception, match=f"DroplessMoEPacked '.*': .*{message}"):
        to_session(proto)


@pytest.mark.parametrize(
    ("form", "name", "shape", "message"),
    [
        ("int4", "w1", (5, 16, 15), "w1 must have shape [5, 16, 16], got [5, 16, 15]"),
        ("int4", "w1_scales", (5, 16, 5), "w1_scales must have shape [5, 16, 4], got [5, 16, 5]"),
        ("int4", "w2_zero_points", (5, 2, 1),
         "w2_zero_points must have shape [5, 32, 2], got [5, 2, 1]"),
        ("fp8", "w2_scales", (5, 2, 1), "w2_scales must have shape [5, 1, 1], got [5, 2, 1]"),
        ("nvfp4", "w2_global_scales", (5, 1, 1),
         "w2_global_scales must have shape [5, 32, 1], got [5, 1, 1]"),
        ("int8", "w1_zero_points", (5, 16, 4), ("w1_zero_points must have shape [5, 1, 1], which "
         "stands for none: int8 has no zero points, got [5, 16, 4]")),
        ("int4", "w1_global_scales", (5, 16, 1), ("w1_global_scales must have shape [5, 1, 1], "
         "which stands for none: int4 has no global scales, got [5, 16, 1]")),
    ],
)  # fmt: skip
def test_wrong_shapes(
    form: str, name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    case = packed_case("dropless", form)
    proto = exported(case, tmp_path / "layer.onnx")
    order = ("x", "router_weight", "w1", "w2", "w1_scales", "w2_scales", "w1_zero_points",
             "w2_zero_points", "w1_global_scales", "w2_global_scales")  # fmt: skip
    node = node_of(proto)
    stored = node.input[order.index(name)]
    dtype = np.float32 if "global" in name or (form != "nvfp4" and "scales" in name) else np.int8
    changed = numpy_helper.from_array(np.zeros(shape, dtype), f"changed {stored}")
    proto.graph.initializer.append(changed)
    node.input[order.index(name)] = changed.name
    session = to_session(proto)
    with pytest.raises(Exception, match=re.escape(message)):
        run(session, case.plain.arguments["x"])


def test_missing_global_scales(tmp_path: Path) -> None:
    proto = exported(packed_case("dropless", "nvfp4", biases=False), tmp_path / "layer.onnx")
    del node_of(proto).input[8:]
    with pytest.raises(Exception, match="w1_global_scales is missing: nvfp4 has one for each row"):
        to_session(proto)
