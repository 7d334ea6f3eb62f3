"""A node's attributes that the plugin refuses, and what it says: never a crash, nothing leaks."""

from __future__ import annotations

import os

import pytest

from custom_ops import ACTIVATIONS
from plugin_host import RUNTIME, Field, attributes_of, version_of
from plugin_layers import small_case, the_error
from standin_gpu import StandinGpu
from trt_plugin.native import library_path

pytest_plugins = ("plugin_layers",)

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)

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
        f"one of {', '.join(ACTIVATIONS)}; got 'swish'",
    ),
    "unprintable": ({"scoring": "a\0b\x1b"}, "softmax, topk_softmax, sigmoid; got 'a?b?'"),
    "empty": ({"activation": ""}, "got ''"),
    "ungated clamp": (
        {"activation": "clamped_swiglu"},
        "activation clamped_swiglu needs attribute gated",
    ),
    "no softcap of the gate": (
        {"activation": "softcapped_silu", "gated": 1, "activation_alpha": 0.0},
        "activation_alpha must be in 2**-126..2**126 with activation softcapped_silu, got 0",
    ),
    "too large a softcap of up": (
        {"activation": "softcapped_silu", "gated": 1, "activation_limit": 1e38},
        "activation_limit must be in 2**-126..2**126 with activation softcapped_silu, got 1e+38",
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


@pytest.mark.each_value
@pytest.mark.parametrize("name", BAD_ATTRIBUTES)
def test_attributes(driver, tensorrt_host, tmp_path, name):
    changes, message = BAD_ATTRIBUTES[name]
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    attributes = attributes_of(case) | {"kernels": str(bundle)} | changes
    attributes = {key: value for key, value in attributes.items() if value is not MISSING}
    assert tensorrt_host.create("DroplessMoE", attributes) is None
    assert message in the_error(tensorrt_host)


ROUNDED = {"logits_dtype": "tokens", "routing_weights_dtype": "float32"}
ROUNDINGS = {
    "unknown": ({"logits_dtype": "float16"}, "must be one of float32, tokens; got 'float16'"),
    "another layer": (ROUNDED, "routed_scaling=1 group_scoring=none logits_dtype=tokens"),
    "both": (
        {**ROUNDED, "routing_weights_dtype": "tokens"},
        "logits_dtype=tokens routing_weights_dtype=tokens",
    ),
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_what_routers_round_is_an_attribute_of_a_version_of_its_own(
    driver, tensorrt_host, tmp_path, name
):
    changes, message = ROUNDINGS[name]
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    attributes = attributes_of(case) | {"kernels": str(bundle)} | changes
    assert tensorrt_host.create("DroplessMoE", attributes, version="3") is None
    assert the_error(tensorrt_host).endswith(message)
    assert tensorrt_host.create("DroplessMoE", attributes) is None
    assert the_error(tensorrt_host).startswith("unknown attribute logits_dtype; known are ")


def test_versions_have_the_attributes_of_their_nodes(tensorrt_host):
    plain, offloaded, rounded, both = (
        tensorrt_host.field_names("DroplessMoE", version) for version in ("1", "2", "3", "4")
    )
    assert rounded == plain | dict.fromkeys(ROUNDED, CHAR)
    assert both == offloaded | dict.fromkeys(ROUNDED, CHAR)
    assert not plain.keys() & ROUNDED.keys()
    experts = [tensorrt_host.field_names("DroplessMoEExperts", version) for version in "1234"]
    assert experts[2:] == experts[:2]


def test_an_engine_has_its_layers_version(driver, tensorrt_host, tmp_path):
    case = small_case(**ROUNDED)
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    attributes = attributes_of(case) | {"kernels": str(bundle)}
    plugin = tensorrt_host.create("DroplessMoE", attributes, version=version_of(case))
    assert plugin.describe().startswith("DroplessMoE/3/: ")
    assert plugin.metadata().endswith("group_scoring=none logits_dtype=tokens")
    plugin.destroy()
    fields = {"programs": bundle.read_bytes()}
    assert tensorrt_host.create("DroplessMoE", fields, RUNTIME) is None
    assert the_error(tensorrt_host) == "field programs is of the plugin's version 3, not 1"


def test_experts_have_no_router(driver, tensorrt_host):
    attributes = attributes_of(small_case("experts")) | {"scoring": "softmax"}
    assert tensorrt_host.create("DroplessMoEExperts", attributes) is None
    error = the_error(tensorrt_host)
    assert error.startswith("unknown attribute scoring; known are top_k, ")
    assert "renormalize" not in error


@pytest.mark.parametrize("end", ["", "\0", "\0\0"])
def test_texts_with_and_without_a_terminator(driver, tensorrt_host, tmp_path, end):
    case = small_case(activation="silu")
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    attributes = attributes_of(case) | {"kernels": str(bundle) + end, "activation": "silu" + end}
    plugin = tensorrt_host.create("DroplessMoE", attributes)
    assert plugin is not None
    plugin.destroy()


def test_absent_attributes_have_the_operators_defaults(driver, tensorrt_host, tmp_path):
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    sizes = ("top_k", "num_experts", "in_features", "hidden_features")
    attributes = {name: attributes_of(case)[name] for name in sizes}
    plugin = tensorrt_host.create("DroplessMoE", attributes | {"kernels": str(bundle)})
    full = tensorrt_host.create("DroplessMoE", attributes_of(case) | {"kernels": str(bundle)})
    assert plugin.metadata() == full.metadata()
    plugin.destroy()
    full.destroy()


def test_attributes_without_effect_need_no_kernels_of_their_own(driver, tensorrt_host, tmp_path):
    case = small_case(scoring="topk_softmax", alpha=1.0, limit=2.0)
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    attributes = attributes_of(case) | {"kernels": str(bundle)}
    all_groups = {"group_scoring": "max", "n_group": 5, "topk_group": 5}
    others = ({"renormalize": 0}, {"activation_limit": 3.0}, {"norm_eps": 0.5}, all_groups)
    for changes in ({}, *others):
        plugin = tensorrt_host.create("DroplessMoE", attributes | changes)
        assert plugin is not None
        plugin.destroy()


def test_the_file_beside_the_library(driver, tensorrt_host, monkeypatch):
    monkeypatch.delenv("DYNAMO_MOE_KERNELS", raising=False)
    beside = library_path().parent / "dynamo_moe.moek"
    if beside.exists():
        pytest.skip("there is one")
    assert tensorrt_host.create("DroplessMoE", attributes_of(small_case())) is None
    assert the_error(tensorrt_host) == (
        f"cannot read the kernels' bundle {beside}: No such file or directory; name it by the "
        "attribute kernels or by the environment variable DYNAMO_MOE_KERNELS"
    )


def test_a_damaged_bundle(driver, tensorrt_host, tmp_path):
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    data = bytearray(bundle.read_bytes())
    attributes = attributes_of(case) | {"kernels": str(bundle)}
    for damaged in (b"", data[:-1], data[:200], b"x" + data[1:], data[:300] + b"x" + data[301:]):
        bundle.write_bytes(damaged)
        assert tensorrt_host.create("DroplessMoE", attributes) is None
        assert the_error(tensorrt_host).startswith(f"{bundle}: ")
    # A file that was replaced is read again.
    bundle.write_bytes(data)
    plugin = tensorrt_host.create("DroplessMoE", attributes)
    assert plugin is not None
    plugin.destroy()


def test_unknown_phases(tensorrt_host):
    assert tensorrt_host.create("DroplessMoE", {}, phase=7) is None
    assert the_error(tensorrt_host) == "unknown phase 7"
