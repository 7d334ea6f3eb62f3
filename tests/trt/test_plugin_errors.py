"""What the plugin refuses, and what it says: never a crash, nothing leaks, the next call works."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from moe_cases import assert_matches, make_case
from plugin_host import (
    NAMES,
    RTX_VERSION,
    RUNTIME,
    VERSIONS,
    Description,
    Field,
    attributes_of,
    describe,
    filled,
    host,
    inputs_of,
    serialized,
)
from standin import LAUNCH_FAILED, OUT_OF_MEMORY
from standin_gpu import StandinGpu
from trt_plugin.bundle import Bundle
from trt_plugin.native import library_path

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)

INVALID_ARGUMENT, INVALID_BUNDLE, NOT_FOUND, NO_DRIVER, CUDA_ERROR, NO_MEMORY = range(1, 7)


@pytest.fixture(params=VERSIONS)
def tensorrt(request):
    tensorrt = host(request.param)
    live = tensorrt.live
    yield tensorrt
    assert tensorrt.messages() == []
    assert tensorrt.live == live


def small_case(op: str = "dropless", **options):
    return filled(make_case(op, (5,), **{"width": 16, "hidden": 24} | options))


def the_error(tensorrt, layer: str = "layers.3.mlp") -> str:
    """Takes the only message, which is an error that names the layer."""
    (message,) = tensorrt.messages()
    logger, severity, name, rest = message.split(" ", 3)
    assert (logger, severity) == ("own", "1")
    assert name in NAMES.values()
    assert rest.startswith(f"{layer}: "), rest
    return rest.removeprefix(f"{layer}: ")


@pytest.fixture
def layer(driver, tensorrt, tmp_path):
    """A plugin of a case, and the case."""
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    plugin = tensorrt.create(NAMES[case.op], attributes_of(case) | {"kernels": str(bundle)})
    yield plugin, case
    plugin.destroy()


def described(case) -> list[Description]:
    return [describe(tensor) for tensor in inputs_of(case)]


# --- Attributes ---

INT32, FLOAT32, CHAR = Field.INT32, Field.FLOAT32, Field.CHAR
ONE = (1).to_bytes(4, "little")
MISSING = object()

BAD_ATTRIBUTES = {
    "missing": ({"top_k": MISSING}, "attribute top_k is missing"),
    "missing size": ({"in_features": MISSING}, "attribute in_features is missing"),
    "unknown": ({"foo": 1}, "unknown attribute foo; known are top_k, num_experts, "),
    "unknown, odd": ({"a\nb" + 99 * "x": 1}, "unknown attribute a?b" + 61 * "x" + "...; known"),
    "twice": ({"top_k*": 2}, "attribute top_k is given twice"),
    "zero": ({"top_k": 0}, "attribute top_k must be in 1..32, got 0"),
    "negative": ({"num_experts": -5}, "attribute num_experts must be in 1..1024, got -5"),
    "too large": ({"num_experts": 1025}, "must be in 1..1024, got 1025"),
    "too many": ({"top_k": 6}, "attribute top_k must be at most num_experts, 5, got 6"),
    "odd size": ({"in_features": 12}, "attribute in_features must be a multiple of 8, got 12"),
    "small size": ({"hidden_features": 4}, "hidden_features must be in 8..2147483647, got 4"),
    "not a flag": ({"gated": 2}, "attribute gated must be in 0..1, got 2"),
    "not a choice": (
        {"activation": "swish"},
        "one of gelu, gelu_tanh, silu, relu, relu2, clamped_swiglu, clamped_silu; got 'swish'",
    ),
    "unprintable": ({"scoring": "a\0b\x1b"}, "softmax, topk_softmax, sigmoid; got 'a?b?'"),
    "empty": ({"activation": ""}, "got ''"),
    "ungated clamp": (
        {"activation": "clamped_swiglu"},
        "activation clamped_swiglu needs attribute gated",
    ),
    "ungated rows": ({"interleaved": 1}, "attribute interleaved needs attribute gated"),
    "not finite": ({"routed_scaling": float("nan")}, "routed_scaling must be finite, got nan"),
    "infinite": ({"activation_alpha": float("-inf")}, "activation_alpha must be finite, got -inf"),
    "limit": ({"activation_limit": 0.0}, "attribute activation_limit must be positive, got 0"),
    "norm": ({"pre_norm": "layer"}, "attribute pre_norm must be one of none, rms; got 'layer'"),
    "no eps": (
        {"norm_eps": 0.0},
        "norm_eps must be positive and a normal number of ",
    ),
    "negative eps": (
        {"norm_eps": -1e-6},
        "must be positive and a normal number of ",
    ),
    "denormal eps": (
        {"norm_eps": 1e-39},
        "a normal number of float32, got 1e-39",
    ),
    "infinite eps": ({"norm_eps": float("inf")}, "attribute norm_eps must be finite, got inf"),
    "residual": ({"residual": -1}, "attribute residual must be in 0..1, got -1"),
    "not a layout": ({"w1_transposed": 2}, "attribute w1_transposed must be in 0..1, got 2"),
    "another layout": ({"w2_transposed": 1}, "w1_transposed=0 w2_transposed=1 "),
    "no groups": ({"n_group": 0}, "attribute n_group must be in 1..2147483647, got 0"),
    "groups alone": ({"n_group": 5}, "attribute n_group needs attribute group_scoring"),
    "uneven groups": (
        {"group_scoring": "max", "n_group": 2},
        "attribute n_group must divide 5 experts into groups of 1 up, got 2",
    ),
    "uneven groups, all chosen": (
        {"group_scoring": "max", "n_group": 2, "topk_group": 2},
        "attribute n_group must divide 5 experts into groups of 1 up, got 2",
    ),
    "small groups": (
        {"group_scoring": "top2_sum", "n_group": 5},
        "attribute n_group must divide 5 experts into groups of 2 up, got 5",
    ),
    "more groups than there are": (
        {"group_scoring": "max", "n_group": 5, "topk_group": 6},
        "attribute topk_group must be in 1..5, the groups, got 6",
    ),
    "too few groups": (
        {"group_scoring": "max", "n_group": 5},
        "attribute top_k must be in 1..1, the experts of 1 groups, got 2",
    ),
    "another norm": ({"pre_norm": "rms"}, "layer: top_k=2 num_experts=5 in_features=16 "),
    "int for text": ({"activation": 1}, "activation must be a text of CHAR, got 1 of INT32 (5)"),
    "text for int": ({"top_k": "2"}, "attribute top_k must be one INT32, got 1 of CHAR (6)"),
    "int for float": ({"routed_scaling": 1}, "must be one FLOAT32, got 1 of INT32 (5)"),
    "int64": ({"top_k": Field(10, 1, ONE * 2)}, "got 1 of another type (10)"),
    "no elements": ({"top_k": Field(INT32, 0, ONE)}, "must be one INT32, got 0 of INT32"),
    "two": ({"top_k": Field(INT32, 2, ONE * 2)}, "must be one INT32, got 2 of INT32"),
    "negative length": ({"scoring": Field(CHAR, -1, b"softmax")}, "got -1 of CHAR"),
    "no data": ({"top_k": Field(INT32, 1, None)}, "attribute top_k has no data"),
    "no text": ({"scoring": Field(CHAR, 7, None)}, "attribute scoring has no data"),
    "no file": ({"kernels": "/none/a.moek"}, "cannot read the kernels' bundle /none/a.moek: No su"),
    "folder": ({"kernels": "/"}, "cannot read the kernels' bundle /: Is a directory"),
    "another layer": ({"top_k": 3}, "has no kernels of this layer: top_k=3 num_experts=5 "),
}


@pytest.mark.parametrize("name", BAD_ATTRIBUTES)
def test_attributes(driver, tensorrt, tmp_path, name):
    changes, message = BAD_ATTRIBUTES[name]
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    attributes = attributes_of(case) | {"kernels": str(bundle)} | changes
    attributes = {key: value for key, value in attributes.items() if value is not MISSING}
    assert tensorrt.create("DroplessMoE", attributes) is None
    assert message in the_error(tensorrt)


def test_experts_have_no_router(driver, tensorrt):
    attributes = attributes_of(small_case("experts")) | {"scoring": "softmax"}
    assert tensorrt.create("DroplessMoEExperts", attributes) is None
    error = the_error(tensorrt)
    assert error.startswith("unknown attribute scoring; known are top_k, ")
    assert "renormalize" not in error


@pytest.mark.parametrize("end", ["", "\0", "\0\0"])
def test_texts_with_and_without_a_terminator(driver, tensorrt, tmp_path, end):
    case = small_case(activation="silu")
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    attributes = attributes_of(case) | {"kernels": str(bundle) + end, "activation": "silu" + end}
    plugin = tensorrt.create("DroplessMoE", attributes)
    assert plugin is not None
    plugin.destroy()


def test_absent_attributes_have_the_operators_defaults(driver, tensorrt, tmp_path):
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    sizes = ("top_k", "num_experts", "in_features", "hidden_features")
    attributes = {name: attributes_of(case)[name] for name in sizes}
    plugin = tensorrt.create("DroplessMoE", attributes | {"kernels": str(bundle)})
    full = tensorrt.create("DroplessMoE", attributes_of(case) | {"kernels": str(bundle)})
    assert plugin.metadata() == full.metadata()
    plugin.destroy()
    full.destroy()


def test_attributes_without_effect_need_no_kernels_of_their_own(driver, tensorrt, tmp_path):
    case = small_case(scoring="topk_softmax", alpha=1.0, limit=2.0)
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    attributes = attributes_of(case) | {"kernels": str(bundle)}
    all_groups = {"group_scoring": "max", "n_group": 5, "topk_group": 5}
    others = ({"renormalize": 0}, {"activation_limit": 3.0}, {"norm_eps": 0.5}, all_groups)
    for changes in ({}, *others):
        plugin = tensorrt.create("DroplessMoE", attributes | changes)
        assert plugin is not None
        plugin.destroy()


def test_the_file_beside_the_library(driver, tensorrt, monkeypatch):
    monkeypatch.delenv("DYNAMO_MOE_KERNELS", raising=False)
    beside = library_path().parent / "dynamo_moe.moek"
    if beside.exists():
        pytest.skip("there is one")
    assert tensorrt.create("DroplessMoE", attributes_of(small_case())) is None
    assert the_error(tensorrt) == (
        f"cannot read the kernels' bundle {beside}: No such file or directory; name it by the "
        "attribute kernels or by the environment variable DYNAMO_MOE_KERNELS"
    )


def test_a_damaged_bundle(driver, tensorrt, tmp_path):
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    data = bytearray(bundle.read_bytes())
    attributes = attributes_of(case) | {"kernels": str(bundle)}
    for damaged in (b"", data[:-1], data[:200], b"x" + data[1:], data[:300] + b"x" + data[301:]):
        bundle.write_bytes(damaged)
        assert tensorrt.create("DroplessMoE", attributes) is None
        assert the_error(tensorrt).startswith(f"{bundle}: ")
    # A file that was replaced is read again.
    bundle.write_bytes(data)
    plugin = tensorrt.create("DroplessMoE", attributes)
    assert plugin is not None
    plugin.destroy()


def test_unknown_phases(tensorrt):
    assert tensorrt.create("DroplessMoE", {}, phase=7) is None
    assert the_error(tensorrt) == "unknown phase 7"


# --- What an engine has stored ---


@pytest.fixture
def stored(layer):
    plugin, case = layer
    assert plugin.configure(described(case), describe(case.arguments["x"])) == 0
    return serialized(plugin)


BAD_FIELDS = {
    "none": lambda bundle: {},
    "other name": lambda bundle: {"program": bundle},
    "short name": lambda bundle: {"programs_name": bundle[:103]},
    "long name": lambda bundle: {"programs_name": bundle[:105]},
    "two": lambda bundle: {"programs": bundle, "more": 1},
    "an attribute": lambda bundle: {"top_k": 2},
    "wrong type": lambda bundle: {"programs": Field(CHAR, len(bundle), bundle)},
    "no data": lambda bundle: {"programs": Field(Field.UNKNOWN, 100, None)},
    "empty": lambda bundle: {"programs": Field(Field.UNKNOWN, 0, b"x")},
    "negative": lambda bundle: {"programs": Field(Field.UNKNOWN, -1, bundle)},
    "short": lambda bundle: {"programs": bundle[:-1]},
    "header": lambda bundle: {"programs": bundle[:100]},
    "one byte": lambda bundle: {"programs": bundle[:1]},
    "long": lambda bundle: {"programs": bundle + b"\0"},
    # As an earlier version stored it.
    "a program": lambda bundle: {"programs": bundle[64:]},
    **{
        f"byte {at}": lambda bundle, at=at: {
            "programs": bundle[:at] + bytes([bundle[at] ^ 1]) + bundle[at + 1 :]
        }
        for at in (0, 8, 12, 16, 24, 32, 40, 64, 100, 300, 1000)
    },
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_fields_of_an_engine(tensorrt, stored, name):
    assert tensorrt.create("DroplessMoE", BAD_FIELDS[name](stored), RUNTIME) is None
    error = the_error(tensorrt)
    assert "bundle" in error or "programs" in error
    if name == "an attribute":
        assert error == (
            "an engine's layer has one field, programs or programs_name; got 1 fields, the first "
            "top_k: was the engine built with another version of this library?"
        )


def test_the_other_operators_program(tensorrt, stored):
    assert tensorrt.create("DroplessMoEExperts", {"programs": stored}, RUNTIME) is None
    assert the_error(tensorrt) == "field programs is of the other operator"


def test_programs_of_several_layers(driver, tensorrt, tmp_path):
    cases = [small_case(), small_case(activation="silu")]
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", *cases)
    assert tensorrt.create("DroplessMoE", {"programs": bundle.read_bytes()}, RUNTIME) is None
    assert the_error(tensorrt) == (
        "bundle: its programs must be of one layer, program 1 is of another than program 0"
    )


# --- Shapes, dtypes, formats ---


def changed(case, **changes) -> list[Description]:
    names = ("x", "router_weight", "w1", "w2", "router_bias", "b1", "b2")
    return [changes.get(name, each) for name, each in zip(names, described(case), strict=False)]


def shaped(*shape: int, dtype=torch.float32, **options) -> Description:
    return Description(shape, dtype, **options)


BAD_TENSORS = {
    "x": ({"x": shaped(5, 24)}, "x must have shape [..., 16] with the tokens of x, [5, 24]; got"),
    "w1": ({"w1": shaped(5, 16, 24)}, "w1 must have shape [5, 24, 16], got [5, 16, 24]"),
    "rank": ({"w2": shaped(5, 16)}, "w2 must have shape [5, 16, 24], got [5, 16]"),
    "scalar": ({"b1": shaped()}, "b1 must have shape [5, 24], got []"),
    "router": ({"router_weight": shaped(4, 16)}, "router_weight must have shape [5, 16], got [4"),
    "shifted": ({"router_bias": shaped(5, 24)}, "router_bias must have shape [5], got [5, 24]"),
    "dtype of w2": (
        {"w2": shaped(5, 16, 24, dtype=torch.float16)},
        "w2 must be float32, got float",
    ),
    "integers": (
        {"x": shaped(5, 16, dtype=torch.int32)},
        "x must be float32, float16 or bfloat16, got TensorRT's type 3",
    ),
    "int8": (
        {"w1": shaped(5, 24, 16, dtype=torch.int8)},
        "w1 must be float32, float16 or bfloat16, got TensorRT's type 2",
    ),
    "format": ({"w1": shaped(5, 24, 16, format=2)}, "w1 must be in linear format, got format 2"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_at_configuration(tensorrt, layer, name):
    plugin, case = layer
    changes, message = BAD_TENSORS[name]
    inputs = changed(case, **changes)
    assert plugin.configure(inputs, inputs[0]) == INVALID_ARGUMENT
    assert message in the_error(tensorrt)


@pytest.fixture(params=["w1", "w2"])
def transposed(request, driver, tensorrt, tmp_path):
    """A plugin whose layer has a weight as (in, out), the weight's name, and the layer's case."""
    case = small_case()
    flag = f"{request.param}_transposed"
    program = StandinGpu(driver).program(case, **{flag: True})
    bundle = tmp_path / "model.moek"
    bundle.write_bytes(Bundle((program,)).data)
    attributes = attributes_of(case) | {"kernels": str(bundle)}
    assert tensorrt.create(NAMES[case.op], attributes) is None
    assert "has no kernels of this layer: " in the_error(tensorrt)
    plugin = tensorrt.create(NAMES[case.op], attributes | {flag: 1})
    assert plugin is not None
    yield plugin, request.param, case
    plugin.destroy()


def test_weights_that_lie_as_in_out(tensorrt, transposed):
    plugin, name, case = transposed
    experts, *sizes = case.arguments[name].shape
    inputs = changed(case, **{name: shaped(experts, *reversed(sizes))})
    assert plugin.configure(inputs, inputs[0]) == 0
    stored = tensorrt.create(NAMES[case.op], plugin.serialize(), RUNTIME)
    assert stored.shape_change(inputs, inputs[0]) == 0
    wrong = described(case)
    wanted, got = [experts, *reversed(sizes)], [experts, *sizes]
    for check in (plugin.configure, stored.shape_change):
        assert check(wrong, wrong[0]) == INVALID_ARGUMENT
        assert the_error(tensorrt) == f"{name} must have shape {wanted}, got {got}"
    stored.destroy()


def test_another_output(tensorrt, layer):
    plugin, case = layer
    for output in (shaped(4, 16), shaped(5, 16, dtype=torch.float16), shaped(5, 16, format=1)):
        assert plugin.configure(described(case), output) == INVALID_ARGUMENT
        assert the_error(tensorrt).startswith("y must ")


@pytest.mark.parametrize("name", [name for name in BAD_TENSORS if name != "integers"])
def test_tensors_at_run_time(tensorrt, stored, layer, name):
    case = layer[1]
    changes, message = BAD_TENSORS[name]
    plugin = tensorrt.create("DroplessMoE", {"programs": stored}, RUNTIME)
    inputs = changed(case, **changes)
    assert plugin.shape_change(inputs, inputs[0]) == INVALID_ARGUMENT
    error = the_error(tensorrt)
    assert message in error or "w1 must be float32, got none (TensorRT's type 2)" in error
    plugin.destroy()


@pytest.mark.parametrize("count", [0, 3, 9])
def test_numbers_of_inputs(tensorrt, layer, count):
    plugin, case = layer
    inputs = (described(case) * 2)[:count]
    output = describe(case.arguments["x"])
    calls = (
        lambda: plugin.configure(inputs, output),
        lambda: plugin.shape_change(inputs, output),
        lambda: plugin.output_shape(inputs)[0],
        lambda: plugin.output_type(inputs)[0],
    )
    for call in calls:
        assert call() == INVALID_ARGUMENT
        assert the_error(tensorrt) == (
            "the layer has 4 to 8 inputs, x, router_weight, w1, w2, router_bias (optional), "
            "b1 (optional), b2 (optional), selection_bias (optional), and 1 output; "
            f"got {count} and 1"
        )


def test_formats_and_types_that_are_not_supported(tensorrt, layer):
    plugin, case = layer
    inputs, output = described(case), describe(case.arguments["x"])
    assert plugin.supports_all(inputs, output)
    # A description is read once TensorRT has written it: Plugin.supports() has that right.
    for position in range(len(inputs)):
        other = list(inputs)
        other[position] = Description(inputs[position].shape, torch.float32, format=2)
        assert not plugin.supports(position, other, output)
    assert not plugin.supports(len(inputs), inputs, shaped(5, 16, dtype=torch.float16))
    (warning,) = tensorrt.messages()
    assert "no kernels with y float16; " in warning
    for position in (-1, len(inputs) + 1):
        assert not plugin.supports(position, inputs, output)
        assert the_error(tensorrt) == f"there is no position {position} among 7 inputs"


def test_too_many_dimensions(tensorrt, layer):
    plugin, case = layer
    inputs = described(case)

    class Nine(Description):
        def dynamic(self):
            made = super().dynamic()
            made.desc.dims.rank = 9
            return made

    inputs[0] = Nine((5, 16), torch.float32)
    assert plugin.configure(inputs, describe(case.arguments["x"])) == INVALID_ARGUMENT
    assert the_error(tensorrt) == "a tensor has 9 dimensions, at most 8 are permitted"


def test_before_the_kernels_are_chosen(tensorrt, layer):
    plugin, case = layer
    inputs, x = inputs_of(case), case.arguments["x"]
    message = "the layer has no kernels yet: configurePlugin() must come first, and succeed"
    assert plugin.serialize() == {}
    assert message in the_error(tensorrt)
    assert plugin.workspace(described(case), describe(x)) == 0
    assert message in the_error(tensorrt)
    assert plugin.shape_change(described(case), describe(x)) == INVALID_ARGUMENT
    assert message in the_error(tensorrt)
    assert plugin.enqueue(inputs, torch.empty_like(x), 256) == INVALID_ARGUMENT
    assert message in the_error(tensorrt)


def test_no_kernels_for_these_dtypes(tensorrt, layer):
    plugin, case = layer
    half = [
        Description(each.shape, torch.float16 if each.dtype == torch.float32 else each.dtype)
        for each in described(case)
    ]
    assert plugin.configure(half, half[0]) == NOT_FOUND
    error = the_error(tensorrt)
    assert error.startswith("no kernels with x float16, router_weight float16, ")
    assert "/model.moek has this layer with x float32, router_weight float32, " in error


def test_a_node_without_the_biases_of_its_kernels(tensorrt, layer):
    plugin, case = layer
    inputs, output = described(case)[:5], describe(case.arguments["x"])
    copy = plugin.clone()
    for each in (plugin, copy):
        assert not each.supports_all(inputs, output)
    # Once, whatever TensorRT asks for.
    error = the_error(tensorrt)
    assert error.startswith("the node has no input b1, b2; ")
    assert "/model.moek has this layer with x float32, router_weight float32, w1 float32" in error
    assert error.endswith(", b1 float32, b2 float32: compile the kernels for this file")
    assert plugin.configure(inputs, output) == NOT_FOUND
    assert the_error(tensorrt).startswith("no kernels with x float32, router_weight float32, w1 ")
    copy.destroy()


# --- Devices ---


def test_an_engine_of_other_architectures(driver, tensorrt, tmp_path):
    case = small_case()
    programs = [StandinGpu(driver, name).program(case) for name in ("sm_86", "sm_90")]
    bundle = Bundle(tuple(programs)).data
    plugin = tensorrt.create("DroplessMoE", {"programs": bundle}, RUNTIME)
    # Code for sm_86 does not run on sm_80, nor that for sm_90 on any other.
    for device in ("sm_80", "sm_120"):
        StandinGpu(driver, device)
        status = plugin.shape_change(described(case), describe(case.arguments["x"]))
        assert status == NOT_FOUND
        assert the_error(tensorrt) == (
            f"the device is {device}, the layer's kernels are for sm_86, sm_90: compile them for "
            f"it too, with dynamo-moe compile --arch {device}"
        )
    plugin.destroy()


BAD_ARCHITECTURES = {
    "sm_89": "names sm_89, {bundle} has this layer for sm_80, sm_90",
    "sm_80,sm_120,": "names sm_120, {bundle} has this layer for sm_80, sm_90",
    "hopper": "must name architectures, as in sm_89,sm_120; got 'hopper'",
    "sm_80;sm_90": "must name architectures, as in sm_89,sm_120; got 'sm_80;sm_90'",
    "sm_90a": "must name architectures, as in sm_89,sm_120; got 'sm_90a'",
    ",": "must name architectures, as in sm_89,sm_120; got ','",
}


@pytest.mark.parametrize("names", BAD_ARCHITECTURES)
def test_architectures_that_the_bundle_lacks(driver, tensorrt, tmp_path, monkeypatch, names):
    case = small_case()
    bundle = tmp_path / "model.moek"
    programs = [StandinGpu(driver, name).program(case) for name in ("sm_90", "sm_80")]
    bundle.write_bytes(Bundle(tuple(programs)).data)
    monkeypatch.setenv("DYNAMO_MOE_ARCHITECTURES", names)
    assert tensorrt.create("DroplessMoE", attributes_of(case) | {"kernels": str(bundle)}) is None
    message = BAD_ARCHITECTURES[names].format(bundle=bundle)
    assert the_error(tensorrt) == f"the environment variable DYNAMO_MOE_ARCHITECTURES {message}"


def test_without_a_context_and_a_stream(driver, tensorrt, stored, layer):
    plugin, case = layer
    x = case.arguments["x"]
    driver.set_context(None)
    # The kernels are loaded when the stream is known.
    assert plugin.shape_change(described(case), describe(x)) == 0
    assert plugin.enqueue(inputs_of(case), torch.empty_like(x), 256) == INVALID_ARGUMENT
    assert the_error(tensorrt) == (
        "this thread has no current CUDA context: a CUDA runtime call such as cudaFree(0) makes "
        "the device's current"
    )


WITHOUT_DRIVER = """
import sys
from pathlib import Path
from moe_cases import make_case
from plugin_host import *
case = make_case("dropless", (5,), width=16, hidden=24)
tensorrt = host(VERSIONS[0])
plugin = tensorrt.create("DroplessMoE", attributes_of(case) | {"kernels": sys.argv[1]})
inputs = [describe(tensor) for tensor in inputs_of(case)]
print(plugin.supports_all(inputs, inputs[0]), plugin.configure(inputs, inputs[0]))
engine = tensorrt.create("DroplessMoE", {"programs": Path(sys.argv[2]).read_bytes()}, RUNTIME)
print(engine.workspace(inputs, inputs[0]) > 0, engine.shape_change(inputs, inputs[0]))
for message in tensorrt.messages():
    print(message)
"""


def test_without_a_driver(driver, tensorrt, stored, tmp_path, layer):
    (tmp_path / "programs").write_bytes(stored)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DRIVER, tmp_path / "model.moek", tmp_path / "programs"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    build, runtime, *messages = done.stdout.splitlines()
    # Building needs none.
    assert build == "True 0"
    assert runtime == f"True {NO_DRIVER}"
    (message,) = messages
    assert message.startswith("own 1 DroplessMoE layers.3.mlp: the CUDA driver is not available")


@pytest.mark.parametrize("launches_before", [0, 1, 2])
def test_a_launch_that_fails(driver, tensorrt, stored, layer, launches_before):
    plugin, case = layer
    inputs, x = inputs_of(case), case.arguments["x"]
    size = plugin.workspace(described(case), describe(x))
    first = plugin.run(inputs, size)
    workspace, y = torch.empty(size, dtype=torch.uint8), torch.empty_like(x)
    driver.fail("cuLaunchKernelEx", LAUNCH_FAILED, launches_before)
    assert plugin.enqueue(inputs, y, workspace.data_ptr()) == CUDA_ERROR
    assert "cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED" in the_error(tensorrt)
    assert torch.equal(plugin.run(inputs, size), first)
    assert_matches(first, case.oracle(), case.dtypes)


def test_device_memory_that_is_exhausted(driver, tensorrt, stored, layer):
    plugin, case = layer
    inputs, output = described(case), describe(case.arguments["x"])
    driver.fail("cuModuleLoadData", OUT_OF_MEMORY, calls_before=1)
    assert plugin.shape_change(inputs, output) == NO_MEMORY
    assert "cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY" in the_error(tensorrt)
    assert driver.live_modules == 0
    result = plugin.run(inputs_of(case), plugin.workspace(inputs, output))
    assert_matches(result, case.oracle(), case.dtypes)


def test_tensors_without_memory(tensorrt, stored, layer):
    plugin, case = layer
    inputs, x = inputs_of(case), case.arguments["x"]
    assert plugin.shape_change(described(case), describe(x)) == 0
    workspace = torch.empty(plugin.workspace(described(case), describe(x)), dtype=torch.uint8)
    y = torch.empty_like(x)
    inputs[3] = None
    status = plugin.enqueue(inputs, y, workspace.data_ptr(), descriptions=described(case))
    assert status == INVALID_ARGUMENT
    assert "tensor w2 is null" in the_error(tensorrt)
    assert plugin.enqueue(inputs_of(case), y, 0) == INVALID_ARGUMENT
    assert "workspace" in the_error(tensorrt)


def test_more_tokens_than_the_kernels_take(tensorrt, stored, layer):
    plugin, case = layer
    inputs, x = described(case), describe(case.arguments["x"])
    inputs[0] = shaped(-1, 16, most=(2**40, 16))
    assert plugin.configure(inputs, x) == INVALID_ARGUMENT
    assert "the number of tokens must be in 0.." in the_error(tensorrt)
    assert plugin.workspace(inputs, x) == 0
    assert the_error(tensorrt).endswith(f", got {2**40}")
    inputs[0] = shaped(2**40, 2**40, 16)
    assert (
        plugin.enqueue(inputs_of(case), case.arguments["x"], 256, descriptions=inputs)
        == INVALID_ARGUMENT
    )
    assert the_error(tensorrt).endswith(f", got {2**63 - 1}")


# --- Loggers ---


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        *((version, ()) for version in (*VERSIONS, RTX_VERSION)),
        *((version, ("-DHOST_SECOND_BASE",)) for version in (VERSIONS[0], RTX_VERSION)),
        # Without run-time type information the version decides.
        *((version, ("-fno-rtti",)) for version in VERSIONS),
    ],
)
def test_the_logger_of_whoever_calls_comes_first(capfd, version, flags):
    tensorrt = host(version, *flags)
    for own, expected in ((True, "own"), (False, "global")):
        tensorrt.call.host_set_loggers(own, True)
        assert tensorrt.create("DroplessMoE", {}) is None
        (message,) = tensorrt.messages()
        assert message.startswith(f"{expected} 1 DroplessMoE layers.3.mlp: attribute num_exp")
    assert capfd.readouterr().err == ""


def test_loggers_of_an_unknown_kind_are_left_alone(capfd):
    # Nothing tells how this TensorRT for RTX lays them out.
    tensorrt = host(RTX_VERSION, "-fno-rtti")
    assert tensorrt.create("DroplessMoE", {}) is None
    assert tensorrt.messages() == []
    expected = "[dynamo-moe] DroplessMoE layers.3.mlp: attribute num_experts is missing\n"
    assert capfd.readouterr().err == expected


def test_without_a_logger_errors_go_to_stderr(tensorrt, capfd):
    expected = "[dynamo-moe] DroplessMoE layers.3.mlp: attribute num_experts is missing\n"
    tensorrt.call.host_set_loggers(False, False)
    assert tensorrt.create("DroplessMoE", {}) is None
    assert capfd.readouterr().err == expected
    tensorrt.call.host_set_loggers(True, True)
    # Nor where the finder is none, or of a library that is not TensorRT's.
    library = ctypes.CDLL(str(library_path()))
    table = (ctypes.c_void_p * 8)(*[ctypes.cast(library.getCreators, ctypes.c_void_p).value] * 8)
    stranger = ctypes.c_void_p(ctypes.addressof(table))
    for finder in (None, ctypes.byref(stranger)):
        library.setLoggerFinder(finder)
        assert tensorrt.create("DroplessMoE", {}) is None
        assert capfd.readouterr().err == expected


def test_long_messages_are_cut(tensorrt):
    attributes = attributes_of(small_case()) | {"kernels": "/none/" + "x" * 3000}
    assert tensorrt.create("DroplessMoE", attributes, layer="y" * 500) is None
    (message,) = tensorrt.messages()
    assert len(message) == len("own 1 ") + 1023
    assert "y" * 200 + "...: cannot read" in message
