"""Layers with packed weights through the plugin, on the stand-in driver: the oracle's numbers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_cases import assert_matches
from packed_cases import PackedCase
from packed_nodes import FORMS, NAMES, attributes, inputs_of, offloaded_node, small_case
from plugin_host import RUNTIME, VERSIONS, Description, describe
from plugin_layers import INVALID_ARGUMENT, NOT_FOUND, checked_host
from standin_gpu import StandinGpu

pytest_plugins = ("plugin_layers",)

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)


@pytest.fixture(params=VERSIONS)
def tensorrt(request):
    with checked_host(request.param) as tensorrt:
        yield tensorrt


def profile(case: PackedCase) -> list[Description]:
    described = [describe(tensor) for tensor in inputs_of(case)]
    tokens = case.plain.arguments["x"].shape[0]
    for index, each in enumerate(described):
        if each.shape[:1] == (tokens,) and index < (3 if case.plain.op == "experts" else 1):
            described[index] = replace(each, shape=(-1, *each.shape[1:]), most=each.shape)
    return described


def built(tensorrt, driver, case: PackedCase, folder: Path, device: str = "sm_80"):
    """What an engine stores of the layer, and its workspace."""
    bundle = StandinGpu(driver, device).bundle(folder / "model.moek", case)
    plugin = tensorrt.create(NAMES[case.plain.op], attributes(case, bundle), layer="layer")
    assert plugin is not None, tensorrt.messages()
    inputs = profile(case)
    assert plugin.supports_all(inputs, inputs[0]), tensorrt.messages()
    assert plugin.configure(inputs, inputs[0]) == 0, tensorrt.messages()
    size = plugin.workspace(inputs, inputs[0])
    fields = plugin.serialize()
    stored = {name: replace(field, data=bytes(field.data)) for name, field in fields.items()}
    plugin.destroy()
    return stored, size


def check(tensorrt, driver, case: PackedCase, folder: Path, device: str = "sm_80") -> None:
    fields, size = built(tensorrt, driver, case, folder, device)
    plugin = tensorrt.create(NAMES[case.plain.op], fields, RUNTIME, "layer")
    assert plugin is not None, tensorrt.messages()
    result = plugin.run(inputs_of(case), size)
    assert_matches(result, case.decoded().oracle(), case.plain.dtypes)
    plugin.destroy()


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
def test_experts(driver, tensorrt, tmp_path, form):
    check(tensorrt, driver, small_case(form, activation="silu", gated=True), tmp_path)


@pytest.mark.each_value
@pytest.mark.parametrize("form", ["int4 zero points", "mxfp4", "fp8"])
@pytest.mark.parametrize("options", [{}, {"biases": False}], ids=["biases", "none"])
def test_dropless(driver, tensorrt, tmp_path, form, options):
    case = small_case(form, "dropless", dtype=torch.float16, **options)
    check(tensorrt, driver, case, tmp_path, "sm_90")


def test_the_engine_names_its_format(driver, tensorrt, tmp_path):
    case = small_case("int4 zero points")
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    given = attributes(case, bundle)
    plugin = tensorrt.create(NAMES["experts"], given, layer="layer")
    assert "weight_format=int4 block_size=8 block_rows=1" in plugin.metadata()
    plugin.destroy()
    for changes, message in (
        (
            {"weight_format": "int3"},
            "weight_format must be one of int4, mxfp4, fp8, nvfp4, int8; got 'int3'",
        ),
        ({"block_size": -1}, "attribute block_size must be in 0..2147483647, got -1"),
        ({"block_size": 16}, "has no kernels of this layer: "),
        ({"weight_format": "fp8"}, "has no kernels of this layer: "),
        ({"w1_transposed": 1}, "unknown attribute w1_transposed"),
    ):
        assert tensorrt.create(NAMES["experts"], given | changes, layer="layer") is None
        (error,) = tensorrt.messages()
        assert message in error
    del given["weight_format"]
    assert tensorrt.create(NAMES["experts"], given, layer="layer") is None
    (error,) = tensorrt.messages()
    assert "attribute weight_format must be one of int4, mxfp4, fp8, nvfp4, int8; got ''" in error


BAD_TENSORS = {
    "bytes": (3, lambda t: t[..., :-1], "w1 must have shape [5, 64, 32], got [5, 64, 31]"),
    "scales": (5, lambda t: t[..., :-1], "w1_scales must have shape [5, 64, 8], got [5, 64, 7]"),
    "ids": (3, lambda t: t.int(), "w1 must be one of int8; got TensorRT's type 3"),
    "integers": (5, lambda t: t.int(), "w1_scales must be one of float32, float16, bfloat16; got"),
    "zero points": (7, lambda t: t[:, :1], "w1_zero_points must have shape [5, 64, 8], got [5, 1"),
    "floats": (8, lambda t: t.float(), "w2_zero_points must be one of int8; got TensorRT's type"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_are_not_the_layers(driver, tensorrt, tmp_path, name):
    index, change, message = BAD_TENSORS[name]
    case = small_case("int4 zero points")
    assert case.packed["w1"].shape == (5, 32, 32), "the shapes of the messages"
    inputs = inputs_of(case)
    inputs[index] = change(inputs[index])
    described = [describe(tensor) for tensor in inputs]
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    plugin = tensorrt.create(NAMES["experts"], attributes(case, bundle), layer="layer")
    assert plugin.configure(described, described[0]) == INVALID_ARGUMENT
    (error,) = tensorrt.messages()
    assert message.replace("5, 64", "5, 32") in error
    plugin.destroy()


def test_global_scales_that_are_not_the_layer_s(driver, tensorrt, tmp_path):
    case = small_case("nvfp4")
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    for index, change, message in (
        (9, lambda t: t[:, :1], "w1_global_scales must have shape [5, 32, 1], got [5, 1, 1]"),
        (10, lambda t: t.half(), "w2_global_scales must be one of float32; got TensorRT's type"),
        (6, lambda t: t[..., :1], "w2_scales must have shape [5, 64, 2], got [5, 64, 1]"),
    ):
        inputs = inputs_of(case)
        inputs[index] = change(inputs[index])
        described = [describe(tensor) for tensor in inputs]
        plugin = tensorrt.create(NAMES["experts"], attributes(case, bundle), layer="layer")
        assert plugin.configure(described, described[0]) == INVALID_ARGUMENT
        assert message in tensorrt.messages()[-1]
        plugin.destroy()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.half(), "w1_global_scales must be one of float32; got TensorRT's type"),
        (lambda t: t[:1], "1, 1], which stands for none: int8 has no global scales, got ["),
    ],
)
def test_what_stands_for_no_global_scales(driver, tensorrt, tmp_path, change, message):
    case = small_case("int8")
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    inputs = inputs_of(case)
    inputs[9] = change(inputs[9])
    described = [describe(tensor) for tensor in inputs]
    plugin = tensorrt.create(NAMES["experts"], attributes(case, bundle), layer="layer")
    assert plugin.configure(described, described[0]) == INVALID_ARGUMENT
    (error,) = tensorrt.messages()
    assert message in error
    plugin.destroy()


def test_zero_points_of_a_format_without_any(driver, tensorrt, tmp_path):
    """Those that stand for none are taken, as the cases with biases show."""
    case = small_case("mxfp4")
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    described = [describe(tensor) for tensor in inputs_of(case)]
    described[7] = replace(described[7], shape=(5, 64, 1))
    plugin = tensorrt.create(NAMES["experts"], attributes(case, bundle), layer="layer")
    assert plugin.configure(described, described[0]) == INVALID_ARGUMENT
    (error,) = tensorrt.messages()
    assert "1, 1], which stands for none: mxfp4 has no zero points, got [" in error
    plugin.destroy()


def test_kernels_of_another_kind_of_scales(driver, tensorrt, tmp_path):
    """Zero points and the scales' dtype are among the inputs, not among the attributes."""
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", small_case("int4"))
    for form in ("int4 zero points", "int4"):
        changes = {"scales_dtype": torch.float16} if form == "int4" else {}
        case = small_case(form, **changes)
        plugin = tensorrt.create(NAMES["experts"], attributes(case, bundle), layer="layer")
        described = [describe(tensor) for tensor in inputs_of(case)]
        assert plugin.configure(described, described[0]) == NOT_FOUND
        (error,) = tensorrt.messages()
        assert "no kernels with x float32, " in error
        plugin.destroy()


def test_an_engine_of_plain_weights_is_not_one_of_packed(driver, tensorrt, tmp_path):
    fields, _ = built(tensorrt, driver, small_case("mxfp4"), tmp_path)
    for name in ("DroplessMoEExperts", "DroplessMoEPacked"):
        assert tensorrt.create(name, fields, RUNTIME, "layer") is None
        (error,) = tensorrt.messages()
        assert "field programs is of DroplessMoEExpertsPacked" in error


# --- Experts in files ---

OFFLOADED = "2"


@pytest.mark.parametrize(
    "form", ["int4", "int4 zero points", "mxfp4", "fp8", "fp8 whole", "nvfp4", "int8"]
)
@pytest.mark.each_value
def test_offloaded_experts(driver, tensorrt, tmp_path, form):
    case = small_case(form, "dropless", activation="silu", gated=True)
    given, inputs = offloaded_node(driver, case, tmp_path, slots=2)
    name = NAMES["dropless"]
    plugin = tensorrt.create(name, given, layer="layer", version=OFFLOADED)
    assert plugin is not None, tensorrt.messages()
    described = [describe(each) for each in inputs]
    assert plugin.supports_all(described, described[0]), tensorrt.messages()
    assert plugin.configure(described, described[0]) == 0, tensorrt.messages()
    size = plugin.workspace(described, described[0])
    fields = {
        name: replace(field, data=bytes(field.data)) for name, field in plugin.serialize().items()
    }
    plugin.destroy()
    engine = tensorrt.create(name, fields, RUNTIME, "layer", OFFLOADED)
    context = engine.attach()
    expected = case.decoded().oracle()
    for _ in range(2):
        assert_matches(context.run(inputs, size), expected, case.plain.dtypes)
    assert any("2 of 5 experts at a time are on the device" in each for each in tensorrt.messages())
    context.destroy()
    engine.destroy()


@pytest.mark.parametrize("change", ["fewer", "more", "sizes"])
def test_sources_that_are_not_the_layers(driver, tensorrt, tmp_path, change):
    case = small_case("int4 zero points")
    given, inputs = offloaded_node(driver, case, tmp_path, slots=2)
    lines = given["w1_source"].split("\n")
    lines, message = {
        "fewer": (lines[:2], "the layer's w1_zero_points has no source: each tensor"),
        "more": ([*lines, lines[0]], "the layer has 6 tensors of w1 and w2, the sources have more"),
        "sizes": ([*lines[:2], lines[0]], "the layer's w1_zero_points must have 1280 bytes, it "),
    }[change]
    described = [describe(each) for each in inputs]
    changed = given | {"w1_source": "\n".join(lines)}
    plugin = tensorrt.create(NAMES["experts"], changed, layer="layer", version=OFFLOADED)
    assert plugin.configure(described, described[0]) == INVALID_ARGUMENT
    (error,) = tensorrt.messages()
    assert message in error
    plugin.destroy()
