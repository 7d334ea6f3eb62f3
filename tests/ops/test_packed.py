"""The operators with packed weights: against the oracle, the plain operators, and ml_dtypes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import custom_ops
from custom_ops import reference
from custom_ops.packed_weights import ENCODINGS, WHOLE, Encoding
from custom_ops.weight_formats import packed_format
from dynamo_moe.tolerances import tolerance_for
from moe_cases import EXPERT_FORMS, OPS, ROUNDING_FORMS
from packed_cases import PackedCase, packed_case

both_ops = pytest.mark.parametrize("op", OPS)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def assert_close(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    bound = tolerance_for({dtype}).max * float(expected.double().square().mean().sqrt())
    torch.testing.assert_close(result.double(), expected.double(), rtol=0, atol=bound)


def test_every_byte_stands_for_two_codes() -> None:
    """ml_dtypes has one uint4 to an element; that of the low bits comes first."""
    numbers = np.arange(256, dtype=np.uint8)
    codes = np.stack([numbers.astype(ml_dtypes.uint4), (numbers >> 4).astype(ml_dtypes.uint4)], -1)
    expected = torch.from_numpy(codes.astype(np.float64).reshape(1, 512))
    packed = torch.from_numpy(numbers).view(1, 256)
    for zero in range(16):
        zero_points = torch.full((1, 1), zero, dtype=torch.int8)
        scales = torch.ones(1, 1)
        decoded = ENCODINGS["int4"].decode(packed, scales, zero_points, dtype=torch.float32)
        assert torch.equal(decoded.double(), expected - zero)
        oracle = reference.unpacked("int4", packed.view(torch.int8), scales, zero_points)
        assert torch.equal(oracle, expected - zero)
    default = ENCODINGS["int4"].decode(packed, torch.ones(1, 1), dtype=torch.float32)
    assert torch.equal(default.double(), expected - 8)


def pairs_of_e2m1(numbers: np.ndarray) -> np.ndarray:
    """The two numbers of each byte, as ml_dtypes has them."""
    pairs = np.stack([numbers & 15, numbers >> 4], -1).astype(np.uint8)
    return pairs.view(ml_dtypes.float4_e2m1fn).reshape(1, 2 * len(numbers))


def test_every_byte_of_mxfp4() -> None:
    """Each pair of numbers with each scale, as ml_dtypes has them."""
    numbers = np.arange(256, dtype=np.uint8)
    values = pairs_of_e2m1(numbers).astype(np.float64)
    scales = numbers.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    packed, powers = torch.from_numpy(numbers).view(1, 256), torch.from_numpy(numbers)
    for scale, power in zip(scales, powers, strict=True):
        scales_NG = power.repeat(1, 16).view(torch.int8)
        expected = torch.from_numpy(values * scale)
        decoded = ENCODINGS["mxfp4"].decode(packed, scales_NG, dtype=torch.float32)
        assert torch.equal(decoded.nan_to_num(7), expected.float().nan_to_num(7))
        oracle = reference.unpacked("mxfp4", packed.view(torch.int8), scales_NG, None)
        assert torch.equal(oracle.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@both_ops
def test_mxfp4(op: str, dtype: torch.dtype) -> None:
    options = {"activation": "clamped_swiglu", "gated": True, "interleaved": True}
    case = packed_case(op, "mxfp4", dtype=dtype, **options)
    assert torch.equal(case(), case.decoded()())
    assert_close(case(), case.oracle(), torch.float32 if dtype == torch.float64 else dtype)
    with pytest.raises(
        ValueError, match=r"w1_scales must have the shape \[64, 1\] in mxfp4, got \[64, 2\]"
    ):
        case.changed(w1_scales=torch.zeros(5, 64, 2, dtype=torch.int8))()
    with pytest.raises(TypeError, match="w1_scales must be int8, got float32"):
        case.changed(w1_scales=torch.zeros(5, 64, 1))()
    zero_points = torch.zeros(5, 1, 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="w1_zero_points must be None: mxfp4 has none"):
        case.changed(w1_zero_points=zero_points, w2_zero_points=zero_points)()


def test_every_byte_of_fp8() -> None:
    numbers = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(numbers.view(ml_dtypes.float8_e4m3fn).astype(np.float64))
    packed = torch.from_numpy(numbers).view(1, 256)
    decoded = ENCODINGS["fp8"].decode(packed, torch.full((1, 2), 0.5), dtype=torch.float32)
    assert torch.equal(decoded[0].double().nan_to_num(7), (expected / 2).nan_to_num(7))


def test_every_byte_of_nvfp4() -> None:
    """Each pair of numbers with each scale, as ml_dtypes has them, and a global scale for a row."""
    numbers = np.arange(256, dtype=np.uint8)
    values = pairs_of_e2m1(numbers).astype(np.float32)
    scales = numbers.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    packed, codes = torch.from_numpy(numbers).repeat(3, 1), torch.from_numpy(numbers)
    factors = torch.tensor([[1.0], [1 / 3], [1e-6]])
    for scale, code in zip(scales, codes, strict=True):
        scales_NG = code.repeat(3, 32).view(torch.int8)
        wide = torch.from_numpy(values * scale)
        expected = torch.from_numpy(values) * (torch.tensor(scale) * factors)
        decoded = ENCODINGS["nvfp4"].decode(packed, scales_NG, None, factors, dtype=torch.float32)
        assert torch.equal(decoded.nan_to_num(7), expected.nan_to_num(7))
        oracle = reference.unpacked("nvfp4", packed.view(torch.int8), scales_NG, None, factors)
        assert torch.equal(oracle.nan_to_num(7), (wide.double() * factors).nan_to_num(7))


def test_every_byte_of_int8() -> None:
    codes = torch.arange(-128, 128, dtype=torch.int8).view(1, 256)
    for scales in (torch.tensor([[0.5]]), torch.tensor([[0.5, 0.25]])):
        expected = codes.float().unflatten(-1, (scales.shape[-1], -1)) * scales.unsqueeze(-1)
        decoded = ENCODINGS["int8"].decode(codes, scales, dtype=torch.float32)
        assert torch.equal(decoded, expected.flatten(-2))
        assert torch.equal(reference.unpacked("int8", codes, scales), decoded.double())


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_format", ["nvfp4", "int8"])
@both_ops
def test_nvfp4_and_int8(op: str, weight_format: str, dtype: torch.dtype) -> None:
    case = packed_case(op, weight_format, dtype=dtype, activation="silu", gated=True)
    # A product of two scales may be rounded, in float32.
    close = {} if (weight_format, dtype) == ("nvfp4", torch.float32) else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(case(), case.decoded()(), **close)
    assert_close(case(), case.oracle(), torch.float32 if dtype == torch.float64 else dtype)


@pytest.mark.parametrize(("weight_format", "group"), [("nvfp4", 16), ("mxfp4", 32)])
def test_groups_divide_a_row(weight_format: str, group: int) -> None:
    case = packed_case("experts", weight_format, width=64)
    changed = {
        "x": case.arguments["x"][:, :-8],
        "w1": case.arguments["w1"][..., :-4],
        "w2": case.arguments["w2"][:, :-8],
        "b2": None,
    }
    with pytest.raises(ValueError, match="the scales of an expert in w1_scales must have"):
        case.changed(**changed)()


def test_global_scales() -> None:
    case = packed_case("experts", "nvfp4")
    with pytest.raises(ValueError, match="w1_global_scales must be given in nvfp4"):
        case.changed(w1_global_scales=None)()
    with pytest.raises(ValueError, match="w2_global_scales must be None: mxfp4 has none"):
        packed_case("experts", "mxfp4").changed(w2_global_scales=torch.ones(5, 32, 1))()
    with pytest.raises(ValueError, match=r"w2_global_scales must be \[E, D, 1\] = \[5, 32, 1\]"):
        case.changed(w2_global_scales=torch.ones(5, 1, 1))()
    with pytest.raises(TypeError, match="w1_global_scales must be float32, got bfloat16"):
        case.changed(w1_global_scales=torch.ones(5, 16, 1).bfloat16())()


@pytest.mark.pairwise
@pytest.mark.parametrize("form", ["fp8", "fp8 rows", "fp8 whole", "fp8 groups"])
@pytest.mark.parametrize("sizes", [(32, 16), (128, 256), (224, 160)], ids=str)
@both_ops
def test_fp8(op: str, sizes: tuple[int, int], form: str) -> None:
    """Also where blocks are cut off, and where a matrix has one alone."""
    width, hidden = sizes
    for dtype in FLOATS:
        case = packed_case(
            op, form, dtype=dtype, width=width, hidden=hidden, activation="silu", gated=True
        )
        assert torch.equal(case(), case.decoded()())
        assert_close(case(), case.oracle(), torch.float32 if dtype == torch.float64 else dtype)


def test_scales_that_fp8_does_not_have() -> None:
    case = packed_case("experts", "fp8", width=256, hidden=256)
    sizes = r"\[2, 2\] or \[1, 1\] or \[256, 1\] or \[256, 8\] in fp8, got \[2, 1\]"
    with pytest.raises(ValueError, match=f"an expert in w1_scales must have the shape {sizes}"):
        case.changed(w1_scales=torch.ones(5, 2, 1))()
    with pytest.raises(ValueError, match=r"blocks of one size .*, got \(1, all\) and \(128, 128\)"):
        case.changed(w1_scales=torch.ones(5, 256, 1))()


@pytest.mark.pairwise
@pytest.mark.parametrize("form", EXPERT_FORMS)
@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@both_ops
def test_the_oracle(op: str, dtype: torch.dtype, zero_points: bool, form: dict[str, Any]) -> None:
    case = packed_case(op, zero_points=zero_points, dtype=dtype, **form)
    assert_close(case(), case.oracle(), torch.float32 if dtype == torch.float64 else dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize("scales_dtype", ENCODINGS["int4"].scales_dtypes, ids=str)
@pytest.mark.parametrize("group", [2, 16, 32])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@both_ops
def test_the_same_bits_as_decoded(
    op: str, dtype: torch.dtype, group: int, scales_dtype: torch.dtype
) -> None:
    options = {"activation": "silu", "gated": True, "selection_bias": op == "dropless"}
    case = packed_case(
        op, group=group, scales_dtype=scales_dtype, dtype=dtype, hidden=32, shape=(2, 3), **options
    )
    assert torch.equal(case(), case.decoded()())


@pytest.mark.parametrize("form", ROUNDING_FORMS)
def test_routers_that_round(form: dict[str, Any]) -> None:
    case = packed_case("dropless", dtype=torch.bfloat16, **form)
    plain = {name: option for name, option in case.decoded().options.items() if name not in form}
    result = case()
    assert torch.equal(result, case.decoded()())
    assert not torch.equal(result, replace(case.decoded(), options=plain)())


@both_ops
def test_one_zero_point_for_an_expert(op: str) -> None:
    zero_points = torch.arange(5, 10, dtype=torch.int8).view(5, 1, 1)
    case = packed_case(op).changed(w1_zero_points=zero_points, w2_zero_points=zero_points)
    assert torch.equal(case(), case.decoded()())
    expanded = {
        f"{name}_zero_points": zero_points.expand(case.packed[f"{name}_scales"].shape).clone()
        for name in ("w1", "w2")
    }
    assert torch.equal(case(), case.changed(**expanded)())


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0, 3)], ids=str)
@both_ops
def test_few_tokens(op: str, shape: tuple[int, ...]) -> None:
    case = packed_case(op, shape=shape)
    assert torch.equal(case(), case.decoded()())


@pytest.mark.pairwise
@pytest.mark.parametrize("weight_format", ["int4", "nvfp4", "int8"])
@pytest.mark.parametrize("biases", [True, False], ids=["biases", "no biases"])
@both_ops
def test_gradients_are_those_of_the_decoded(op: str, biases: bool, weight_format: str) -> None:
    zero_points: Any = "groups" if weight_format == "int4" else ""
    options = {"activation": "silu", "gated": True, "zero_points": zero_points}
    case = packed_case(op, weight_format, biases=biases, **options)
    results = []
    for each in (case, case.decoded()):
        names = [n for n, t in case.plain.floats.items() if n not in ("w1", "w2")]
        leaves = {name: case.plain.arguments[name].clone().requires_grad_() for name in names}
        result = each.changed(**leaves)()
        results.append(torch.autograd.grad(result.square().sum(), list(leaves.values())))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.each_value
@pytest.mark.parametrize("weight_format", ENCODINGS)
@both_ops
def test_opcheck(op: str, weight_format: str) -> None:
    for biases in (True, False):
        zero_points: Any = "groups" if biases and weight_format == "int4" else ""
        case = packed_case(op, weight_format, biases=biases, zero_points=zero_points)
        leaves = {
            name: tensor.clone().requires_grad_()
            for name, tensor in case.plain.floats.items()
            if name not in ("w1", "w2")
        }
        changed = case.changed(**leaves)
        order = [a.name for a in case.overload._schema.arguments if not a.kwarg_only]
        arguments = tuple(changed.arguments[name] for name in order)
        torch.library.opcheck(case.overload, arguments, changed.options)


@both_ops
def test_a_second_derivative_is_refused(op: str) -> None:
    x = torch.randn(3, 32, requires_grad=True)
    case = packed_case(op, shape=(3,)).changed(x=x)
    (dx,) = torch.autograd.grad(case().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once only"):
        dx.sum().backward()


@both_ops
def test_autocast_changes_nothing(op: str) -> None:
    case = packed_case(op)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = case()
    assert torch.equal(result, case())


@pytest.mark.parametrize("weight_format", ["int4", "nvfp4"])
@both_ops
def test_compiled(op: str, weight_format: str) -> None:
    case = packed_case(op, weight_format, zero_points="groups" if weight_format == "int4" else "")
    compiled = torch.compile(lambda x: case.changed(x=x)(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(case.plain.arguments["x"]), case())


@both_ops
def test_one_expert_is_decoded_at_a_time(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none that no token has chosen."""
    decoded: list[int] = []
    decode = Encoding.decode

    def counted(encoding: Encoding, values: Tensor, *rest: Any, **options: Any) -> Tensor:
        decoded.append(values.ndim)
        return decode(encoding, values, *rest, **options)

    monkeypatch.setattr(Encoding, "decode", counted)
    case = packed_case(op, shape=(1,), experts=64)
    case()
    assert decoded == [2] * 4  # Both weights of two experts.


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"weight_format": "int5"},
        ValueError,
        "weight_format must be one of int4, mxfp4, fp8, nvfp4, int8; got 'int5'",
    ),
    ({"w1": torch.zeros(5, 16, 16)}, TypeError, "w1 must be int8, got float32"),
    (
        {"w1": torch.zeros(5, 16, 15, dtype=torch.int8)},
        ValueError,
        r"w1 must be \[E, F, D / 2\] = \[5, 16, 16\], got \[5, 16, 15\]",
    ),
    (
        {"w2": torch.zeros(5, 32, 9, dtype=torch.int8)},
        ValueError,
        r"w2 must be \[E, D, H / 2\] = \[5, 32, 8\], got \[5, 32, 9\]",
    ),
    ({"x": torch.zeros(3, 31)}, ValueError, "D must be a multiple of 2 where it is packed, got 31"),
    ({"x": torch.zeros(3, 32, dtype=torch.int32)}, TypeError, "x must be one of float32"),
    (
        {"w1_scales": torch.ones(5, 16, 3)},
        ValueError,
        r"must have the shape \[16, G\], where G divides 32 in int4, got \[16, 3\]",
    ),
    ({"w1_scales": torch.ones(5, 16, 0)}, ValueError, r"G divides 32 in int4, got \[16, 0\]"),
    ({"w1_scales": torch.ones(5, 15, 4)}, ValueError, r"G divides 32 in int4, got \[15, 4\]"),
    ({"w1_scales": torch.ones(5, 16)}, ValueError, r"w1_scales must be \[E, ...\] = \[5, ...\]"),
    ({"w2_scales": torch.ones(5, 32, 1)}, ValueError, r"of one size .* \(1, 8\) and \(1, 16\)"),
    (
        {"w2_scales": torch.ones(5, 32, 2).half()},
        TypeError,
        "w2_scales must be float32 as w1_scales",
    ),
    ({"w1_scales": torch.ones(5, 16, 4).double()}, TypeError, "w1_scales must be one of float32"),
    (
        {"w1_zero_points": torch.zeros(5, 16, 4, dtype=torch.int8)},
        ValueError,
        "w1_zero_points and w2_zero_points must be given together",
    ),
    ({"w1_zero_points": torch.zeros(5, 16, 4)}, TypeError, "w1_zero_points must be int8"),
    ({"b1": torch.zeros(5, 16).half()}, TypeError, "b1 must be float32 as x, got float16"),
    ({"b2": torch.zeros(5, 31)}, ValueError, r"b2 must be \[E, D\] = \[5, 32\], got \[5, 31\]"),
    ({"gated": True, "interleaved": False, "activation": "silu"}, ValueError, "w2 must be"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=lambda value: None)
@both_ops
def test_errors(op: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    case = packed_case(op, biases=False).changed(**change)
    if op == "experts" and "x" in change:
        ids = torch.zeros(3, 2, dtype=torch.int64)
        case = case.changed(expert_ids=ids, expert_weights=torch.ones(3, 2))
    with pytest.raises(error, match=message):
        case()
    fakes = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    with fakes, pytest.raises(error, match=message):
        case()


def test_functions_call_the_operators() -> None:
    for op in OPS:
        case = packed_case(op, activation="silu", gated=True)
        function = getattr(custom_ops, f"{op}_packed")
        assert torch.equal(function(**case.arguments, **case.options), case())
        with pytest.raises(TypeError, match="unexpected keyword argument 'gatd'"):
            function(**case.arguments, **case.options, gatd=True)


def test_zero_points_of_two_kinds_are_refused() -> None:
    case = packed_case("experts", zero_points="groups")
    one = torch.full((5, 1, 1), 8, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"must both have one for each scale, or both be \[E, 1"):
        case.changed(w2_zero_points=one)()


def test_rows_of_two_widths_may_each_have_one_scale() -> None:
    case = packed_case("experts", group=16, width=32, hidden=16)
    case = case.changed(w1_scales=torch.rand(5, 16, 1), w2_scales=torch.rand(5, 32, 1) / 9)
    expected = case.oracle()
    assert float((case() - expected).norm() / expected.norm()) < 1e-5


def test_formats() -> None:
    int4 = packed_format("int4", torch.bfloat16, torch.float16, (1, 32), zero_points_block=(1, 32))
    assert int4.expert_bytes(64, 96) == 64 * (48 + 3 * 2 + 3)
    assert not int4.is_plain
    with pytest.raises(
        ValueError, match="weight_format must be one of int4, mxfp4, fp8, nvfp4, int8; got 'int3'"
    ):
        packed_format("int3", torch.float32, torch.float32, (1, 32))
    with pytest.raises(TypeError, match=r"scales of int4 must be one of float32, .*; got float64"):
        packed_format("int4", torch.float32, torch.float64, (1, 32))
    with pytest.raises(ValueError, match="int4 has no scales of 1 rows and 0 columns"):
        packed_format("int4", torch.float32, torch.float32, (1, 0))
    with pytest.raises(ValueError, match="fp8 has no scales of 64 rows and 64 columns"):
        packed_format("fp8", torch.float32, torch.float32, (64, 64))
    fp8 = packed_format("fp8", torch.bfloat16, torch.float32, (128, 128))
    assert fp8.expert_bytes(200, 256) == 200 * 256 + 4 * 2 * 2
    rows = packed_format("fp8", torch.bfloat16, torch.float32, (1, WHOLE))
    assert rows.expert_bytes(200, 256) == 200 * 256 + 4 * 200


def test_a_case_decodes() -> None:
    """What all others compare with is not zero."""
    case: PackedCase = packed_case("experts")
    assert float(case.oracle().abs().mean()) > 0.1
